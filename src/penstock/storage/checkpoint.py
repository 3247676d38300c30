"""The checkpoint: what a start finds sealed, before it replays the rest of the log.

Invariant: everything the manifest names is there, and its batches hold every retained row once
(coverage.py), or CorruptLog says what is not. Loading changes nothing; `remove_leftovers`, once the
log was read too, leaves no snapshot, history or journal file that the manifest does not name. The
log's segments are not touched. Must not know how sealing works, only what it leaves.
"""

from __future__ import annotations

import logging
import os
import time

import msgspec

from penstock.core.image import restore_image
from penstock.core.state import BrokerState
from penstock.model.limits import Limits
from penstock.storage.coverage import check_coverage
from penstock.storage.errors import CorruptManifest, DirectoryInUse
from penstock.storage.file_identity import check_identity
from penstock.storage.history import BatchRef, HistoryFile, history_name, history_number
from penstock.storage.journal_files import JournalFile, JournalIndex, journal_name, journal_number
from penstock.storage.manifest import MANIFEST_NAME, Manifest, load_manifest
from penstock.storage.segments import list_segments
from penstock.storage.snapshot import load_snapshot, snapshot_name, snapshot_number
from penstock.storage.vfs import Vfs, remove_if_there

SEAL_LOCK_NAME = "SEAL-LOCK"
"""Held by the sealing process for as long as it lives, besides the broker's own lock."""

_ORPHAN_WAIT_S = 30.0
_ORPHAN_STEP_S = 0.02

logger = logging.getLogger("penstock.storage")


class Checkpoint(msgspec.Struct):
    """`state` is that before the first record of `first_segment`; `refs` are by topic, partition
    and offset, without those whose rows are all trimmed or whose topic is deleted. `leftovers` are
    files that nothing names."""

    state: BrokerState
    refs: list[BatchRef]
    files: list[int]
    first_segment: int
    journal: JournalIndex = JournalIndex()
    leftovers: list[str] = []


def load_checkpoint(vfs: Vfs, directory: str, limits: Limits) -> Checkpoint:
    """The caller holds the directory's lock. Without a manifest the state is empty."""
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
    )


def remove_leftovers(vfs: Vfs, checkpoint: Checkpoint) -> None:
    """To be called when the log was found to fit the checkpoint: under a manifest that is not the
    one of this log, files that are needed would seem to be leftovers."""
    for path in checkpoint.leftovers:
        try:
            remove_if_there(vfs, path)
        except OSError as error:
            logger.warning("%s is a leftover and cannot be removed: %s", path, error)


def load_state(vfs: Vfs, directory: str, manifest: Manifest, limits: Limits) -> BrokerState:
    """The snapshot's state. CorruptIndex unless the manifest's batches hold all its rows."""
    state = load_unchecked_state(vfs, directory, manifest, limits)
    check_coverage(os.path.join(directory, MANIFEST_NAME), manifest.history, state)
    return state


def load_unchecked_state(
    vfs: Vfs, directory: str, manifest: Manifest, limits: Limits
) -> BrokerState:
    """For tools that look at damage: nobody may read rows by a manifest that was not checked."""
    if not manifest.snapshot:
        return BrokerState(limits)
    image = load_snapshot(vfs, directory, manifest.snapshot, manifest.snapshot_mark)
    return restore_image(image, limits)


def live_refs(history: list[HistoryFile], state: BrokerState) -> list[BatchRef]:
    """Every batch with a row that `state` retains."""
    found = [ref for file in history for ref in file.batches if is_live(ref, state)]
    return sorted(found, key=lambda ref: (ref.topic_id, ref.partition, ref.first))


def is_live(ref: BatchRef, state: BrokerState) -> bool:
    topic = state.topics_by_id.get(ref.topic_id)
    if topic is None or not 0 <= ref.partition < len(topic.partitions):
        return False
    return ref.last >= topic.partitions[ref.partition].first_offset


def wait_for_orphan(vfs: Vfs, directory: str) -> int:
    """A sealing process whose broker was killed ends by itself within moments."""
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
    """A first sealing that a crash interrupted left all of the log; a lost manifest did not."""
    names = vfs.listdir(directory)
    sealed = any(map(_is_sealed, names))
    segments = list_segments(vfs, directory)
    if sealed and (not segments or segments[0][0] != 1):
        path = os.path.join(directory, MANIFEST_NAME)
        raise CorruptManifest(path, 0, "missing, but there are sealed files beside it")


def named_files(manifest: Manifest) -> list[tuple[str, HistoryFile | JournalFile]]:
    """Every file of history and journal, with its name."""
    found: list[tuple[str, HistoryFile | JournalFile]] = []
    found += [(history_name(file.number), file) for file in manifest.history]
    found += [(journal_name(file.number), file) for file in manifest.journal.files]
    return found


def leftovers(vfs: Vfs, directory: str, manifest: Manifest) -> list[str]:
    """What a crash left between writing files and naming them, or naming and removing."""
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
