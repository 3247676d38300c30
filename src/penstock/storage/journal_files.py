"""Journal files: events of messages as Arrow batches, and the references to these batches.

Invariant: rows are sorted by position, within a batch and from batch to batch. A file is on disk
before a manifest names it, and is never changed. Batches are written as they fill, so that a long
job holds one in memory. Unlike history they are compressed, because neighbouring rows are alike; so
a batch is sent as it is on disk or read whole. Readers always see all columns of JOURNAL_SCHEMA:
those that an older file lacks are null, except that `resource_kind` is `topic`. Must not know what
else the rows say, nor the log.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Iterator, Sequence

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from penstock.model.journal import TOPIC
from penstock.storage.batch_file import BatchFileWriter, WrittenBatch
from penstock.storage.columns import complete
from penstock.storage.errors import CorruptLog
from penstock.storage.file_identity import FileIdentity
from penstock.storage.history import MAX_BATCH_BYTES, MAX_BATCH_ROWS
from penstock.storage.history_reader import check_batch, checked_batch, integers
from penstock.storage.journal_rows import JOURNAL_SCHEMA
from penstock.storage.numbered_files import NumberedFiles
from penstock.storage.vfs import Vfs

MERGED_FILES = 16
"""This many files in a row, each smaller than a batch, become one. Every request for the newest
events makes a file, however small."""

FIRST_COLUMNS = 16
"""The number of columns of files from before the manifest recorded it."""

_files = NumberedFiles("journal-", ".arrow")
journal_name, journal_number, remove_journal = _files.name, _files.number, _files.remove
_OPTIONS = pa.ipc.IpcWriteOptions(compression="zstd")


class JournalRef(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Batch `index` of file number `file`: rows at positions `first` to `last`. `first_ts` and
    `last_ts` are the least and the greatest time in ms. Its Arrow message is `length` bytes from
    `start`, with the first `columns` columns of JOURNAL_SCHEMA."""

    file: int
    index: int
    first: int
    last: int
    rows: int
    first_ts: int
    last_ts: int
    start: int
    length: int
    crc: int
    columns: int = FIRST_COLUMNS


class JournalFile(msgspec.Struct, frozen=True, array_like=True):
    """A file with its batches. There is at least one."""

    number: int
    size: int
    batches: list[JournalRef]
    identity: FileIdentity | None = None

    @property
    def rows(self) -> int:
        return sum(ref.rows for ref in self.batches)

    @property
    def last(self) -> int:
        return self.batches[-1].last

    @property
    def last_ts(self) -> int:
        return max(ref.last_ts for ref in self.batches)


class JournalIndex(msgspec.Struct, frozen=True):
    """The files in order. Every row from position `start` on is in them or still in the log. A
    `start` of -1 means that no journal is kept, or that nothing was sealed yet."""

    start: int = -1
    files: list[JournalFile] = []


class JournalReader:
    """Reads batches, from any thread. Blocking."""

    schema = JOURNAL_SCHEMA
    order = "position"

    def __init__(self, vfs: Vfs, directory: str) -> None:
        self._vfs = vfs
        self._directory = directory

    def raw(self, ref: JournalRef) -> bytes:
        """Returns one message of an Arrow stream: the batch as it is on disk, unless it lacks
        columns."""
        if ref.columns == len(JOURNAL_SCHEMA):
            return self._stored(ref)
        return bytes(self.batch(ref).serialize())

    def batch(self, ref: JournalRef) -> pa.RecordBatch:
        schema = pa.schema(list(JOURNAL_SCHEMA)[: ref.columns])
        batch = pa.ipc.read_record_batch(pa.py_buffer(self._stored(ref)), schema)
        return _with_resource_kind(complete(batch, JOURNAL_SCHEMA), ref.columns)

    def positions(self, ref: JournalRef) -> Sequence[int]:
        return integers(self.batch(ref), "position", "q")

    def position_at(self, ref: JournalRef, time_ms: int) -> int:
        """Returns the batch's first position at or after that time. There must be one."""
        batch = self.batch(ref)
        row = bisect_left(integers(batch, "timestamp", "q"), time_ms * 1000)
        return integers(batch, "position", "q")[row]

    def check(self, ref: JournalRef) -> None:
        """Raises CorruptHistory unless the batch's bytes match its checksum."""
        check_batch(self._vfs, self.path(ref.file), ref)

    def path(self, number: int) -> str:
        return os.path.join(self._directory, journal_name(number))

    def _stored(self, ref: JournalRef) -> bytes:
        return b"".join(checked_batch(self._vfs, self.path(ref.file), ref))


