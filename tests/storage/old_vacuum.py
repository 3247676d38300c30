"""Sealing as it was before batches were checked: it joins batches around rows of files that stay.

It makes directories that are damaged as those in the field are. `with old_release(monkeypatch)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby

import pyarrow as pa
import pytest

from penstock.core.state import BrokerState
from penstock.storage import checkpoint, history, manifest, seal, vacuum
from penstock.storage.checkpoint import live_refs
from penstock.storage.history import BatchRef, PartitionRows, joined
from penstock.storage.history_reader import HistoryReader, row_at
from penstock.storage.vacuum import VacuumPlan
from tests.storage.sealed_store import SealedStore

MERGED_FILES = 4


@contextmanager
def old_release(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patched:
        patched.setattr(seal, "kept_rows", _kept_rows)
        patched.setattr(seal, "batches_of", _batches_of)
        patched.setattr(manifest, "check_index", _nothing)
        patched.setattr(checkpoint, "check_index", _nothing)
        patched.setattr(history, "is_in_order", lambda batch: True)
        yield


def damaged_store(monkeypatch: pytest.MonkeyPatch, partitions: int = 1) -> SealedStore:
    """Small files around a larger one, merged by the older release. A second topic is sound."""
    monkeypatch.setattr(vacuum, "SMALL_BYTES", 2_000)
    monkeypatch.setattr(vacuum, "MERGED_FILES", MERGED_FILES)
    store = SealedStore()
    topic, other = store.topic("orders", partitions), store.topic("other")
    with old_release(monkeypatch):
        for number in range(MERGED_FILES):
            if number == MERGED_FILES // 2:
                store.produce(topic, 40, "large" * 20)
                store.seal()
            store.produce(topic, 10, partition=number % partitions)
            store.produce(other, 3)
            store.seal()
        store.produce(topic, 10)
        assert store.seal().dropped, "nothing was merged"
    return store


def _nothing(*_: object) -> None:
    pass


def _kept_rows(
    plan: VacuumPlan, state: BrokerState, reader: HistoryReader
) -> Iterator[PartitionRows]:
    for place, refs in groupby(live_refs(plan.rewrite, state), key=_place):
        first = state.topics_by_id[place[0]].partitions[place[1]].first_offset
        live = (batch.slice(row_at(batch, first)) for batch in map(reader.batch, refs))
        for batch in joined(live):
            yield PartitionRows(*place, batch)


def _batches_of(
    topic_id: int, partition: int, preceding: int, chunks: list[pa.RecordBatch]
) -> Iterator[PartitionRows]:
    for batch in joined(chunks):
        yield PartitionRows(topic_id, partition, batch)


def _place(ref: BatchRef) -> tuple[int, int]:
    return ref.topic_id, ref.partition
