"""Checks the index: the batches that a manifest names must hold every retained row exactly once.

Compares the batch references with the state of the same moment. Reads no file; costs one sort of
the batches. Readers look for a row in the batch with the least `last` at or above its offset, so
two batches of a partition that overlap hide rows from every reader.

Checked for each partition with retained messages: batches do not overlap, the newest ends where the
partition ends, and the rows add up. The state counts messages ever stored (`stored_msgs`) and
trimmed (`trimmed_msgs`), and a batch knows how many were stored before its first row (`preceding`),
so a hole is located exactly. For each topic, the counts of its partitions must add up to its next
offset. Batches of deleted topics and trimmed rows are not checked.

Two limits. A batch of a release without `preceding` is only counted: if its beginning is trimmed
and its topic has several partitions, its live rows are known within bounds, not exactly. And
`trimmed_msgs` may be too high where an older release trimmed overlapping batches; that hides no row
and is allowed.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from operator import attrgetter
from typing import Literal

import msgspec

from penstock.core.state import BrokerState
from penstock.core.topics import Partition, Topic
from penstock.model.scopes import shown_name
from penstock.storage.errors import CorruptIndex
from penstock.storage.history import BatchRef, HistoryFile, history_name


class IndexFault(msgspec.Struct, frozen=True):
    """An error in the batches of one partition, at offsets `first` to `last`. `ref` is the batch
    with the error, None if there is no batch. `msgs` messages are missing; 0 means unknown."""

    kind: Literal["overlap", "missing", "invalid"]
    topic_id: int
    partition: int
    first: int
    last: int
    detail: str
    ref: BatchRef | None = None
    msgs: int = 0


def check_index(manifest_path: str, history: list[HistoryFile], state: BrokerState) -> None:
    """Raises CorruptIndex, with file and byte, unless every retained row is in one batch."""
    error = index_error(manifest_path, find_index_faults(history, state))
    if error is not None:
        raise error


def index_error(manifest_path: str, faults: list[IndexFault]) -> CorruptIndex | None:
    """Returns the first fault as an error, of the batch's file or else of the manifest."""
    if not faults:
        return None
    fault = faults[0]
    more = f" (and {len(faults) - 1} more such places)" if len(faults) > 1 else ""
    if fault.ref is None:
        return CorruptIndex(manifest_path, 0, fault.detail + more)
    path = os.path.join(os.path.dirname(manifest_path), history_name(fault.ref.file))
    return CorruptIndex(path, fault.ref.start, fault.detail + more)


def find_index_faults(history: list[HistoryFile], state: BrokerState) -> list[IndexFault]:
    """Returns every fault. Those of single batches come first, then by topic and partition."""
    faults: list[IndexFault] = []
    places: dict[tuple[int, int], list[BatchRef]] = defaultdict(list)
    topics = state.topics_by_id
    for file in history:
        for ref in file.batches:
            topic = topics.get(ref.topic_id)
            if topic is None:
                if ref.topic_id >= state.next_id:
                    faults.append(_invalid(ref, "its topic is not known to the snapshot"))
            elif ref.file != file.number or not 0 <= ref.partition < len(topic.partitions):
                faults.append(_invalid(ref, "it names another file or an unknown partition"))
            elif not 0 < ref.msgs <= ref.last - ref.first + 1:
                faults.append(_invalid(ref, f"it cannot hold {ref.msgs} messages"))
            elif ref.last >= topic.partitions[ref.partition].first_offset:
                places[ref.topic_id, ref.partition].append(ref)
    for topic_id in sorted(topics):
        topic = topics[topic_id]
        faults += _topic_faults(topic)
        for partition in topic.partitions:
            refs = places.get((topic_id, partition.index), [])
            faults += _partition_faults(topic, partition, refs)
    return faults


def describe(topic: Topic, partition: int) -> str:
    return f"partition {partition} of topic {shown_name(topic.name)}"


def _invalid(ref: BatchRef, why: str) -> IndexFault:
    detail = (
        f"batch {ref.index} says it has offsets {ref.first} to {ref.last} of partition "
        f"{ref.partition} of the topic with id {ref.topic_id}, but {why}"
    )
    return IndexFault("invalid", ref.topic_id, ref.partition, ref.first, ref.last, detail, ref)


