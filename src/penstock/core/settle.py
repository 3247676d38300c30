"""Ack, nack, release and extend: who may settle a delivery, when it is tried again, and its record.

The rules, in order: an offset that is done for the group may be acked again, and nothing is
written. An offset that was never delivered to the group is refused. Otherwise only the last owner
may settle it, also after the lease has ended, until another delivery changes the owner. A
`delivery_id` narrows that to one delivery. Must not know leases and timers.
"""

from __future__ import annotations

import msgspec

from penstock.api.messages import Settle
from penstock.core.groups import DYING, IN_FLIGHT, WAITING, Group, Progress, Unfinished
from penstock.core.produce import find_topic
from penstock.core.state import BrokerState
from penstock.core.stream_logs import no_subscription
from penstock.core.topics import Topic
from penstock.model.envelope import RetryPolicy
from penstock.model.errors import FailedPrecondition, InvalidArgument
from penstock.model.limits import MAX_BACKOFF_MS, Limits
from penstock.model.options import check_number
from penstock.model.records import DEAD, Extended, Finished, Released
from penstock.model.scopes import is_stream_log, plain_name


def backoff_ms(policy: RetryPolicy | None, attempts: int) -> int:
    """Returns the policy's wait after delivery number `attempts`, or 0 without a policy."""
    if policy is None or not policy.backoff_ms:
        return 0
    return _doubled(policy.backoff_ms, policy.max_backoff_ms or MAX_BACKOFF_MS, attempts)


def default_backoff_ms(topic: Topic, limits: Limits, attempts: int) -> int:
    """Returns the wait after a nack of a message without a policy, from the settings of the topic
    or else of the broker."""
    first = topic.retry_backoff_ms or limits.retry_backoff_ms
    longest = topic.retry_max_backoff_ms or limits.retry_max_backoff_ms
    return _doubled(first, max(first, longest), attempts)


def is_last_attempt(topic: Topic, policy: RetryPolicy | None, attempts: int) -> bool:
    """Returns True if delivery number `attempts` was the last. The policy's `max_attempts` goes
    before the topic's. A dead-letter topic never gives up."""
    own = policy.max_attempts if policy is not None else 0
    return 0 < (own or topic.max_attempts) <= attempts and not topic.is_dead_letter


def _doubled(first_ms: int, longest_ms: int, attempts: int) -> int:
    # After 48 doublings any backoff exceeds any cap. The bound keeps the shift small.
    return min(first_ms << min(attempts - 1, 48), longest_ms)


NACKED = "nack"
LAPSED = "ack_timeout"


class AlreadyDone(msgspec.Struct, gc=False):
    """The offset is done, if it belongs to the partition. Only the log can tell that."""

    topic_id: int
    partition: int
    offset: int


NOT_DELIVERED = "this offset was never delivered to the group"
NOT_DELIVERED_EVENT = "this event was never delivered to the subscription"
NOT_IN_FLIGHT = "this offset is not in flight: its delivery was released or taken back"


def delivery_id(group_id: int, delivery: int) -> str:
    """Returns the id of one delivery of an offset. It is unique: a group's id is never used again,
    and the number of deliveries does not go back when a delivery is returned."""
    return f"{group_id}-{delivery}"


def decide_ack(state: BrokerState, command: Settle, now_ms: int) -> Finished | AlreadyDone | None:
    """Returns the record of the ack, or None if it is a duplicate."""
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
    """Returns the record of a failed attempt. `delay_ms` replaces the backoff; `dead` gives the
    message up at once. After the lease has ended, only the reason changes, not the retry time."""
    if delay_ms is not None:
        check_number("delay_ms", delay_ms, 0, MAX_BACKOFF_MS)
    if dead and delay_ms is not None:
        raise InvalidArgument("dead and delay_ms exclude each other")
    topic, progress = _find(state, command)
    entry = _find_held(progress, command)
    if dead:
        if topic.is_dead_letter:
            raise FailedPrecondition("a dead-letter topic has no dead letters; ack the message")
        retry_at = DEAD
    elif entry.state == IN_FLIGHT:
        retry_at = _retry_after_nack(state, topic, entry, delay_ms, now_ms)
    elif entry.state == DYING:
        retry_at = DEAD
    else:
        retry_at = max(entry.retry_at, now_ms) if entry.state == WAITING else now_ms
    return released(progress, entry, reason or NACKED, retry_at, now_ms)


