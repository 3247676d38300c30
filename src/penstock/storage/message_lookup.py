"""Looks up envelope ids and storing times of messages by topic, partition and offset.

Searches the messages of the sealing step, which are in no file yet, and then history; column by
column, never row by row. Invariant: a value found is the message's own. It is null if the message
does not have it, if retention has removed the message, or if its batch cannot be read. Must not
know what the values are used for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator

import pyarrow as pa
import pyarrow.compute as pc

from penstock.storage.columns import SCHEMA
from penstock.storage.errors import CorruptLog
from penstock.storage.history import BatchRef, HistoryFile, HistoryGone, PartitionKey
from penstock.storage.history_reader import HistoryReader, row_at

ID_COLUMNS = ("run_id", "step_id", "parent_step_id", "tenant_id", "routing_label")


class MessageLookup:
    """`recent` returns the messages of a partition that are not in history, in offset order.
    `damaged` collects the errors of batches that could not be read."""

    def __init__(
        self,
        recent: Callable[[PartitionKey], list[pa.RecordBatch]],
        history: list[HistoryFile],
        reader: HistoryReader,
    ) -> None:
        self.damaged: set[str] = set()
        self._recent = recent
        self._history = history
        self._reader = reader
        self._refs: dict[PartitionKey, list[BatchRef]] | None = None

    def columns(
        self,
        partitions: list[PartitionKey],
        contexts: pa.Array,
        offsets: pa.Array,
        timed: set[PartitionKey],
    ) -> dict[str, pa.Array]:
        """Returns ID_COLUMNS and `produced_at` for the rows at `offsets`. Row n is in partition
        `partitions[contexts[n]]`. Times are needed only for the partitions in `timed`."""
        pool = _Pool()
        numbers = {partition: number for number, partition in enumerate(dict.fromkeys(partitions))}
        partition_of = pa.array([numbers[partition] for partition in partitions], pa.int32()).take(
            contexts
        )
        order = pc.sort_indices(partition_of)
        sorted_offsets = offsets.take(order)
        found = [
            self._look_up(
                partition, sorted_offsets.slice(start, end - start), partition in timed, pool
            )
            for partition, start, end in _runs(list(numbers), partition_of.take(order))
        ]
        index = pa.concat_arrays(found).take(pc.sort_indices(order))
        columns = {name: pool.column(name, index) for name in ID_COLUMNS}
        return columns | {"produced_at": pool.column("timestamp", index)}

    def _look_up(
        self, partition: PartitionKey, wanted: pa.Array, is_timed: bool, pool: _Pool
    ) -> pa.Array:
        """Returns for each offset the row of its message in the pool, or null."""
        found = pa.nulls(len(wanted), pa.int64())
        bounds = pc.min_max(wanted)
        low, high = bounds["min"].as_py(), bounds["max"].as_py()
        for batch in self._batches(partition, low, high):
            first = row_at(batch, low)
            rows = batch.slice(first, row_at(batch, high + 1) - first)
            if is_timed or any(_column(rows, name) is not None for name in ID_COLUMNS):
                index = pc.index_in(wanted, value_set=rows.column("offset"))
                found = pc.coalesce(found, pc.add(index.cast(pa.int64()), pool.add(rows)))
        return found

    def _batches(self, partition: PartitionKey, low: int, high: int) -> Iterator[pa.RecordBatch]:
        """Yields the batches that may hold offsets from `low` to `high`."""
        recent = self._recent(partition)
        for chunk in recent:
            offsets = chunk.column("offset")
            if offsets[0].as_py() <= high and offsets[-1].as_py() >= low:
                yield chunk
        if recent and recent[0].column("offset")[0].as_py() <= low:
            return
        for ref in self._refs_of(partition):
            if ref.first <= high and ref.last >= low:
                try:
                    yield self._reader.batch(ref)
                except (CorruptLog, HistoryGone) as error:
                    self.damaged.add(str(error))

    def _refs_of(self, partition: PartitionKey) -> list[BatchRef]:
        if self._refs is None:
            refs = defaultdict(list)
            for file in self._history:
                for ref in file.batches:
                    refs[ref.topic_id, ref.partition].append(ref)
            self._refs = dict(refs)
        return self._refs.get(partition, [])


class _Pool:
    """Rows of several batches, numbered as if they were one batch."""

    def __init__(self) -> None:
        self.rows = 0
        self._batches: list[pa.RecordBatch] = []

    def add(self, batch: pa.RecordBatch) -> int:
        """Adds a batch and returns the number of its first row."""
        start = self.rows
        self._batches.append(batch)
        self.rows += batch.num_rows
        return start

    def column(self, name: str, index: pa.Array) -> pa.Array:
        """Returns the column's values at these rows."""
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
    """Returns the column, or None if it is missing or all null."""
    at = batch.schema.get_field_index(name)
    column = None if at < 0 else batch.column(at)
    return None if column is None or column.null_count == len(column) else column


def _runs(
    partitions: list[PartitionKey], numbers: pa.Array
) -> Iterator[tuple[PartitionKey, int, int]]:
    """Yields each partition with its first and one past its last row of a sorted column."""
    encoded = pc.run_end_encode(numbers)
    start = 0
    for number, end in zip(encoded.values.to_pylist(), encoded.run_ends.to_pylist(), strict=True):
        yield partitions[number], start, end
        start = end