def _topic_faults(topic: Topic) -> Iterator[IndexFault]:
    stored = sum(partition.backlog.stored_msgs for partition in topic.partitions)
    if stored != topic.next_offset:
        detail = (
            f"the partitions of topic {shown_name(topic.name)} have stored {stored} messages, and "
            f"its offsets end at {topic.next_offset}"
        )
        yield IndexFault("invalid", topic.id, 0, 0, topic.next_offset, detail)


def _partition_faults(topic: Topic, partition: Partition, refs: list[BatchRef]) -> list[IndexFault]:
    if partition.first_offset >= partition.end_offset:
        return []
    where = describe(topic, partition.index)
    retained = partition.backlog.retained_msgs()
    if not refs:
        first, last = partition.first_offset, partition.end_offset - 1
        detail = f"no batch holds the {retained} messages of {where}, offsets {first} to {last}"
        return [
            IndexFault("missing", topic.id, partition.index, first, last, detail, None, retained)
        ]
    refs.sort(key=attrgetter("last", "first"))
    faults = _overlaps(topic, partition, refs)
    newest = refs[-1]
    if newest.last != partition.end_offset - 1:
        detail = (
            f"the last batch of {where} ends with offset {newest.last}, the partition with "
            f"{partition.end_offset - 1}"
        )
        first, last = newest.last + 1, partition.end_offset - 1
        faults.append(IndexFault("missing", topic.id, partition.index, first, last, detail, newest))
    # Counting back from the end needs batches that do not overlap and reach the end.
    return faults or _holes(topic, partition, refs)


def _overlaps(topic: Topic, partition: Partition, refs: list[BatchRef]) -> list[IndexFault]:
    faults = []
    before = refs[0]
    for ref in refs[1:]:
        if ref.first <= before.last:
            first = max(ref.first, partition.first_offset)
            detail = (
                f"batch {ref.index} spans offsets {ref.first} to {ref.last} of "
                f"{describe(topic, partition.index)}, and batch {before.index} of "
                f"{history_name(before.file)} has offsets {before.first} to {before.last} of it: "
                f"messages from offset {first} to {before.last} cannot be reached"
            )
            faults.append(
                IndexFault("overlap", topic.id, partition.index, first, before.last, detail, ref)
            )
        before = ref
    return faults


def _holes(topic: Topic, partition: Partition, refs: list[BatchRef]) -> list[IndexFault]:
    """Finds missing rows by counting back from the end, over sorted and separate `refs`."""
    faults: list[IndexFault] = []
    end = partition.backlog.stored_msgs
    behind = partition.end_offset
    for ref in reversed(refs):
        start = end - ref.msgs
        if ref.preceding >= 0 and ref.preceding != start:
            faults.append(_hole(topic, partition, ref, behind, start - ref.preceding))
            start = ref.preceding
        end, behind = start, ref.first
    oldest = refs[0]
    missing = end + _rows_below(oldest, partition.first_offset) - partition.backlog.trimmed_msgs
    if missing > 0:
        first, last = partition.first_offset, oldest.first - 1
        detail = (
            f"{missing} messages of {describe(topic, partition.index)} are in no batch: "
            f"there should be {partition.backlog.retained_msgs()} from offset {first} on"
        )
        if last < first or oldest.preceding < 0:
            last = partition.end_offset - 1
        faults.append(
            IndexFault("missing", topic.id, partition.index, first, last, detail, oldest, missing)
        )
    return faults[::-1]


def _rows_below(ref: BatchRef, offset: int) -> int:
    """Returns the least number of the batch's rows that must be below `offset`."""
    if ref.first >= offset:
        return 0
    return max(1, ref.msgs - (ref.last + 1 - offset))


def _hole(topic: Topic, partition: Partition, ref: BatchRef, behind: int, msgs: int) -> IndexFault:
    where = describe(topic, partition.index)
    if msgs > 0:
        detail = (
            f"{msgs} messages of {where} between offsets {ref.last + 1} and {behind - 1} are in "
            f"no batch: batch {ref.index} is the last before them"
        )
        first, last = ref.last + 1, behind - 1
        return IndexFault("missing", topic.id, partition.index, first, last, detail, ref, msgs)
    detail = (
        f"batch {ref.index} and those behind it have {-msgs} more messages of {where} than were "
        "stored"
    )
    return IndexFault("invalid", topic.id, partition.index, ref.first, ref.last, detail, ref)
