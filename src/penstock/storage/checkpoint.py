"""The checkpoint: the sealed state that a start loads before it replays the rest of the log.

Invariant: every file that the manifest names exists, and its batches hold every retained row once
(index_check.py); otherwise CorruptLog says what is wrong. Loading changes nothing. Once the log has
been read too, `remove_leftovers` removes the snapshot, history and journal files that the manifest
does not name. Never touches the log's segments. Must not know how sealing works, only its results.
"""

from __future__ import annotations

import logging
import os
import time

import msgspec

from penstock.core.image import restore_image
from penstock.core.state import BrokerState
from penstock.model.limits import Limits
from penstock.storage.errors import CorruptManifest, DirectoryInUse
from penstock.storage.file_identity import check_identity
from penstock.storage.history import BatchRef, HistoryFile, history_name, history_number
from penstock.storage.index_check import check_index
from penstock.storage.journal_files import JournalFile, JournalIndex, journal_name, journal_number
from penstock.storage.manifest import MANIFEST_NAME, Manifest, load_manifest
from penstock.storage.segments import list_segments
from penstock.storage.snapshot import load_snapshot, snapshot_name, snapshot_number
from penstock.storage.vfs import Vfs, remove_if_there

SEAL_LOCK_NAME = "SEAL-LOCK"
"""The sealing process locks this file while it lives. The broker has a lock of its own."""

_ORPHAN_WAIT_S = 30.0
_ORPHAN_STEP_S = 0.02

logger = logging.getLogger("penstock.storage")


class Checkpoint(msgspec.Struct):
    """`state` is the state before the first record of `first_segment`. `refs` are the batches with
    retained rows, sorted by topic, partition and offset. The manifest does not name `leftovers`."""

    state: BrokerState
    refs: list[BatchRef]
    files: list[int]
    first_segment: int
    journal: JournalIndex = JournalIndex()
    leftovers: list[str] = []
    ends_empty: bool = False
    """The last frame that is sealed has no records."""
    next_seq: int = 0
    """The frame behind those that are sealed; 0 in older manifests, and if nothing is sealed."""


def load_checkpoint(vfs: Vfs, directory: str, limits: Limits) -> Checkpoint:
    """Loads the checkpoint, empty without a manifest. The caller holds the directory's lock."""
    lock = wait_for_orphan(vfs, directory)
    try:
        manifest = load_manifest(vfs, directory)
        if manifest is None:
            check_never_sealed(vfs, directory)
            manifest = Manifest()
        for name, file in named_files(manifest):
            check_identity(vfs, os.path.join(directory, name), file)
        state = load_state(vfs, directory, manifest, limits)
        unnamed = leftovers(vfs, directory, manifest)
    finally:
        vfs.close(lock)
    return Checkpoint(
        state,
        live_refs(manifest.history, state),
        [file.number for file in manifest.history],
        manifest.first_segment,
        manifest.journal,
        unnamed,
        manifest.ends_empty,
        manifest.next_seq,
    )


def remove_leftovers(vfs: Vfs, checkpoint: Checkpoint) -> None:
    """Removes leftovers. Call it only after the log was read without an error: if the manifest is
    of another log, files that are needed look like leftovers."""
    for path in checkpoint.leftovers:
        try:
            remove_if_there(vfs, path)
        except OSError as error:
            logger.warning("%s is a leftover and cannot be removed: %s", path, error)


def load_state(vfs: Vfs, directory: str, manifest: Manifest, limits: Limits) -> BrokerState:
    """Returns the snapshot's state. Raises CorruptIndex unless the batches hold all its rows."""
    state = load_unchecked_state(vfs, directory, manifest, limits)
    check_index(os.path.join(directory, MANIFEST_NAME), manifest.history, state)
    return state


def load_unchecked_state(
    vfs: Vfs, directory: str, manifest: Manifest, limits: Limits
) -> BrokerState:
    """Returns the snapshot's state without checking the batches. Only for tools that examine
    damage: rows must not be read through an unchecked manifest."""
    if not manifest.snapshot:
        return BrokerState(limits)
    image = load_snapshot(vfs, directory, manifest.snapshot, manifest.snapshot_mark)
    return restore_image(image, limits)


def live_refs(history: list[HistoryFile], state: BrokerState) -> list[BatchRef]:
    """Returns every batch with a row that `state` retains, by topic, partition and offset."""
    found = [ref for file in history for ref in file.batches if is_live(ref, state)]
    return sorted(found, key=lambda ref: (ref.topic_id, ref.partition, ref.first))


def is_live(ref: BatchRef, state: BrokerState) -> bool:
    topic = state.topics_by_id.get(ref.topic_id)
    if topic is None or not 0 <= ref.partition < len(topic.partitions):
        return False
    return ref.last >= topic.partitions[ref.partition].first_offset


def wait_for_orphan(vfs: Vfs, directory: str) -> int:
    """Locks SEAL-LOCK and returns its descriptor. Waits for a sealing process whose broker was
    killed: it ends by itself within moments."""
    path = os.path.join(directory, SEAL_LOCK_NAME)
    deadline = time.monotonic() + _ORPHAN_WAIT_S
    while True:
        try:
            return vfs.lock_file(path)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise DirectoryInUse(directory, None) from None
        time.sleep(_ORPHAN_STEP_S)


def check_never_sealed(vfs: Vfs, directory: str) -> None:
    """Raises CorruptManifest if the manifest was lost. Sealed files without one are harmless only
    if a crash interrupted the first sealing, and then the log is complete."""
    segments = list_segments(vfs, directory)
    is_complete = bool(segments) and segments[0][0] == 1
    if not is_complete and any(map(_is_sealed, vfs.listdir(directory))):
        path = os.path.join(directory, MANIFEST_NAME)
        raise CorruptManifest(path, 0, "missing, but there are sealed files beside it")


def named_files(manifest: Manifest) -> list[tuple[str, HistoryFile | JournalFile]]:
    """Returns every history and journal file of the manifest, with its name."""
    found: list[tuple[str, HistoryFile | JournalFile]] = []
    found += [(history_name(file.number), file) for file in manifest.history]
    found += [(journal_name(file.number), file) for file in manifest.journal.files]
    return found


def leftovers(vfs: Vfs, directory: str, manifest: Manifest) -> list[str]:
    """Returns the files that a crash left behind: written and not yet named by the manifest, or no
    longer named and not yet removed."""
    wanted = {MANIFEST_NAME, snapshot_name(manifest.snapshot)}
    wanted.update(name for name, _ in named_files(manifest))
    found = []
    for name in sorted(vfs.listdir(directory)):
        whole = name.removesuffix(".tmp")
        if name not in wanted and (whole == MANIFEST_NAME or _is_sealed(whole)):
            found.append(os.path.join(directory, name))
    return found


def _is_sealed(name: str) -> bool:
    numbers = (history_number(name), journal_number(name), snapshot_number(name))
    return any(number is not None for number in numbers)
