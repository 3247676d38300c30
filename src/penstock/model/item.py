"""What a consumer is given: one line of the stream, members in the wire's order."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from penstock.model.envelope import Envelope, Routing


class Item(msgspec.Struct, gc=False):
    """`routing` and `envelope` are absent, not null, when there is nothing in them."""

    partition: int
    offset: int
    attempts: int
    key: str
    value: str
    last_error: str
    routing: Routing | UnsetType = UNSET
    envelope: Envelope | UnsetType = UNSET
    delivery_id: str = ""
