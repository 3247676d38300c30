"""The identity of the stream that a data directory is a copy of, in its file STREAM.

It tells a stream that somebody deleted and made anew from the one that the files are a beginning
of, even when nothing else can: the new one is empty, or everything here is sealed. Must not know
what an identity is made of. The layout is in docs/storage-format.md.
"""

from __future__ import annotations

import os

import msgspec

from penstock.storage.errors import CorruptManifest
from penstock.storage.headed_json import HeadedJson
from penstock.storage.vfs import Vfs

STREAM_NAME = "STREAM"
FORMAT_VERSION = 1


class StreamMark(msgspec.Struct, frozen=True):
    identity: str


_file = HeadedJson("PENSTOCK-STREAM", FORMAT_VERSION, StreamMark, CorruptManifest)


def load_identity(vfs: Vfs, directory: str) -> str:
    """Returns an empty text if the directory has never followed a stream."""
    found = _file.load(vfs, os.path.join(directory, STREAM_NAME))
    return "" if found is None else found.identity


def write_identity(vfs: Vfs, directory: str, identity: str) -> None:
    _file.write(vfs, os.path.join(directory, STREAM_NAME), StreamMark(identity))
