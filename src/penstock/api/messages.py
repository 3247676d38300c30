"""Messages: the commands that produce and settle them, and the router that may redirect them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from penstock.model.envelope import Envelope, Routing, RoutingDecision
from penstock.model.errors import InvalidArgument, PenstockError
from penstock.model.records import Message


class Produce(msgspec.Struct, gc=False):
    """A produce as requested: names cleaned, envelope validated and in normal form."""

    topic: str
    key: str
    value: str
    envelope: Envelope | None = None
    routing: Routing | None = None
    deadline_ms: int = 0


ProduceOutcome = Message | PenstockError | None
"""The stored message, None for a duplicate, or the refusal."""


class Settle(msgspec.Struct, gc=False):
    """The delivery that an ack, nack, release or extend names, and its owner."""

    topic: str
    group: str
    partition: int
    offset: int
    owner: str
    delivery_id: str = ""


SettleOutcome = PenstockError | None
"""None for success, or the refusal."""

Decided = Callable[[RoutingDecision | None], None]


class Router(Protocol):
    """Chooses the topic and partition of new messages."""

    def route(self, command: Produce, decided: Decided) -> None:
        """Calls `decided` once, on the loop, with the decision, or None when there is none."""
        ...


def check_deadline(deadline_ms: int, now_ms: int) -> None:
    """Refuses a deadline in the past; 0 means none. `now_ms` is the machine's time, not the
    broker's, because the client wrote the deadline by its own clock."""
    if deadline_ms and deadline_ms <= now_ms:
        raise InvalidArgument("the deadline has already passed")
