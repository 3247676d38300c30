"""Produces come in here: decided, stored and marked for dispatch, one by one or by the thousand.

Every command has its own outcome: the message stored, None for a duplicate, or the refusal.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.core.produce import Produce, decide_produce
from penstock.engine.parts import Parts
from penstock.engine.upkeep import Upkeep
from penstock.model.errors import PenstockError, ResourceExhausted
from penstock.model.records import Message

Outcome = Message | PenstockError | None


class Intake:
    def __init__(self, parts: Parts, upkeep: Upkeep) -> None:
        self.rejected: dict[tuple[str, str, str], int] = {}
        self._parts = parts
        self._upkeep = upkeep

    def store(self, commands: Sequence[Produce | PenstockError]) -> list[Outcome]:
        """In order, each standing alone. An error among the commands is its own outcome."""
        journal, state, window = self._parts.journal, self._parts.state, self._parts.window
        is_durable = self._upkeep.pages_to_disk
        now_ms = journal.now_ms()
        outcomes: list[Outcome] = []
        stored: dict[tuple[int, int], None] = {}
        for command in commands:
            if isinstance(command, PenstockError):
                outcomes.append(command)
                continue
            try:
                if journal.failure is not None:
                    raise journal.failure
                decided = decide_produce(state, command, now_ms)
                if decided is None:
                    outcomes.append(None)
                    continue
                if not is_durable and window.is_over():
                    self._check_memory()
                message = decided[0]
                journal.store(message, decided[1])
            except PenstockError as error:
                self._count(command, error)
                outcomes.append(error)
            else:
                stored[message.topic_id, message.partition] = None
                outcomes.append(message)
        for topic_id, partition in stored:
            self._parts.dispatcher.mark_topic(state.topics_by_id[topic_id], partition)
        return outcomes

    def forget(self, topic: str) -> None:
        """The topic is gone, and its counts with it."""
        for key in [key for key in self.rejected if key[0] == topic]:
            del self.rejected[key]

    def _check_memory(self) -> None:
        """Without a disk to page to, what no group needs any more makes room; else nothing can."""
        self._upkeep.reclaim_memory()
        if self._parts.window.is_over():
            raise ResourceExhausted("the broker's memory is full", limit="memory_bytes")

    def _count(self, command: Produce, error: PenstockError) -> None:
        reason, partition = error.code.lower(), ""
        if isinstance(error, ResourceExhausted):
            reason = error.limit
            partition = "" if error.partition is None else str(error.partition)
        # A name that is no topic is not made a label: anyone could make up any number of them.
        topic = command.topic if command.topic in self._parts.state.topics else ""
        key = (topic, partition, reason)
        self.rejected[key] = self.rejected.get(key, 0) + 1
