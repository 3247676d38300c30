"""What can be read of a topic: its partitions, its groups and how far they are."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from penstock.core.groups import Group, Progress
from penstock.core.topics import Partition, Topic


class PartitionReport(msgspec.Struct, frozen=True):
    partition: int
    first_offset: int
    next_offset: int
    retained_msgs: int
    retained_bytes: int
    buffered_msgs: int
    buffered_bytes: int


class ProgressReport(msgspec.Struct, frozen=True):
    """`lag` is what the group has not finished, in flight and waiting included."""

    partition: int
    last_acked: int
    next_offset: int
    in_flight: int
    unfinished: int
    lag: int


class GroupReport(msgspec.Struct, frozen=True):
    name: str
    consumers: int
    partitions: list[ProgressReport]


class TopicReport(msgspec.Struct, frozen=True):
    name: str
    next_offset: int
    retention_ms: int
    retention_bytes: int
    after_archive: bool
    partitions: list[PartitionReport]
    groups: list[GroupReport]


def report_topic(topic: Topic, consumers: Callable[[int], int]) -> TopicReport:
    return TopicReport(
        name=topic.name,
        next_offset=topic.next_offset,
        retention_ms=topic.retention_ms,
        retention_bytes=topic.retention_bytes,
        after_archive=topic.after_archive,
        partitions=[_partition(partition) for partition in topic.partitions],
        groups=[
            GroupReport(
                name=group.name,
                consumers=consumers(group.id),
                partitions=[_progress(group, progress) for progress in group.progress],
            )
            for _, group in sorted(topic.groups.items())
        ],
    )


def lag(group: Group, progress: Progress) -> int:
    """Messages of the partition that the group has not finished."""
    stored = group.topic.partitions[progress.partition].backlog.stored_msgs
    return stored - progress.finished_msgs + progress.free_msgs


def _partition(partition: Partition) -> PartitionReport:
    backlog = partition.backlog
    return PartitionReport(
        partition=partition.index,
        first_offset=partition.first_offset,
        next_offset=partition.end_offset,
        retained_msgs=backlog.retained_msgs(),
        retained_bytes=backlog.retained_bytes(),
        buffered_msgs=backlog.buffered_msgs(),
        buffered_bytes=backlog.buffered_bytes(),
    )


def _progress(group: Group, progress: Progress) -> ProgressReport:
    return ProgressReport(
        partition=progress.partition,
        last_acked=progress.last_acked,
        next_offset=progress.cursor,
        in_flight=progress.in_flight,
        unfinished=len(progress.unfinished),
        lag=lag(group, progress),
    )
