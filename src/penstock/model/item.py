"""A delivered message on the wire: one line of the consumer's stream.

The order of the fields is that of the wire.
"""

from __future__ import annotations

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
