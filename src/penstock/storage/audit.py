"""Everything that a start reads, judged in the same order by the same code, and nothing changed.

Invariant: `Audit.damage` is what a start would be refused for, or None if it would succeed; what
a start does not look at (the batches of history and journal) is checked too, and told apart. The
caller is alone in the directory (`alone_in`). Must not know what is done about what it finds.
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
from penstock.storage.checkpoint import (
    SEAL_LOCK_NAME,
    check_never_sealed,
    is_live,
    leftovers,
    load_unchecked_state,
    wait_for_orphan,
)
from penstock.storage.coverage import Fault, find_faults, index_error
from penstock.storage.errors import CorruptLog, CorruptManifest, CorruptStopped
from penstock.storage.file_identity import NamedFile, check_bytes, check_identity
from penstock.storage.history import BatchRef, HistoryFile, history_name, is_in_order
from penstock.storage.history_reader import HistoryReader
from penstock.storage.journal_files import JournalFile, JournalReader, JournalRef
from penstock.storage.lock import DirectoryLock
from penstock.storage.manifest import MANIFEST_NAME, Manifest, load_manifest
from penstock.storage.rebuild import HiddenRows, Place, find_hidden
from penstock.storage.recovery import Replay, walk_log
from penstock.storage.segments import Tail, list_segments
from penstock.storage.snapshot import snapshot_name
from penstock.storage.staging import check_pieces
from penstock.storage.stopped import check_reached, load_stopped
from penstock.storage.vfs import Vfs

Ref = TypeVar("Ref", BatchRef, JournalRef)

SealedKind = Literal["manifest", "snapshot", "history", "journal", "staged"]


class Damage(msgspec.Struct, frozen=True):
    """Why a start would be refused."""

    path: str
    position: int
    detail: str


class SealedFile(msgspec.Struct, frozen=True):
    """The manifest, a file that it names, or a staged piece. `position` and `detail` say where it
    is damaged, and `lost` which messages cannot be delivered or which rows cannot be read."""

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


class Audit(msgspec.Struct):
    """`files` are in the order in which a start reads them; the index of their batches and the log
    come after them. `first_segment` is 0 where the manifest cannot be read: then the log is not
    judged. `faults` are what a start finds wrong with the index, `hidden` the rows that no reader
    finds, for that or because they are out of order in a batch."""

    first_segment: int
    files: list[SealedFile]
    history: list[HistoryFile] = []
    journal: list[JournalFile] = []
    leftovers: list[str] = []
    torn: list[Tail] = []
    log_damage: Damage | None = None
    index_damage: Damage | None = None
    faults: list[Fault] = []
    hidden: list[HiddenRows] = []
    is_stopped: bool = False
    """The STOPPED file is there."""

    @property
    def damage(self) -> Damage | None:
        for file in self.files:
            if file.refuses_start:
                return file.damage
        return self.index_damage or self.log_damage


@contextmanager
def alone_in(vfs: Vfs, directory: str, *, is_reading: bool = False) -> Iterator[None]:
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
        # Nothing seals in a directory that is mounted to be read only.
        if not is_reading or error.errno != errno.EROFS:
            raise


def audit(vfs: Vfs, directory: str) -> Audit:
    path = os.path.join(directory, MANIFEST_NAME)
    try:
        manifest = load_manifest(vfs, directory)
        if manifest is None:
            check_never_sealed(vfs, directory)
    except CorruptManifest as error:
        return Audit(0, [_bad(vfs, error, "manifest", refuses_start=True)])
    files = [] if manifest is None else [SealedFile(path, "manifest", "sound")]
    manifest = manifest or Manifest()
    snapshot, state = _snapshot(vfs, directory, manifest)
    disordered: set[Place] = set()
    files += [_history_file(vfs, directory, f, state, disordered) for f in manifest.history]
    files += [_journal_file(vfs, directory, file) for file in manifest.journal.files]
    files += [] if snapshot is None else [snapshot]
    for path, damage in check_pieces(vfs, directory):
        sound = SealedFile(path, "staged", "sound")
        files.append(sound if damage is None else _bad(vfs, damage, "staged"))
    found = Audit(manifest.first_segment, files, manifest.history, manifest.journal.files)
    if state is not None:
        _judge_index(vfs, directory, found, state, disordered)
    found.leftovers = leftovers(vfs, directory, manifest)
    for number, path in list_segments(vfs, directory):
        if number < manifest.first_segment:
            found.leftovers.append(path)
    try:
        stopped = load_stopped(vfs, directory)
        found.is_stopped = stopped is not None
        log = walk_log(vfs, directory, first_segment=manifest.first_segment, replay=_replay(state))
        if stopped is not None:
            check_reached(directory, stopped, log, manifest.first_segment)
        # After an orderly stop a log that ends too early is damaged, not torn by a crash.
        found.torn = log.tails
    except CorruptLog as error:
        found.is_stopped = found.is_stopped or isinstance(error, CorruptStopped)
        found.log_damage = Damage(error.path, error.position, error.detail)
    return found


def _judge_index(
    vfs: Vfs, directory: str, found: Audit, state: BrokerState, disordered: set[Place]
) -> None:
    found.faults = find_faults(found.history, state)
    error = index_error(os.path.join(directory, MANIFEST_NAME), found.faults)
    if error is not None:
        found.index_damage = Damage(error.path, error.position, error.detail)
    places = disordered | {(fault.topic_id, fault.partition) for fault in found.faults}
    found.hidden = find_hidden(vfs, directory, found.history, state, places)


def _replay(state: BrokerState | None) -> Replay | None:
    """Applies each record as a start does; without a snapshot there is nothing to apply it to."""
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
    disordered: set[Place],
) -> SealedFile:
    """Adds the partitions of batches whose rows are not in order to `disordered`."""
    try:
        check_identity(vfs, os.path.join(directory, history_name(file.number)), file)
    except CorruptLog as error:
        lost = messages_of(file.batches, state)
        return _bad(vfs, error, "history", refuses_start=True, lost=lost)
    reader = HistoryReader(vfs, directory)
    path = os.path.join(directory, history_name(file.number))

    def check(ref: BatchRef) -> None:
        if not is_in_order(reader.batch(ref)):
            disordered.add((ref.topic_id, ref.partition))

    first, damaged = _damage(file.batches, check)
    first = first or _damage_elsewhere(vfs, path, file)
    if first is None:
        return SealedFile(path, "history", "sound")
    return _bad(vfs, first, "history", lost=messages_of(damaged, state))


def _journal_file(vfs: Vfs, directory: str, file: JournalFile) -> SealedFile:
    reader = JournalReader(vfs, directory)
    path = reader.path(file.number)
    try:
        check_identity(vfs, path, file)
    except CorruptLog as error:
        return _bad(vfs, error, "journal", refuses_start=True, lost=rows_of(file.batches))
    first, damaged = _damage(file.batches, reader.check)
    first = first or _damage_elsewhere(vfs, path, file)
    if first is None:
        return SealedFile(path, "journal", "sound")
    return _bad(vfs, first, "journal", lost=rows_of(damaged))


def _damage(refs: list[Ref], check: Callable[[Ref], object]) -> tuple[CorruptLog | None, list[Ref]]:
    """The first damage that `check` finds, and all batches that have some."""
    first: CorruptLog | None = None
    damaged: list[Ref] = []
    for ref in refs:
        try:
            check(ref)
        except CorruptLog as error:
            first = first or error
            damaged.append(ref)
    return first, damaged


def _damage_elsewhere(vfs: Vfs, path: str, file: NamedFile) -> CorruptLog | None:
    """Damage to bytes that are in no batch."""
    try:
        check_bytes(vfs, path, file)
    except CorruptLog as error:
        return error
    return None


def rows_of(refs: list[JournalRef]) -> list[str]:
    """What is in these batches, in words."""
    return [f"positions {r.first} to {r.last} ({r.rows} rows) of the journal" for r in refs]


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


def messages_of(refs: list[BatchRef], state: BrokerState | None) -> list[str]:
    """What is in these batches, in words; without a state nobody knows what is still wanted."""
    wanted = [ref for ref in refs if state is None or is_live(ref, state)]
    return [
        f"offsets {ref.first} to {ref.last} ({ref.msgs} messages) of partition {ref.partition} "
        f"of {_topic(ref, state)}"
        for ref in wanted
    ]


def _topic(ref: BatchRef, state: BrokerState | None) -> str:
    topic = state.topics_by_id.get(ref.topic_id) if state is not None else None
    return f"topic {topic.name}" if topic is not None else f"the topic with id {ref.topic_id}"
