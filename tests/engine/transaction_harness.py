"""A broker driven by hand that takes transactions, with words for their operations."""

from __future__ import annotations

from typing import Any

from penstock.api.effects import EffectCommand
from penstock.api.messages import Produce
from penstock.api.transactions import (
    AckOperation,
    EffectOperation,
    NackOperation,
    Operation,
    TransactionCommand,
)
from penstock.model.envelope import Envelope
from penstock.model.errors import PenstockError
from penstock.model.item import Item
from penstock.model.tenancy import Path
from penstock.model.transactions import OperationResult
from tests.engine.cache_harness import CacheBroker
from tests.engine.harness import Reader, values
from tests.storage.faulty_vfs import FaultyVfs

CACHE: Path = ("default", "default", "c")


class TransactionBroker(CacheBroker):
    def try_commit(
        self, *operations: Operation, tx: str = "", fingerprint: bytes = b""
    ) -> list[OperationResult] | PenstockError:
        command = TransactionCommand([*operations], tx, fingerprint)
        outcome: list[OperationResult] | PenstockError = self.call(
            self.engine.transactions.commit, command
        )
        return outcome

    def do(self, *operations: Operation, tx: str = "") -> list[OperationResult]:
        outcome = self.try_commit(*operations, tx=tx)
        if isinstance(outcome, PenstockError):
            raise outcome
        return outcome

    def refused(self, *operations: Operation, tx: str = "") -> PenstockError:
        """The refusal; the log has nothing of it."""
        seq, position = self.log.seq, self.engine.parts.ledger.position
        outcome = self.try_commit(*operations, tx=tx)
        assert isinstance(outcome, PenstockError), outcome
        assert (self.log.seq, self.engine.parts.ledger.position) == (seq, position)
        return outcome

    def acking(self, reader: Reader, item: Item | int, **changes: Any) -> AckOperation:
        return AckOperation(self.naming(reader, item, **changes))

    def fenced(self, reader: Reader, item: Item) -> AckOperation:
        return AckOperation(self.naming(reader, item, delivery_id=item.delivery_id))

    def nacking(self, reader: Reader, item: Item | int, **how: Any) -> NackOperation:
        return NackOperation(self.naming(reader, item), "because", **how)

    def contents(self, topic: str) -> list[str]:
        partitions = range(len(self.state.topics[topic].partitions))
        found = [message for index in partitions for message in self.stored(topic, index)]
        return values(sorted(found, key=lambda message: message.offset))


def producing(topic: str, value: str, key: str = "", once: str = "", **fields: Any) -> Produce:
    envelope = Envelope(idempotency_key=once, **fields) if once or fields else None
    return Produce(topic, key, value, envelope)


def effect(key: str, owner: str = "o", result: str = "") -> EffectOperation:
    return EffectOperation(EffectCommand("", "t", "g", key, owner), result)


def begun(**options: Any) -> tuple[TransactionBroker, Reader]:
    """A broker with the topics t and u, a durable cache, and a consumer that has two messages."""
    broker = TransactionBroker(FaultyVfs(), **options)
    broker.topic("t")
    broker.topic("u", 2)
    broker.cache("c", "default", "default", durable=True)
    broker.put("t", "a", "b")
    return broker, broker.consume("t", lease_ms=1000)
