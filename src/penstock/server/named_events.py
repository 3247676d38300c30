"""Encodes the deliveries of a named subscription: events with what is needed to ack them.

Must not know connections.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.model.item import EventItem


class NamedEvent(msgspec.Struct, omit_defaults=True, gc=False, tag_field="type", tag="event"):
    """`attempt` is 1 for the first delivery. `last_error` says why the one before it failed."""

    subscription_id: str
    offset: int
    attempt: int
    delivery_id: str
    payload: bytes
    last_error: str = ""


_encode = msgspec.json.Encoder().encode
_encode_lines = msgspec.json.Encoder().encode_lines


def encode_frames(subscription_id: str, items: Sequence[EventItem]) -> list[bytes]:
    """Returns an `event` for each."""
    return [_encode(_event(subscription_id, item)) for item in items]


def encode_lines(subscription_id: str, items: Sequence[EventItem]) -> bytes:
    return _encode_lines([_event(subscription_id, item) for item in items])


def encode_sse(subscription_id: str, stream_id: int, items: Sequence[EventItem]) -> bytes:
    """Returns server-sent events. The id of each has the stream's id and the offset."""
    return b"".join(
        [
            b"id: %d-%d\nevent: event\ndata: %b\n\n"
            % (stream_id, item.offset, _encode(_event(subscription_id, item)))
            for item in items
        ]
    )


def _event(subscription_id: str, item: EventItem) -> NamedEvent:
    return NamedEvent(
        subscription_id, item.offset, item.attempts, item.delivery_id, item.value, item.last_error
    )
