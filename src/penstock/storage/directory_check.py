"""Checks everything that a start reads, with the code of a start, and changes nothing.

Owns the verdict on a data directory: which files are sound, damaged or missing, and whether a start
would be refused. Invariant: `DirectoryCheck.damage` is the reason a start would give, or None if it
would succeed. Damage that a start does not look for (in the batches of history and journal) is
reported too, and marked as such. The caller holds the directory (`locked_directory`). Must not know
how damage is repaired.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, TypeVar

import msgspec

from penstock.core.state import BrokerState, apply
from penstock.model.limits import Limits
from penstock.model.records import decode_record
from penstock.model.scopes import shown_name
from penstock.storage.checkpoint import (
    SEAL_LOCK_NAME,
    check_never_sealed,
    is_live,
    leftovers,
    load_unchecked_state,
    wait_for_orphan,
)
from penstock.storage.errors import CorruptLog, CorruptManifest, CorruptStopped
from penstock.storage.file_identity import NamedFile, check_bytes, check_identity
from penstock.storage.hidden_rows import HiddenRows, find_hidden
from penstock.storage.history import (
    BatchRef,
    HistoryFile,
    PartitionKey,
    history_name,
    is_in_order,
    partition_key,
)
from penstock.storage.history_reader import HistoryReader
from penstock.storage.index_check import IndexFault, find_index_faults, index_error
from penstock.storage.journal_files import JournalFile, JournalReader, JournalRef
from penstock.storage.lock import DirectoryLock
from penstock.storage.log import Replay
from penstock.storage.manifest import MANIFEST_NAME, Manifest, load_manifest
from penstock.storage.recovery import walk_log
from penstock.storage.segments import TornTail, list_segments
from penstock.storage.snapshot import snapshot_name
from penstock.storage.staging import check_pieces
from penstock.storage.stopped_file import check_log_reaches, load_stopped
from penstock.storage.vfs import Vfs

Ref = TypeVar("Ref", BatchRef, JournalRef)

SealedKind = Literal["manifest", "snapshot", "history", "journal", "staged"]


class Damage(msgspec.Struct, frozen=True):
    """The reason why a start would be refused."""

    path: str
    position: int
    detail: str


class SealedFile(msgspec.Struct, frozen=True):
    """The manifest, a file that it names, or a staged piece. `position` and `detail` say where it
    is damaged. `lost` lists the messages or rows that cannot be read."""

    path: str
    kind: SealedKind
    state: Literal["sound", "damaged", "missing"]
    refuses_start: bool = False
    position: int = 0
    detail: str = ""
    lost: list[str] = []

    @property
    def damage(self) -> Damage:
        return Damage(self.path, self.position, self.detail)


class DirectoryCheck(msgspec.Struct):
    """The result of a check. `files` are in the order in which a start reads them.

    `first_segment` is 0 if the manifest cannot be read; the log is not checked then. `faults` are
    the errors that a start finds in the index of batches. `hidden` are rows that no reader finds,
    because of such an error or because they are out of order in their batch.
    """

    first_segment: int
    files: list[SealedFile]
    history: list[HistoryFile] = []
    journal: list[JournalFile] = []
    leftovers: list[str] = []
    torn: list[TornTail] = []
    log_damage: Damage | None = None
    index_damage: Damage | None = None
    faults: list[IndexFault] = []
    hidden: list[HiddenRows] = []
    is_stopped: bool = False
    """The STOPPED file exists."""

    @property
    def damage(self) -> Damage | None:
        for file in self.files:
            if file.refuses_start:
                return file.damage
        return self.index_damage or self.log_damage


@contextmanager
def locked_directory(vfs: Vfs, directory: str, *, is_reading: bool = False) -> Iterator[None]:
    """Holds the directory's lock, and waits for a sealing process that outlived its broker."""
    if not vfs.exists(directory):
        raise FileNotFoundError(f"there is no data directory {directory}")
    if MANIFEST_NAME not in vfs.listdir(directory) and not list_segments(vfs, directory):
        raise FileNotFoundError(
            f"{directory} is no data directory of a broker: it has neither {MANIFEST_NAME} nor a "
            "segment of a log"
        )
    lock = DirectoryLock.take(vfs, directory, is_reading=is_reading)
    try:
        if vfs.exists(os.path.join(directory, SEAL_LOCK_NAME)):
            _await_sealing(vfs, directory, is_reading=is_reading)
        yield
    finally:
        lock.release()


def _await_sealing(vfs: Vfs, directory: str, *, is_reading: bool) -> None:
    try:
        vfs.close(wait_for_orphan(vfs, directory))
    except OSError as error:
        # No process can be sealing on a read-only mount.
        if not is_reading or error.errno != errno.EROFS:
            raise


