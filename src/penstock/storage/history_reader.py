"""Reads history: rows of a batch as messages, through mapped files, from any thread.

Invariant: returns nothing from a batch whose checksum does not match. Never changes a file. A file
that is forgotten stays readable for reads in progress. Blocking: must not be called on the event
loop. Must not know which batches are live.
"""

from __future__ import annotations

import mmap
import os
import threading
import zlib
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Literal, Protocol

import pyarrow as pa

from penstock.model.records import Stored
from penstock.storage.columns import MESSAGE_SCHEMA, SCHEMA, complete, to_messages
from penstock.storage.errors import CorruptHistory
from penstock.storage.history import BatchRef, HistoryGone, history_name
from penstock.storage.vfs import Vfs

OPEN_FILES = 32
"""Files mapped at the same time. A mapping costs address space and a little kernel state."""
PAGE_BYTES = 8 * 1024 * 1024

_CHECK_BYTES = 1024 * 1024

_SIZED = ("key", "value", "payload")
"""The columns whose bytes are counted."""


class HistoryReader:
    """A small cache of mapped files over one data directory."""

    schema = SCHEMA
    order = "offset"

    def __init__(self, vfs: Vfs, directory: str, open_files: int = OPEN_FILES) -> None:
        self._vfs = vfs
        self._directory = directory
        self._open_files = open_files
        self._files: OrderedDict[int, _MappedFile] = OrderedDict()
        self._lock = threading.Lock()

    def read(
        self, ref: BatchRef, from_offset: int, max_rows: int, max_bytes: int = PAGE_BYTES
    ) -> list[Stored]:
        """Returns the batch's messages from `from_offset` on: at most `max_rows`, and at most
        `max_bytes` of keys and values unless the first message alone is larger."""
        batch = self.batch(ref)
        start = row_at(batch, from_offset)
        rows = min(max_rows, batch.num_rows - start)
        if rows <= 0:
            return []
        rows = min(rows, max(1, _rows_within(batch, start, rows, max_bytes)))
        return to_messages(batch.slice(start, rows), ref.topic_id, ref.partition)

    def contains(self, ref: BatchRef, offset: int) -> bool:
        batch = self.batch(ref)
        row = row_at(batch, offset)
        return row < batch.num_rows and _offsets(batch)[row] == offset

    def count_from(self, ref: BatchRef, offset: int) -> tuple[int, int]:
        """Counts the messages from `offset` on, and the bytes of their keys and values."""
        batch = self.batch(ref)
        start, end = row_at(batch, offset), batch.num_rows
        columns = [integers(batch, name, "i") for name in _SIZED]
        return end - start, sum(column[end] - column[start] for column in columns)

    def offsets(self, ref: BatchRef) -> Sequence[int]:
        """Returns the offsets of all messages of the batch. Nothing is copied."""
        return _offsets(self.batch(ref))

    def batch(self, ref: BatchRef) -> pa.RecordBatch:
        """Returns the whole batch, mapped. No row is converted or copied."""
        return self._file(ref.file).batch(ref)

    def offset_at(self, ref: BatchRef, time_ms: int) -> int:
        """Returns the batch's first offset at or after that time. There must be one."""
        batch = self.batch(ref)
        return _offsets(batch)[bisect_left(integers(batch, "timestamp", "q"), time_ms * 1000)]

    def raw(self, ref: BatchRef) -> bytes:
        """Returns the batch as it is on disk: one message of an Arrow stream. Columns that an
        older file lacks are added."""
        mapped = self._file(ref.file)
        if mapped.lacks_columns:
            data: bytes = mapped.batch(ref).serialize().to_pybytes()
            return data
        path = os.path.join(self._directory, history_name(ref.file))
        return b"".join(checked_batch(self._vfs, path, ref))

    def forget(self, file: int) -> None:
        """Drops the mapping of a file that is about to be removed."""
        with self._lock:
            self._files.pop(file, None)

    def _file(self, number: int) -> _MappedFile:
        with self._lock:
            mapped = self._files.get(number)
            if mapped is not None:
                self._files.move_to_end(number)
                return mapped
        mapped = _MappedFile(self._vfs, os.path.join(self._directory, history_name(number)))
        with self._lock:
            mapped = self._files.setdefault(number, mapped)
            while len(self._files) > self._open_files:
                self._files.popitem(last=False)
        return mapped


