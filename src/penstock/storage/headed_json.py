"""Small files of JSON behind a first line with kind, format version and checksum.

Owns this layout, which MANIFEST and STOPPED share. Invariant: `load` returns a value only if kind,
version and checksum match. Must not know what the JSON means.
"""

from __future__ import annotations

import zlib
from typing import Generic, TypeVar

import msgspec

from penstock.storage.errors import CorruptLog
from penstock.storage.vfs import Vfs

T = TypeVar("T")

_MAX_HEAD_BYTES = 64


class HeadedJson(Generic[T]):
    """Reads and writes files of one kind. `error` is raised if a file is damaged."""

    def __init__(self, kind: str, version: int, shape: type[T], error: type[CorruptLog]) -> None:
        self._kind = kind
        self._version = version
        self._decoder = msgspec.json.Decoder(shape)
        self._error = error

    def write(self, vfs: Vfs, path: str, value: T) -> None:
        """Replaces the file atomically and returns once it is on disk."""
        body = msgspec.json.encode(value)
        head = f"{self._kind} {self._version} {zlib.crc32(body):08x}\n"
        vfs.write_file_atomically(path, head.encode() + body)

    def load(self, vfs: Vfs, path: str) -> T | None:
        """Returns None if there is no file."""
        try:
            data = vfs.read_file(path)
        except FileNotFoundError:
            return None
        return self.decode(path, data)

    def decode(self, path: str, data: bytes) -> T:
        """Reads the content of a file. `path` is for the error."""
        head, newline, body = data.partition(b"\n")
        words = head[:_MAX_HEAD_BYTES].split(b" ")
        if not newline or len(words) != 3 or words[0] != self._kind.encode():
            raise self._error(path, 0, f"the first line is not that of a {self._kind} file")
        if words[1] != b"%d" % self._version:
            version = words[1].decode(errors="replace")
            detail = f"format version {version}; this release reads {self._version}"
            raise self._error(path, 0, detail)
        if words[2] != b"%08x" % zlib.crc32(body):
            raise self._error(path, len(head) + 1, "the checksum does not match")
        try:
            return self._decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise self._error(path, len(head) + 1, str(error)) from None
