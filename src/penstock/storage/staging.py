"""Staged pieces: rows that wait for the commit of their batch, a file each or, without a disk, in
memory.

Invariant: a piece is there whole or not at all, and is on disk when `write` returns; nothing is
returned from a slice whose checksum does not hold. A file is never changed: a piece that is sent
again is another file. Blocking. Must not know which pieces are committed, nor what rows mean. The
layout is in docs/storage-format.md.
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
import zlib
from collections.abc import Iterator
from typing import Protocol

import msgspec
import pyarrow as pa

from penstock.core.write_rules import StagedPiece
from penstock.model.errors import Unavailable
from penstock.model.limits import MIB
from penstock.storage.errors import CorruptStaged
from penstock.storage.vfs import Vfs, remove_if_there

DIRECTORY_NAME = "staged"
SLICE_ROWS = 8192
SLICE_BYTES = 2 * MIB
"""A slice is read whole, and two of a batch are held while it is stored."""

MAGIC = b"PENSTAGE"
FORMAT_VERSION = 1

_HEAD = struct.Struct("<8sIIQ")
_NAME = re.compile(r"piece-([0-9]{20})\.rows")


class Slice(msgspec.Struct, frozen=True, array_like=True):
    """An Arrow message of `rows` rows: `length` bytes from `start` behind the header."""

    rows: int
    start: int
    length: int
    crc: int


class Content(msgspec.Struct, frozen=True):
    """The rows of a piece as bytes. `topic` is that of rows which name none; of a piece for a
    cache, `cache` is its path and `topic` is empty."""

    topic: str
    cache: list[str]
    columns: list[str]
    slices: list[Slice]


class Header(msgspec.Struct, frozen=True):
    piece: StagedPiece
    content: Content


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Header)


class Packed(msgspec.Struct, frozen=True):
    """A piece's rows, ready to be written."""

    content: Content
    rows: int
    buffers: list[pa.Buffer]

    @property
    def nbytes(self) -> int:
        return sum(part.length for part in self.content.slices)


def pack(table: pa.Table, topic: str, cache: list[str]) -> Packed:
    """Cuts a table of normalised columns into slices."""
    slices: list[Slice] = []
    buffers: list[pa.Buffer] = []
    start = 0
    for batch in table.combine_chunks().to_batches(max_chunksize=_rows_a_slice(table)):
        buffer = batch.serialize()
        slices.append(Slice(batch.num_rows, start, buffer.size, zlib.crc32(buffer)))
        buffers.append(buffer)
        start += buffer.size
    content = Content(topic, cache, table.column_names, slices)
    return Packed(content, table.num_rows, buffers)


