"""Connected consumers: who may be given the next delivery, and what has not left yet.

Invariant: `unwritten` holds exactly the deliveries decided for a consumer and not yet handed to
its sink; on close or lapse those go back uncounted. A consumer is in its group's `available` ring
if and only if it can take another delivery; the ring's order is the round robin.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable

from penstock.api.consumers import Sink
from penstock.core.groups import Group, Progress, Unfinished
from penstock.model.item import Item
from penstock.model.limits import MAX_UNWRITTEN_BYTES
from penstock.model.records import Message

_log = logging.getLogger("penstock.engine")


Leaving = tuple[Unfinished, Item]
"""A delivery on its way: the item is that of one attempt, the entry may have had others since."""

Lot = tuple["Consumer", list[Leaving]]
"""What one consumer was given of a partition at once."""


class Feed:
    """Where a group reads in a partition: a page and the place in it. `is_loading` the next page,
    `is_fetching` one for a redelivery. `lots` are on their way to consumers. `is_set_back`: a first
    delivery of one went back, and until all of them have arrived none may pass it over."""

    __slots__ = ("index", "is_fetching", "is_loading", "is_set_back", "lots", "messages")

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.index = 0
        self.is_loading = False
        self.is_fetching = False
        self.is_set_back = False
        self.lots = 0


def weight(item: Item | Message) -> int:
    """What an item adds to what is not written yet."""
    return len(item.key) + len(item.value)


class GroupRun:
    """A group that has consumers."""

    __slots__ = ("available", "consumers", "feeds", "group", "starved")

    def __init__(self, group: Group) -> None:
        self.group = group
        self.consumers: dict[int, Consumer] = {}
        self.available: OrderedDict[Consumer, None] = OrderedDict()
        # Partitions that may have something to give, while nobody can take it.
        self.starved: dict[Progress, None] = {}
        self.feeds = [Feed() for _ in group.progress]


class Consumer:
    """One open stream, which the server pauses while the connection is full, and closes."""

    __slots__ = (
        "_changed",
        "closed",
        "id",
        "lease_ms",
        "outstanding",
        "owner",
        "paused",
        "prefetch",
        "run",
        "sink",
        "unwritten",
        "unwritten_bytes",
    )

    def __init__(
        self,
        consumer_id: int,
        run: GroupRun,
        owner: str,
        lease_ms: int,
        prefetch: int,
        sink: Sink,
        changed: Callable[[Consumer], None],
    ) -> None:
        self.id = consumer_id
        self.run = run
        self.owner = owner
        self.lease_ms = lease_ms
        self.prefetch = prefetch
        self.sink = sink
        self.paused = False
        self.closed = False
        self.outstanding = 0
        self.unwritten: dict[Unfinished, Item] = {}
        self.unwritten_bytes = 0
        self._changed = changed

    def can_take(self) -> bool:
        return (
            not self.closed
            and not self.paused
            and self.unwritten_bytes < MAX_UNWRITTEN_BYTES
            and (not self.prefetch or self.outstanding < self.prefetch)
        )

    def pause(self) -> None:
        """The connection is above its high-water mark: nothing is handed to it."""
        self.paused = True
        self._changed(self)

    def resume(self) -> None:
        self.paused = False
        self._changed(self)

    def close(self) -> None:
        """The connection is gone."""
        if not self.closed:
            self.closed = True
            self._changed(self)

    def end(self, reason: str) -> None:
        """The broker ends the stream."""
        try:
            self.sink.end(reason)
        except Exception:  # noqa: BLE001 - one departed client must not stop the others
            _log.exception("a stream could not be ended; the others go on")

    def expect(self, entry: Unfinished, item: Item) -> None:
        """A delivery was decided for this consumer; it leaves when its record is durable."""
        self.unwritten[entry] = item
        self.unwritten_bytes += weight(item)
        self.outstanding += 1

    def forget(self, entry: Unfinished) -> bool:
        """The delivery will not be written after all. False if it has been."""
        item = self.unwritten.pop(entry, None)
        if item is None:
            return False
        self.unwritten_bytes -= weight(item)
        return True

    def is_wanted(self, entry: Unfinished, item: Item) -> bool:
        """Is this very delivery still to be written? It may have been answered or given back."""
        return self.unwritten.get(entry) is item

    def write(self, leaving: list[Leaving]) -> None:
        """Hands what is still wanted of `leaving` to the sink."""
        items = []
        for entry, item in leaving:
            if self.is_wanted(entry, item):
                del self.unwritten[entry]
                self.unwritten_bytes -= weight(item)
                items.append(item)
        if items:
            try:
                self.sink.write(items)
            except Exception:  # noqa: BLE001 - one departed client must not stop the others
                _log.exception("items could not be written; the other consumers go on")
