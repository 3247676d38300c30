"""Repairs the index of batches, when batches hide rows or the snapshot counts rows in no file.

Files with batches that overlap or are out of order are written anew: sorted, and cut where a batch
of another file lies between. Invariant: the new history file, snapshot and manifest are written in
that order, each on disk before the next, and the history is read back and counted before the
manifest names it. A crash leaves the old manifest or the new one, with every file that it names.
Replaced files are renamed afterwards, never deleted, and the old manifest is kept as a copy. The
caller holds the directory. Must not know the command line.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from itertools import groupby, pairwise
from typing import NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from penstock.core.image import StateImage, restore_image
from penstock.core.state import BrokerState
from penstock.model.limits import Limits
from penstock.storage.checkpoint import live_refs, load_unchecked_state
from penstock.storage.columns import complete
from penstock.storage.directory_check import Damage
from penstock.storage.errors import CorruptIndex, CorruptLog
from penstock.storage.hidden_rows import undeleted_refs
from penstock.storage.history import (
    BatchRef,
    HistoryFile,
    PartitionKey,
    PartitionRows,
    batches_of,
    history_name,
    is_in_order,
    partition_key,
    remove_history,
    write_history,
)
from penstock.storage.history_reader import HistoryReader, row_at
from penstock.storage.index_check import describe, find_index_faults
from penstock.storage.manifest import MANIFEST_NAME, Manifest, load_manifest, write_manifest
from penstock.storage.segments import TornTail
from penstock.storage.snapshot import load_snapshot, write_snapshot
from penstock.storage.vfs import Vfs


class Repair(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a repair, or of its dry run. `set_aside` maps each file to the file that keeps
    its bytes, `lost` lists what the broker no longer has, and `found` the messages that can be
    reached again. `possible` is False if no repair can help."""

    done: bool
    cut: list[TornTail] = []
    damage: Damage | None = None
    set_aside: dict[str, str] = {}
    explanation: str
    lost: list[str] = []
    possible: bool = True
    found: list[str] = []


def repair_index(vfs: Vfs, directory: str, *, dry_run: bool, accept_loss: bool) -> Repair:
    """Rewrites the files whose batches hide rows. If messages are in no file, changes nothing
    unless `accept_loss` says to count them as removed."""
    manifest = load_manifest(vfs, directory) or Manifest()
    reader = HistoryReader(vfs, directory)
    try:
        state = load_unchecked_state(vfs, directory, manifest, Limits())
        work = _HistoryRewrite(manifest.history, state, reader)
        lost = _lost(state, work.live_rows())
        needed = sum(file.size for file in work.moved)
        if needed > vfs.free_bytes(directory):
            return _impossible(f"The disk lacks room for {needed} bytes: make room first")
        done = not dry_run and (accept_loss or not lost)
        if done:
            set_aside = _carry_out(vfs, directory, manifest, work, state)
        else:
            set_aside = _free_names(vfs, directory, work)
        return Repair(done=done, explanation=_explain(work, lost), set_aside=set_aside, lost=lost)
    except CorruptIndex as error:
        return _impossible(f"{error.path}: {error.detail}. This cannot be repaired")
    except CorruptLog as error:
        return _impossible(
            f"{error.path} is damaged at byte {error.position}: {error.detail}. Its rows are "
            "needed to put the others in order: restore it from a copy that has it"
        )


def _impossible(why: str) -> Repair:
    explanation = f"Some messages cannot be reached. {why}."
    return Repair(done=False, explanation=explanation, possible=False)


def _carry_out(
    vfs: Vfs, directory: str, old: Manifest, work: _HistoryRewrite, state: BrokerState
) -> dict[str, str]:
    number = old.next_file
    history, snapshot, mark = old.history, old.snapshot, old.snapshot_mark
    try:
        if work.moved:
            written = work.write(vfs, directory, number)
            history = [*work.kept, written] if written.batches else work.kept
        if find_index_faults(history, state):
            image = load_snapshot(vfs, directory, old.snapshot, old.snapshot_mark)
            _recount(image, state, history, HistoryReader(vfs, directory))
            state = restore_image(image, Limits())
            mark = write_snapshot(vfs, directory, number, image)
            snapshot = number
        manifest = msgspec.structs.replace(
            old, snapshot=snapshot, next_file=number + 1, history=history, snapshot_mark=mark
        )
        asides = _free_names(vfs, directory, work)
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


