"""History files: sealed messages as Arrow batches, and the references to these batches.

Invariant: a batch holds rows of one partition in offset order; writing others fails. A BatchRef
says where a batch is, what it holds and its checksum. A file is on disk before a manifest names it,
and is never changed afterwards, only removed. Must not know the state machine or the log. The
layout is in docs/storage-format.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from penstock.storage.batch_file import BatchFileWriter, WrittenBatch
from penstock.storage.columns import SCHEMA, complete
from penstock.storage.errors import CorruptIndex, StorageError
from penstock.storage.file_identity import FileIdentity
from penstock.storage.numbered_files import NumberedFiles
from penstock.storage.vfs import Vfs

MAX_BATCH_ROWS = 65_536
"""Large enough to be read at full speed, small enough to be skipped cheaply."""
MAX_BATCH_BYTES = 64 * 1024 * 1024

_files = NumberedFiles("history-", ".arrow")
history_name, history_number, remove_history = _files.name, _files.number, _files.remove


PartitionKey = tuple[int, int]
"""Topic id and partition index."""


class BatchRef(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Batch `index` of file number `file`: rows `first` to `last` of one partition.

    `bytes` counts keys and values in UTF-8, and payloads. `first_ts` and `last_ts` are the least
    and the greatest time in ms. The batch's Arrow message is `length` bytes from `start`. Bit n of
    `filled` is 0 if
    column n is null in all rows; in older files all bits are 1. `preceding` is the number of
    messages that the partition stored before the batch's first, including trimmed ones; -1 means
    unknown.
    """

    file: int
    index: int
    topic_id: int
    partition: int
    first: int
    last: int
    msgs: int
    bytes: int
    first_ts: int
    last_ts: int
    start: int
    length: int
    crc: int
    filled: int = -1
    preceding: int = -1


class PartitionRows(NamedTuple):
    """The rows of one batch. `preceding` is as in BatchRef."""

    topic_id: int
    partition: int
    batch: pa.RecordBatch
    preceding: int = -1


class HistoryFile(msgspec.Struct, frozen=True, array_like=True):
    """A file with all its batches, including those without retained rows."""

    number: int
    size: int
    batches: list[BatchRef]
    identity: FileIdentity | None = None


class HistoryGone(StorageError):
    """The file was rewritten or expired since the reference was made. Look the row up again."""

    def __init__(self, path: str) -> None:
        super().__init__(f"{path} is no longer part of the history")
        self.path = path


def partition_key(ref: BatchRef) -> PartitionKey:
    return ref.topic_id, ref.partition


def write_history(
    vfs: Vfs, directory: str, number: int, batches: Iterable[PartitionRows]
) -> HistoryFile:
    """Writes the batches as one file and returns once it is on disk. Without batches, leaves no
    file. Each batch must be within MAX_BATCH_ROWS and MAX_BATCH_BYTES."""
    writer = BatchFileWriter(vfs, directory, history_name(number), SCHEMA)
    refs: list[BatchRef] = []
    try:
        for rows in batches:
            rows = rows._replace(batch=complete(rows.batch))
            if not is_in_order(rows.batch):
                detail = f"batch {len(refs)} has rows out of order"
                raise CorruptIndex(writer.path, writer.end, detail)
            refs.append(_ref(number, len(refs), rows, writer.write(rows.batch)))
        size, identity = writer.finish()
    except BaseException:
        writer.abandon()
        raise
    return HistoryFile(number, size, refs, identity)


def is_in_order(batch: pa.RecordBatch) -> bool:
    """Returns True if there are rows and their offsets rise."""
    offsets = batch.column("offset")
    rises = pc.less(offsets.slice(0, max(0, len(offsets) - 1)), offsets.slice(1))
    return len(offsets) > 0 and bool(pc.all(rises, min_count=0).as_py())


def batches_of(
    topic_id: int, partition: int, preceding: int, chunks: Iterable[pa.RecordBatch]
) -> Iterator[PartitionRows]:
    """Joins chunks into batches. They must be in offset order, and no other file may hold a row of
    the partition between them."""
    for batch in joined(chunks):
        yield PartitionRows(topic_id, partition, batch, preceding)
        if preceding >= 0:
            preceding += batch.num_rows


def joined(chunks: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Joins consecutive chunks, as many as fit into a batch."""
    run: list[pa.RecordBatch] = []
    rows = size = 0
    for chunk in chunks:
        if run and (
            rows + chunk.num_rows > MAX_BATCH_ROWS or size + chunk.nbytes > MAX_BATCH_BYTES
        ):
            yield _concatenated(run)
            run, rows, size = [], 0, 0
        run.append(chunk)
        rows += chunk.num_rows
        size += chunk.nbytes
    if run:
        yield _concatenated(run)


def _concatenated(run: list[pa.RecordBatch]) -> pa.RecordBatch:
    if len(run) == 1:
        return run[0]
    if len({chunk.num_columns for chunk in run}) > 1:
        run = [complete(chunk) for chunk in run]
    return pa.concat_batches(run)


def _ref(number: int, index: int, rows: PartitionRows, written: WrittenBatch) -> BatchRef:
    batch = rows.batch
    offsets = batch.column("offset")
    times = pc.min_max(batch.column("timestamp").view(pa.int64()))
    return BatchRef(
        number,
        index,
        rows.topic_id,
        rows.partition,
        offsets[0].as_py(),
        offsets[-1].as_py(),
        batch.num_rows,
        sum(_text_bytes(batch, name) for name in ("key", "value", "payload")),
        times["min"].as_py() // 1000,
        times["max"].as_py() // 1000,
        *written,
        _filled(batch),
        rows.preceding,
    )


def _filled(batch: pa.RecordBatch) -> int:
    rows = batch.num_rows
    return sum(1 << n for n, column in enumerate(batch.columns) if column.null_count < rows)


def _text_bytes(batch: pa.RecordBatch, name: str) -> int:
    total = pc.sum(pc.binary_length(batch.column(name))).as_py()
    return int(total or 0)