class JournalWriter:
    """Writes one file. Ends with `finish` or `abandon`."""

    def __init__(self, vfs: Vfs, directory: str, number: int) -> None:
        self._number = number
        name = journal_name(number)
        self._file = BatchFileWriter(vfs, directory, name, JOURNAL_SCHEMA, _OPTIONS)
        self._refs: list[JournalRef] = []
        self._pending: list[pa.RecordBatch] = []
        self._pending_rows = 0

    def add(self, rows: pa.RecordBatch) -> None:
        """Appends rows. Holds them in memory until they fill a batch."""
        while rows.num_rows:
            part = rows.slice(0, MAX_BATCH_ROWS - self._pending_rows)
            rows = rows.slice(part.num_rows)
            self._pending.append(part)
            self._pending_rows += part.num_rows
            if self._pending_rows == MAX_BATCH_ROWS:
                self._flush()

    def finish(self) -> JournalFile | None:
        """Writes the rest and returns the file once it is on disk, or None if there are no rows."""
        self._flush()
        size, identity = self._file.finish()
        return JournalFile(self._number, size, self._refs, identity) if self._refs else None

    def abandon(self) -> None:
        """Removes the unfinished file after a failure."""
        self._file.abandon()

    def _flush(self) -> None:
        pending, self._pending, self._pending_rows = self._pending, [], 0
        if pending:
            for batch in _parts(pa.concat_batches(pending)):
                written = self._file.write(batch)
                self._refs.append(_ref(self._number, len(self._refs), batch, written))


def _with_resource_kind(batch: pa.RecordBatch, columns: int) -> pa.RecordBatch:
    """Sets the column if the file lacks it. Its rows are those of topics: access rules for a stream
    must not open them."""
    at = JOURNAL_SCHEMA.get_field_index("resource_kind")
    if columns > at:
        return batch
    topics = pa.repeat(pa.scalar(TOPIC, pa.string()), batch.num_rows)
    return batch.set_column(at, JOURNAL_SCHEMA.field(at), topics)


def small_tail(files: list[JournalFile]) -> list[JournalFile]:
    """Returns the last files if they are many and small, to be merged into one; else none."""
    tail: list[JournalFile] = []
    for file in reversed(files):
        if file.rows >= MAX_BATCH_ROWS:
            break
        tail.append(file)
    return tail[::-1] if len(tail) >= MERGED_FILES else []


def are_sound(files: list[JournalFile], reader: JournalReader) -> bool:
    """Returns True if every batch matches its checksum. Damage must not be copied into a new file,
    under a new checksum."""
    try:
        for file in files:
            for ref in file.batches:
                reader.check(ref)
    except CorruptLog:
        return False
    return True


def _parts(rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Halves the rows until each part is within MAX_BATCH_BYTES."""
    if rows.nbytes > MAX_BATCH_BYTES and rows.num_rows > 1:
        half = rows.num_rows // 2
        yield from _parts(rows.slice(0, half))
        yield from _parts(rows.slice(half))
    else:
        yield rows


def _ref(number: int, index: int, batch: pa.RecordBatch, written: WrittenBatch) -> JournalRef:
    positions = batch.column("position")
    times = pc.min_max(batch.column("timestamp").view(pa.int64()))
    return JournalRef(
        number,
        index,
        positions[0].as_py(),
        positions[-1].as_py(),
        batch.num_rows,
        times["min"].as_py() // 1000,
        times["max"].as_py() // 1000,
        *written,
        batch.num_columns,
    )
