"""The identity of a sealed Arrow file: the name stored in it, its head and its checksum.

Invariant: a file that passes `check_identity` has the length and the head that were written under
its name; the head contains that name and a random id. A file that also passes `check_bytes` has all
its bytes. The first check is one short read, whatever the size, and every start makes it. The
second reads the whole file, and only `penstock wal verify` makes it. Files of older releases have
no identity; only their length is checked. Must not know what the rows are.
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


class FileIdentity(msgspec.Struct, frozen=True, array_like=True):
    """The first `head` bytes of the file have the CRC-32 `head_crc`; the whole file has `crc`."""

    head: int
    head_crc: int
    crc: int


class NamedFile(Protocol):
    """A file that the manifest names. `identity` is None if an older release wrote it."""

    @property
    def size(self) -> int: ...

    @property
    def identity(self) -> FileIdentity | None: ...


def named_schema(vfs: Vfs, schema: pa.Schema, name: str) -> pa.Schema:
    """Adds the file's name and a random id to the schema, with which the file begins."""
    return schema.with_metadata({_NAME_KEY: name, _ID_KEY: vfs.random_bytes(_ID_BYTES).hex()})


def check_identity(vfs: Vfs, path: str, file: NamedFile) -> None:
    """Raises CorruptHistory unless the file exists and has its length and its head.

    A head of zeros passes: `penstock wal repair` writes it into a file that it gives up.
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
        raise CorruptHistory(path, min(size, file.size), f"{size} bytes long, not {file.size}")
    if file.identity is None or zlib.crc32(head) == file.identity.head_crc or not any(head):
        return
    found = _NAME.search(head)
    name = found[0].decode() if found is not None else os.path.basename(path)
    if name != os.path.basename(path):
        raise CorruptHistory(path, 0, f"it says that it is {name}")
    raise CorruptHistory(path, 0, "another file than the one that was written")


def zero_other_head(vfs: Vfs, fd: int, file: NamedFile) -> None:
    """Writes zeros over the head unless it is this file's, to pass `check_identity`."""
    if file.identity is None:
        return
    head = vfs.read_at(fd, file.identity.head, 0)
    if zlib.crc32(head) != file.identity.head_crc:
        vfs.write_at(fd, [bytes(len(head))], 0)


def check_bytes(vfs: Vfs, path: str, file: NamedFile) -> None:
    """Raises CorruptHistory unless every byte is as it was written. Reads the whole file."""
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
        raise CorruptHistory(path, 0, "the checksum of the whole file does not match")
