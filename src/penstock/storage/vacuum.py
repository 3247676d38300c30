"""Vacuum: which history files give their room back, and the rows of them that are kept.

A row is dead when its topic is deleted or retention has trimmed it. A file without a live row is
dropped; one that is mostly dead, or that holds rows of a deleted topic, is rewritten, as much in
one run as COPY_BYTES and the free disk allow, the emptiest first; so are small ones, when there
are many of them, into one. Must not know the log, and
writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import msgspec
import pyarrow as pa

from penstock.core.state import BrokerState
from penstock.storage.checkpoint import is_live, live_refs
from penstock.storage.errors import CorruptLog
from penstock.storage.history import MAX_BATCH_ROWS, BatchRef, HistoryFile, joined
from penstock.storage.history_reader import HistoryReader, row_at

COPY_BYTES = 512 * 1024 * 1024
"""What one run copies at most (one file may be more): sealing must not wait long for it."""
SMALL_BYTES = 4 * 1024 * 1024
MERGED_FILES = 16
"""So many small files become one: a log that is sealed often makes many, with little in each."""
_FREE_PART = 4
"""No more than this part of the free disk is filled: a full one must still be sealed."""


class Plan(msgspec.Struct):
    """Files in neither list are dropped. `damaged` ones are kept as they are."""

    keep: list[HistoryFile] = []
    rewrite: list[HistoryFile] = []
    damaged: list[str] = []


def plan_vacuum(
    history: list[HistoryFile], state: BrokerState, reader: HistoryReader, free_bytes: int
) -> Plan:
    plan = Plan()
    worn: list[tuple[float, int, HistoryFile]] = []
    for file in history:
        live = sum(_live_bytes(ref, state) for ref in file.batches)
        total = sum(ref.bytes for ref in file.batches)
        if not any(is_live(ref, state) for ref in file.batches):
            continue
        if live * 2 < total or any(_is_deleted(ref, state) for ref in file.batches):
            worn.append((live / max(total, 1), live, file))
        else:
            plan.keep.append(file)
    small = [file for file in plan.keep if _is_small(file)]
    if len(small) >= MERGED_FILES:
        plan.keep = [file for file in plan.keep if not _is_small(file)]
        worn += [(1.0, sum(_live_bytes(ref, state) for ref in f.batches), f) for f in small]
    most = free_bytes // _FREE_PART
    room = min(COPY_BYTES, most)
    for _, live, file in sorted(worn, key=lambda item: (item[0], item[2].number)):
        fits = live <= room or (live <= most and not plan.rewrite)
        if fits and _is_readable(file, state, reader, plan):
            plan.rewrite.append(file)
            room -= live
        else:
            plan.keep.append(file)
    plan.keep.sort(key=lambda file: file.number)
    return plan


def kept_rows(
    files: list[HistoryFile], state: BrokerState, reader: HistoryReader
) -> Iterator[tuple[int, int, pa.RecordBatch]]:
    """The live rows of `files`, mapped: none is converted."""
    for (topic_id, index), refs in groupby(live_refs(files, state), key=_place):
        first = state.topics_by_id[topic_id].partitions[index].first_offset
        batches = map(reader.batch, refs)
        live = (batch.slice(row_at(batch, first)) for batch in batches)
        for batch in joined(live):
            yield topic_id, index, batch


def _is_readable(file: HistoryFile, state: BrokerState, reader: HistoryReader, plan: Plan) -> bool:
    """Damage must not be copied under a new checksum, nor keep the log from being sealed."""
    try:
        for ref in file.batches:
            if is_live(ref, state):
                reader.batch(ref)
    except CorruptLog as error:
        plan.damaged.append(str(error))
        return False
    return True


def _place(ref: BatchRef) -> tuple[int, int]:
    return ref.topic_id, ref.partition


def _is_small(file: HistoryFile) -> bool:
    msgs = sum(ref.msgs for ref in file.batches)
    return msgs < MAX_BATCH_ROWS and sum(ref.bytes for ref in file.batches) < SMALL_BYTES


def _is_deleted(ref: BatchRef, state: BrokerState) -> bool:
    return ref.topic_id not in state.topics_by_id


def _live_bytes(ref: BatchRef, state: BrokerState) -> int:
    """Of a batch that is trimmed in part, an estimate: its rows are taken as evenly spread."""
    if not is_live(ref, state):
        return 0
    first = state.topics_by_id[ref.topic_id].partitions[ref.partition].first_offset
    if first <= ref.first:
        return ref.bytes
    return ref.bytes * (ref.last + 1 - first) // (ref.last + 1 - ref.first)
