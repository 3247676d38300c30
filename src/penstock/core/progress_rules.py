"""Published progress: finishes everything of a partition below an offset for a group.

Invariant: the messages that a decision finishes are counted exactly, so the backlog stays exact.
The number of messages ever stored below an offset never changes. It is counted elsewhere and is an
argument here. Must not know how it is counted.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from penstock.core.groups import Group, Progress, Unfinished
from penstock.core.state import BrokerState
from penstock.core.topic_rules import decide_create_group
from penstock.core.topics import Partition, Topic
from penstock.model.errors import InvalidArgument, NotYet
from penstock.model.progress import Reached
from penstock.model.records import Advanced, GroupCreated
from penstock.model.scopes import plain_name


class ProgressTarget(msgspec.Struct, frozen=True, gc=False):
    """Everything below `next` is done. `stored_msgs` and `stored_bytes` were ever stored there."""

    partition: int
    next: int
    stored_msgs: int
    stored_bytes: int


def check_not_past_end(topic: Topic, reached: Iterable[Reached]) -> None:
    """Raises unless every partition and offset exists in the topic."""
    seen: set[int] = set()
    for each in reached:
        if not 0 <= each.partition < len(topic.partitions):
            raise InvalidArgument(
                f"partition {each.partition} is out of range; "
                f"topic {plain_name(topic.name)!r} has {len(topic.partitions)}"
            )
        if each.partition in seen:
            raise InvalidArgument(f"partition {each.partition} is named twice")
        seen.add(each.partition)
        end = topic.partitions[each.partition].end_offset
        if each.next > end:
            raise NotYet(
                f"next is {each.next}, but partition {each.partition} ends at offset {end}"
            )


def decide_progress(
    state: BrokerState, topic: Topic, name: str, targets: Iterable[ProgressTarget], now_ms: int
) -> list[GroupCreated | Advanced]:
    """Returns a record of the group, if it is new, and of each partition in which it advances."""
    created = decide_create_group(state, topic, name, now_ms)
    group = topic.groups.get(name)
    records: list[GroupCreated | Advanced] = [] if created is None else [created]
    group_id = group.id if created is None and group is not None else state.next_id
    for target in targets:
        partition = topic.partitions[target.partition]
        finished = _finished(group, partition, target)
        if finished is not None:
            records.append(
                Advanced(topic.id, group_id, partition.index, now_ms, target.next, *finished)
            )
    return records


def below(progress: Progress, offset: int) -> list[Unfinished]:
    """Returns the unfinished entries that progress up to `offset` finishes."""
    return [entry for entry in progress.unfinished.values() if entry.offset < offset]


def _finished(
    group: Group | None, partition: Partition, target: ProgressTarget
) -> tuple[int, int] | None:
    """Returns the messages and bytes that this finishes, or None if it changes nothing."""
    if group is None:
        if target.next <= partition.first_offset:
            return None
        backlog = partition.backlog
        return (
            target.stored_msgs - backlog.trimmed_msgs,
            target.stored_bytes - backlog.trimmed_bytes,
        )
    progress = group.progress[partition.index]
    if target.next > progress.cursor:
        # All unfinished entries are below the cursor, so this finishes them too.
        msgs = target.stored_msgs - (progress.finished_msgs - progress.free_msgs)
        return msgs, target.stored_bytes - (progress.finished_bytes - progress.free_bytes)
    entries = below(progress, target.next)
    return (len(entries), sum(entry.size for entry in entries)) if entries else None
