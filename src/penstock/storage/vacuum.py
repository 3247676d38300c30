"""Vacuum: decides which history files are dropped or rewritten, and which rows of them are kept.

A row is dead when its topic is deleted or retention has trimmed it. A file without live rows is
dropped. A file that is mostly dead, or that holds rows of a deleted topic, is rewritten: the
emptiest first, as much in one run as COPY_BYTES and the free disk allow. Small files are merged
when at least MERGED_FILES of them fit; merging fewer would copy files without reducing their number
much. Invariant: batches are joined only if they are neighbours in their partition, so no batch
spans rows of a file that stays. Must not know the log, and writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import msgspec

from penstock.core.state import BrokerState
from penstock.storage.checkpoint import is_live, live_refs
from penstock.storage.errors import CorruptLog
from penstock.storage.history import (
    MAX_BATCH_ROWS,
    BatchRef,
    HistoryFile,
    PartitionRows,
    batches_of,
)
from penstock.storage.history_reader import HistoryReader, row_at

COPY_BYTES = 512 * 1024 * 1024
"""The most that one run copies, unless a single file is larger. Sealing must not wait long."""
SMALL_BYTES = 4 * 1024 * 1024
MERGED_FILES = 16
"""This many small files become one. A log that is sealed often makes many small files."""
_FREE_PART = 4
"""One part in this many of the free disk is filled at most: sealing must work on a nearly full
disk."""


class VacuumPlan(msgspec.Struct):
    """The files to `keep` and `rewrite`; others are dropped. `damaged` has errors of kept ones."""

    keep: list[HistoryFile] = []
    rewrite: list[HistoryFile] = []
    damaged: list[str] = []


def plan_vacuum(
    history: list[HistoryFile], state: BrokerState, reader: HistoryReader, free_bytes: int
) -> VacuumPlan:
    plan = VacuumPlan()
    worn: list[tuple[float, int, HistoryFile]] = []
    for file in history:
        live = _live_bytes_of(file, state)
        total = sum(ref.bytes for ref in file.batches)
        if not any(is_live(ref, state) for ref in file.batches):
            continue
        if live * 2 < total or any(ref.topic_id not in state.topics_by_id for ref in file.batches):
            worn.append((live / max(total, 1), live, file))
        else:
            plan.keep.append(file)
    most = free_bytes // _FREE_PART
    room = min(COPY_BYTES, most)
    for _, live, file in sorted(worn, key=lambda item: (item[0], item[2].number)):
        fits = live <= room or (live <= most and not plan.rewrite)
        if fits and _is_readable(file, state, reader, plan):
            plan.rewrite.append(file)
            room -= live
        else:
            plan.keep.append(file)
    _plan_merge(plan, state, reader, room)
    plan.keep.sort(key=lambda file: file.number)
    return plan


def _plan_merge(plan: VacuumPlan, state: BrokerState, reader: HistoryReader, room: int) -> None:
    """Chooses small files to merge, oldest first, as many as fit. Does nothing if they are few."""
    chosen: list[HistoryFile] = []
    fitting: list[HistoryFile] = []
    for file in filter(_is_small, sorted(plan.keep, key=lambda file: file.number)):
        live = _live_bytes_of(file, state)
        if live <= room:
            fitting.append(file)
            room -= live
    if len(fitting) >= MERGED_FILES:
        chosen = [file for file in fitting if _is_readable(file, state, reader, plan)]
    if len(chosen) >= MERGED_FILES:
        numbers = {file.number for file in chosen}
        plan.keep = [file for file in plan.keep if file.number not in numbers]
        plan.rewrite += chosen


def kept_rows(
    plan: VacuumPlan, state: BrokerState, reader: HistoryReader
) -> Iterator[PartitionRows]:
    """Yields the live rows of the files to rewrite. Joins batches up to the next one of a file that
    stays. Rows are mapped, not converted."""
    moved = {file.number for file in plan.rewrite}
    if not moved:
        return
    refs = live_refs([*plan.keep, *plan.rewrite], state)
    for (topic_id, index, is_moved), run in groupby(
        refs, key=lambda ref: (ref.topic_id, ref.partition, ref.file in moved)
    ):
        if is_moved:
            first = state.topics_by_id[topic_id].partitions[index].first_offset
            yield from _run_rows(list(run), first, reader)


def _run_rows(
    run: list[BatchRef], first_offset: int, reader: HistoryReader
) -> Iterator[PartitionRows]:
    """Yields the rows of neighbouring batches from `first_offset` on."""
    trimmed = row_at(reader.batch(run[0]), first_offset)
    preceding = _preceding(run)
    live = (batch.slice(row_at(batch, first_offset)) for batch in map(reader.batch, run))
    start = preceding + trimmed if preceding >= 0 else -1
    yield from batches_of(run[0].topic_id, run[0].partition, start, live)


def _preceding(run: list[BatchRef]) -> int:
    """Returns `preceding` of the first batch, counted back from a later one if it is unknown."""
    counted = 0
    for ref in run:
        if ref.preceding >= 0:
            return ref.preceding - counted
        counted += ref.msgs
    return -1


def _is_readable(
    file: HistoryFile, state: BrokerState, reader: HistoryReader, plan: VacuumPlan
) -> bool:
    """Returns False if a live batch is damaged, and notes the error. Damage must not be copied
    under a new checksum, nor stop the log from being sealed."""
    try:
        for ref in file.batches:
            if is_live(ref, state):
                reader.batch(ref)
    except CorruptLog as error:
        plan.damaged.append(str(error))
        return False
    return True


def _is_small(file: HistoryFile) -> bool:
    msgs = sum(ref.msgs for ref in file.batches)
    return msgs < MAX_BATCH_ROWS and sum(ref.bytes for ref in file.batches) < SMALL_BYTES


def _live_bytes_of(file: HistoryFile, state: BrokerState) -> int:
    return sum(_live_bytes(ref, state) for ref in file.batches)


def _live_bytes(ref: BatchRef, state: BrokerState) -> int:
    """Returns the bytes of the batch's live rows: an estimate if it is partly trimmed."""
    if not is_live(ref, state):
        return 0
    first = state.topics_by_id[ref.topic_id].partitions[ref.partition].first_offset
    if first <= ref.first:
        return ref.bytes
    return ref.bytes * (ref.last + 1 - first) // (ref.last + 1 - ref.first)
