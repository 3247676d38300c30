"""Lineage: the ids that a message's envelope carries, and when it was stored, for whoever knows
only where that is.

Looked up by (topic, partition, offset) among the messages of the sealing step, which are not in
any file yet, and else in history; column by column, never row by row. Invariant: what is found is
the message's own or null: it has no such id, retention has removed it, or its batch cannot be read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator

import pyarrow as pa
import pyarrow.compute as pc

from penstock.storage.columns import SCHEMA
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

    def columns(
        self, places: list[Place], contexts: pa.Array, offsets: pa.Array, timed: set[Place]
    ) -> dict[str, pa.Array]:
        """ID_COLUMNS and `produced_at` for rows at `offsets`; row n is of place
        `places[contexts[n]]`. The times are needed of the places in `timed` only."""
        pool = _Pool()
        numbers = {place: number for number, place in enumerate(dict.fromkeys(places))}
        place_of = pa.array([numbers[place] for place in places], pa.int32()).take(contexts)
        order = pc.sort_indices(place_of)
        sorted_offsets = offsets.take(order)
        found = [
            self._look_up(place, sorted_offsets.slice(start, end - start), place in timed, pool)
            for place, start, end in _runs(list(numbers), place_of.take(order))
        ]
        index = pa.concat_arrays(found).take(pc.sort_indices(order))
        columns = {name: pool.column(name, index) for name in ID_COLUMNS}
        return columns | {"produced_at": pool.column("timestamp", index)}

    def _look_up(self, place: Place, wanted: pa.Array, is_timed: bool, pool: _Pool) -> pa.Array:
        """For each offset the row of the pool that is its message, or null."""
        found = pa.nulls(len(wanted), pa.int64())
        bounds = pc.min_max(wanted)
        low, high = bounds["min"].as_py(), bounds["max"].as_py()
        for batch in self._batches(place, low, high):
            first = row_at(batch, low)
            rows = batch.slice(first, row_at(batch, high + 1) - first)
            if is_timed or _has_ids(rows):
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

    def column(self, name: str, index: pa.Array) -> pa.Array:
        """The column's values at these rows."""
        kind = SCHEMA.field(name).type
        parts = [_column(batch, name) for batch in self._batches]
        if all(part is None for part in parts):
            return pa.nulls(len(index), kind)
        sizes = [batch.num_rows for batch in self._batches]
        return pa.concat_arrays(
            [
                pa.nulls(rows, kind) if part is None else part
                for part, rows in zip(parts, sizes, strict=True)
            ]
        ).take(index)


def _column(batch: pa.RecordBatch, name: str) -> pa.Array | None:
    """None if it has no value. Messages without envelope or routing may lack columns altogether."""
    at = batch.schema.get_field_index(name)
    column = None if at < 0 else batch.column(at)
    return None if column is None or column.null_count == len(column) else column


def _has_ids(batch: pa.RecordBatch) -> bool:
    return any(_column(batch, name) is not None for name in ID_COLUMNS)


def _runs(places: list[Place], numbers: pa.Array) -> Iterator[tuple[Place, int, int]]:
    """Which rows of a sorted column belong to each place."""
    encoded = pc.run_end_encode(numbers)
    start = 0
    for number, end in zip(encoded.values.to_pylist(), encoded.run_ends.to_pylist(), strict=True):
        yield places[number], start, end
        start = end
