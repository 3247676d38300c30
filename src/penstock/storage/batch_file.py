"""Writes a file of Arrow batches: a history or a journal file.

Invariant: the file is on disk with its name when `finish` returns, and is gone after `abandon`. The
place and checksum of each batch, and the identity of the file, are those of the written bytes. Must
not know what the rows are.
"""

from __future__ import annotations

import os
import zlib
from typing import NamedTuple

import pyarrow as pa

from penstock.storage.file_identity import FileIdentity, named_schema
from penstock.storage.vfs import Vfs, remove_if_there

_MAGIC_BYTES = 8
_WRITE_BYTES = 1024 * 1024
_HOLE_BYTES = 16 * 1024
_ZEROS = pa.py_buffer(bytes(_WRITE_BYTES))


class WrittenBatch(NamedTuple):
    """The place of a batch's Arrow message in the file, and its CRC-32."""

    start: int
    length: int
    crc: int


class BatchFileWriter:
    """Writes one file, which is created with the first batch. Ends with `finish` or `abandon`."""

    def __init__(
        self,
        vfs: Vfs,
        directory: str,
        name: str,
        schema: pa.Schema,
        options: pa.ipc.IpcWriteOptions | None = None,
    ) -> None:
        self._vfs = vfs
        self._directory = directory
        self._options = options
        self._fd = -1
        self._is_finished = False
        self._sink: _ArrowSink | None = None
        self._writer: pa.ipc.RecordBatchFileWriter | None = None
        self._schema = named_schema(vfs, schema, name)
        self.path = os.path.join(directory, name)
        # Arrow's writer writes the head together with the first batch, not when it is opened.
        self.end = _MAGIC_BYTES + int(self._schema.serialize().size)
        """The byte where the next batch will begin."""

    def write(self, batch: pa.RecordBatch) -> WrittenBatch:
        if self._sink is None or self._writer is None:
            remove_if_there(self._vfs, self.path)
            self._fd = self._vfs.open(self.path, create=True)
            self._sink = _ArrowSink(self._vfs, self._fd, self.end)
            file = pa.PythonFile(self._sink, "w")
            self._writer = pa.ipc.new_file(file, self._schema, options=self._options)
        start = self.end
        self._sink.begin_batch(start)
        self._writer.write_batch(batch)
        self.end = self._sink.tell()
        return WrittenBatch(start, self.end - start, self._sink.crc)

    def finish(self) -> tuple[int, FileIdentity | None]:
        """Returns size and identity of the file once it is on disk; 0 and None without a batch."""
        if self._sink is None or self._writer is None:
            return 0, None
        self._writer.close()
        self._sink.flush()
        self._vfs.sync(self._fd)
        self._close()
        self._vfs.fsync_dir(self._directory)
        self._is_finished = True
        return self._sink.tell(), self._sink.identity()

    def abandon(self) -> None:
        """Removes the file after a failure, unless it is finished: a manifest may name it then."""
        if self._sink is not None and not self._is_finished:
            self._close()
            remove_if_there(self._vfs, self.path)

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._vfs.close(fd)


class _ArrowSink:
    """The file object for Arrow's writer. Computes the checksums, and leaves long runs of zeros out
    as holes, so that a column without values takes no space on disk."""

    closed = False

    def __init__(self, vfs: Vfs, fd: int, head: int) -> None:
        self._vfs = vfs
        self._fd = fd
        self._head = head
        self._head_crc = 0
        self._whole_crc = 0
        self._position = 0
        self._flushed = 0
        self._pending: list[bytes | memoryview] = []
        self._batch_start = 0
        self.crc = 0

    def begin_batch(self, start: int) -> None:
        self._batch_start = start
        self.crc = 0

    def write(self, data: bytes | pa.Buffer) -> int:
        size = memoryview(data).nbytes
        self._whole_crc = zlib.crc32(data, self._whole_crc)
        if self._position < self._head:
            self._head_crc = self._whole_crc
        if self._position >= self._batch_start:
            self.crc = zlib.crc32(data, self.crc)
        if _is_zeros(data, size):
            self.flush()
            self._flushed += size
        else:
            # Copied, because Arrow may reuse its memory once this returns.
            self._pending.append(bytes(data))
        self._position += size
        if self._position - self._flushed >= _WRITE_BYTES:
            self.flush()
        return size

    def flush(self) -> None:
        if self._pending:
            self._vfs.write_at(self._fd, self._pending, self._flushed)
            self._pending = []
            self._flushed = self._position

    def tell(self) -> int:
        return self._position

    def identity(self) -> FileIdentity:
        """Returns the identity of the file. Call it when everything is written."""
        return FileIdentity(self._head, self._head_crc, self._whole_crc)

    def close(self) -> None:
        """Does nothing: the caller closes the descriptor."""


def _is_zeros(data: bytes | pa.Buffer, size: int) -> bool:
    if size < _HOLE_BYTES or size > _WRITE_BYTES or isinstance(data, bytes):
        return False
    return bool(data.equals(_ZEROS.slice(0, size)))