def _rows_a_slice(table: pa.Table) -> int:
    """As many as are likely to make SLICE_BYTES, by their average."""
    row_bytes: int = table.nbytes // max(1, table.num_rows) + 1
    return max(1, min(SLICE_ROWS, SLICE_BYTES // row_bytes))


class OpenPiece(Protocol):
    """A piece that is being read."""

    piece: StagedPiece
    content: Content

    def read(self, part: Slice) -> pa.Buffer: ...


class Shelf(Protocol):
    """Where staged pieces are, by their numbers. `found` are those of before the start."""

    found: dict[int, StagedPiece | CorruptStaged]

    def write(self, piece: StagedPiece, packed: Packed) -> None:
        """It is safe when this returns."""
        ...

    def open(self, number: int) -> OpenPiece: ...

    def remove(self, number: int) -> None: ...


class StagedInMemory:
    """For a broker without a disk."""

    def __init__(self) -> None:
        self.found: dict[int, StagedPiece | CorruptStaged] = {}
        self._pieces: dict[int, tuple[StagedPiece, Packed]] = {}

    def write(self, piece: StagedPiece, packed: Packed) -> None:
        self._pieces[piece.number] = (piece, packed)

    def open(self, number: int) -> OpenPiece:
        return _PieceInMemory(*self._pieces[number])

    def remove(self, number: int) -> None:
        self._pieces.pop(number, None)


class _PieceInMemory:
    def __init__(self, piece: StagedPiece, packed: Packed) -> None:
        self.piece = piece
        self.content = packed.content
        self._packed = packed

    def read(self, part: Slice) -> pa.Buffer:
        return self._packed.buffers[self.content.slices.index(part)]


class StagedFiles:
    """In a directory of their own; `reserve_bytes` of the disk are not for them."""

    def __init__(self, vfs: Vfs, directory: str, reserve_bytes: int) -> None:
        self.found: dict[int, StagedPiece | CorruptStaged] = {}
        self._vfs = vfs
        self._directory = os.path.join(directory, DIRECTORY_NAME)
        self._reserve_bytes = reserve_bytes

    def write(self, piece: StagedPiece, packed: Packed) -> None:
        """Unavailable where there is no room."""
        header = _encoder.encode(Header(piece, packed.content))
        size = _HEAD.size + len(header) + packed.nbytes
        if self._vfs.free_bytes(self._directory) < size + self._reserve_bytes:
            raise Unavailable("the disk is nearly full; pieces are staged when there is room")
        head = _HEAD.pack(MAGIC, FORMAT_VERSION, _crc(header), len(header))
        slices = [memoryview(buffer) for buffer in packed.buffers]
        self._write(self._path(piece.number), [head, header, *slices])

    def _write(self, path: str, buffers: list[bytes | memoryview]) -> None:
        """As `write_file_atomically`, without another copy of it all in memory."""
        vfs, temporary = self._vfs, f"{path}.tmp"
        try:
            fd = vfs.open(temporary, create=True)
            try:
                vfs.write_at(fd, buffers, 0)
                vfs.sync(fd)
            finally:
                vfs.close(fd)
            vfs.rename(temporary, path)
            vfs.fsync_dir(self._directory)
        except OSError:
            # Whoever sends it again is given another number.
            with contextlib.suppress(OSError):
                remove_if_there(vfs, temporary)
                remove_if_there(vfs, path)
            raise

    def open(self, number: int) -> OpenPiece:
        return _PieceOnDisk(self._vfs, self._path(number), number)

    def remove(self, number: int) -> None:
        remove_if_there(self._vfs, self._path(number))

    def load(self) -> None:
        """Finds every piece there is, and removes what a crash left of others."""
        self._vfs.mkdir(self._directory)
        for name in sorted(self._vfs.listdir(self._directory)):
            path = os.path.join(self._directory, name)
            match = _NAME.fullmatch(name)
            if name.endswith(".tmp"):
                remove_if_there(self._vfs, path)
            elif match is not None:
                number = int(match[1])
                try:
                    self.found[number] = _PieceOnDisk(self._vfs, path, number).piece
                except CorruptStaged as error:
                    self.found[number] = error

    def _path(self, number: int) -> str:
        return os.path.join(self._directory, piece_name(number))


def check_pieces(vfs: Vfs, directory: str) -> Iterator[tuple[str, CorruptStaged | None]]:
    """The path of every piece, and what is wrong with it. Reads all of them, changes nothing."""
    staged = os.path.join(directory, DIRECTORY_NAME)
    if not vfs.exists(staged):
        return
    for name in sorted(vfs.listdir(staged)):
        match = _NAME.fullmatch(name)
        if match is not None:
            path = os.path.join(staged, name)
            try:
                piece = _PieceOnDisk(vfs, path, int(match[1]))
                for part in piece.content.slices:
                    piece.read(part)
            except CorruptStaged as error:
                yield path, error
            else:
                yield path, None


class _PieceOnDisk:
    """CorruptStaged unless the header is sound, that of this number, and all slices are there."""

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
            raise CorruptStaged(path, min(size, wanted), f"{size} bytes long, it had {wanted}")

    def read(self, part: Slice) -> pa.Buffer:
        start = self._base + part.start
        fd = self._vfs.open_read(self._path)
        try:
            data = self._vfs.read_at(fd, part.length, start)
        finally:
            self._vfs.close(fd)
        if len(data) != part.length or zlib.crc32(data) != part.crc:
            raise CorruptStaged(self._path, start, "the checksum does not hold")
        return pa.py_buffer(data)


def _read_header(vfs: Vfs, path: str) -> tuple[Header, int, int]:
    """The header, where it ends, and the size of the file."""
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
        raise CorruptStaged(path, _HEAD.size, "the checksum does not hold")
    return _decoder.decode(data), _HEAD.size + length, size


def _crc(header: bytes) -> int:
    """Of its length and the header."""
    return zlib.crc32(header, zlib.crc32(struct.pack("<Q", len(header))))


def piece_name(number: int) -> str:
    return f"piece-{number:020d}.rows"
