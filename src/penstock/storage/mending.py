"""Mending: repairs an index of batches that hides rows, or expects some that are in no file.

Invariant: history, snapshot and manifest are written in that order, each on disk before the next; a
crash leaves the old manifest or the new one, with every file that it names. Files that the new
manifest no longer names are renamed after it is on disk, never deleted, and the old manifest is
kept as a copy. Whoever calls is alone in the directory. Must not know the command line.
"""

from __future__ import annotations

import os

import msgspec

from penstock.core.image import StateImage, restore_image
from penstock.core.state import BrokerState
from penstock.model.limits import Limits
from penstock.storage.checkpoint import live_refs, load_unchecked_state
from penstock.storage.coverage import describe, find_faults
from penstock.storage.errors import CorruptIndex, CorruptLog
from penstock.storage.history import HistoryFile, history_name, remove_history
from penstock.storage.history_reader import HistoryReader
from penstock.storage.manifest import MANIFEST_NAME, Manifest, load_manifest, write_manifest
from penstock.storage.rebuild import Place, Rebuilding
from penstock.storage.snapshot import load_snapshot, write_snapshot
from penstock.storage.vfs import Vfs


class Mending(msgspec.Struct):
    """What was done, or would be. `set_aside` maps each file to the one that keeps its bytes,
    `lost` says which messages are in no file. Not `possible`: nothing here can help."""

    done: bool
    explanation: str
    set_aside: dict[str, str] = {}
    lost: list[str] = []
    possible: bool = True


def mend_index(vfs: Vfs, directory: str, *, dry_run: bool, accept_loss: bool) -> Mending:
    """Writes the files anew whose batches hide rows. If messages are in no file, nothing is changed
    unless `accept_loss` says that they are no longer expected."""
    manifest = load_manifest(vfs, directory) or Manifest()
    reader = HistoryReader(vfs, directory)
    try:
        state = load_unchecked_state(vfs, directory, manifest, Limits())
        work = Rebuilding(manifest.history, state, reader)
        lost = _lost(state, work.live_rows())
        needed = sum(file.size for file in work.moved)
        if needed > vfs.free_bytes(directory):
            return _impossible(f"The disk lacks room for {needed} bytes: make room first.")
        if dry_run or (lost and not accept_loss):
            return Mending(False, _explain(work, lost), _asides(vfs, directory, work), lost)
        asides = _carry_out(vfs, directory, manifest, work, state)
        return Mending(True, _explain(work, lost), asides, lost)
    except CorruptIndex as error:
        return _impossible(f"{error.path}: {error.detail}. This cannot be repaired")
    except CorruptLog as error:
        return _impossible(
            f"{error.path} is damaged at byte {error.position}: {error.detail}. Its rows are "
            "needed to put the others in order: restore it from a copy that has it"
        )


def _impossible(why: str) -> Mending:
    return Mending(False, f"Some messages cannot be reached. {why}.", possible=False)


def _carry_out(
    vfs: Vfs, directory: str, old: Manifest, work: Rebuilding, state: BrokerState
) -> dict[str, str]:
    number = old.next_file
    history, snapshot, mark = old.history, old.snapshot, old.snapshot_mark
    try:
        if work.moved:
            history = [*work.kept, work.write(vfs, directory, number)]
        if find_faults(history, state):
            image = load_snapshot(vfs, directory, old.snapshot, old.snapshot_mark)
            _count_anew(image, state, history, HistoryReader(vfs, directory))
            state = restore_image(image, Limits())
            mark = write_snapshot(vfs, directory, number, image)
            snapshot = number
        manifest = msgspec.structs.replace(
            old,
            snapshot=snapshot,
            next_file=number + 1,
            history=history,
            snapshot_mark=mark,
        )
        asides = _asides(vfs, directory, work)
        path = os.path.join(directory, MANIFEST_NAME)
        vfs.write_file_atomically(asides[path], vfs.read_file(path))
        write_manifest(vfs, directory, manifest, state)
    except CorruptLog:
        remove_history(vfs, directory, [number])
        raise
    for moved, aside in asides.items():
        if moved != path:
            vfs.rename(moved, aside)
    vfs.fsync_dir(directory)
    return asides


def _count_anew(
    image: StateImage, state: BrokerState, history: list[HistoryFile], reader: HistoryReader
) -> None:
    """Counts as trimmed what is in no file, in the partitions whose rows do not add up."""
    wrong = {(fault.topic_id, fault.partition) for fault in find_faults(history, state)}
    found = dict.fromkeys(wrong, (0, 0))
    for ref in live_refs(history, state):
        place = (ref.topic_id, ref.partition)
        if place in wrong:
            first = state.topics_by_id[ref.topic_id].partitions[ref.partition].first_offset
            msgs, size = reader.count_from(ref, first)
            found[place] = found[place][0] + msgs, found[place][1] + size
    for topic in image.topics:
        for index, partition in enumerate(topic.partitions):
            if (topic.id, index) in found:
                msgs, size = found[topic.id, index]
                partition.trimmed_msgs = partition.stored_msgs - msgs
                partition.trimmed_bytes = partition.stored_bytes - size


def _asides(vfs: Vfs, directory: str, work: Rebuilding) -> dict[str, str]:
    """Where the manifest is copied to, and each file that is written anew is renamed to."""
    names = [MANIFEST_NAME, *(history_name(file.number) for file in work.moved)]
    paths = [os.path.join(directory, name) for name in names]
    return {path: free_name(vfs, path) for path in paths}


def free_name(vfs: Vfs, path: str) -> str:
    """A name beside `path`, for bytes that are set aside, that no file has."""
    name = f"{path}.damaged"
    number = 1
    while vfs.exists(name):
        name = f"{path}.damaged.{number}"
        number += 1
    return name


def _lost(state: BrokerState, live_rows: dict[Place, int]) -> list[str]:
    """Messages that should be there and are in no file, in words."""
    lost = []
    for topic in state.topics_by_id.values():
        for partition in topic.partitions:
            found = live_rows.get((topic.id, partition.index), 0)
            missing = partition.backlog.retained_msgs() - found
            if missing > 0 and partition.first_offset < partition.end_offset:
                lost.append(
                    f"{missing} messages of {describe(topic, partition.index)}, of offsets "
                    f"{partition.first_offset} to {partition.end_offset - 1}: they are in no file"
                )
    return lost


def _explain(work: Rebuilding, lost: list[str]) -> str:
    said = []
    if work.moved:
        names = ", ".join(history_name(file.number) for file in work.moved)
        said.append(
            "Batches of history overlap, or have rows out of order, so that readers pass over "
            f"messages. All of them are on disk: {names} can be written anew, with the rows in "
            "order. Nothing is lost by that, and the old files are kept."
        )
    if lost:
        said.append(
            "Messages that the snapshot counts are in no file. Restore the whole data directory "
            "from a copy that has them. Otherwise --set-damage-aside counts them as removed, and "
            "the broker starts without them."
        )
    return " ".join(said) or "All messages can be reached."
