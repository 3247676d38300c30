"""One batch of a producer at the broker: staged in pieces, then committed as a whole, or dropped.

Invariant: a batch is stored once, however often it is sent and committed. A task stages under a
name of its own attempt, and the commit names the attempts that count. If the batch turns out to be
committed already, the rest of it is not sent. The pieces hold every row once, in order, and a piece
is no larger than twice the limit, or the limit and one row. Must not know what the rows mean.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import WriterCommitMessage

from penstock.client.calls import encode, segment
from penstock.model.errors import FailedPrecondition, NotFound, Unavailable
from penstock.spark.broker import BrokerConnection

ARROW = "application/vnd.apache.arrow.stream"
STORING = "storing"
ALREADY = "already_committed"

PIECE_BYTES = 8 << 20
"""Far below the largest body of a request, and large enough that a sync for each costs little."""


class RowPiece(NamedTuple):
    """Rows as the bytes of an Arrow IPC stream."""

    rows: int
    body: bytes


@dataclass(frozen=True)
class StagedPart(WriterCommitMessage):
    """The part of a batch that one task has staged; Spark sends it to the driver's commit. With 0
    pieces, the batch was committed before, and `rows` is how many it would have now."""

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

    def __init__(self, broker: BrokerConnection, producer: str, batch: int) -> None:
        self.producer = producer
        self.batch = batch
        self._broker = broker
        self._path = f"/v1/writes/{segment(producer)}/{batch}"

    def send(self, part: int, pieces: Iterator[RowPiece], target: dict[str, str]) -> StagedPart:
        """Stages the pieces of a task on the broker's disk. `target` has the topic or cache."""
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
        """Returns when every row is stored, by this commit or an earlier one of the batch."""
        parts = [
            {"part": one.part, "attempt": one.attempt, "pieces": one.pieces, "rows": one.rows}
            for one in staged
            if one.pieces
        ]
        body = encode({"parts": parts, "once": once})
        answer, retry_time, done = self._ask_to_commit(body), self._broker.retry_time(), -1
        while answer.status == STORING:
            if answer.done > done:
                retry_time.renew()
                done = answer.done
            retry_time.wait_after(Unavailable(self._unfinished(answer)))
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


# -- cutting rows into pieces ----------------------------------------------------------------------


def cut(batches: Iterable[pa.RecordBatch], limit: int = PIECE_BYTES) -> Iterator[RowPiece]:
    """Yields pieces of about the same size. All batches have the schema of the first."""
    open_piece: _OpenPiece | None = None
    for batch in batches:
        for part in _no_larger_than(limit, batch):
            open_piece = open_piece or _OpenPiece(part.schema)
            if open_piece.add(part) >= limit:
                yield open_piece.close()
                open_piece = None
    if open_piece is not None:
        yield open_piece.close()


class _OpenPiece:
    """Counts the bytes written, not those of the rows: small batches are mostly headers."""

    def __init__(self, schema: pa.Schema) -> None:
        self._out = pa.BufferOutputStream()
        self._stream = pa.ipc.new_stream(self._out, schema)
        self._rows = 0

    def add(self, batch: pa.RecordBatch) -> int:
        """Returns the bytes written so far."""
        self._stream.write_batch(batch)
        self._rows += batch.num_rows
        return int(self._out.tell())

    def close(self) -> RowPiece:
        self._stream.close()
        return RowPiece(self._rows, self._out.getvalue().to_pybytes())


def _no_larger_than(limit: int, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    if batch.num_rows == 0:
        return
    if batch.nbytes <= limit or batch.num_rows == 1:
        yield batch
        return
    half = batch.num_rows // 2
    yield from _no_larger_than(limit, batch.slice(0, half))
    yield from _no_larger_than(limit, batch.slice(half))
