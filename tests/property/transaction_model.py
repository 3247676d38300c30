"""A plain model of transactions: it works on copies, so that all or nothing is trivial.

It knows two topics, one group that consumes `in`, the dead letters, a cache and the remembered
ids. Every delivery that is not finished is with the one consumer, whose last delivery counts.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

from penstock.api.messages import Produce
from penstock.api.transactions import AckOperation, NackOperation, Operation
from penstock.model.caching import Delete, Increment, Put
from penstock.model.transactions import (
    CacheResult,
    DuplicateResult,
    OperationResult,
    SettledResult,
    StoredResult,
)

TTL_MS = 3000
MAX_MSGS = 14
"""Per partition."""

Stored = tuple[int, str]
"""Partition and value."""


class Refused(Exception):
    """The operation cannot be done."""


class TransactionModel:
    def __init__(self) -> None:
        self.topics: dict[str, list[Stored]] = {"in": [], "out": []}
        self.partitions = {"in": 2, "out": 2}
        self.done: set[int] = set()
        self.dead: set[str] = set()
        self.deliveries: dict[int, str] = {}
        self.cache: dict[str, bytes] = {}
        self.keys: dict[tuple[str, str], int] = {}
        self.ids: dict[str, tuple[bytes, int, list[OperationResult]]] = {}

    def facts(self) -> dict[str, object]:
        """What can be seen of it from outside."""
        return {
            "topics": self.topics,
            "done": self.done,
            "dead": self.dead,
            "cache": self.cache,
        }

    def after(
        self, operations: Sequence[Operation], tx: str, fingerprint: bytes, now_ms: int
    ) -> tuple[TransactionModel, list[OperationResult] | int | None]:
        """The model after it, and the results, the index of the refusal, or None if the id is used
        by another transaction. Cache versions are left out: they are 0."""
        known = self.ids.get(tx)
        if tx and known is not None and known[1] > now_ms:
            return self, known[2] if known[0] == fingerprint else None
        new = copy.deepcopy(self)
        settled: set[int] = set()
        room = {name: self._buffered(name) for name in self.topics}
        results: list[OperationResult] = []
        for index, operation in enumerate(operations):
            try:
                results.append(new._do(operation, settled, room, now_ms))
            except Refused:
                return self, index
        if tx:
            new.ids[tx] = (fingerprint, now_ms + TTL_MS, results)
        return new, results

    def _buffered(self, topic: str) -> list[int]:
        counts = [0] * self.partitions[topic]
        for offset, (partition, _) in enumerate(self.topics[topic]):
            counts[partition] += topic == "out" or offset not in self.done
        return counts

    def _do(
        self, operation: Operation, settled: set[int], room: dict[str, list[int]], now_ms: int
    ) -> OperationResult:
        if isinstance(operation, Produce):
            return self._produce(operation, room, now_ms)
        if isinstance(operation, AckOperation | NackOperation):
            return self._settle(operation, settled)
        assert isinstance(operation, Put | Delete | Increment)
        return self._change(operation)

    def _produce(
        self, command: Produce, room: dict[str, list[int]], now_ms: int
    ) -> OperationResult:
        if command.topic not in self.topics:
            raise Refused
        envelope = command.envelope
        assert envelope is not None
        partition = envelope.partition_override
        assert partition is not None
        key = (command.topic, envelope.idempotency_key)
        if key[1] and self.keys.get(key, 0) > now_ms:
            return DuplicateResult()
        if room[command.topic][partition] >= MAX_MSGS:
            raise Refused
        room[command.topic][partition] += 1
        if key[1]:
            self.keys[key] = now_ms + TTL_MS
        self.topics[command.topic].append((partition, command.value))
        return StoredResult(partition, len(self.topics[command.topic]) - 1)

    def _settle(
        self, operation: AckOperation | NackOperation, settled: set[int]
    ) -> OperationResult:
        delivery = operation.delivery
        offset = delivery.offset
        if offset in settled or offset in self.done or offset not in self.deliveries:
            raise Refused
        if delivery.owner != "o" or delivery.delivery_id != self.deliveries[offset]:
            raise Refused
        if delivery.partition != self.topics["in"][offset][0]:
            raise Refused
        settled.add(offset)
        if isinstance(operation, AckOperation):
            self.done.add(offset)
        elif operation.dead:
            self.done.add(offset)
            self.dead.add(self.topics["in"][offset][1])
        return SettledResult()

    def _change(self, operation: Put | Delete | Increment) -> OperationResult:
        key = operation.key
        old = self.cache.get(key)
        if isinstance(operation, Put):
            if operation.if_not_exists and old is not None:
                raise Refused
            self.cache[key] = operation.value
            return CacheResult(0)
        if isinstance(operation, Delete):
            self.cache.pop(key, None)
            return CacheResult(0, deleted=old is not None)
        if old is not None and not old.isdigit():
            raise Refused
        number = int(old or b"0") + operation.delta
        self.cache[key] = b"%d" % number
        return CacheResult(0, number=number)
