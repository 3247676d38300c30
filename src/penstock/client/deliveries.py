"""What a consumer is given, and how it is read from the bytes of a stream. No IO.

A delivery knows its topic, group and owner, so that it can be acked as it is. Invariant of the
buffer: deliveries come out in the order of their lines, each once, and never from half a line.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections import deque

import msgspec
from msgspec import UNSET

from penstock.model.envelope import Envelope, Routing
from penstock.model.errors import Internal
from penstock.model.item import Item

DEFAULT_LEASE_MS = 30_000
"""Longer than the wire's default, which is for trying things out: work takes its time."""

_decode_lines = msgspec.json.Decoder(Item).decode_lines
_NO_ENVELOPE = Envelope()
_NO_ROUTING = Routing()


class DeliveryRef(msgspec.Struct, frozen=True, kw_only=True):
    """Which delivery is meant, and by whom: what ack, nack and extend need to know.

    With a `delivery_id` only that very delivery is meant: a late ack cannot finish a later one.
    """

    topic: str
    group: str
    partition: int
    offset: int
    owner: str
    delivery_id: str = ""


class Delivery(DeliveryRef, frozen=True, kw_only=True):
    """A message, and the lease on it."""

    attempts: int
    key: str
    value: str
    last_error: str = ""
    routing: Routing = _NO_ROUTING
    envelope: Envelope = _NO_ENVELOPE


class DeliveryBuffer:
    """From chunks of a stream to deliveries, and how long there have been none."""

    def __init__(self, topic: str, group: str, owner: str) -> None:
        self._topic = topic
        self._group = group
        self._owner = owner
        self._half_line: list[bytes] = []
        self._ready: deque[Delivery] = deque()
        self._waiting_since: float | None = None

    def feed(self, chunk: bytes) -> None:
        """Takes bytes in. Lines end at a newline and nowhere else; blank ones are heartbeats."""
        end = chunk.rfind(b"\n")
        if end < 0:
            self._half_line.append(chunk)
            return
        lines = b"".join((*self._half_line, chunk[: end + 1]))
        self._half_line = [chunk[end + 1 :]]
        try:
            items = _decode_lines(lines)
        except (msgspec.DecodeError, ValueError) as error:
            raise Internal(f"the stream has a line that is no item: {error}") from error
        self._ready.extend(map(self._delivery_of, items))

    def take(self, now_s: float) -> Delivery | None:
        """The next delivery, if there is one; else the wait for it has begun."""
        if self._ready:
            self._waiting_since = None
            return self._ready.popleft()
        if self._waiting_since is None:
            self._waiting_since = now_s
        return None

    def waited_s(self, now_s: float) -> float:
        """Since the caller began to wait for the next delivery."""
        return 0.0 if self._waiting_since is None else now_s - self._waiting_since

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
    """A name for one worker: who it is for people, unique for the broker."""
    return f"{socket.gethostname()[:64]}-{os.getpid()}-{secrets.token_hex(3)}"
