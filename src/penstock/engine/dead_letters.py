"""Moves messages that are out of attempts to the dead-letter topic.

That needs the body, which may have to be read from disk, and room for a new message. Until it has
both, the message stays DYING and holds no place in flight.
"""

from __future__ import annotations

from itertools import islice

from penstock.core.dead_letters import decide_dead_letter
from penstock.core.deliver import is_effect_committed, redelivery, skip
from penstock.core.groups import DYING, Unfinished
from penstock.core.state import BrokerState
from penstock.engine.dispatcher import Dispatcher
from penstock.engine.leases import is_unfinished
from penstock.engine.ledger import Ledger
from penstock.engine.pages import Pages
from penstock.engine.window import PartitionLog, Window
from penstock.model.records import Message, TopicCreated

BURST = 1000
"""Messages moved in one turn, so that a mass of them does not hold up the loop."""


class DeadLetters:
    def __init__(
        self,
        state: BrokerState,
        window: Window,
        pages: Pages,
        ledger: Ledger,
        dispatcher: Dispatcher,
    ) -> None:
        self._state = state
        self._window = window
        self._pages = pages
        self._ledger = ledger
        self._dispatcher = dispatcher
        self._dying: dict[Unfinished, None] = {}
        self._is_fetching = False
        self.counts: dict[tuple[str, str, int], int] = {}

    def __len__(self) -> int:
        return len(self._dying)

    def add(self, entry: Unfinished) -> None:
        """Adds an entry that a record made DYING."""
        self._dying[entry] = None

    def forget(self, topic: str) -> None:
        """Drops the counts of a deleted topic."""
        for key in [key for key in self.counts if key[0] == topic]:
            del self.counts[key]

    def run(self) -> None:
        """Moves what can be moved now; the rest waits for room or for its body."""
        is_any_gone = False
        for entry in list(islice(self._dying, BURST)):
            is_settled = not is_unfinished(entry) or entry.state != DYING
            is_gone = is_settled or self._try(entry)
            if is_gone:
                del self._dying[entry]
                is_any_gone = True
        if self._dying and is_any_gone:
            self._ledger.wake()

    def _try(self, entry: Unfinished) -> bool:
        progress, now_ms = entry.progress, self._ledger.now_ms()
        if is_effect_committed(progress.group, entry.effect_key, now_ms):
            # Its effect is committed: only the ack is missing.
            return self._ledger.record(skip(progress, redelivery(entry), now_ms))
        if not self._ledger.can_store(entry.size):
            # It is not read either: messages that wait would push each other out of the page cache.
            return False
        log = self._window.log(progress.group.topic.id, progress.partition)
        body = self._pages.message(log, entry.offset)
        if not isinstance(body, Message):
            self._fetch(log, entry.offset)
            return False
        return self._store_copy(entry, body)

    def _fetch(self, log: PartitionLog, offset: int) -> None:
        """Loads one page at a time: it may hold other bodies too."""
        if self._is_fetching:
            return
        self._is_fetching = True

        def fetched() -> None:
            self._is_fetching = False
            self._ledger.wake()

        self._pages.load(log, offset, fetched)

    def _store_copy(self, entry: Unfinished, body: Message) -> bool:
        source = entry.progress.group.topic
        now_ms = self._ledger.now_ms()
        records, copy = decide_dead_letter(self._state, entry, body, entry.last_error, now_ms)
        first, finished = records[0], records[-1]
        if isinstance(first, TopicCreated):
            if not self._ledger.record(first):
                return False
            self._window.open_topic(first.topic_id, first.partitions)
        if not self._ledger.store_with(copy, entry.size, finished):
            return False
        key = (source.name, entry.progress.group.name, entry.progress.partition)
        self.counts[key] = self.counts.get(key, 0) + 1
        self._dispatcher.dead_lettered(entry, copy)
        return True
