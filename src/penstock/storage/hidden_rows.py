"""Finds hidden rows: messages that are on disk and that no reader finds.

Older releases could join batches around rows of a file that stayed, and so wrote batches that
overlap; rewriting such a file again put rows out of order within a batch. Readers pass over such
rows. Invariant: only reads. Must not know how the rows are brought back (index_repair.py).
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Sequence
from itertools import groupby

import msgspec
import pyarrow as pa

from penstock.core.state import BrokerState
from penstock.model.scopes import shown_name
from penstock.storage.errors import CorruptLog
from penstock.storage.history import (
    BatchRef,
    HistoryFile,
    PartitionKey,
    history_name,
    is_in_order,
    partition_key,
)
from penstock.storage.history_reader import HistoryReader, integers
from penstock.storage.vfs import Vfs


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


def find_hidden(
    vfs: Vfs,
    directory: str,
    history: list[HistoryFile],
    state: BrokerState,
    partitions: set[PartitionKey],
) -> list[HiddenRows]:
    """Returns the hidden rows of these partitions. Rows of unreadable batches do not count."""
    found = []
    reader = HistoryReader(vfs, directory)
    refs = [ref for ref in undeleted_refs(history, state) if partition_key(ref) in partitions]
    for (topic_id, index), group in groupby(refs, key=partition_key):
        topic = state.topics_by_id[topic_id]
        first_offset = topic.partitions[index].first_offset
        below = -1
        for ref in group:
            try:
                hidden = _hidden_offsets(reader.batch(ref), ref, below, first_offset)
            except CorruptLog:
                hidden = []
            below = max(below, ref.last)
            if hidden:
                path = os.path.join(directory, history_name(ref.file))
                low, high = min(hidden), max(hidden)
                found.append(
                    HiddenRows(shown_name(topic.name), index, low, high, len(hidden), path)
                )
    return found


def undeleted_refs(history: list[HistoryFile], state: BrokerState) -> list[BatchRef]:
    """Returns the batches of topics that are not deleted, by partition and last offset. Includes
    batches that should end below the first retained offset: rows out of order may be above it."""
    refs = [
        ref
        for file in history
        for ref in file.batches
        if (topic := state.topics_by_id.get(ref.topic_id)) is not None
        and 0 <= ref.partition < len(topic.partitions)
    ]
    return sorted(refs, key=lambda ref: (ref.topic_id, ref.partition, ref.last, ref.first))


def _hidden_offsets(
    batch: pa.RecordBatch, ref: BatchRef, below: int, first_offset: int
) -> list[int]:
    """Returns the batch's offsets that a reader does not find. A reader takes the first batch, by
    last offset, that does not end below the wanted offset, and bisects for the row in it. `below`
    is where the batches before this one end."""
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