def _retry_after_nack(
    state: BrokerState, topic: Topic, entry: Unfinished, delay_ms: int | None, now_ms: int
) -> int:
    if is_last_attempt(topic, entry.policy, entry.attempts):
        return DEAD
    if delay_ms is not None:
        return now_ms + delay_ms
    if entry.policy is None:
        # Not at once: a message that always fails would keep others of its partition waiting.
        return now_ms + default_backoff_ms(topic, state.limits, entry.attempts)
    return now_ms + backoff_ms(entry.policy, entry.attempts)


def find_leased(state: BrokerState, command: Settle) -> Unfinished:
    """Returns the delivery to release or extend. Refused once its lease has ended: the attempt
    counts by then, and the message may go to another owner."""
    _, progress = _find(state, command)
    entry = _find_held(progress, command)
    if entry.state != IN_FLIGHT:
        raise FailedPrecondition("the lease has ended, or the delivery was released already")
    return entry


def decide_lapse(entry: Unfinished, ended_ms: int, now_ms: int) -> Released:
    """Returns the record of a lease that ended at `ended_ms` without an answer. A policy's backoff
    counts from then; without a policy the message is delivered again at once."""
    progress = entry.progress
    retry_at = ended_ms + backoff_ms(entry.policy, entry.attempts)
    if is_last_attempt(progress.group.topic, entry.policy, entry.attempts):
        retry_at = DEAD
    return released(progress, entry, LAPSED, retry_at, now_ms)


def decide_extend(entry: Unfinished, lease_ms: int, now_ms: int) -> Extended:
    """Returns the record that the next owner of a shared log needs, to give the lease again."""
    progress = entry.progress
    group = progress.group
    return Extended(group.topic.id, group.id, progress.partition, now_ms, entry.offset, lease_ms)


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
            f"{plain_name(topic.name)!r} has {len(topic.partitions)} partitions"
        )
    group = topic.groups.get(command.group)
    if group is None:
        if is_stream_log(topic.name):
            raise FailedPrecondition(no_subscription(topic.name, command.group))
        raise FailedPrecondition(f"group {command.group!r} has never consumed from this topic")
    return topic, group.progress[command.partition]


def _find_held(progress: Progress, command: Settle) -> Unfinished:
    """Returns the unfinished message if its last delivery was to this owner."""
    entry = progress.unfinished.get(command.offset)
    if entry is None:
        if not progress.first_offset <= command.offset < progress.cursor:
            raise _not_delivered(progress.group.topic)
        raise FailedPrecondition("this offset is already done")
    _check_owner(progress.group, entry, command)
    return entry


def _done_or_refused(topic: Topic, progress: Progress, command: Settle) -> AlreadyDone | None:
    if not progress.first_offset <= command.offset < progress.cursor:
        raise _not_delivered(topic)
    if len(topic.partitions) == 1:
        return None
    return AlreadyDone(topic.id, command.partition, command.offset)


def _not_delivered(topic: Topic) -> FailedPrecondition:
    is_event = is_stream_log(topic.name)
    return FailedPrecondition(NOT_DELIVERED_EVENT if is_event else NOT_DELIVERED)


def _check_owner(group: Group, entry: Unfinished, command: Settle) -> None:
    if not entry.attempts:
        # No attempt counts: its only delivery was returned.
        raise FailedPrecondition(NOT_IN_FLIGHT)
    if entry.owner != command.owner:
        raise FailedPrecondition("not owner")
    if command.delivery_id and command.delivery_id != delivery_id(group.id, entry.delivery):
        raise FailedPrecondition("not owner: delivery_id names another delivery")
