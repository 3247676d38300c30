"""What the sink asks of the broker, and what it makes of the answers. The broker is a script."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest

from penstock.model.errors import FailedPrecondition, NotFound, PenstockError, Unavailable
from penstock.spark.broker import BrokerConnection, RetryTime
from penstock.spark.options import BrokerSettings
from penstock.spark.staging import ProducerBatch, RowPiece, StagedPart

Answer = dict[str, Any] | PenstockError
COMMIT = ("POST", "/v1/writes/p%2Fq/7/commit")
PRODUCER = ("GET", "/v1/writes/p%2Fq")


class ScriptedBroker(BrokerConnection):
    """Answers each call from its list; the last of a list is answered again."""

    def __init__(self, answers: dict[tuple[str, str], list[Answer]]) -> None:
        super().__init__(BrokerSettings(retry_s=10))
        self.answers = answers
        self.asked: list[tuple[str, str]] = []
        self.bodies: list[bytes] = []
        self.queries: list[Mapping[str, str | int] | None] = []
        self.now = 0.0

    def retry_time(self) -> RetryTime:
        return RetryTime(self.retry_s, lambda: self.now, self._sleep)

    def call(
        self,
        method: str,
        path: str,
        *,
        body: bytes = b"",
        content_type: str = "",
        query: Mapping[str, str | int] | None = None,
        retry_time: RetryTime | None = None,
    ) -> bytes:
        self.asked.append((method, path))
        self.bodies.append(body)
        self.queries.append(query)
        answers = self.answers[method, path]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, PenstockError):
            raise answer
        return msgspec.json.encode(answer)

    def _sleep(self, seconds: float) -> None:
        self.now += seconds


def staging(answers: dict[tuple[str, str], list[Answer]]) -> tuple[ScriptedBroker, ProducerBatch]:
    broker = ScriptedBroker(answers)
    return broker, ProducerBatch(broker, "p/q", 7)


def put(part: int, piece: int) -> tuple[str, str]:
    return "PUT", f"/v1/writes/p%2Fq/7/{part}/{piece}"


def staged(part: int, rows: int) -> StagedPart:
    return StagedPart("p/q", part, f"attempt-{part}", 1 if rows else 0, rows)


def test_pieces_are_numbered_and_counted():
    broker, batch = staging({put(3, 0): [{}], put(3, 1): [{}]})
    sent = batch.send(3, iter([RowPiece(5, b"one"), RowPiece(6, b"two")]), {"topic": "t"})
    assert broker.asked == [put(3, 0), put(3, 1)]
    assert broker.bodies == [b"one", b"two"]
    assert broker.queries == [{"topic": "t", "attempt": sent.attempt}] * 2
    assert (sent.producer, sent.part, sent.pieces, sent.rows) == ("p/q", 3, 2, 11)


def test_no_two_attempts_share_a_name():
    _, batch = staging({})
    names = {batch.send(0, iter([]), {}).attempt for _ in range(100)}
    assert len(names) == 100


def test_a_batch_that_is_committed_already_is_counted_and_not_sent():
    refused = FailedPrecondition("already committed")
    broker, batch = staging({put(0, 0): [refused], PRODUCER: [{"last_batch": 7}]})
    pieces = iter([RowPiece(1, b"a"), RowPiece(1, b"b")])
    sent = batch.send(0, pieces, {"topic": "t"})
    assert (sent.pieces, sent.rows) == (0, 2)
    assert broker.asked == [put(0, 0), PRODUCER]
    assert next(pieces, None) is None


@pytest.mark.parametrize("known", [{"last_batch": 6}, NotFound("no such producer")])
def test_a_refusal_of_a_batch_that_is_not_committed_is_an_error(known: Answer):
    _, batch = staging({put(0, 0): [FailedPrecondition("no")], PRODUCER: [known]})
    with pytest.raises(FailedPrecondition, match="no"):
        batch.send(0, iter([RowPiece(1, b"a")]), {"topic": "t"})


def test_a_commit_names_the_attempts_that_have_rows():
    broker, batch = staging({COMMIT: [{"status": "committed", "rows": 11}]})
    answer = batch.commit([staged(0, 5), staged(1, 0), staged(2, 6)], once=True)
    assert answer.rows == 11
    assert msgspec.json.decode(broker.bodies[0]) == {
        "parts": [
            {"part": 0, "attempt": "attempt-0", "pieces": 1, "rows": 5},
            {"part": 2, "attempt": "attempt-2", "pieces": 1, "rows": 6},
        ],
        "once": True,
    }


def test_a_batch_without_rows_is_committed_too():
    broker, batch = staging({COMMIT: [{"status": "committed", "rows": 0}]})
    batch.commit([staged(0, 0)])
    assert msgspec.json.decode(broker.bodies[0]) == {"parts": [], "once": False}


def storing(done: int) -> Answer:
    return {"status": "storing", "rows": 100, "done": done}


def test_a_commit_that_is_being_stored_is_asked_for_again_for_as_long_as_it_goes_on():
    finished: Answer = {"status": "committed", "rows": 100}
    many: list[Answer] = [storing(done) for done in range(50)]
    broker, batch = staging({COMMIT: [*many, finished]})
    assert batch.commit([staged(0, 100)]).status == "committed"
    assert broker.asked == [COMMIT] * 51
    assert len(set(broker.bodies)) == 1


def test_a_commit_that_goes_no_further_is_given_up_after_a_time():
    broker, batch = staging({COMMIT: [storing(30)]})
    with pytest.raises(Unavailable, match="30 of its 100 rows are stored") as caught:
        batch.commit([staged(0, 100)])
    assert "retrySeconds" in caught.value.message
    assert broker.now == pytest.approx(10)


@pytest.mark.parametrize(
    ("call", "method", "path"),
    [
        (ProducerBatch.drop, "DELETE", "/v1/writes/p%2Fq/7"),
        (ProducerBatch.last_committed, *PRODUCER),
    ],
)
def test_names_are_escaped_in_paths(call: Callable[[ProducerBatch], Any], method: str, path: str):
    broker, batch = staging({(method, path): [{"last_batch": 1}]})
    call(batch)
    assert broker.asked == [(method, path)]
