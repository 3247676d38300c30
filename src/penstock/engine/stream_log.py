"""The log of one durable stream: stores its events, and says how far they are durable.

Invariant: a publish is one frame, and is answered when that is on disk. `durable_end` never passes
an event that is not. The events are those of a topic (core/stream_logs.py). Must not know
subscribers, except that those who read the log want to hear when it has grown.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from penstock.api.metrics import StreamCounts
from penstock.core.publish_rules import NewEvents, Repeat, decide_event, decide_publish
from penstock.core.state import BrokerState
from penstock.core.topics import Topic
from penstock.engine.ledger import Ledger
from penstock.engine.quotas import PublishMeter
from penstock.model.errors import PenstockError, ResourceExhausted
from penstock.storage.log import RECORD_OVERHEAD_BYTES

if TYPE_CHECKING:
    from penstock.engine.publish_queue import PendingPublish

Mark = Callable[[list[tuple[int, int]]], None]
"""Marks partitions with new messages for dispatch."""

EVENT_OVERHEAD_BYTES = 64 + RECORD_OVERHEAD_BYTES
"""The most bytes that the log needs for an event besides its payload."""

PUBLISH_LATER = "publish goes on when there is room"


class Cursor(Protocol):
    """A reader of the log."""

    def advance(self) -> None:
        """Called when events of the log have become durable."""
        ...


class StreamLog:
    def __init__(
        self,
        state: BrokerState,
        ledger: Ledger,
        topic: Topic,
        mark: Mark,
        counts: StreamCounts,
        meter: PublishMeter,
    ) -> None:
        self.meter = meter
        self.topic = topic
        # Nothing was published since the start of the broker: all that is there is durable.
        self.durable_end = topic.next_offset
        self.cursors: set[Cursor] = set()
        self._state = state
        self._ledger = ledger
        self._mark = mark
        self._counts = counts

    def is_repeat(self, publish: PendingPublish) -> bool:
        """Says whether the publish is stored already, by its number."""
        if publish.sequence is None:
            return False
        publisher = self.topic.publishers.find(publish.producer_id, self._ledger.now_ms())
        return publisher is not None and publish.sequence < publisher.next

    def decide(self, publish: PendingPublish) -> NewEvents | Repeat:
        """Raises if the publish is refused. If it invalidates keys, there must be room for all of
        it, since it cannot be refused after that."""
        ledger = self._ledger
        if ledger.failure is not None:
            raise ledger.failure
        decided = decide_publish(
            self._state,
            self.topic,
            publish.payloads,
            publish.nbytes,
            publish.producer_id,
            publish.sequence,
            ledger.now_ms(),
        )
        if isinstance(decided, NewEvents):
            self.meter.check(len(publish.payloads), publish.nbytes)
        if publish.targets:
            size = publish.nbytes + EVENT_OVERHEAD_BYTES * (len(publish.payloads) + 1)
            if not ledger.can_store(size):
                raise ledger.no_room(PUBLISH_LATER)
        return decided

    def store(self, decided: NewEvents) -> int:
        """Stores the events. Returns the offset of the first."""
        ledger, events = self._ledger, decided.events
        if len(events) == 1 and decided.published is None:
            ledger.store(events[0], len(events[0].value))
        else:
            sizes = [len(event.value) for event in events]
            if ledger.store_all(events, sizes, decided.published) is None:
                raise ledger.no_room(PUBLISH_LATER)
        self.meter.take(len(events), sum(len(event.value) for event in events))
        if self.topic.groups:
            self._mark([(self.topic.id, 0)])
        return events[0].offset

    def publish(self, publish: PendingPublish) -> None:
        """Stores and answers a publish that nobody waits for except those who read the log."""
        if publish.sequence is None and len(publish.payloads) == 1 and not self.cursors:
            self._publish_one(publish)
            return
        try:
            decided = self.decide(publish)
            publish.offset = decided.offset if isinstance(decided, Repeat) else self.store(decided)
        except PenstockError as error:
            self._counts.refused_publishes += _is_full(error)
            self._ledger.answer(publish.done, error)
            return
        if isinstance(decided, NewEvents):
            self._counts.published += len(decided.events)
        if self.cursors or isinstance(decided, Repeat):
            self._ledger.when_durable(lambda failure: self._settled(publish, decided, failure))
        else:
            self._ledger.answer(publish.done, publish.offset)

    def _publish_one(self, publish: PendingPublish) -> None:
        ledger, topic, payload = self._ledger, self.topic, publish.payloads[0]
        outcome: int | PenstockError
        try:
            if ledger.failure is not None:
                raise ledger.failure
            event = decide_event(self._state, topic, payload, ledger.now_ms())
            self.meter.check(1, len(payload))
            ledger.store(event, len(payload))
            self.meter.take(1, len(payload))
            if topic.groups:
                self._mark([(topic.id, 0)])
            outcome = event.offset
            self._counts.published += 1
        except PenstockError as error:
            outcome = error
            self._counts.refused_publishes += _is_full(error)
        ledger.answer(publish.done, outcome)

    def _settled(
        self,
        publish: PendingPublish,
        decided: NewEvents | Repeat,
        failure: PenstockError | None,
    ) -> None:
        if failure is None and isinstance(decided, NewEvents):
            self.grown_to(decided.events[-1].offset + 1)
        publish.done(failure or publish.offset)

    def follow_publish(self, publish: PendingPublish) -> None:
        """Counts events that are stored already, and tells the readers when they are durable."""
        self._counts.published += len(publish.payloads)
        if self.cursors and publish.offset is not None:
            end = publish.offset + len(publish.payloads)
            self._ledger.when_durable(lambda failure: None if failure else self.grown_to(end))

    def grown_to(self, end: int) -> None:
        """Tells the readers of the log that all events below `end` are durable."""
        if end > self.durable_end:
            self.durable_end = end
            for cursor in list(self.cursors):
                cursor.advance()

    def follow(self, cursor: Cursor) -> None:
        """Adds a reader. Without one, nobody kept count of what is durable."""
        if not self.cursors:
            end = self.topic.next_offset
            self._ledger.when_durable(
                lambda failure: self.grown_to(end) if failure is None else None
            )
        self.cursors.add(cursor)


def _is_full(error: PenstockError) -> bool:
    """Says whether the stream was full. Refusals by a quota are counted with the quota."""
    return isinstance(error, ResourceExhausted) and error.reason != "quota"
