"""The MANIFEST: names the snapshot, history and journal files and the part of the log in use.

Invariant: it is replaced as a whole and last, after every file it names is on disk, so a crash
leaves the old set of files or the new one. Files that it does not name are leftovers. It is not
written unless its batches hold every row once (index_check.py). Must not know the log. The layout
is in docs/storage-format.md.
"""

from __future__ import annotations

import os

import msgspec

from penstock.core.state import BrokerState
from penstock.storage.errors import CorruptManifest
from penstock.storage.headed_json import HeadedJson
from penstock.storage.history import HistoryFile
from penstock.storage.index_check import check_index
from penstock.storage.journal_files import JournalIndex
from penstock.storage.snapshot import SnapshotMark
from penstock.storage.vfs import Vfs

MANIFEST_NAME = "MANIFEST"
FORMAT_VERSION = 1


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """`snapshot` is the number of the state before the first record of `first_segment`; 0 means
    none yet. Numbers from `next_file` on are free. `snapshot_mark` is None in older ones.

    `next_seq` is the number of the frame behind the snapshot, 0 in older ones, and `ends_empty`
    says whether the frame before it has no records. A copy of a shared log needs both.
    """

    snapshot: int = 0
    first_segment: int = 1
    next_file: int = 1
    history: list[HistoryFile] = []
    journal: JournalIndex = JournalIndex()
    snapshot_mark: SnapshotMark | None = None
    next_seq: int = 0
    ends_empty: bool = False


_file = HeadedJson("PENSTOCK-MANIFEST", FORMAT_VERSION, Manifest, CorruptManifest)


def load_manifest(vfs: Vfs, directory: str) -> Manifest | None:
    """Returns None if nothing was ever sealed. Raises CorruptManifest if the file is damaged."""
    return _file.load(vfs, os.path.join(directory, MANIFEST_NAME))


def write_manifest(vfs: Vfs, directory: str, manifest: Manifest, state: BrokerState) -> None:
    """Puts the manifest in force. Everything it names must be on disk; `state` is the state of its
    snapshot. Raises CorruptIndex, and writes nothing, if readers would not find every row."""
    path = os.path.join(directory, MANIFEST_NAME)
    check_index(path, manifest.history, state)
    _file.write(vfs, path, manifest)


def decode_manifest(path: str, data: bytes) -> Manifest:
    """Reads a manifest of another broker. `path` is for the error."""
    return _file.decode(path, data)


def put_copied_manifest(vfs: Vfs, path: str, manifest: Manifest) -> None:
    """Writes the manifest of a copy. Its index was checked by the broker that made it, and is
    checked again when the copy is opened."""
    _file.write(vfs, path, manifest)
