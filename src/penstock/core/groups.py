"""A group's progress through a topic: which messages are unfinished, and in what state.

Invariant, per (group, partition): every offset of the partition below `cursor` is either in
`unfinished` or done; nothing at or above it has been delivered. `in_flight` counts exactly the
entries in state IN_FLIGHT, and `ready` holds exactly those in state READY.

A message's body is never here: an entry carries what settling it needs, no more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from penstock.core.scope_counts import ScopeCounts
from penstock.model.envelope import RetryPolicy

if TYPE_CHECKING:
    from penstock.core.topics import Topic

IN_FLIGHT = 0
"""Delivered to `owner`, under a lease that the engine keeps."""
WAITING = 1
"""Backing off until `retry_at`. It stays WAITING until it is delivered: time writes no record."""
READY = 2
"""Waits to be delivered again as soon as there is room."""
DYING = 3
"""Out of attempts; waits to be copied to the dead-letter topic."""


class Unfinished(msgspec.Struct, gc=False, eq=False):
    """One message that was delivered to a group and is not done there.

    `delivered_at` is the wall-clock ms of the delivery to `owner`; 0: none, or from before it was
    kept. `deliveries` counts all deliveries and never goes back, unlike `attempts`; `delivery` is
    the number of the one to `owner`. `retry_at` is the time of the next attempt after a failure,
    or DEAD. `lease_ms` is how long the lease of a delivery in flight lasts, 0 if that is not known.
    When it ends is known to the process that serves only: see engine/leases.py.
    """

    progress: Progress
    offset: int
    size: int
    policy: RetryPolicy | None
    effect_key: str
    state: int = READY
    attempts: int = 0
    owner: str = ""
    previous_owner: str = ""
    last_error: str = ""
    delivered_at: int = 0
    previous_delivered_at: int = 0
    deliveries: int = 0
    delivery: int = 0
    previous_delivery: int = 0
    retry_at: int = 0
    lease_ms: int = 0


class Progress:
    """One group in one partition."""

    __slots__ = (
        "cursor",
        "finished_bytes",
        "finished_msgs",
        "first_offset",
        "free_bytes",
        "free_msgs",
        "group",
        "in_flight",
        "last_acked",
        "partition",
        "ready",
        "unfinished",
    )

    def __init__(self, group: Group, partition: int, first_offset: int) -> None:
        self.group = group
        self.partition = partition
        self.first_offset = first_offset
        self.cursor = first_offset
        self.unfinished: dict[int, Unfinished] = {}
        self.ready: OrderedDict[int, Unfinished] = OrderedDict()
        self.in_flight = 0
        self.last_acked = -1
        # Counted towards the partition's buffer (see core/topics.py).
        self.finished_msgs = 0
        self.finished_bytes = 0
        # History that all earlier groups had finished is not charged to this one.
        self.free_msgs = 0
        self.free_bytes = 0

    def floor(self) -> int:
        """Returns the lowest offset that is not done; everything below may be removed."""
        return min(self.unfinished, default=self.cursor)

    def count_finished(self, size: int, msgs: int = 1) -> None:
        if self.free_msgs:
            free_msgs = min(self.free_msgs, msgs)
            self.free_msgs -= free_msgs
            msgs -= free_msgs
        self.finished_msgs += msgs
        free = min(self.free_bytes, size)
        self.free_bytes -= free
        self.finished_bytes += size - free


class GroupTable(dict[int, "Group"]):
    """Groups by id. `counts` has their number in every tenant and namespace, those of the logs of
    streams included."""

    __slots__ = ("counts",)

    def __init__(self) -> None:
        super().__init__()
        self.counts = ScopeCounts()

    def __setitem__(self, group_id: int, group: Group) -> None:
        if group_id not in self:
            self.counts.add(group.topic.scope, 1)
        super().__setitem__(group_id, group)

    def __delitem__(self, group_id: int) -> None:
        self.counts.add(self[group_id].topic.scope, -1)
        super().__delitem__(group_id)


class Group:
    """A consumer group of a topic; exists from its first consume until it is deleted."""

    __slots__ = ("created_ms", "id", "name", "open_effects", "progress", "topic")

    def __init__(self, group_id: int, name: str, topic: Topic, created_ms: int) -> None:
        self.id = group_id
        self.name = name
        self.topic = topic
        self.created_ms = created_ms
        self.progress: list[Progress] = []
        # How many unfinished messages carry an effect key: while any does, its entry stays.
        self.open_effects: dict[str, int] = {}

    def unfinished(self) -> Iterator[Unfinished]:
        return (entry for progress in self.progress for entry in progress.unfinished.values())
