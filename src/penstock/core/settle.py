"""Ack, nack and extend: who may settle a delivery, and what that records.

The rules, in order: an offset done for the group may be acked again and nothing is written; one
never delivered to it is refused; otherwise only the last owner settles it, also after the lease
ran out, until another delivery changes the owner. A `delivery_id` narrows that to one delivery.
"""

from __future__ import annotations

import msgspec

from penstock.core.groups import DYING, IN_FLIGHT, WAITING, Group, Progress, Unfinished
from penstock.core.produce import find_topic
from penstock.core.retries import backoff_ms, is_last_attempt
from penstock.core.state import BrokerState
from penstock.core.topics import Topic
from penstock.model.errors import FailedPrecondition, InvalidArgument
from penstock.model.records import DEAD, Finished, Released

NACKED = "nack"
LAPSED = "ack_timeout"


class Settle(msgspec.Struct, gc=False):
    """Which delivery is meant, and by whom."""

    topic: str
    group: str
    partition: int
    offset: int
    owner: str
    delivery_id: str = ""


class AlreadyDone(msgspec.Struct, gc=False):
    """The offset is done, provided it is one of the partition's: only the log can tell."""

    topic_id: int
    partition: int
    offset: int


NOT_DELIVERED = "this offset was never delivered to the group"


def delivery_id(group_id: int, attempts: int) -> str:
    """Names one delivery of an offset: a group's id is never used again, its attempts only grow."""
    return f"{group_id}-{attempts}"


def decide_ack(state: BrokerState, command: Settle, now_ms: int) -> Finished | AlreadyDone | None:
    """The record of the ack; None when it is a duplicate."""
    topic, progress = _find(state, command)
    entry = progress.unfinished.get(command.offset)
    if entry is None:
        return _done_or_refused(topic, progress, command)
    _check_owner(progress.group, entry, command)
    return Finished(topic.id, progress.group.id, progress.partition, now_ms, command.offset)


def decide_nack(state: BrokerState, command: Settle, reason: str, now_ms: int) -> Released:
    topic, progress = _find(state, command)
    entry = progress.unfinished.get(command.offset)
    if entry is None:
        done = progress.first_offset <= command.offset < progress.cursor
        raise FailedPrecondition("this offset is already done" if done else NOT_DELIVERED)
    _check_owner(progress.group, entry, command)
    # After the lease's end the schedule stands; only the reason is news.
    if entry.state == IN_FLIGHT:
        retry_at = retry_time(topic, entry, now_ms)
    elif entry.state == DYING:
        retry_at = DEAD
    else:
        retry_at = entry.until if entry.state == WAITING else now_ms
    return released(progress, entry, reason or NACKED, retry_at, now_ms)


def decide_extend(state: BrokerState, command: Settle) -> Unfinished:
    """The entry whose lease may be moved. A lease is of this process: there is no record."""
    _, progress = _find(state, command)
    entry = progress.unfinished.get(command.offset)
    if entry is None:
        done = progress.first_offset <= command.offset < progress.cursor
        raise FailedPrecondition("this offset is already done" if done else NOT_DELIVERED)
    _check_owner(progress.group, entry, command)
    if entry.state != IN_FLIGHT:
        raise FailedPrecondition("the lease has ended")
    return entry


def decide_lapse(entry: Unfinished, ended_ms: int, now_ms: int) -> Released:
    """The lease ended at `ended_ms` without an answer; the backoff counts from there."""
    progress = entry.progress
    retry_at = retry_time(progress.group.topic, entry, ended_ms)
    return released(progress, entry, LAPSED, retry_at, now_ms)


def retry_time(topic: Topic, entry: Unfinished, from_ms: int) -> int:
    """When the next delivery is due, or DEAD. A dead-letter topic never gives up."""
    if is_last_attempt(entry.policy, entry.attempts) and not topic.is_dead_letter:
        return DEAD
    return from_ms + backoff_ms(entry.policy, entry.attempts)


def released(
    progress: Progress, entry: Unfinished, reason: str, retry_at: int, now_ms: int
) -> Released:
    group = progress.group
    return Released(
        group.topic.id, group.id, progress.partition, now_ms, entry.offset, reason, retry_at
    )


def _find(state: BrokerState, command: Settle) -> tuple[Topic, Progress]:
    topic = find_topic(state, command.topic)
    if not 0 <= command.partition < len(topic.partitions):
        raise InvalidArgument(
            f"partition {command.partition} is out of range: "
            f"{topic.name!r} has {len(topic.partitions)} partitions"
        )
    group = topic.groups.get(command.group)
    if group is None:
        raise FailedPrecondition(f"group {command.group!r} has never consumed from this topic")
    return topic, group.progress[command.partition]


def _done_or_refused(topic: Topic, progress: Progress, command: Settle) -> AlreadyDone | None:
    if not progress.first_offset <= command.offset < progress.cursor:
        raise FailedPrecondition(NOT_DELIVERED)
    if len(topic.partitions) == 1:
        return None
    return AlreadyDone(topic.id, command.partition, command.offset)


def _check_owner(group: Group, entry: Unfinished, command: Settle) -> None:
    if not entry.attempts:
        raise FailedPrecondition(NOT_DELIVERED)
    if entry.owner != command.owner:
        raise FailedPrecondition("not owner")
    if command.delivery_id and command.delivery_id != delivery_id(group.id, entry.attempts):
        raise FailedPrecondition("not owner: delivery_id names an earlier delivery")
