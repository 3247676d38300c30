"""Produces come in here: decided, stored and marked for dispatch, one by one or by the thousand.

Every command has its own outcome: the message stored, None for a duplicate, or the refusal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.core.produce import Produce, decide_produce
from penstock.engine.parts import Parts
from penstock.engine.upkeep import Upkeep
from penstock.model.errors import PenstockError, ResourceExhausted
from penstock.model.records import Message

Outcome = Message | PenstockError | None

Store = Callable[[Message, int], None]
"""Takes a message that was decided, and its size."""


class Intake:
    def __init__(self, parts: Parts, upkeep: Upkeep) -> None:
        self.rejected: dict[tuple[str, str, str], int] = {}
        self._parts = parts
        self._ledger = parts.ledger
        self._state = parts.state
        self._upkeep = upkeep
        self._is_in_memory = not upkeep.pages_to_disk

    def store(self, command: Produce) -> Outcome:
        ledger = self._ledger
        outcome = self._store(command, ledger.now_ms(), ledger.store)
        if type(outcome) is Message:
            self._mark(outcome.topic_id, outcome.partition)
        return outcome

    def store_many(self, commands: Sequence[Produce | PenstockError]) -> list[Outcome]:
        """In order, each standing alone. An error among the commands is its own outcome."""
        if self._is_in_memory:
            # What a message takes is known when it is stored, and counts against the next.
            return [c if isinstance(c, PenstockError) else self.store(c) for c in commands]
        now_ms = self._ledger.now_ms()
        with self._ledger.lot() as lot:
            outcomes: list[Outcome] = [
                command
                if isinstance(command, PenstockError)
                else self._store(command, now_ms, lot.store)
                for command in commands
            ]
        for place in lot.places:
            self._mark(*place)
        return outcomes

    def _store(self, command: Produce, now_ms: int, store: Store) -> Outcome:
        try:
            if self._ledger.failure is not None:
                raise self._ledger.failure
            decided = decide_produce(self._state, command, now_ms)
            if decided is None:
                return None
            if self._is_in_memory:
                self.check_memory()
            message, size = decided
            store(message, size)
        except PenstockError as error:
            self._count(command, error)
            return error
        return message

    def _mark(self, topic_id: int, partition: int) -> None:
        topic = self._state.topics_by_id[topic_id]
        if topic.groups:
            self._parts.dispatcher.mark_topic(topic, partition)

    def forget(self, topic: str) -> None:
        """The topic is gone, and its counts with it."""
        for key in [key for key in self.rejected if key[0] == topic]:
            del self.rejected[key]

    def check_memory(self) -> None:
        """Without a disk to page to, what no group needs any more makes room; else nothing can."""
        window = self._parts.window
        if self._is_in_memory and window.is_over():
            self._upkeep.reclaim_memory()
            if window.is_over():
                raise ResourceExhausted("the broker's memory is full", limit="memory_bytes")

    def _count(self, command: Produce, error: PenstockError) -> None:
        reason, partition = error.code.lower(), ""
        if isinstance(error, ResourceExhausted):
            reason = error.limit
            partition = "" if error.partition is None else str(error.partition)
        # A name that is no topic is not made a label: anyone could make up any number of them.
        topic = command.topic if command.topic in self._state.topics else ""
        key = (topic, partition, reason)
        self.rejected[key] = self.rejected.get(key, 0) + 1
