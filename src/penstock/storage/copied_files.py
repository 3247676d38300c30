"""The sealed files of another broker, copied beside a data directory and put in its place.

Invariant: a copy is opened only once it is whole. Its files are made in DIRECTORY.copy; the
manifest comes last, when all the others are on disk. Then the old files go, and the new ones come,
the manifest last again. A crash leaves the old files, the new ones, or a copy that `install` goes
on with. Nothing is copied of the log: the copy begins an empty segment where the snapshot ends.
Blocking. Must not know where the bytes come from. The layout is in docs/storage-format.md.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import msgspec

from penstock.storage.checkpoint import named_files
from penstock.storage.errors import StorageError
from penstock.storage.file_identity import check_bytes, check_identity
from penstock.storage.history import HistoryFile, history_number
from penstock.storage.journal_files import JournalFile, journal_number
from penstock.storage.manifest import MANIFEST_NAME, Manifest, put_copied_manifest
from penstock.storage.segments import (
    encode_header,
    list_segments,
    prepare_segment,
    segment_name,
)
from penstock.storage.snapshot import load_snapshot, snapshot_name, snapshot_number
from penstock.storage.stopped_file import STOPPED_NAME
from penstock.storage.vfs import Vfs, remove_if_there

INSTALLING_NAME = "MANIFEST.install"
"""The manifest's name in a copy while its files take the places of the old ones."""
FIRST_SEGMENT = 2
"""Segment 1 would have to begin with the first frame of all."""


class CopiedFile(msgspec.Struct, frozen=True):
    """A file that a manifest names. `sealed` is None for the snapshot."""

    name: str
    size: int
    sealed: HistoryFile | JournalFile | None


def files_of(manifest: Manifest) -> list[CopiedFile]:
    """Returns what has to be copied, the snapshot first: it is removed soonest."""
    mark = manifest.snapshot_mark
    first = CopiedFile(snapshot_name(manifest.snapshot), 0 if mark is None else mark.size, None)
    others = [CopiedFile(name, file.size, file) for name, file in named_files(manifest)]
    return [first, *others] if manifest.snapshot else others


def is_copied_name(name: str) -> bool:
    """Says whether a name is one of a file that is copied; it has no path in it."""
    numbers = (history_number(name), journal_number(name), snapshot_number(name))
    return any(number is not None for number in numbers)


class CopyDirectory:
    """The copy that is being made for a data directory."""

    def __init__(self, vfs: Vfs, directory: str, segment_bytes: int) -> None:
        self.path = f"{directory}.copy"
        self._vfs = vfs
        self._segment_bytes = segment_bytes

    def begin(self, manifest: Manifest) -> None:
        """Removes what an earlier attempt left and this manifest does not name."""
        self._vfs.mkdir(self.path)
        wanted = {file.name for file in files_of(manifest)}
        for name in self._vfs.listdir(self.path):
            if name not in wanted:
                self._vfs.unlink(os.path.join(self.path, name))

    def has(self, file: CopiedFile, manifest: Manifest) -> bool:
        """Says whether the whole file is here from an earlier attempt. Another broker may have
        given its own file this name: all bytes are read."""
        if not self._vfs.exists(os.path.join(self.path, file.name)):
            return False
        try:
            self._check(file.name, file, manifest)
        except (StorageError, OSError):
            self._vfs.unlink(os.path.join(self.path, file.name))
            return False
        return True

    def add(self, file: CopiedFile, manifest: Manifest, parts: Iterator[bytes]) -> None:
        """Writes a file. Raises StorageError if its bytes are not those of the manifest."""
        path = os.path.join(self.path, file.name)
        temporary = f"{path}.tmp"
        remove_if_there(self._vfs, temporary)
        fd = self._vfs.open(temporary, create=True)
        try:
            at = 0
            for part in parts:
                self._vfs.write_at(fd, [part], at)
                at += len(part)
            self._vfs.sync(fd)
        finally:
            self._vfs.close(fd)
        self._vfs.rename(temporary, path)
        try:
            self._check(file.name, file, manifest)
        except StorageError:
            self._vfs.unlink(path)
            raise

    def finish(self, manifest: Manifest) -> None:
        """Makes the copy whole: it is installed from now on, whatever happens."""
        vfs = self._vfs
        remove_if_there(vfs, os.path.join(self.path, segment_name(FIRST_SEGMENT)))
        *_, segment = prepare_segment(vfs, self.path, FIRST_SEGMENT, self._segment_bytes)
        if segment is None:
            raise RuntimeError("no segment was made")
        segment.first_seq = manifest.next_seq
        vfs.write_at_durable(segment.fd, [encode_header(segment.header())], 0)
        vfs.close(segment.fd)
        vfs.fsync_dir(self.path)
        own = msgspec.structs.replace(manifest, first_segment=FIRST_SEGMENT)
        put_copied_manifest(vfs, os.path.join(self.path, MANIFEST_NAME), own)

    def _check(self, name: str, file: CopiedFile, manifest: Manifest) -> None:
        if file.sealed is None:
            load_snapshot(self._vfs, self.path, manifest.snapshot, manifest.snapshot_mark)
        else:
            path = os.path.join(self.path, name)
            check_identity(self._vfs, path, file.sealed)
            check_bytes(self._vfs, path, file.sealed)


def has_whole_copy(vfs: Vfs, directory: str) -> bool:
    """Says whether there is a copy that must be installed before the directory is opened."""
    names = (MANIFEST_NAME, INSTALLING_NAME)
    return any(vfs.exists(os.path.join(f"{directory}.copy", name)) for name in names)


def install(vfs: Vfs, directory: str) -> bool:
    """Puts a whole copy in the place of the directory's files, or goes on with that after a crash.
    Returns False if there is none. The caller holds the directory's lock."""
    copy = f"{directory}.copy"
    manifest = os.path.join(copy, MANIFEST_NAME)
    installing = os.path.join(copy, INSTALLING_NAME)
    if vfs.exists(manifest):
        _remove_old(vfs, directory)
        _move(vfs, copy, MANIFEST_NAME, copy, INSTALLING_NAME)
    if not vfs.exists(installing):
        return False
    names = [name for name in sorted(vfs.listdir(copy)) if name != INSTALLING_NAME]
    for name in names:
        vfs.link(os.path.join(copy, name), os.path.join(directory, name))
    # First all have their new names on disk, then the old names go: no file is ever without one.
    vfs.fsync_dir(directory)
    for name in names:
        remove_if_there(vfs, os.path.join(copy, name))
    vfs.fsync_dir(copy)
    _move(vfs, copy, INSTALLING_NAME, directory, MANIFEST_NAME)
    return True


def _move(vfs: Vfs, old_place: str, old: str, new_place: str, new: str) -> None:
    vfs.link(os.path.join(old_place, old), os.path.join(new_place, new))
    vfs.fsync_dir(new_place)
    remove_if_there(vfs, os.path.join(old_place, old))
    vfs.fsync_dir(old_place)


def _remove_old(vfs: Vfs, directory: str) -> None:
    """The manifest goes first: without it, what is left is never taken for a directory."""
    remove_if_there(vfs, os.path.join(directory, MANIFEST_NAME))
    vfs.fsync_dir(directory)
    segments = {os.path.basename(path) for _, path in list_segments(vfs, directory)}
    for name in sorted(vfs.listdir(directory)):
        whole = name.removesuffix(".tmp")
        is_ours = (
            name in segments or is_copied_name(whole) or whole in (MANIFEST_NAME, STOPPED_NAME)
        )
        if is_ours:
            vfs.unlink(os.path.join(directory, name))
    vfs.fsync_dir(directory)