def check_directory(vfs: Vfs, directory: str) -> DirectoryCheck:
    """Reads every file of the directory and reports what a start would find."""
    path = os.path.join(directory, MANIFEST_NAME)
    try:
        manifest = load_manifest(vfs, directory)
        if manifest is None:
            check_never_sealed(vfs, directory)
    except CorruptManifest as error:
        return DirectoryCheck(0, [_bad(vfs, error, "manifest", refuses_start=True)])
    files = [] if manifest is None else [SealedFile(path, "manifest", "sound")]
    manifest = manifest or Manifest()
    snapshot, state = _snapshot(vfs, directory, manifest)
    disordered: set[PartitionKey] = set()
    files += [_history_file(vfs, directory, f, state, disordered) for f in manifest.history]
    files += [_journal_file(vfs, directory, file) for file in manifest.journal.files]
    files += [] if snapshot is None else [snapshot]
    for path, damage in check_pieces(vfs, directory):
        sound = SealedFile(path, "staged", "sound")
        files.append(sound if damage is None else _bad(vfs, damage, "staged"))
    found = DirectoryCheck(manifest.first_segment, files, manifest.history, manifest.journal.files)
    if state is not None:
        _check_batch_index(vfs, directory, found, state, disordered)
    found.leftovers = leftovers(vfs, directory, manifest)
    for number, path in list_segments(vfs, directory):
        if number < manifest.first_segment:
            found.leftovers.append(path)
    try:
        stopped = load_stopped(vfs, directory)
        found.is_stopped = stopped is not None
        log = walk_log(vfs, directory, first_segment=manifest.first_segment, replay=_replay(state))
        if stopped is not None:
            check_log_reaches(directory, stopped, log, manifest.first_segment)
        # Only now: after an orderly stop, a log that ends too early is damaged, not torn.
        found.torn = log.tails
    except CorruptLog as error:
        found.is_stopped = found.is_stopped or isinstance(error, CorruptStopped)
        found.log_damage = Damage(error.path, error.position, error.detail)
    return found


def _check_batch_index(
    vfs: Vfs,
    directory: str,
    found: DirectoryCheck,
    state: BrokerState,
    disordered: set[PartitionKey],
) -> None:
    found.faults = find_index_faults(found.history, state)
    error = index_error(os.path.join(directory, MANIFEST_NAME), found.faults)
    if error is not None:
        found.index_damage = Damage(error.path, error.position, error.detail)
    suspect = disordered | {(fault.topic_id, fault.partition) for fault in found.faults}
    found.hidden = find_hidden(vfs, directory, found.history, state, suspect)


def _replay(state: BrokerState | None) -> Replay | None:
    """Applies each record as a start does. Without a snapshot there is no state to apply it to."""
    if state is None:
        return None
    return lambda data, _: apply(state, decode_record(data))


def _snapshot(
    vfs: Vfs, directory: str, manifest: Manifest
) -> tuple[SealedFile | None, BrokerState | None]:
    path = os.path.join(directory, snapshot_name(manifest.snapshot))
    try:
        state = load_unchecked_state(vfs, directory, manifest, Limits())
    except CorruptLog as error:
        return _bad(vfs, error, "snapshot", refuses_start=True), None
    return SealedFile(path, "snapshot", "sound") if manifest.snapshot else None, state


def _history_file(
    vfs: Vfs,
    directory: str,
    file: HistoryFile,
    state: BrokerState | None,
    disordered: set[PartitionKey],
) -> SealedFile:
    """Checks a history file. Adds partitions with a batch out of order to `disordered`."""
    reader = HistoryReader(vfs, directory)

    def check(ref: BatchRef) -> None:
        if not is_in_order(reader.batch(ref)):
            disordered.add(partition_key(ref))

    def describe_lost(refs: list[BatchRef]) -> list[str]:
        return _describe_messages(refs, state)

    path = os.path.join(directory, history_name(file.number))
    return _check_file(vfs, path, "history", file, file.batches, check, describe_lost)


def _journal_file(vfs: Vfs, directory: str, file: JournalFile) -> SealedFile:
    reader = JournalReader(vfs, directory)
    path = reader.path(file.number)
    return _check_file(vfs, path, "journal", file, file.batches, reader.check, _describe_rows)


def _check_file(
    vfs: Vfs,
    path: str,
    kind: SealedKind,
    file: NamedFile,
    refs: list[Ref],
    check: Callable[[Ref], object],
    describe_lost: Callable[[list[Ref]], list[str]],
) -> SealedFile:
    """Checks the file's identity, each batch with `check`, and then the bytes outside batches."""
    try:
        check_identity(vfs, path, file)
    except CorruptLog as error:
        return _bad(vfs, error, kind, refuses_start=True, lost=describe_lost(refs))
    first: CorruptLog | None = None
    damaged: list[Ref] = []
    for ref in refs:
        try:
            check(ref)
        except CorruptLog as error:
            first = first or error
            damaged.append(ref)
    try:
        if first is None:
            check_bytes(vfs, path, file)
    except CorruptLog as error:
        first = error
    if first is None:
        return SealedFile(path, kind, "sound")
    return _bad(vfs, first, kind, lost=describe_lost(damaged))


def _bad(
    vfs: Vfs,
    error: CorruptLog,
    kind: SealedKind,
    *,
    refuses_start: bool = False,
    lost: list[str] | None = None,
) -> SealedFile:
    state: Literal["damaged", "missing"] = "damaged" if vfs.exists(error.path) else "missing"
    return SealedFile(
        error.path, kind, state, refuses_start, error.position, error.detail, lost or []
    )


def _describe_rows(refs: list[JournalRef]) -> list[str]:
    return [f"positions {r.first} to {r.last} ({r.rows} rows) of the journal" for r in refs]


def _describe_messages(refs: list[BatchRef], state: BrokerState | None) -> list[str]:
    """Lists the retained messages of these batches. Without a state, all count as retained."""
    return [
        f"offsets {ref.first} to {ref.last} ({ref.msgs} messages) of partition {ref.partition} "
        f"of {_topic(ref, state)}"
        for ref in refs
        if state is None or is_live(ref, state)
    ]


def _topic(ref: BatchRef, state: BrokerState | None) -> str:
    topic = state.topics_by_id.get(ref.topic_id) if state is not None else None
    return (
        f"topic {shown_name(topic.name)}"
        if topic is not None
        else f"the topic with id {ref.topic_id}"
    )
