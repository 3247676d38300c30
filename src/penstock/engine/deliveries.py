"""Decides which durable deliveries leave, and which are returned to their group.

Invariant: within a partition no first delivery leaves before an earlier one that was decided for a
full connection. Must not know how a delivery is decided or recorded.
"""

from __future__ import annotations

from msgspec import UNSET

from penstock.core.groups import Unfinished
from penstock.core.settle import delivery_id
from penstock.engine.consumers import Leaving, PartitionFeed, Share
from penstock.model.item import EventItem, Item
from penstock.model.limits import MAX_OFFSET
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
