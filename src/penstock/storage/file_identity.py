"""What tells a sealed Arrow file from every other: its name inside, its head and its checksum.

Invariant: a file that passes `check_identity` has the length and the head that were written under
its name, and the head contains that name and a random id; one that passes `check_bytes` too has all
the bytes. The first is cheap, one short read whatever the size, and made at every start; the second
reads everything, and only `penstock wal verify` does it. Files of older releases have no identity
and are known by their length alone. Must not know what the rows are.
"""

from __future__ import annotations

import os
import re
import zlib
from typing import Protocol

import msgspec
import pyarrow as pa

from penstock.storage.errors import CorruptHistory
from penstock.storage.vfs import ZERO_STEP_BYTES, Vfs

_NAME_KEY = "penstock.name"
_ID_KEY = "penstock.id"
_ID_BYTES = 16
_NAME = re.compile(rb"(?:history|journal)-\d{20}\.arrow")


class Identity(msgspec.Struct, frozen=True, array_like=True):
    """The first `head` bytes of the file have the CRC-32 `head_crc`, the whole file has `crc`."""

    head: int
    head_crc: int
    crc: int


class NamedFile(Protocol):
    """A file of the manifest. `identity` is None if an older release wrote it."""

    @property
    def size(self) -> int: ...

    @property
    def identity(self) -> Identity | None: ...


def named_schema(vfs: Vfs, schema: pa.Schema, name: str) -> pa.Schema:
    """The schema with the file's name and a random id; it is what a file begins with."""
    return schema.with_metadata({_NAME_KEY: name, _ID_KEY: vfs.random_bytes(_ID_BYTES).hex()})


def check_identity(vfs: Vfs, path: str, file: NamedFile) -> None:
    """CorruptHistory unless the file is there, with its length and its head.

    A head of zeros passes: `penstock wal repair` leaves it where it gives a file up, and each batch
    has a checksum of its own.
    """
    try:
        fd = vfs.open_read(path)
    except FileNotFoundError:
        raise CorruptHistory(path, 0, "the manifest names it and it is missing") from None
    try:
        size = vfs.size(fd)
        head = vfs.read_at(fd, file.identity.head, 0) if file.identity is not None else b""
    finally:
        vfs.close(fd)
    if size != file.size:
        raise CorruptHistory(path, min(size, file.size), f"{size} bytes long, it had {file.size}")
    if file.identity is None or zlib.crc32(head) == file.identity.head_crc or not any(head):
        return
    found = _NAME.search(head)
    said = "" if found is None or found[0].decode() == os.path.basename(path) else found[0].decode()
    detail = f"it says that it is {said}" if said else "another file than the one that was written"
    raise CorruptHistory(path, 0, detail)


def zero_other_head(vfs: Vfs, fd: int, file: NamedFile) -> None:
    """Makes a file that was given up pass `check_identity`: its head is this file's, or zeros."""
    if file.identity is None:
        return
    head = vfs.read_at(fd, file.identity.head, 0)
    if zlib.crc32(head) != file.identity.head_crc:
        vfs.write_at(fd, [bytes(len(head))], 0)


def check_bytes(vfs: Vfs, path: str, file: NamedFile) -> None:
    """CorruptHistory unless every byte is the one that was written. Reads the whole file."""
    if file.identity is None:
        return
    crc = at = 0
    fd = vfs.open_read(path)
    try:
        while data := vfs.read_at(fd, ZERO_STEP_BYTES, at):
            crc = zlib.crc32(data, crc)
            at += len(data)
    finally:
        vfs.close(fd)
    if crc != file.identity.crc:
        raise CorruptHistory(path, 0, "the checksum of the whole file does not hold")
