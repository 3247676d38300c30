"""Rebuild: brings rows that overlapping batches hide back within reach of readers.

A release before the check of coverage.py joined batches around rows of a file that stayed;
rewriting such files again put rows out of order within a batch. All rows are still on disk. The
files with such batches are written anew, cut where a batch of another file lies between, and sorted
where needed. Invariant: the new file is on disk, read back and counted before the manifest that
names it is written; the old files and the old manifest are kept under other names after that.
Interrupted at any point, the directory is the old one or the new one. Must not know what is done
with it (mending.py).
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from penstock.core.state import BrokerState
from penstock.storage.columns import complete
from penstock.storage.errors import CorruptIndex, CorruptLog
from penstock.storage.history import (
    BatchRef,
    HistoryFile,
    PartitionRows,
    batches_of,
    history_name,
    is_in_order,
    write_history,
)
from penstock.storage.history_reader import HistoryReader, integers, row_at
from penstock.storage.vfs import Vfs

Place = tuple[int, int]
"""Topic id and partition."""


class HiddenRows(msgspec.Struct, frozen=True):
    """Messages of one batch that are on disk and that no reader finds."""

    topic: str
    partition: int
    first: int
    last: int
    msgs: int
    path: str

    def __str__(self) -> str:
        return (
            f"offsets {self.first} to {self.last} ({self.msgs} messages) of partition "
            f"{self.partition} of topic {self.topic}"
        )


class _Extent(NamedTuple):
    """A batch and the offsets that it really has, in order."""

    ref: BatchRef
    first: int
    last: int
    is_sorted: bool


def find_hidden(
    vfs: Vfs, directory: str, history: list[HistoryFile], state: BrokerState, places: set[Place]
) -> list[HiddenRows]:
    """What no reader finds in these partitions. A batch that cannot be read is passed over: its
    rows are damaged, not hidden."""
    found = []
    reader = HistoryReader(vfs, directory)
    refs = [ref for ref in _refs(history, state) if _place(ref) in places]
    for place, group in groupby(refs, key=_place):
        topic = state.topics_by_id[place[0]]
        first_offset = topic.partitions[place[1]].first_offset
        below = -1
        for ref in group:
            try:
                hidden = _unreached(reader.batch(ref), ref, below, first_offset)
            except CorruptLog:
                hidden = []
            below = max(below, ref.last)
            if hidden:
                path = os.path.join(directory, history_name(ref.file))
                low, high = min(hidden), max(hidden)
                found.append(HiddenRows(topic.name, place[1], low, high, len(hidden), path))
    return found


def _refs(history: list[HistoryFile], state: BrokerState) -> list[BatchRef]:
    """The batches of topics that are not deleted, by place and last offset. Those that are said to
    end below what is retained are among them: rows out of order may lie above that."""
    refs = [
        ref
        for file in history
        for ref in file.batches
        if (topic := state.topics_by_id.get(ref.topic_id)) is not None
        and 0 <= ref.partition < len(topic.partitions)
    ]
    return sorted(refs, key=lambda ref: (ref.topic_id, ref.partition, ref.last, ref.first))


def _unreached(batch: pa.RecordBatch, ref: BatchRef, below: int, first_offset: int) -> list[int]:
    """The batch's offsets that a reader does not find. A reader takes the first batch, by its last
    offset, that does not end below what it wants, and looks for the row by bisection."""
    offsets = integers(batch, "offset", "q")[: batch.num_rows]
    if is_in_order(batch):
        start = bisect_left(offsets, first_offset)
        return list(offsets[start : bisect_left(offsets, below + 1)])
    return [
        offset
        for offset in offsets
        if offset >= first_offset
        and not (below < offset <= ref.last and _is_found(offsets, offset))
    ]


def _is_found(offsets: Sequence[int], offset: int) -> bool:
    row = bisect_left(offsets, offset)
    return row < len(offsets) and offsets[row] == offset


class Rebuilding:
    """Chooses the files that have to be written anew, and gives their rows in order. CorruptHistory
    if one of those cannot be read."""

    def __init__(
        self, history: list[HistoryFile], state: BrokerState, reader: HistoryReader
    ) -> None:
        self._state = state
        self._reader = reader
        self._extents: dict[Place, list[_Extent]] = defaultdict(list)
        for ref in _refs(history, state):
            self._extents[_place(ref)].append(self._extent(ref))
        moved = self._wrong_files()
        self.moved = [file for file in history if file.number in moved]
        self.kept = [file for file in history if file.number not in moved]
        self._numbers = moved

    def _extent(self, ref: BatchRef) -> _Extent:
        """A batch that cannot be read is taken to hold what its reference says: as long as it can
        stay where it is, it does not matter."""
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
            # One in which another begins has to be cut there.
            wrong |= {a.ref.file for a, b in pairwise(extents) if b.first <= a.last}
        mixed = set()
        for extents in self._extents.values():
            for extent in extents:
                if extent.ref.file in wrong:
                    mixed |= self._mixed_with(extent, extents)
        return wrong | mixed

    def _mixed_with(self, extent: _Extent, others: list[_Extent]) -> set[int]:
        """Files with a batch between whose rows there are some of this one: cutting is no help."""
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
        """All live rows of the moved files. Batches are joined up to the next one that stays."""
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

    def live_rows(self) -> dict[Place, int]:
        """How many rows of each partition are retained and on disk."""
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
        """Writes the rows as file `number`, and reads it back. On disk when this returns."""
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
            raise CorruptIndex(path, 0, f"{written} rows were written and {wanted} were to be")
        return file


def _place(ref: BatchRef) -> Place:
    return ref.topic_id, ref.partition


def _clusters(extents: list[_Extent]) -> Iterator[list[_Extent]]:
    """Extents by their first offset, those together that overlap."""
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
    """The batch in pieces that lie between the offsets `ends`, each with its place among them."""
    while batch.num_rows:
        place = bisect_left(ends, batch.column("offset")[0].as_py() + 1)
        rows = row_at(batch, ends[place]) if place < len(ends) else batch.num_rows
        yield place, batch.slice(0, rows)
        batch = batch.slice(rows)
