"""Lineage: the ids that a message's envelope carries, for whoever knows only where it is stored.

Looked up by (topic, partition, offset) among the messages of the sealing step, which are not in
any file yet, and else in history; column by column, never row by row. Invariant: an id is the
message's own or null: when it has none, retention has removed it, or its batch cannot be read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator

import pyarrow as pa
import pyarrow.compute as pc

from penstock.storage.errors import CorruptLog
from penstock.storage.history import BatchRef, HistoryFile, HistoryGone
from penstock.storage.history_reader import HistoryReader, row_at

ID_COLUMNS = ("run_id", "step_id", "parent_step_id", "tenant_id", "routing_label")

Place = tuple[int, int]
"""Topic id and partition."""


class Lineage:
    """`recent` gives the packed messages of a place that are not in history, in offset order."""

    def __init__(
        self,
        recent: Callable[[Place], list[pa.RecordBatch]],
        history: list[HistoryFile],
        reader: HistoryReader,
    ) -> None:
        self.damaged: set[str] = set()
        self._recent = recent
        self._history = history
        self._reader = reader
        self._refs: dict[Place, list[BatchRef]] | None = None

    def ids(
        self, places: list[Place], contexts: pa.Array, offsets: pa.Array
    ) -> dict[str, pa.Array]:
        """The columns of ids for rows at `offsets`; row n is of place `places[contexts[n]]`."""
        pool = _Pool()
        numbers = {place: number for number, place in enumerate(dict.fromkeys(places))}
        place_of = pa.array([numbers[place] for place in places], pa.int32()).take(contexts)
        order = pc.sort_indices(place_of)
        sorted_offsets = offsets.take(order)
        found = [
            self._look_up(place, sorted_offsets.slice(start, end - start), pool)
            for place, start, end in _runs(list(numbers), place_of.take(order))
        ]
        rows = len(offsets)
        if not pool.rows:
            return {name: pa.nulls(rows, pa.string()) for name in ID_COLUMNS}
        index = pa.concat_arrays(found).take(pc.sort_indices(order))
        return {name: pool.column(name).take(index) for name in ID_COLUMNS}

    def _look_up(self, place: Place, wanted: pa.Array, pool: _Pool) -> pa.Array:
        """For each offset the row of the pool that has its ids, or null."""
        found = pa.nulls(len(wanted), pa.int64())
        bounds = pc.min_max(wanted)
        low, high = bounds["min"].as_py(), bounds["max"].as_py()
        for batch in self._batches(place, low, high):
            first = row_at(batch, low)
            rows = batch.slice(first, row_at(batch, high + 1) - first)
            if _has_ids(rows):
                index = pc.index_in(wanted, value_set=rows.column("offset"))
                found = pc.coalesce(found, pc.add(index.cast(pa.int64()), pool.add(rows)))
        return found

    def _batches(self, place: Place, low: int, high: int) -> Iterator[pa.RecordBatch]:
        """Those that may hold offsets from `low` to `high`."""
        recent = self._recent(place)
        for chunk in recent:
            offsets = chunk.column("offset")
            if offsets[0].as_py() <= high and offsets[-1].as_py() >= low:
                yield chunk
        if recent and recent[0].column("offset")[0].as_py() <= low:
            return
        for ref in self._refs_of(place):
            if ref.first <= high and ref.last >= low:
                try:
                    yield self._reader.batch(ref)
                except (CorruptLog, HistoryGone) as error:
                    self.damaged.add(str(error))

    def _refs_of(self, place: Place) -> list[BatchRef]:
        if self._refs is None:
            refs = defaultdict(list)
            for file in self._history:
                for ref in file.batches:
                    refs[ref.topic_id, ref.partition].append(ref)
            self._refs = dict(refs)
        return self._refs.get(place, [])


class _Pool:
    """Rows of several batches, as if they were of one."""

    def __init__(self) -> None:
        self.rows = 0
        self._batches: list[pa.RecordBatch] = []

    def add(self, batch: pa.RecordBatch) -> int:
        """Where its rows begin."""
        start = self.rows
        self._batches.append(batch)
        self.rows += batch.num_rows
        return start

    def column(self, name: str) -> pa.Array:
        return pa.concat_arrays([batch.column(name) for batch in self._batches])


def _has_ids(batch: pa.RecordBatch) -> bool:
    """Messages without envelope or routing may lack the columns altogether."""
    names = set(batch.schema.names)
    return any(
        name in names and batch.column(name).null_count < batch.num_rows for name in ID_COLUMNS
    )


def _runs(places: list[Place], numbers: pa.Array) -> Iterator[tuple[Place, int, int]]:
    """Which rows of a sorted column belong to each place."""
    encoded = pc.run_end_encode(numbers)
    start = 0
    for number, end in zip(encoded.values.to_pylist(), encoded.run_ends.to_pylist(), strict=True):
        yield places[number], start, end
        start = end
