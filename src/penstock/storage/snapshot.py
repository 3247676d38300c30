"""Snapshot files: an image of the state at the boundary of a segment.

Invariant: `load_snapshot` returns what was written under that number, or raises CorruptSnapshot
with the file's name. Must not know when a snapshot is taken or which one is in force (manifest.py).
The layout is in docs/storage-format.md.
"""

from __future__ import annotations

import os
import zlib
from struct import Struct

import msgspec

from penstock.core.image import StateImage, decode_image, encode_image
from penstock.storage.errors import CorruptSnapshot
from penstock.storage.numbered_files import NumberedFiles
from penstock.storage.vfs import Vfs

SNAPSHOT_MAGIC = b"PENSNAP\n"
FORMAT_VERSION = 2
UNNAMED_VERSION = 1
"""The version of older files, which do not contain their number. They are still read."""

_PREFIX = Struct("<8sII")  # magic, version, CRC of what follows it
_BODY = {UNNAMED_VERSION: Struct("<Q"), FORMAT_VERSION: Struct("<QQ")}
"""The fields before the image: its length and, in the current version, the file's number first."""
_files = NumberedFiles("snapshot-", ".bin")
snapshot_name, snapshot_number = _files.name, _files.number


class SnapshotMark(msgspec.Struct, frozen=True, array_like=True):
    """Identifies a snapshot in the manifest: its size in bytes and the checksum in its header."""

    size: int
    crc: int


def write_snapshot(vfs: Vfs, directory: str, number: int, image: StateImage) -> SnapshotMark:
    """Writes a snapshot and returns once it is on disk."""
    data = encode_image(image)
    body = _BODY[FORMAT_VERSION].pack(number, len(data)) + data
    crc = zlib.crc32(body)
    head = _PREFIX.pack(SNAPSHOT_MAGIC, FORMAT_VERSION, crc)
    vfs.write_file_atomically(os.path.join(directory, snapshot_name(number)), head + body)
    return SnapshotMark(len(head) + len(body), crc)


def load_snapshot(
    vfs: Vfs, directory: str, number: int, mark: SnapshotMark | None = None
) -> StateImage:
    """Raises CorruptSnapshot unless number and `mark` match. Older manifests have no mark."""
    path = os.path.join(directory, snapshot_name(number))
    try:
        data = vfs.read_file(path)
    except FileNotFoundError:
        raise CorruptSnapshot(path, 0, "the manifest names it and it is missing") from None
    if len(data) < _PREFIX.size + _BODY[UNNAMED_VERSION].size:
        raise CorruptSnapshot(path, 0, "shorter than its header")
    magic, version, crc = _PREFIX.unpack_from(data)
    if magic != SNAPSHOT_MAGIC:
        raise CorruptSnapshot(path, 0, "no snapshot")
    fields = _BODY.get(version)
    if fields is None:
        detail = f"format version {version}; this release reads {', '.join(map(str, _BODY))}"
        raise CorruptSnapshot(path, 0, detail)
    with memoryview(data) as view, view[_PREFIX.size :] as body:
        if zlib.crc32(body) != crc:
            raise CorruptSnapshot(path, _PREFIX.size, "the checksum does not match")
        if mark is not None and mark != SnapshotMark(len(data), crc):
            detail = "a sound snapshot, but not the one that the manifest names"
            raise CorruptSnapshot(path, 0, f"{detail}{_other_number(version, body, number)}")
        other = _other_number(version, body, number)
        if other:
            raise CorruptSnapshot(path, _PREFIX.size, f"a sound snapshot{other}")
        return _image(path, fields, body)


def _other_number(version: int, body: memoryview, number: int) -> str:
    found = _BODY[version].unpack_from(body)[0] if version != UNNAMED_VERSION else number
    return "" if found == number else f": it says that it is {snapshot_name(found)}"


def _image(path: str, fields: Struct, body: memoryview) -> StateImage:
    length = fields.unpack_from(body)[-1]
    start = _PREFIX.size + fields.size
    with body[fields.size :] as image:
        if len(image) != length:
            raise CorruptSnapshot(path, start, f"{len(image)} bytes of the image's {length}")
        try:
            return decode_image(image)
        except msgspec.MsgspecError as error:
            raise CorruptSnapshot(path, start, str(error)) from None