def _recount(
    image: StateImage, state: BrokerState, history: list[HistoryFile], reader: HistoryReader
) -> None:
    """Counts rows that are in no file as trimmed, in the partitions whose rows do not add up."""
    wrong = {(fault.topic_id, fault.partition) for fault in find_index_faults(history, state)}
    found = dict.fromkeys(wrong, (0, 0))
    for ref in live_refs(history, state):
        key = partition_key(ref)
        if key in wrong:
            first = state.topics_by_id[ref.topic_id].partitions[ref.partition].first_offset
            msgs, size = reader.count_from(ref, first)
            found[key] = found[key][0] + msgs, found[key][1] + size
    for topic in image.topics:
        for index, partition in enumerate(topic.partitions):
            if (topic.id, index) in found:
                msgs, size = found[topic.id, index]
                partition.trimmed_msgs = partition.stored_msgs - msgs
                partition.trimmed_bytes = partition.stored_bytes - size


def _free_names(vfs: Vfs, directory: str, work: _HistoryRewrite) -> dict[str, str]:
    """Maps the manifest and each moved file to the free name that will keep its bytes."""
    names = [MANIFEST_NAME, *(history_name(file.number) for file in work.moved)]
    paths = [os.path.join(directory, name) for name in names]
    return {path: free_name(vfs, path) for path in paths}


def free_name(vfs: Vfs, path: str) -> str:
    """Returns an unused name beside `path`, for bytes that are set aside."""
    name = f"{path}.damaged"
    number = 1
    while vfs.exists(name):
        name = f"{path}.damaged.{number}"
        number += 1
    return name


def _lost(state: BrokerState, live_rows: dict[PartitionKey, int]) -> list[str]:
    """Describes the messages that should be there and are in no file."""
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


def _explain(work: _HistoryRewrite, lost: list[str]) -> str:
    sentences = []
    if work.moved:
        names = ", ".join(history_name(file.number) for file in work.moved)
        sentences.append(
            "Batches of history overlap, or have rows out of order, so that readers pass over "
            f"messages. All of them are on disk: {names} can be written anew, with the rows in "
            "order. Nothing is lost by that, and the old files are kept."
        )
    if lost:
        sentences.append(
            "Messages that the snapshot counts are in no file. Restore the whole data directory "
            "from a copy that has them. Otherwise --set-damage-aside counts them as removed, and "
            "the broker starts without them."
        )
    return " ".join(sentences) or "All messages can be reached."


class _Extent(NamedTuple):
    """A batch and the range of offsets that its rows really have."""

    ref: BatchRef
    first: int
    last: int
    is_sorted: bool


