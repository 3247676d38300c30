"""The MANIFEST: which snapshot, history and journal files and which part of the log are the store.

Invariant: it is replaced whole and last, after every file it names is on disk; so a crash leaves
the old set of files or the new one. A file that it does not name is a leftover. One whose batches
do not hold every row once is not written (coverage.py). Must not know the log. The layout is in
docs/storage-format.md.
"""

from __future__ import annotations

import os
import zlib

import msgspec

from penstock.core.state import BrokerState
from penstock.storage.coverage import check_coverage
from penstock.storage.errors import CorruptManifest
from penstock.storage.history import HistoryFile
from penstock.storage.journal_files import JournalIndex
from penstock.storage.snapshot import SnapshotMark
from penstock.storage.vfs import Vfs

MANIFEST_NAME = "MANIFEST"
FORMAT_VERSION = 1

_HEAD = "PENSTOCK-MANIFEST"
_MAX_HEAD_BYTES = 64


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """`snapshot` is the state before the first record of segment `first_segment`; 0: none yet.
    File numbers from `next_file` on are free. `snapshot_mark` is None if an older release wrote
    the snapshot."""

    snapshot: int = 0
    first_segment: int = 1
    next_file: int = 1
    history: list[HistoryFile] = []
    journal: JournalIndex = JournalIndex()
    snapshot_mark: SnapshotMark | None = None


_decoder = msgspec.json.Decoder(Manifest)


def load_manifest(vfs: Vfs, directory: str) -> Manifest | None:
    """None where nothing was ever sealed. CorruptManifest if it is not what was written."""
    path = os.path.join(directory, MANIFEST_NAME)
    try:
        data = vfs.read_file(path)
    except FileNotFoundError:
        return None
    head, newline, body = data.partition(b"\n")
    words = head[:_MAX_HEAD_BYTES].split(b" ")
    if not newline or len(words) != 3 or words[0] != _HEAD.encode():
        raise CorruptManifest(path, 0, "the first line is not that of a manifest")
    if words[1] != b"%d" % FORMAT_VERSION:
        version = words[1].decode(errors="replace")
        detail = f"format version {version}; this release reads {FORMAT_VERSION}"
        raise CorruptManifest(path, 0, detail)
    if words[2] != b"%08x" % zlib.crc32(body):
        raise CorruptManifest(path, len(head) + 1, "the checksum does not hold")
    try:
        return _decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise CorruptManifest(path, len(head) + 1, str(error)) from None


def write_manifest(vfs: Vfs, directory: str, manifest: Manifest, state: BrokerState) -> None:
    """Everything it names must be on disk already; it is in force once this returns. `state` is
    that of its snapshot. CorruptIndex, and nothing written, if readers would not find every row."""
    check_coverage(os.path.join(directory, MANIFEST_NAME), manifest.history, state)
    body = msgspec.json.encode(manifest)
    head = f"{_HEAD} {FORMAT_VERSION} {zlib.crc32(body):08x}\n"
    vfs.write_file_atomically(os.path.join(directory, MANIFEST_NAME), head.encode() + body)
