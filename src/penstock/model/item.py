"""A delivered message on the wire: one line of the consumer's stream.

The order of the fields is that of the wire.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from penstock.model.envelope import Envelope, Routing


class Item(msgspec.Struct, gc=False):
    """`routing` and `envelope` are absent, not null, if they are empty."""

    partition: int
    offset: int
    attempts: int
    key: str
    value: str
    last_error: str
    routing: Routing | UnsetType = UNSET
    envelope: Envelope | UnsetType = UNSET
    delivery_id: str = ""


class EventItem(msgspec.Struct, gc=False):
    """A delivered event of a durable stream, for a named subscription."""

    offset: int
    attempts: int
    value: bytes
    last_error: str
    delivery_id: str

    key: ClassVar[str] = ""