class _HistoryRewrite:
    """Chooses the files to rewrite (`moved`) and yields their rows in order."""

    def __init__(
        self, history: list[HistoryFile], state: BrokerState, reader: HistoryReader
    ) -> None:
        self._state = state
        self._reader = reader
        self._extents: dict[PartitionKey, list[_Extent]] = defaultdict(list)
        for ref in undeleted_refs(history, state):
            self._extents[partition_key(ref)].append(self._extent(ref))
        moved = self._wrong_files()
        self.moved = [file for file in history if file.number in moved]
        self.kept = [file for file in history if file.number not in moved]
        self._numbers = moved

    def _extent(self, ref: BatchRef) -> _Extent:
        """Returns the extent of a batch. An unreadable one is taken to hold what its reference
        says. That matters only if its file has to be rewritten, and then reading it raises."""
        try:
            batch = self._reader.batch(ref)
        except CorruptLog:
            return _Extent(ref, ref.first, ref.last, True)
        if is_in_order(batch):
            return _Extent(ref, ref.first, ref.last, True)
        bounds = pc.min_max(batch.column("offset"))
        return _Extent(ref, bounds["min"].as_py(), bounds["max"].as_py(), False)

    def _wrong_files(self) -> set[int]:
        wrong = set()
        for extents in self._extents.values():
            extents.sort(key=lambda extent: (extent.first, extent.last))
            wrong |= {extent.ref.file for extent in extents if not extent.is_sorted}
            # A batch has to be cut where another one begins in it.
            wrong |= {a.ref.file for a, b in pairwise(extents) if b.first <= a.last}
        mixed = set()
        for extents in self._extents.values():
            for extent in extents:
                if extent.ref.file in wrong:
                    mixed |= self._mixed_with(extent, extents)
        return wrong | mixed

    def _mixed_with(self, extent: _Extent, others: list[_Extent]) -> set[int]:
        """Returns the files with a batch whose rows alternate with rows of this one."""
        inside = [
            other
            for other in others
            if other is not extent and other.first <= extent.last and extent.first <= other.last
        ]
        if not inside:
            return set()
        offsets = sorted(self._reader.offsets(extent.ref))
        return {
            other.ref.file
            for other in inside
            if bisect_left(offsets, other.first) != bisect_left(offsets, other.last + 1)
        }

    def rows(self) -> Iterator[PartitionRows]:
        """Yields the live rows of the moved files. Joins batches up to the next one that stays."""
        for (topic_id, index), extents in sorted(self._extents.items()):
            stay = [each for each in extents if each.ref.file not in self._numbers]
            ends = [each.first for each in stay]
            pieces: list[tuple[int, pa.RecordBatch]] = []
            moved = [each for each in extents if each.ref.file in self._numbers]
            first_offset = self._state.topics_by_id[topic_id].partitions[index].first_offset
            for cluster in _clusters(moved):
                batch = self._ordered(cluster)
                batch = batch.slice(row_at(batch, first_offset))
                pieces += _cut(batch, ends)
            for _, run in groupby(pieces, key=lambda piece: piece[0]):
                yield from batches_of(topic_id, index, -1, [batch for _, batch in run])

    def _ordered(self, cluster: list[_Extent]) -> pa.RecordBatch:
        batches = [self._reader.batch(extent.ref) for extent in cluster]
        if len(batches) == 1 and cluster[0].is_sorted:
            return batches[0]
        rows = pa.concat_batches([complete(batch) for batch in batches])
        rows = rows.take(pc.sort_indices(rows.column("offset")))
        if not is_in_order(rows):
            ref = cluster[0].ref
            detail = f"batch {ref.index} has an offset that another batch has too"
            raise CorruptIndex(history_name(ref.file), ref.start, detail)
        return rows

    def live_rows(self) -> dict[PartitionKey, int]:
        """Counts the retained rows on disk, by partition."""
        return {
            place: sum(self._live_rows(extent) for extent in extents)
            for place, extents in self._extents.items()
        }

    def _live_rows(self, extent: _Extent) -> int:
        ref = extent.ref
        first = self._state.topics_by_id[ref.topic_id].partitions[ref.partition].first_offset
        if extent.first >= first:
            return ref.msgs
        try:
            return sum(offset >= first for offset in self._reader.offsets(ref))
        except CorruptLog:
            return ref.msgs

    def write(self, vfs: Vfs, directory: str, number: int) -> HistoryFile:
        """Writes the rows as file `number`, syncs it and reads it back."""
        file = write_history(vfs, directory, number, self.rows())
        reader = HistoryReader(vfs, directory)
        written = sum(reader.batch(ref).num_rows for ref in file.batches)
        wanted = sum(
            self._live_rows(extent)
            for extents in self._extents.values()
            for extent in extents
            if extent.ref.file in self._numbers
        )
        if written != wanted:
            path = os.path.join(directory, history_name(number))
            raise CorruptIndex(path, 0, f"{written} rows were written, not {wanted}")
        return file


def _clusters(extents: list[_Extent]) -> Iterator[list[_Extent]]:
    """Groups extents that overlap. They must be sorted by first offset."""
    cluster: list[_Extent] = []
    last = -1
    for extent in extents:
        if cluster and extent.first > last:
            yield cluster
            cluster = []
        cluster.append(extent)
        last = max(last, extent.last)
    if cluster:
        yield cluster


def _cut(batch: pa.RecordBatch, ends: list[int]) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Cuts the batch at the offsets `ends`. Yields each piece with its place among them."""
    while batch.num_rows:
        place = bisect_left(ends, batch.column("offset")[0].as_py() + 1)
        rows = row_at(batch, ends[place]) if place < len(ends) else batch.num_rows
        yield place, batch.slice(0, rows)
        batch = batch.slice(rows)
