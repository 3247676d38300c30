"""What leaves of that which is durable, and what goes back because it may not.

Invariant: within a partition no first delivery leaves while one before it, decided for a full
connection, has not. Must not know how a delivery is decided or recorded.
"""

from __future__ import annotations

from msgspec import UNSET

from penstock.core.groups import Unfinished
from penstock.core.settle import delivery_id
from penstock.engine.consumers import Feed, Leaving, Lot
from penstock.model.item import Item
from penstock.model.limits import MAX_OFFSET
from penstock.model.records import Message


def part(feed: Feed, lots: list[Lot]) -> tuple[list[Lot], list[Unfinished]]:
    """What may leave now, and what goes back: a full connection's share, and with it every first
    delivery behind one of it, for whomever it was."""
    limit = 0 if feed.is_set_back else _first_stuck(lots)
    leaves: list[Lot] = []
    back: list[Unfinished] = []
    for consumer, leaving in lots:
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


def _first_stuck(lots: list[Lot]) -> int:
    """The lowest first delivery that a full connection was to have."""
    return min(
        (
            item.offset
            for consumer, leaving in lots
            if consumer.paused and not consumer.closed
            for entry, item in leaving
            if item.attempts == 1 and consumer.is_wanted(entry, item)
        ),
        default=MAX_OFFSET,
    )


def item_of(entry: Unfinished, message: Message, group_id: int) -> Item:
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
