"""One batch of a producer at the broker: staged in pieces, then committed as a whole, or dropped.

Invariant: a batch is stored once, however often it is sent and committed. A task stages under a
name of its own attempt, and the commit names the attempts that count. If the batch turns out to be
committed already, the rest of it is not sent. Must not know Spark's rows.
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
    """The part of a batch that one task has staged; Spark sends it from the executor to the
    driver's commit. With 0 pieces, the batch was committed before, and `rows` is how many it would
    have had now."""

    producer: str
    part: int
    attempt: str
    pieces: int
    rows: int


class CommitAnswer(msgspec.Struct):
    """The broker's answer to a commit. `done` rows are stored so far."""

    status: str
    rows: int = 0
    done: int = 0


class ProducerAnswer(msgspec.Struct):
    last_batch: int


_read_committed = msgspec.json.Decoder(CommitAnswer).decode
_read_producer = msgspec.json.Decoder(ProducerAnswer).decode


class ProducerBatch:
    """Batch number `batch` of `producer`. Tasks send its pieces; the driver commits or drops it."""

    def __init__(self, broker: Broker, producer: str, batch: int) -> None:
        self.producer = producer
        self.batch = batch
        self._broker = broker
        self._path = f"/v1/writes/{segment(producer)}/{batch}"

    def send(self, part: int, pieces: Iterator[RowPiece], target: dict[str, str]) -> StagedPart:
        """Sends the pieces of a task. All of them are on the broker's disk when this returns.
        `target` has the topic or the cache."""
        attempt = uuid.uuid4().hex
        count = rows = 0
        for piece in pieces:
            if not self._sent(f"{part}/{count}", piece, target | {"attempt": attempt}):
                # Spark requires a task to take all of its rows.
                rows += piece.rows + sum(more.rows for more in pieces)
                return StagedPart(self.producer, part, attempt, 0, rows)
            count += 1
            rows += piece.rows
        return StagedPart(self.producer, part, attempt, count, rows)

    def commit(self, staged: Sequence[StagedPart], *, once: bool = False) -> CommitAnswer:
        """Returns when every row is stored, by this commit or by an earlier one of the same
        batch."""
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
        """Returns the number of the producer's last batch, -1 before the first."""
        try:
            answer = self._broker.call("GET", f"/v1/writes/{segment(self.producer)}")
        except NotFound:
            return -1
        return _read_producer(answer).last_batch

    def _sent(self, path: str, piece: RowPiece, query: dict[str, str]) -> bool:
        """Sends a piece. Returns False if the batch is committed already."""
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
            f"batch {self.batch} of {self.producer} is committed, but only {answer.done} of its "
            f"{answer.rows} rows are stored yet; the broker stores the others without being asked"
        )

    def _ask_to_commit(self, body: bytes) -> CommitAnswer:
        return _read_committed(self._broker.call("POST", f"{self._path}/commit", body=body))
