"""Produce commands, one by one or in batches: decides, stores and marks for dispatch.

Every command has its own outcome: the stored message, None for a duplicate, or the refusal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from penstock.api.messages import Produce, ProduceOutcome, check_deadline
from penstock.core.produce import choose_partition, decide_produce, destination
from penstock.core.state import BrokerState
from penstock.engine.dispatcher import Dispatcher
from penstock.engine.ledger import Ledger
from penstock.engine.quotas import Quotas
from penstock.engine.retention import Retention
from penstock.model.envelope import Envelope
from penstock.model.errors import PenstockError, ResourceExhausted
from penstock.model.records import Message

UNKNOWN_TOPIC = "(unknown)"
"""The metric label of refusals for unknown topics. Their names are no labels: anyone could make up
any number of them."""

Store = Callable[[Message, int], None]
"""Stores a message that was decided; takes its size too."""


class Producing:
    def __init__(
        self,
        state: BrokerState,
        ledger: Ledger,
        dispatcher: Dispatcher,
        retention: Retention,
        quotas: Quotas,
        *,
        is_in_memory: bool,
    ) -> None:
        self.rejected: dict[tuple[str, str, str], int] = {}
        self._ledger = ledger
        self._state = state
        self._dispatcher = dispatcher
        self._check_memory = retention.check_memory
        self._quotas = quotas
        self._is_in_memory = is_in_memory

    def store(self, command: Produce) -> ProduceOutcome:
        ledger = self._ledger
        outcome = self._store(command, ledger.now_ms(), ledger.store)
        if type(outcome) is Message:
            self.mark([(outcome.topic_id, outcome.partition)])
        return outcome

    def store_many(self, commands: Sequence[Produce | PenstockError]) -> list[ProduceOutcome]:
        """Stores commands in order, each by itself. An error among them is its own outcome."""
        if self._is_in_memory:
            # The memory of a message is known when it is stored, and counts for the next.
            return [c if isinstance(c, PenstockError) else self.store(c) for c in commands]
        now_ms = self._ledger.now_ms()
        with self._ledger.batch() as batch:
            outcomes: list[ProduceOutcome] = [
                command
                if isinstance(command, PenstockError)
                else self._store(command, now_ms, batch.store)
                for command in commands
            ]
        self.mark(batch.partitions)
        return outcomes

    def _store(self, command: Produce, now_ms: int, store: Store) -> ProduceOutcome:
        try:
            if self._ledger.failure is not None:
                raise self._ledger.failure
            if command.deadline_ms:
                check_deadline(command.deadline_ms, self._ledger.wall_ms())
            decided = decide_produce(self._state, command, now_ms)
            if decided is None:
                return None
            if self._is_in_memory:
                self._check_memory()
            message, size = decided
            if self._quotas.is_active:
                self._store_within_quota(message, size, store)
            else:
                store(message, size)
        except PenstockError as error:
            self.count_refusal(command, error)
            return error
        return message

    def _store_within_quota(self, message: Message, size: int, store: Store) -> None:
        scope = self._state.topics_by_id[message.topic_id].scope
        keys = message.envelope is not None and bool(message.envelope.idempotency_key)
        self._quotas.check(scope, 1, size, is_kept=True, keys=keys)
        store(message, size)
        self._quotas.take(scope, 1, size, is_kept=True, keys=keys)

    def mark(self, partitions: Iterable[tuple[int, int]]) -> None:
        """Marks partitions with new messages, which are in the log already, for dispatch."""
        try:
            for topic_id, partition in partitions:
                topic = self._state.topics_by_id[topic_id]
                if topic.groups:
                    self._dispatcher.mark_topic(topic, partition)
        except BaseException as error:
            raise self._ledger.stop_serving(error, is_appended=True) from error

    def forget(self, topic: str) -> None:
        """Drops the counts of a deleted topic."""
        for key in [key for key in self.rejected if key[0] == topic]:
            del self.rejected[key]

    def _destination(self, command: Produce) -> tuple[str, str]:
        envelope = command.envelope or Envelope()
        topic = self._state.topics.get(destination(command))
        if topic is None:
            return UNKNOWN_TOPIC, ""
        try:
            return topic.name, str(choose_partition(topic, command.key, envelope))
        except PenstockError:
            return topic.name, ""

    def count_refusal(self, command: Produce, error: PenstockError) -> None:
        """Counts a refusal under the topic and partition that the message would have gone to."""
        reason = error.limit if isinstance(error, ResourceExhausted) else error.code.lower()
        key = (*self._destination(command), reason)
        self.rejected[key] = self.rejected.get(key, 0) + 1
