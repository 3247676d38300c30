"""The lease of a shard: the broker that should own it, as the key store says.

A lease only decides who tries to own the log, and how long its owner may answer reads from memory.
What keeps two owners apart is the fence in the stream. Must not know how leases are renewed.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from penstock.cluster.shared import StoredKey

MIN_TTL_MS = 300
"""With a shorter lease, one slow answer of the store would end it."""
MOST_SHARDS = 1_000_000
"""Keys of higher shards are nobody's."""

_Number = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
"""A number that fits into the messages of the log, with room to spare."""


class Identity(msgspec.Struct, frozen=True):
    """A broker. `node_id` belongs to its data directory, `life_id` to its process."""

    name: str
    url: str
    node_id: str
    life_id: str


class LeaseTimes(msgspec.Struct, frozen=True):
    """A lease that was not renewed for `ttl_ms` may be taken over by another broker."""

    ttl_ms: int

    @property
    def renew_ms(self) -> int:
        """The time between two renewals."""
        return self.ttl_ms // 3

    @property
    def current_ms(self) -> int:
        """How long after a renewal was sent the owner may be sure of its lease. It is shorter than
        the lease, because clocks of machines do not run equally fast."""
        return self.ttl_ms * 9 // 10


class Lease(msgspec.Struct, frozen=True):
    """`now_ms` is the owner's broker time at the last renewal. A released lease may be taken at
    once, best by `successor`."""

    owner: str
    url: str
    node_id: str
    life_id: str
    epoch: _Number
    now_ms: _Number
    renewals: _Number = 0
    is_released: bool = False
    successor: str = ""


class HeldLease(msgspec.Struct, frozen=True):
    """A lease as it was read: `revision` is 0 if the key has no value. `lease` is None then, and
    for a value that is no lease."""

    lease: Lease | None
    revision: int


def lease_key(shard: int) -> str:
    return f"shard.{shard}"


def shard_of_key(key: str) -> int | None:
    """Returns None for a key that `lease_key` never gives."""
    head, _, text = key.partition(".")
    if head != "shard" or not (text.isascii() and text.isdigit() and len(text) < 8):
        return None
    number = int(text)
    return number if number < MOST_SHARDS and lease_key(number) == key else None


def encode_lease(lease: Lease) -> bytes:
    return msgspec.json.encode(lease)


def read_lease(entry: StoredKey | None) -> HeldLease:
    if entry is None:
        return HeldLease(None, 0)
    try:
        return HeldLease(msgspec.json.decode(entry.value, type=Lease), entry.revision)
    except (msgspec.DecodeError, msgspec.ValidationError):
        return HeldLease(None, entry.revision)
