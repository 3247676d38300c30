"""Staged pieces: rows that wait for the commit of their batch, in files or in memory.

Invariant: a piece exists whole or not at all, and is on disk when `write` returns. Nothing is
returned from a slice whose checksum does not match. A file is never changed: a piece that is sent
again becomes another file. Blocking. Must not know which pieces are committed, nor what rows mean.
The layout is in docs/storage-format.md.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from collections.abc import Iterator
from typing import Protocol

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from penstock.core.write_rules import StagedPiece
from penstock.model.errors import Unavailable
from penstock.model.limits import MIB
from penstock.storage.errors import CorruptStaged
from penstock.storage.numbered_files import NumberedFiles
from penstock.storage.vfs import Vfs, remove_if_there

DIRECTORY_NAME = "staged"
SLICE_ROWS = 8192
SLICE_BYTES = 2 * MIB
"""A slice is read whole, and two slices of a batch are held in memory while it is stored."""

MAGIC = b"PENSTAGE"
FORMAT_VERSION = 1

_CONTENT = {"key", "value", "payload"}

_HEAD = struct.Struct("<8sIIQ")
_files = NumberedFiles("piece-", ".rows")
piece_name = _files.name


class StagedSlice(msgspec.Struct, frozen=True, array_like=True):
    """An Arrow message of `rows` rows: `length` bytes from `start` behind the header."""

    rows: int
    start: int
    length: int
    crc: int


class PieceContent(msgspec.Struct, frozen=True):
    """Describes the rows of a piece. `topic` is for rows that name none. In a piece for a cache,
    `cache` is the cache's path and `topic` is empty. In a piece for a stream, `topic` is the name
    of the stream's log."""

    topic: str
    cache: list[str]
    columns: list[str]
    slices: list[StagedSlice]


class PieceHeader(msgspec.Struct, frozen=True):
    piece: StagedPiece
    content: PieceContent


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(PieceHeader)


class PackedPiece(msgspec.Struct, frozen=True):
    """A piece's rows, ready to be written."""

    content: PieceContent
    rows: int
    buffers: list[pa.Buffer]
    content_bytes: int
    """The bytes of the rows' keys and values."""

    @property
    def nbytes(self) -> int:
        return sum(part.length for part in self.content.slices)


def pack(table: pa.Table, topic: str, cache: list[str]) -> PackedPiece:
    """Cuts a table of normalised columns into slices."""
    slices: list[StagedSlice] = []
    buffers: list[pa.Buffer] = []
    start = 0
    for batch in table.combine_chunks().to_batches(max_chunksize=_rows_a_slice(table)):
        buffer = batch.serialize()
        slices.append(StagedSlice(batch.num_rows, start, buffer.size, zlib.crc32(buffer)))
        buffers.append(buffer)
        start += buffer.size
    content = PieceContent(topic, cache, table.column_names, slices)
    return PackedPiece(content, table.num_rows, buffers, _content_bytes(table))


def _content_bytes(table: pa.Table) -> int:
    columns = [table[name] for name in table.column_names if name in _CONTENT]
    return sum(pc.sum(pc.binary_length(column)).as_py() or 0 for column in columns)


