"""Snapshot files: an image of the state at a segment's boundary, whole or refused.

Invariant: what `load_snapshot` returns is what was written, or CorruptSnapshot names the file. Must
not know when a snapshot is taken or which one is in force (manifest.py). The layout is in
docs/storage-format.md.
"""

from __future__ import annotations

import os
import re
import zlib
from struct import Struct

import msgspec

from penstock.core.image import StateImage, decode_image, encode_image
from penstock.storage.errors import CorruptSnapshot
from penstock.storage.vfs import Vfs

SNAPSHOT_MAGIC = b"PENSNAP\n"
FORMAT_VERSION = 1

_HEADER = Struct("<8sIIQ")  # magic, version, CRC of what follows it, length of the image
_LENGTH = Struct("<Q")
_NAME = re.compile(r"snapshot-(\d{20})\.bin")


def snapshot_name(number: int) -> str:
    return f"snapshot-{number:020d}.bin"


def snapshot_number(name: str) -> int | None:
    """The number of the snapshot of this name; None if it is no such name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def write_snapshot(vfs: Vfs, directory: str, number: int, image: StateImage) -> None:
    body = encode_image(image)
    crc = zlib.crc32(body, zlib.crc32(_LENGTH.pack(len(body))))
    header = _HEADER.pack(SNAPSHOT_MAGIC, FORMAT_VERSION, crc, len(body))
    vfs.write_file_atomically(os.path.join(directory, snapshot_name(number)), header + body)


def load_snapshot(vfs: Vfs, directory: str, number: int) -> StateImage:
    path = os.path.join(directory, snapshot_name(number))
    try:
        data = vfs.read_file(path)
    except FileNotFoundError:
        raise CorruptSnapshot(path, 0, "the manifest names it and it is missing") from None
    if len(data) < _HEADER.size:
        raise CorruptSnapshot(path, 0, "shorter than its header")
    magic, version, crc, length = _HEADER.unpack_from(data)
    if magic != SNAPSHOT_MAGIC:
        raise CorruptSnapshot(path, 0, "no snapshot")
    if version != FORMAT_VERSION:
        detail = f"format version {version}; this release reads {FORMAT_VERSION}"
        raise CorruptSnapshot(path, 0, detail)
    with memoryview(data) as view, view[_HEADER.size :] as body:
        if len(body) != length or zlib.crc32(body, zlib.crc32(_LENGTH.pack(length))) != crc:
            raise CorruptSnapshot(path, _HEADER.size, "the checksum does not hold")
        try:
            return decode_image(body)
        except msgspec.MsgspecError as error:
            raise CorruptSnapshot(path, _HEADER.size, str(error)) from None