class _MappedFile:
    """A mapped file. It is unmapped when the last reference to one of its batches is gone."""

    def __init__(self, vfs: Vfs, path: str) -> None:
        self._vfs = vfs
        self._path = path
        self._bytes = map_file(vfs, path)
        try:
            self._schema = pa.ipc.open_file(pa.BufferReader(self._bytes)).schema
        except (pa.ArrowException, OSError) as error:
            raise CorruptHistory(path, 0, f"no Arrow file: {error}") from None
        # Checked here, since no checksum covers the file's footer, which has the schema.
        self.lacks_columns = self._schema.equals(MESSAGE_SCHEMA)
        if not (self.lacks_columns or self._schema.equals(SCHEMA)):
            raise CorruptHistory(path, self._bytes.size, "the columns it names are not history's")
        # Without the file's name: rows of several files are joined.
        self._schema = MESSAGE_SCHEMA if self.lacks_columns else SCHEMA
        self._batches: dict[int, pa.RecordBatch] = {}

    def batch(self, ref: BatchRef) -> pa.RecordBatch:
        batch = self._batches.get(ref.index)
        if batch is None:
            check_batch(self._vfs, self._path, ref)
            message = self._bytes.slice(ref.start, ref.length)
            batch = complete(pa.ipc.read_record_batch(message, self._schema))
            self._batches[ref.index] = batch
        return batch


def map_file(vfs: Vfs, path: str) -> pa.Buffer:
    fd = _open(vfs, path)
    try:
        return pa.py_buffer(mmap.mmap(fd, 0, access=mmap.ACCESS_READ))
    except ValueError:
        raise CorruptHistory(path, 0, "the file is empty") from None
    finally:
        vfs.close(fd)


def _open(vfs: Vfs, path: str) -> int:
    try:
        return vfs.open_read(path)
    except FileNotFoundError:
        raise HistoryGone(path) from None


class StoredBatch(Protocol):
    """A batch of history or journal: BatchRef and JournalRef mirror it. Rows are ordered from
    `first` to `last`, by offset or position."""

    @property
    def index(self) -> int: ...

    @property
    def first(self) -> int: ...

    @property
    def last(self) -> int: ...

    @property
    def first_ts(self) -> int: ...

    @property
    def last_ts(self) -> int: ...

    @property
    def start(self) -> int: ...

    @property
    def length(self) -> int: ...

    @property
    def crc(self) -> int: ...


def check_batch(vfs: Vfs, path: str, ref: StoredBatch) -> None:
    """Raises CorruptHistory unless the batch's bytes match its checksum."""
    for _ in checked_batch(vfs, path, ref):
        pass


def checked_batch(vfs: Vfs, path: str, ref: StoredBatch) -> Iterator[bytes]:
    """Yields the batch's bytes, and raises CorruptHistory at their end if the checksum is wrong.

    They are read, not mapped: a failing disk then raises an error, while a mapping would kill the
    process.
    """
    fd = _open(vfs, path)
    crc, at, end = 0, ref.start, ref.start + ref.length
    try:
        while at < end and (data := vfs.read_at(fd, min(_CHECK_BYTES, end - at), at)):
            crc = zlib.crc32(data, crc)
            at += len(data)
            yield data
    finally:
        vfs.close(fd)
    if at != end or crc != ref.crc:
        raise CorruptHistory(path, ref.start, f"batch {ref.index} does not match its checksum")


def row_at(batch: pa.RecordBatch, at: int, order: str = "offset") -> int:
    """Returns the first row whose value in the column `order` is `at` or more."""
    return bisect_left(integers(batch, order, "q")[: batch.num_rows], at)


def _offsets(batch: pa.RecordBatch) -> memoryview[int]:
    return integers(batch, "offset", "q")[: batch.num_rows]


def _rows_within(batch: pa.RecordBatch, start: int, rows: int, max_bytes: int) -> int:
    """Counts the rows from `start` on whose keys, values and payloads fit into `max_bytes`."""
    keys, values, payloads = (integers(batch, name, "i") for name in _SIZED)
    before = keys[start] + values[start] + payloads[start]
    ends = range(start + 1, start + rows + 1)
    return bisect_right(
        ends, before + max_bytes, key=lambda end: keys[end] + values[end] + payloads[end]
    )


def integers(batch: pa.RecordBatch, name: str, code: Literal["i", "q"]) -> memoryview[int]:
    """Returns the values of a number column, or where each value of a text column begins. Nothing
    is copied."""
    column = batch.column(name)
    buffer: memoryview[int] = memoryview(column.buffers()[1])
    return buffer.cast("B").cast(code)[column.offset :]
