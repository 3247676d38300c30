"""Results of a transaction's operations.

They are part of the log: the answer to a transaction with an id is remembered, so that a repeat
gets it again. Tags and field order are the format; fields are only ever added at the end.
"""

from __future__ import annotations

import msgspec


class StoredResult(msgspec.Struct, array_like=True, tag=1, frozen=True, gc=False):
    """A produce, and where its message is."""

    partition: int
    offset: int


class DuplicateResult(msgspec.Struct, array_like=True, tag=2, frozen=True, gc=False):
    """A produce whose idempotency key is known, or a publish whose number is: nothing was stored.
    `offset` is where the first publish put its events, -1 if that is not known."""

    offset: int = -1


class SettledResult(msgspec.Struct, array_like=True, tag=3, frozen=True, gc=False):
    """An ack, a nack or the commit of an effect."""


class CacheResult(msgspec.Struct, array_like=True, tag=4, frozen=True, gc=False):
    """An operation on a cache. `deleted` is set by a delete, `number` by an increment."""

    version: int
    deleted: bool | None = None
    number: int | None = None


OperationResult = StoredResult | DuplicateResult | SettledResult | CacheResult

encode_results = msgspec.msgpack.Encoder().encode
decode_results = msgspec.msgpack.Decoder(list[OperationResult]).decode
