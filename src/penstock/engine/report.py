"""Reports of topics and effects, made from the state."""

from __future__ import annotations

from collections.abc import Callable

from penstock.api.effects import EffectReport
from penstock.api.topics import GroupReport, PartitionReport, ProgressReport, TopicReport
from penstock.core.effects import Effect
from penstock.core.groups import Group, Progress
from penstock.core.topics import Partition, Topic
from penstock.model.records import COMMITTED, FAILED, PENDING
from penstock.model.scopes import plain_name

_STATUS = {PENDING: "PENDING", COMMITTED: "COMMITTED", FAILED: "FAILED"}


def report_effect(effect: Effect, now_ms: int) -> EffectReport:
    is_committed = effect.status == COMMITTED
    return EffectReport(
        status=_STATUS[effect.status],
        owner=effect.owner,
        lease_ms=max(0, effect.lease_until - now_ms),
        result=effect.text if is_committed else "",
        last_error="" if is_committed else effect.text,
    )


def report_topic(topic: Topic, consumers: Callable[[int], int]) -> TopicReport:
    return TopicReport(
        name=plain_name(topic.name),
        next_offset=topic.next_offset,
        retention_ms=topic.retention_ms,
        retention_bytes=topic.retention_bytes,
        after_archive=topic.after_archive,
        max_attempts=topic.max_attempts,
        retry_backoff_ms=topic.retry_backoff_ms,
        retry_max_backoff_ms=topic.retry_max_backoff_ms,
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
