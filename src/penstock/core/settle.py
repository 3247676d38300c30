"""Ack, nack, release and extend: who may settle a delivery, and what that records.

The rules, in order: an offset done for the group may be acked again and nothing is written; one
never delivered to it is refused; otherwise only the last owner settles it, also after the lease
ran out, until another delivery changes the owner. A `delivery_id` narrows that to one delivery.
"""

from __future__ import annotations

import msgspec

from penstock.api.messages import Settle
from penstock.core.groups import DYING, IN_FLIGHT, WAITING, Group, Progress, Unfinished
from penstock.core.produce import find_topic
from penstock.core.retries import backoff_ms, default_backoff_ms, is_last_attempt
from penstock.core.state import BrokerState
from penstock.core.topics import Topic
from penstock.model.errors import FailedPrecondition, InvalidArgument
from penstock.model.limits import MAX_BACKOFF_MS
from penstock.model.records import DEAD, Finished, Released

NACKED = "nack"
LAPSED = "ack_timeout"


class AlreadyDone(msgspec.Struct, gc=False):
    """The offset is done, provided it is one of the partition's: only the log can tell."""

    topic_id: int
    partition: int
    offset: int


NOT_DELIVERED = "this offset was never delivered to the group"
NOT_IN_FLIGHT = "this offset is not in flight: its delivery was released or taken back"


def delivery_id(group_id: int, delivery: int) -> str:
    """Names one delivery of an offset. A group's id is never used again, and deliveries are
    numbered by a count that does not go back when one is returned uncounted."""
    return f"{group_id}-{delivery}"


def decide_ack(state: BrokerState, command: Settle, now_ms: int) -> Finished | AlreadyDone | None:
    """The record of the ack; None when it is a duplicate."""
    topic, progress = _find(state, command)
    entry = progress.unfinished.get(command.offset)
    if entry is None:
        return _done_or_refused(topic, progress, command)
    _check_owner(progress.group, entry, command)
    return Finished(topic.id, progress.group.id, progress.partition, now_ms, command.offset)


def decide_nack(
    state: BrokerState,
    command: Settle,
    reason: str,
    now_ms: int,
    *,
    delay_ms: int | None = None,
    dead: bool = False,
) -> Released:
    """The record of a failed attempt. `delay_ms` goes before every backoff; `dead` gives the
    message up at once. After the lease's end the schedule stands, and only the reason is news."""
    if delay_ms is not None and not 0 <= delay_ms <= MAX_BACKOFF_MS:
        raise InvalidArgument(f"delay_ms must be between 0 and {MAX_BACKOFF_MS}")
    if dead and delay_ms is not None:
        raise InvalidArgument("dead and delay_ms exclude each other")
    topic, progress = _find(state, command)
    entry = _find_held(progress, command)
    if dead:
        if topic.is_dead_letter:
            raise FailedPrecondition("a dead-letter topic has no dead letters of its own; ack it")
        retry_at = DEAD
    elif entry.state == IN_FLIGHT:
        retry_at = _retry_after_nack(state, topic, entry, delay_ms, now_ms)
    elif entry.state == DYING:
        retry_at = DEAD
    else:
        retry_at = entry.until if entry.state == WAITING else now_ms
    return released(progress, entry, reason or NACKED, retry_at, now_ms)


def _retry_after_nack(
    state: BrokerState, topic: Topic, entry: Unfinished, delay_ms: int | None, now_ms: int
) -> int:
    if is_last_attempt(topic, entry.policy, entry.attempts):
        return DEAD
    if delay_ms is not None:
        return now_ms + delay_ms
    if entry.policy is None:
        # At once, a message that always fails would keep the others of its partition waiting.
        return now_ms + default_backoff_ms(topic, state.limits, entry.attempts)
    return now_ms + backoff_ms(entry.policy, entry.attempts)


def find_leased(state: BrokerState, command: Settle) -> Unfinished:
    """The delivery that a release or an extend means. Refused once its lease has ended: the
    attempt has been counted by then, and somebody else may be next."""
    _, progress = _find(state, command)
    entry = _find_held(progress, command)
    if entry.state != IN_FLIGHT:
        raise FailedPrecondition("the lease has ended, or the delivery was released already")
    return entry


def decide_lapse(entry: Unfinished, ended_ms: int, now_ms: int) -> Released:
    """The lease ended at `ended_ms` without an answer: the backoff of a policy counts from there,
    and without one the message comes again at once."""
    progress = entry.progress
    retry_at = ended_ms + backoff_ms(entry.policy, entry.attempts)
    if is_last_attempt(progress.group.topic, entry.policy, entry.attempts):
        retry_at = DEAD
    return released(progress, entry, LAPSED, retry_at, now_ms)


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


def _find_held(progress: Progress, command: Settle) -> Unfinished:
    """The unfinished message, if its last delivery was to this owner."""
    entry = progress.unfinished.get(command.offset)
    if entry is None:
        done = progress.first_offset <= command.offset < progress.cursor
        raise FailedPrecondition("this offset is already done" if done else NOT_DELIVERED)
    _check_owner(progress.group, entry, command)
    return entry


def _done_or_refused(topic: Topic, progress: Progress, command: Settle) -> AlreadyDone | None:
    if not progress.first_offset <= command.offset < progress.cursor:
        raise FailedPrecondition(NOT_DELIVERED)
    if len(topic.partitions) == 1:
        return None
    return AlreadyDone(topic.id, command.partition, command.offset)


def _check_owner(group: Group, entry: Unfinished, command: Settle) -> None:
    if not entry.attempts:
        # Only a delivery that was put back uncounted leaves an unfinished message like this.
        raise FailedPrecondition(NOT_IN_FLIGHT)
    if entry.owner != command.owner:
        raise FailedPrecondition("not owner")
    if command.delivery_id and command.delivery_id != delivery_id(group.id, entry.delivery):
        raise FailedPrecondition("not owner: delivery_id names another delivery")
