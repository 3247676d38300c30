"""Connected consumers: which of them can take a delivery, and what has not left yet.

Invariants: `unwritten` holds exactly the deliveries decided for a consumer and not yet handed to
its sink; when the consumer closes or a lease ends, those are returned uncounted. A consumer is in
the `available` ring of its group if and only if it can take another delivery; the order of the ring
is the round robin. Within a partition no first delivery leaves before an earlier one that was
decided for a full connection.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Collection

from msgspec import UNSET

from penstock.api.consumers import Sink
from penstock.core.groups import Group, Progress, Unfinished
from penstock.core.settle import delivery_id
from penstock.model.item import EventItem, Item
from penstock.model.limits import MAX_OFFSET, MAX_UNWRITTEN_BYTES
from penstock.model.records import Stored, StoredEvent


def divide(feed: PartitionFeed, shares: list[Share]) -> tuple[list[Share], list[Unfinished]]:
    """Splits shares into what leaves now and what is returned: the deliveries of a full connection,
    and every first delivery behind one of them, whoever it was for."""
    limit = 0 if feed.is_set_back else _first_stuck(shares)
    leaves: list[Share] = []
    back: list[Unfinished] = []
    for consumer, leaving in shares:
        going: list[Leaving] = []
        for entry, item in leaving:
            is_stuck = consumer.paused or (item.attempts == 1 and item.offset >= limit)
            if not is_stuck:
                going.append((entry, item))
            elif not consumer.closed and consumer.is_wanted(entry, item):
                back.append(entry)
        leaves.append((consumer, going))
    feed.is_set_back = limit != MAX_OFFSET
    return leaves, back


def _first_stuck(shares: list[Share]) -> int:
    """Returns the lowest offset of a first delivery for a full connection."""
    return min(
        (
            item.offset
            for consumer, leaving in shares
            if consumer.paused and not consumer.closed
            for entry, item in leaving
            if item.attempts == 1 and consumer.is_wanted(entry, item)
        ),
        default=MAX_OFFSET,
    )


def make_item(entry: Unfinished, message: Stored, group_id: int) -> Item | EventItem:
    if isinstance(message, StoredEvent):
        number = delivery_id(group_id, entry.delivery)
        return EventItem(message.offset, entry.attempts, message.value, entry.last_error, number)
    return Item(
        message.partition,
        message.offset,
        entry.attempts,
        message.key,
        message.value,
        entry.last_error,
        UNSET if message.routing is None else message.routing,
        UNSET if message.envelope is None else message.envelope,
        delivery_id(group_id, entry.delivery),
    )


_log = logging.getLogger("penstock.engine")


Leaving = tuple[Unfinished, Item | EventItem]
"""A delivery that is about to leave. The item belongs to one attempt; the entry may have had others
since."""

Share = tuple["OpenConsumer", list[Leaving]]
"""The deliveries of one partition that a consumer was given at once."""


class PartitionFeed:
    """The place in a partition where a group reads: a page, and an index in it.

    `is_loading` is set while the next page is read, `is_fetching` while one for a redelivery is.
    `shares` counts the shares that wait to become durable. `is_set_back` is set when a first
    delivery of one of them was returned: until all of them have arrived, no new message may be
    given, since it would pass the returned one.
    """

    __slots__ = ("index", "is_fetching", "is_loading", "is_set_back", "messages", "shares")

    def __init__(self) -> None:
        self.messages: list[Stored] = []
        self.index = 0
        self.is_loading = False
        self.is_fetching = False
        self.is_set_back = False
        self.shares = 0

    def take(self, cursor: int) -> Stored | None:
        """Takes the first message at or after `cursor`, if it is the next one of the page."""
        messages, index = self.messages, self.index
        if (
            index < len(messages)
            and messages[index].offset >= cursor
            and (index == 0 or messages[index - 1].offset < cursor)
        ):
            self.index = index + 1
            return messages[index]
        return None

    def turn_to(self, page: list[Stored], cursor: int) -> Stored | None:
        """Goes on with `page`, and takes its first message at or after `cursor`."""
        index = bisect_left(page, cursor, key=_offset_of)
        if index == len(page):
            return None
        self.messages, self.index = page, index + 1
        return page[index]


def weight(item: Item | EventItem | Stored) -> int:
    """Returns the bytes that an item adds to those not written yet."""
    return len(item.key) + len(item.value)


class ActiveGroup:
    """A group that has consumers."""

    __slots__ = ("available", "consumers", "feeds", "group", "starved")

    def __init__(self, group: Group) -> None:
        self.group = group
        self.consumers: dict[int, OpenConsumer] = {}
        self.available: OrderedDict[OpenConsumer, None] = OrderedDict()
        # Partitions that may have something to give while no consumer can take it.
        self.starved: dict[Progress, None] = {}
        self.feeds = [PartitionFeed() for _ in group.progress]


class ActiveGroups:
    """The groups that have consumers, by id and by topic. A new message concerns only these,
    however many groups its topic has."""

    __slots__ = ("_by_id", "_by_topic", "get")

    def __init__(self) -> None:
        self._by_id: dict[int, ActiveGroup] = {}
        self._by_topic: dict[int, dict[int, ActiveGroup]] = {}
        self.get = self._by_id.get

    def add(self, group: Group) -> ActiveGroup:
        active = self._by_id[group.id] = ActiveGroup(group)
        self._by_topic.setdefault(group.topic.id, {})[group.id] = active
        return active

    def remove(self, group_id: int) -> ActiveGroup | None:
        active = self._by_id.pop(group_id, None)
        if active is not None:
            topic_id = active.group.topic.id
            of_topic = self._by_topic[topic_id]
            del of_topic[group_id]
            if not of_topic:
                del self._by_topic[topic_id]
        return active

    def of_topic(self, topic_id: int) -> Collection[ActiveGroup]:
        return self._by_topic.get(topic_id, _NO_GROUPS).values()

    def all(self) -> Collection[ActiveGroup]:
        return self._by_id.values()


_NO_GROUPS: dict[int, ActiveGroup] = {}


class OpenConsumer:
    """A consumer with an open connection. The server pauses it while the connection is full, and
    closes it."""

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
        run: ActiveGroup,
        owner: str,
        lease_ms: int,
        prefetch: int,
        sink: Sink,
        changed: Callable[[OpenConsumer], None],
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
        self.unwritten: dict[Unfinished, Item | EventItem] = {}
        self.unwritten_bytes = 0
        self._changed = changed

    @property
    def topic_id(self) -> int:
        return self.run.group.topic.id

    def can_take(self) -> bool:
        return (
            not self.closed
            and not self.paused
            and self.unwritten_bytes < MAX_UNWRITTEN_BYTES
            and (not self.prefetch or self.outstanding < self.prefetch)
        )

    def pause(self) -> None:
        """Stops handing out: the connection is above its high-water mark."""
        self.paused = True
        self._changed(self)

    def resume(self) -> None:
        self.paused = False
        self._changed(self)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._changed(self)

    def end(self, reason: str) -> None:
        """Ends the stream from the broker's side."""
        try:
            self.sink.end(reason)
        except Exception:  # noqa: BLE001 - one departed client must not stop the others
            _log.exception("a stream could not be ended; the others go on")

    def expect(self, entry: Unfinished, item: Item | EventItem) -> None:
        """Adds a delivery that was decided for this consumer. It leaves when its record is
        durable."""
        self.unwritten[entry] = item
        self.unwritten_bytes += weight(item)
        self.outstanding += 1

    def forget(self, entry: Unfinished) -> bool:
        """Removes a delivery that will not be written. Returns False if it has been written."""
        item = self.unwritten.pop(entry, None)
        if item is None:
            return False
        self.unwritten_bytes -= weight(item)
        return True

    def is_wanted(self, entry: Unfinished, item: Item | EventItem) -> bool:
        """Says whether this delivery is still to be written. It may have been settled or
        returned."""
        return self.unwritten.get(entry) is item

    def write(self, leaving: list[Leaving]) -> None:
        """Hands the deliveries that are still wanted to the sink."""
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


def _offset_of(message: Stored) -> int:
    return message.offset
