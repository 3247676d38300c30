"""Deliveries, and how to read them from the lines of a consume stream. No IO.

A delivery has its topic, group and owner with it: `ack(delivery)` needs nothing else.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterable

import msgspec
from msgspec import UNSET

from penstock.client.lines import LineBuffer
from penstock.model.envelope import Envelope, Routing
from penstock.model.item import Item

DEFAULT_LEASE_MS = 30_000
"""Longer than the default of the HTTP API, which is for trying things out."""

_decode_lines = msgspec.json.Decoder(Item).decode_lines
_NO_ENVELOPE = Envelope()
_NO_ROUTING = Routing()


class DeliveryRef(msgspec.Struct, frozen=True, kw_only=True):
    """The name of a delivery and its owner: all that ack, nack and extend need.

    With a `delivery_id` it means only that delivery, so that a late ack cannot finish a later one.
    """

    topic: str
    group: str
    partition: int
    offset: int
    owner: str
    delivery_id: str = ""


class Delivery(DeliveryRef, frozen=True, kw_only=True):
    """A message that is leased to its owner."""

    attempts: int
    key: str
    value: str
    last_error: str = ""
    routing: Routing = _NO_ROUTING
    envelope: Envelope = _NO_ENVELOPE


class DeliveryBuffer(LineBuffer[Delivery]):
    def __init__(self, topic: str, group: str, owner: str) -> None:
        super().__init__()
        self._topic = topic
        self._group = group
        self._owner = owner

    def _read(self, lines: bytes) -> Iterable[Delivery]:
        return map(self._delivery_of, _decode_lines(lines))

    def _delivery_of(self, item: Item) -> Delivery:
        return Delivery(
            topic=self._topic,
            group=self._group,
            partition=item.partition,
            offset=item.offset,
            owner=self._owner,
            delivery_id=item.delivery_id,
            attempts=item.attempts,
            key=item.key,
            value=item.value,
            last_error=item.last_error,
            routing=_NO_ROUTING if item.routing is UNSET else item.routing,
            envelope=_NO_ENVELOPE if item.envelope is UNSET else item.envelope,
        )


def new_owner() -> str:
    """Returns a unique name for a worker that tells people its machine and process."""
    return f"{socket.gethostname()[:64]}-{os.getpid()}-{secrets.token_hex(3)}"