def _rows_a_slice(table: pa.Table) -> int:
    """Returns how many rows of average size make SLICE_BYTES."""
    row_bytes: int = table.nbytes // max(1, table.num_rows) + 1
    return max(1, min(SLICE_ROWS, SLICE_BYTES // row_bytes))


class StagedPieceReader(Protocol):
    """Reads the slices of one staged piece."""

    piece: StagedPiece
    content: PieceContent

    def read(self, part: StagedSlice) -> pa.Buffer: ...


class PieceStore(Protocol):
    """Stores staged pieces by their numbers. `found` has the pieces from before the start; new
    ones have numbers from `first_number` on."""

    found: dict[int, StagedPiece | CorruptStaged]
    first_number: int

    def write(self, piece: StagedPiece, packed: PackedPiece) -> None:
        """Stores the piece. It is durable when this returns."""
        ...

    def open(self, number: int) -> StagedPieceReader: ...

    def remove(self, number: int) -> None: ...


class StagedInMemory:
    """The store of a broker without a disk."""

    first_number = 1

    def __init__(self) -> None:
        self.found: dict[int, StagedPiece | CorruptStaged] = {}
        self._pieces: dict[int, tuple[StagedPiece, PackedPiece]] = {}

    def write(self, piece: StagedPiece, packed: PackedPiece) -> None:
        self._pieces[piece.number] = (piece, packed)

    def open(self, number: int) -> StagedPieceReader:
        return _PieceInMemory(*self._pieces[number])

    def remove(self, number: int) -> None:
        self._pieces.pop(number, None)


class _PieceInMemory:
    def __init__(self, piece: StagedPiece, packed: PackedPiece) -> None:
        self.piece = piece
        self.content = packed.content
        self._packed = packed

    def read(self, part: StagedSlice) -> pa.Buffer:
        return self._packed.buffers[self.content.slices.index(part)]


class StagedPieceFiles:
    """A directory with one file for each piece. Leaves `reserve_bytes` of the disk free."""

    first_number = 1

    def __init__(self, vfs: Vfs, directory: str, reserve_bytes: int) -> None:
        self.found: dict[int, StagedPiece | CorruptStaged] = {}
        self._vfs = vfs
        self._directory = os.path.join(directory, DIRECTORY_NAME)
        self._reserve_bytes = reserve_bytes

    def write(self, piece: StagedPiece, packed: PackedPiece) -> None:
        """Raises Unavailable if the disk is nearly full."""
        header = _encoder.encode(PieceHeader(piece, packed.content))
        size = _HEAD.size + len(header) + packed.nbytes
        if self._vfs.free_bytes(self._directory) < size + self._reserve_bytes:
            raise Unavailable("the disk is nearly full; pieces are staged when there is room")
        head = _HEAD.pack(MAGIC, FORMAT_VERSION, _crc(header), len(header))
        slices = [memoryview(buffer) for buffer in packed.buffers]
        path = self._path(piece.number)
        try:
            self._vfs.write_file_atomically(path, head, header, *slices)
        except OSError:
            # Removed, since a client that sends the piece again is given another number.
            with contextlib.suppress(OSError):
                remove_if_there(self._vfs, f"{path}.tmp")
                remove_if_there(self._vfs, path)
            raise

    def open(self, number: int) -> StagedPieceReader:
        return _PieceOnDisk(self._vfs, self._path(number), number)

    def remove(self, number: int) -> None:
        remove_if_there(self._vfs, self._path(number))

    def load(self) -> None:
        """Finds all pieces, and removes temporary files that a crash left behind."""
        self._vfs.mkdir(self._directory)
        for name in sorted(self._vfs.listdir(self._directory)):
            path = os.path.join(self._directory, name)
            number = _files.number(name)
            if name.endswith(".tmp"):
                remove_if_there(self._vfs, path)
            elif number is not None:
                try:
                    self.found[number] = _PieceOnDisk(self._vfs, path, number).piece
                except CorruptStaged as error:
                    self.found[number] = error

    def _path(self, number: int) -> str:
        return os.path.join(self._directory, piece_name(number))


def check_pieces(vfs: Vfs, directory: str) -> Iterator[tuple[str, CorruptStaged | None]]:
    """Yields the path of every piece, and its damage or None. Reads all rows, changes nothing."""
    staged = os.path.join(directory, DIRECTORY_NAME)
    if not vfs.exists(staged):
        return
    for name in sorted(vfs.listdir(staged)):
        number = _files.number(name)
        if number is not None:
            path = os.path.join(staged, name)
            try:
                piece = _PieceOnDisk(vfs, path, number)
                for part in piece.content.slices:
                    piece.read(part)
            except CorruptStaged as error:
                yield path, error
            else:
                yield path, None


class _PieceOnDisk:
    """Reads a piece's file. Raises CorruptStaged unless its header is undamaged, has this number,
    and the file has the length of all slices."""

    def __init__(self, vfs: Vfs, path: str, number: int) -> None:
        self._vfs = vfs
        self._path = path
        header, self._base, size = _read_header(vfs, path)
        self.piece = header.piece
        self.content = header.content
        if self.piece.number != number:
            detail = f"it says that it is {piece_name(self.piece.number)}"
            raise CorruptStaged(path, _HEAD.size, detail)
        wanted = self._base + sum(part.length for part in self.content.slices)
        if size != wanted:
            raise CorruptStaged(path, min(size, wanted), f"{size} bytes long, not {wanted}")

    def read(self, part: StagedSlice) -> pa.Buffer:
        start = self._base + part.start
        fd = self._vfs.open_read(self._path)
        try:
            data = self._vfs.read_at(fd, part.length, start)
        finally:
            self._vfs.close(fd)
        if len(data) != part.length or zlib.crc32(data) != part.crc:
            raise CorruptStaged(self._path, start, "the checksum does not match")
        return pa.py_buffer(data)


def _read_header(vfs: Vfs, path: str) -> tuple[PieceHeader, int, int]:
    """Returns the header, the byte where it ends, and the size of the file."""
    try:
        fd = vfs.open_read(path)
    except FileNotFoundError:
        raise CorruptStaged(path, 0, "a commit names it and it is missing") from None
    try:
        head = vfs.read_at(fd, _HEAD.size, 0)
        if len(head) != _HEAD.size:
            raise CorruptStaged(path, len(head), "it ends within its head")
        magic, version, crc, length = _HEAD.unpack(head)
        if magic != MAGIC or version != FORMAT_VERSION:
            raise CorruptStaged(path, 0, "the head is not that of a staged piece")
        size = vfs.size(fd)
        if length > size:
            raise CorruptStaged(path, _HEAD.size, "it ends within its header")
        data = vfs.read_at(fd, length, _HEAD.size)
    finally:
        vfs.close(fd)
    if _crc(data) != crc:
        raise CorruptStaged(path, _HEAD.size, "the checksum does not match")
    return _decoder.decode(data), _HEAD.size + length, size


def _crc(header: bytes) -> int:
    """Returns the CRC-32 of the header's length and the header."""
    return zlib.crc32(header, zlib.crc32(struct.pack("<Q", len(header))))
