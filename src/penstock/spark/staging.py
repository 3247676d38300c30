"""One batch of a producer at the broker: staged in pieces, then committed whole, or dropped.

Invariant: a batch is stored once, whoever asks for it how often. Tasks stage under a name of their
attempt, which no other attempt has; the commit names the attempts that count. A batch that is found
committed while it is staged again is done, and nothing of it is sent. Must not know Spark's rows.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
from pyspark.sql.datasource import WriterCommitMessage

from penstock.client.calls import encode, segment
from penstock.model.errors import FailedPrecondition, NotFound, Unavailable
from penstock.spark.broker import Broker
from penstock.spark.pieces import RowPiece

ARROW = "application/vnd.apache.arrow.stream"
STORING = "storing"
ALREADY = "already_committed"


@dataclass(frozen=True)
class StagedPart(WriterCommitMessage):
    """What a task has staged: it travels from the executor to the driver's commit. Without pieces
    the batch was committed before, and `rows` is what it would have been now."""

    producer: str
    part: int
    attempt: str
    pieces: int
    rows: int


class CommitAnswer(msgspec.Struct):
    """The broker's answer to a commit; `done` rows are stored so far."""

    status: str
    rows: int = 0
    done: int = 0


class ProducerAnswer(msgspec.Struct):
    last_batch: int


_read_committed = msgspec.json.Decoder(CommitAnswer).decode
_read_producer = msgspec.json.Decoder(ProducerAnswer).decode


class ProducerBatch:
    """`batch` of `producer`. Used by tasks to send, and by the driver to end it."""

    def __init__(self, broker: Broker, producer: str, batch: int) -> None:
        self.producer = producer
        self.batch = batch
        self._broker = broker
        self._path = f"/v1/writes/{segment(producer)}/{batch}"

    def send(self, part: int, pieces: Iterator[RowPiece], target: dict[str, str]) -> StagedPart:
        """Every piece is on the broker's disk when this returns. `target`: topic or cache."""
        attempt = uuid.uuid4().hex
        count = rows = 0
        for piece in pieces:
            if not self._sent(f"{part}/{count}", piece, target | {"attempt": attempt}):
                # Spark wants its rows taken, though nobody needs them.
                rows += piece.rows + sum(more.rows for more in pieces)
                return StagedPart(self.producer, part, attempt, 0, rows)
            count += 1
            rows += piece.rows
        return StagedPart(self.producer, part, attempt, count, rows)

    def commit(self, staged: Sequence[StagedPart], *, once: bool = False) -> CommitAnswer:
        """Returns when every row is stored, now or by an earlier commit of the batch."""
        parts = [
            {"part": one.part, "attempt": one.attempt, "pieces": one.pieces, "rows": one.rows}
            for one in staged
            if one.pieces
        ]
        body = encode({"parts": parts, "once": once})
        answer, patience, done = self._ask_to_commit(body), self._broker.patience(), -1
        while answer.status == STORING:
            if answer.done > done:
                patience.renew()
                done = answer.done
            patience.bear(Unavailable(self._unfinished(answer)))
            answer = self._ask_to_commit(body)
        return answer

    def drop(self) -> None:
        self._broker.call("DELETE", self._path)

    def last_committed(self) -> int:
        """The producer's last batch, -1 before its first."""
        try:
            answer = self._broker.call("GET", f"/v1/writes/{segment(self.producer)}")
        except NotFound:
            return -1
        return _read_producer(answer).last_batch

    def _sent(self, path: str, piece: RowPiece, query: dict[str, str]) -> bool:
        """False when the batch needs no pieces any more."""
        try:
            self._broker.call(
                "PUT", f"{self._path}/{path}", body=piece.body, content_type=ARROW, query=query
            )
        except FailedPrecondition:
            if self.last_committed() < self.batch:
                raise
            return False
        return True

    def _unfinished(self, answer: CommitAnswer) -> str:
        return (
            f"batch {self.batch} of {self.producer} is committed, and {answer.done} of its "
            f"{answer.rows} rows are stored; the broker stores the others by itself"
        )

    def _ask_to_commit(self, body: bytes) -> CommitAnswer:
        return _read_committed(self._broker.call("POST", f"{self._path}/commit", body=body))
