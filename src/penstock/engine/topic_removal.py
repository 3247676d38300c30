"""Deletes topics, and everything that the serving process knows of them.

Invariant: the records are appended together, and leases, consumers, messages in memory and counts
of the topics are gone when they are applied. Must not know why topics are deleted.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.core.state import BrokerState
from penstock.engine.dead_letters import DeadLetters
from penstock.engine.dispatcher import Dispatcher
from penstock.engine.leases import Leases
from penstock.engine.ledger import Ledger
from penstock.engine.producing import Producing
from penstock.engine.quotas import Quotas
from penstock.engine.sealing import Sealing
from penstock.engine.window import Window
from penstock.model.records import Record, TopicDeleted
from penstock.model.scopes import is_stream_log, plain_name


class TopicRemoval:
    def __init__(
        self,
        state: BrokerState,
        ledger: Ledger,
        window: Window,
        leases: Leases,
        dispatcher: Dispatcher,
        dead_letters: DeadLetters,
        producing: Producing,
        quotas: Quotas,
        sealing: Sealing | None,
    ) -> None:
        self._state = state
        self._ledger = ledger
        self._window = window
        self._leases = leases
        self._dispatcher = dispatcher
        self._dead_letters = dead_letters
        self._producing = producing
        self._quotas = quotas
        self._sealing = sealing

    def record(self, deletions: Sequence[TopicDeleted], others: Sequence[Record] = ()) -> None:
        """Records the deletions, and the `others` with them. Raises if there is no room."""
        topics = [self._state.topics_by_id[deletion.topic_id] for deletion in deletions]
        groups = [(topic, list(topic.groups.values())) for topic in topics]
        entries = [
            entry for _, several in groups for group in several for entry in group.unfinished()
        ]
        # Even an empty topic has records in the log that can be removed.
        removed = sum(
            1 + sum(partition.backlog.retained_bytes() for partition in topic.partitions)
            for topic in topics
        )
        self._ledger.must_record(*deletions, *others)
        self._leases.drop(entries)
        for topic, several in groups:
            for group in several:
                kind = "stream" if is_stream_log(topic.name) else "topic"
                reason = f"{kind} {plain_name(topic.name)!r} was deleted"
                self._dispatcher.end_group(group.id, reason)
            self._window.drop_topic(topic.id)
            self._producing.forget(topic.name)
            self._quotas.topic_removed(topic)
            self._dead_letters.forget(topic.name)
        if removed and self._sealing is not None:
            self._sealing.note_removed(removed)
