"""Transactions: operations on topics, groups, durable streams and durable caches, all or none.

A produce, a publish and a cache operation are the commands that do the same alone. Another kind of
operation needs its command in `Operation`, its decision in core/transaction_rules.py, and its body
in server/routes/transaction_operations.py.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from penstock.api.effects import EffectCommand
from penstock.api.messages import Produce, Settle
from penstock.api.outcomes import Done
from penstock.model.caching import Delete, Increment, Put
from penstock.model.streams import Publish
from penstock.model.tenancy import Path
from penstock.model.transactions import OperationResult


class AckOperation(msgspec.Struct, gc=False):
    """Finishes a delivery. Refused if the offset is done already: what the transaction produces
    for it was then produced before."""

    delivery: Settle


class NackOperation(msgspec.Struct, gc=False):
    delivery: Settle
    reason: str = ""
    delay_ms: int | None = None
    dead: bool = False


class EventAckOperation(msgspec.Struct, gc=False):
    """Finishes an event of the named subscription `name`. Refused if it is done already."""

    path: Path
    name: str
    offset: int
    owner: str
    delivery_id: str = ""


class EventNackOperation(EventAckOperation, gc=False):
    """Reports that an event of a named subscription could not be handled."""

    reason: str = ""
    delay_ms: int | None = None


class EffectOperation(msgspec.Struct, gc=False):
    """Commits an effect that its owner has begun. Refused if it is committed already."""

    effect: EffectCommand
    result: str = ""


Operation = (
    Produce
    | Publish
    | AckOperation
    | NackOperation
    | EventAckOperation
    | EventNackOperation
    | EffectOperation
    | Put
    | Delete
    | Increment
)


class TransactionCommand(msgspec.Struct):
    """`transaction_id`, if not empty, is remembered with the answer for the idempotency TTL: a
    repeat is answered with the results of the first. `fingerprint` tells a repeat from another
    transaction that uses the same id by mistake."""

    operations: list[Operation]
    transaction_id: str = ""
    fingerprint: bytes = b""


class TransactionsPart(Protocol):
    def commit(self, command: TransactionCommand, done: Done[list[OperationResult]]) -> None:
        """Does all operations, in order, or none. Gives the result of each. A refusal has the
        index of the operation it is about in `operation`, if it is about one."""
        ...
