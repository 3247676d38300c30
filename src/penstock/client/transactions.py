"""A transaction's operations, and the call that sends them. No IO.

Invariant: a transaction that was sent does not change any more, so that sending it again after a
lost answer is the same request with the same id, which the broker does not do twice.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from penstock.client.calls import Call, Payload, bytes_of, encode, reader, require_text
from penstock.client.deliveries import DeliveryRef
from penstock.client.feeds import EventRef
from penstock.client.requests import EffectRef, NewMessage, delivery_members
from penstock.client.results import Produced, PublishedAt
from penstock.client.scope import may_be_equal
from penstock.client.streams import event_members
from penstock.model.caching import Written
from penstock.model.envelope import Envelope
from penstock.model.errors import InvalidArgument
from penstock.model.scopes import DEFAULT_SCOPE, Scope

TransactionResult = Produced | PublishedAt | Written | None
"""The place of a message or an event, the version after a cache operation, None for the others."""


class ReceivedStreamEvent(Protocol):
    """An event that a subscription of either client gave."""

    @property
    def ref(self) -> EventRef: ...


_Read = Callable[[bytes], TransactionResult]


class TransactionOperations:
    """Collects operations. Each method adds one and returns at once; nothing is sent before the
    transaction is committed. All of them are in `scope`, the client's tenant and namespace."""

    def __init__(self, transaction_id: str = "", scope: Scope = DEFAULT_SCOPE) -> None:
        require_text("transaction_id", transaction_id)
        self.transaction_id = transaction_id or secrets.token_hex(16)
        self.results: list[TransactionResult] = []
        self.is_committed = False
        self._scope = scope
        self._operations: list[Any] = []
        self._readers: list[_Read] = []
        self._call: Call[list[TransactionResult]] | None = None

    def __len__(self) -> int:
        return len(self._operations)

    def __repr__(self) -> str:
        state = "committed" if self.is_committed else "open" if self._call is None else "sent"
        return f"{type(self).__name__}({self.transaction_id!r}, {len(self)} operations, {state})"

    def produce(
        self, topic: str, value: str, *, key: str = "", envelope: Envelope | None = None
    ) -> None:
        """Stores a message."""
        self.produce_message(NewMessage(topic, value, key, envelope))

    def produce_message(self, message: NewMessage) -> None:
        self.add("produce", msgspec.to_builtins(message), reader(Produced))

    def ack(self, delivery: DeliveryRef | EventRef | ReceivedStreamEvent) -> None:
        """Finishes a message for its group, or an event for its named subscription. The transaction
        is refused if that was done before, so `once` needs not know of the event."""
        if isinstance(delivery, DeliveryRef):
            self.add("ack", delivery_members(delivery), _nothing)
        else:
            self.add("event_ack", self._event_members(delivery), _nothing)

    def nack(
        self,
        delivery: DeliveryRef | EventRef | ReceivedStreamEvent,
        reason: str = "",
        *,
        delay_ms: int | None = None,
        dead: bool = False,
    ) -> None:
        """Reports a failed attempt, as `client.nack` and `event.nack` do."""
        require_text("reason", reason)
        how = {"reason": reason, "delay_ms": delay_ms}
        if isinstance(delivery, DeliveryRef):
            self.add("nack", delivery_members(delivery) | how | {"dead": dead}, _nothing)
        elif dead:
            raise InvalidArgument(
                "streams have no dead letters; ack the event, and publish it elsewhere"
            )
        else:
            self.add("event_nack", self._event_members(delivery) | how, _nothing)

    def commit_effect(self, effect: EffectRef, result: str = "") -> None:
        """Records that an effect was run. The transaction is refused if that was done before."""
        require_text("result", result)
        self.add("effect_commit", msgspec.structs.asdict(effect) | {"result": result}, _nothing)

    def publish(
        self,
        stream: str,
        *payloads: Payload,
        producer_id: str | None = None,
        sequence: int | None = None,
    ) -> None:
        """Publishes events to a durable stream, in their order."""
        events = [bytes_of(payload) for payload in payloads]
        numbers = {"producer_id": producer_id, "sequence": sequence}
        members = {name: value for name, value in numbers.items() if value is not None}
        self.add("publish", {"stream": stream, "payloads": events} | members, reader(PublishedAt))

    def cache(self, name: str) -> TransactionCache:
        """Returns a handle of a durable cache, whose methods add operations."""
        return TransactionCache(self, name)

    def add(self, op: str, members: dict[str, Any], read: _Read) -> None:
        if self._call is not None:
            raise InvalidArgument("the transaction was sent already; begin another one")
        self._operations.append({"op": op, **members})
        self._readers.append(read)

    def _event_members(self, event: EventRef | ReceivedStreamEvent) -> dict[str, Any]:
        ref = event if isinstance(event, EventRef) else event.ref
        if not ref.name:
            raise InvalidArgument(
                "an event of a subscription without a name is not acked; subscribe with a name"
            )
        *scope, stream = ref.stream
        if not may_be_equal((scope[0], scope[1]), self._scope):
            raise InvalidArgument(
                f"the event is of namespace {'/'.join(scope)!r}, and the transaction of "
                f"{'/'.join(self._scope)!r}; use a client with the event's tenant and namespace"
            )
        return {"stream": stream} | event_members(ref)

    def call(self) -> Call[list[TransactionResult]]:
        """Returns the call that commits the transaction, always the same one."""
        if self._call is None:
            body = {"transaction_id": self.transaction_id, "operations": self._operations}
            self._call = Call("POST", "/v1/transactions", self._read, encode(body))
        return self._call

    def _read(self, data: bytes) -> list[TransactionResult]:
        found = reader(_Committed)(data).results
        return [read(raw) for read, raw in zip(self._readers, found, strict=True)]


class TransactionCache:
    """A durable cache in a transaction: `tx.cache("totals").incr("orders")`."""

    def __init__(self, transaction: TransactionOperations, name: str) -> None:
        self._transaction = transaction
        self._name = name

    def put(
        self,
        key: str,
        value: Payload,
        *,
        ttl_ms: int | None = None,
        if_not_exists: bool = False,
        if_version: int | None = None,
    ) -> None:
        """Puts a value under a key, on the same conditions as the put of a cache's handle."""
        self._add(
            "cache_put",
            key,
            value=bytes_of(value),
            ttl_ms=ttl_ms,
            if_not_exists=if_not_exists,
            if_version=if_version,
        )

    def delete(self, key: str, *, if_version: int | None = None) -> None:
        """Deletes the value under a key, if there is one."""
        self._add("cache_delete", key, if_version=if_version)

    def incr(self, key: str, delta: int = 1, *, ttl_ms: int | None = None) -> None:
        """Adds to a counter. Its result has the new value as `number`."""
        self._add("cache_incr", key, delta=delta, ttl_ms=ttl_ms)

    def _add(self, op: str, key: str, **members: Any) -> None:
        self._transaction.add(op, {"cache": self._name, "key": key, **members}, reader(Written))


class _Committed(msgspec.Struct):
    results: list[msgspec.Raw]


def _nothing(_: bytes) -> None:
    """Reads a result that says nothing but that it happened."""
