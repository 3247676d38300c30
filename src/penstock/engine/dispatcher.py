"""Decides which consumer gets which message next. All deliveries, first ones and retries, start
here.

For a (group, partition) that is marked dirty it gives out retries, then new messages, to the
consumers that can take more, in turn, until the in-flight limit is reached. Messages that are not
in memory are loaded and given out when they have come; no other partition waits for them.
"""

from __future__ import annotations

from penstock.api.consumers import Sink
from penstock.core.deliver import (
    delivered,
    first_delivery,
    is_effect_committed,
    redelivery,
    returned,
    skip,
)
from penstock.core.groups import IN_FLIGHT, Progress, Unfinished
from penstock.core.scope_counts import ScopeCounts
from penstock.core.state import BrokerState
from penstock.core.topics import Topic
from penstock.engine.consumers import (
    ActiveGroup,
    ActiveGroups,
    Leaving,
    OpenConsumer,
    PartitionFeed,
    Share,
    divide,
    make_item,
    weight,
)
from penstock.engine.histogram import Histogram
from penstock.engine.leases import Leases, is_unfinished
from penstock.engine.ledger import Ledger
from penstock.engine.pages import Pages
from penstock.model.errors import PenstockError
from penstock.model.limits import DISPATCH_BURST, MAX_UNFINISHED
from penstock.model.records import DeliveredItem, Stored

Given = dict[OpenConsumer, list[tuple[DeliveredItem, Stored]]]
"""Deliveries that were assigned to consumers and are not recorded yet."""


class Dispatcher:
    def __init__(
        self, state: BrokerState, pages: Pages, ledger: Ledger, leases: Leases, opened: ScopeCounts
    ) -> None:
        self._state = state
        self._opened = opened
        self._leases = leases
        self._window = pages.window
        self._pages = pages
        self._ledger = ledger
        self._active = ActiveGroups()
        self._consumers: dict[int, OpenConsumer] = {}
        self._next_consumer = 1
        # An ordered set: groups are served in the order they asked.
        self._dirty: dict[Progress, None] = {}
        # Had something to give when there was no room to record it. Nothing is read for them
        # meanwhile: pages that cannot be given would push each other out of the cache.
        self._unrecorded: dict[Progress, None] = {}
        # Did not leave and will not: returned when that can be recorded.
        self._unreturned: dict[Unfinished, None] = {}
        self.deliveries = 0
        self.redeliveries = 0
        self.delivery_seconds = Histogram()

    # -- consumers ---------------------------------------------------------------------------

    def open(
        self, group_id: int, owner: str, lease_ms: int, prefetch: int, sink: Sink
    ) -> OpenConsumer:
        run = self._active.get(group_id) or self._active.add(self._state.groups[group_id])
        consumer = OpenConsumer(
            self._next_consumer, run, owner, lease_ms, prefetch, sink, self._consumer_changed
        )
        self._next_consumer += 1
        self._consumers[consumer.id] = consumer
        self._opened.add(run.group.topic.scope, 1)
        run.consumers[consumer.id] = consumer
        run.available[consumer] = None
        self._dirty.update(dict.fromkeys(run.group.progress))
        self._ledger.wake()
        return consumer

    def consumer_count(self, group_id: int) -> int:
        run = self._active.get(group_id)
        return len(run.consumers) if run is not None else 0

    def end_group(self, group_id: int, reason: str) -> None:
        """Ends the streams of a deleted group. Nothing of it is returned."""
        run = self._active.remove(group_id)
        if run is None:
            return
        for progress in run.group.progress:
            self._dirty.pop(progress, None)
        for consumer in list(run.consumers.values()):
            consumer.closed = True
            consumer.unwritten.clear()
            del self._consumers[consumer.id]
            self._opened.add(run.group.topic.scope, -1)
            consumer.end(reason)

    def end_all(self, reason: str) -> None:
        for consumer in list(self._consumers.values()):
            consumer.end(reason)
            consumer.close()

    def _consumer_changed(self, consumer: OpenConsumer) -> None:
        run = consumer.run
        if consumer.closed:
            if self._consumers.pop(consumer.id, None) is not None:
                self._opened.add(run.group.topic.scope, -1)
                run.available.pop(consumer, None)
                del run.consumers[consumer.id]
                if not run.consumers:
                    self._active.remove(run.group.id)
                self.give_back(list(consumer.unwritten))
        elif consumer.paused:
            run.available.pop(consumer, None)
        else:
            self._refresh(consumer)
            self._ledger.wake()

    def _start_leases(self, consumer: OpenConsumer, leaving: list[Leaving]) -> None:
        """Starts leases when their items leave, however long the commit took."""
        until = self._ledger.now_ms() + consumer.lease_ms
        for entry, item in leaving:
            if consumer.is_wanted(entry, item):
                self._leases.extend(entry, until)

    def _refresh(self, consumer: OpenConsumer) -> None:
        run = consumer.run
        if not consumer.can_take():
            run.available.pop(consumer, None)
        elif consumer not in run.available:
            run.available[consumer] = None
            self._dirty.update(run.starved)
            run.starved.clear()
            self._ledger.wake()

    # -- what makes a partition worth looking at ----------------------------------------------

    def mark(self, progress: Progress) -> None:
        """Notes that this (group, partition) may have something to deliver now."""
        run = self._active.get(progress.group.id)
        if run is not None:
            (self._dirty if run.available else run.starved)[progress] = None

    def mark_topic(self, topic: Topic, partition: int) -> None:
        """Marks the partition for every group with consumers: it has a new message."""
        for run in self._active.of_topic(topic.id):
            (self._dirty if run.available else run.starved)[run.group.progress[partition]] = None

    def try_again(self) -> None:
        """Retries what could not be recorded for lack of room."""
        unrecorded, self._unrecorded = self._unrecorded, {}
        for progress in unrecorded:
            self._mark_and_wake(progress)
        unreturned, self._unreturned = self._unreturned, {}
        if unreturned:
            self.give_back([entry for entry in unreturned if is_unfinished(entry)])

    def dead_lettered(self, entry: Unfinished, copy: Stored) -> None:
        """Marks the partitions that a dead letter changes: its source, and the one of its copy."""
        self.mark(entry.progress)
        self.mark_topic(self._state.topics_by_id[copy.topic_id], copy.partition)

    def left_flight(self, entry: Unfinished) -> None:
        """Frees the entry's place after a record ended its delivery or its wait: its consumer can
        take more, its partition can give more."""
        consumer = self._consumers.get(self._leases.settle(entry))
        self._unreturned.pop(entry, None)
        if consumer is not None:
            consumer.outstanding -= 1
            consumer.forget(entry)
            if consumer.prefetch:
                self._refresh(consumer)
        self.mark(entry.progress)

    def is_unwritten(self, entry: Unfinished) -> bool:
        """Says whether the delivery was decided and has not left: its consumer is slow, or closed
        and the return could not be recorded yet."""
        consumer = self._consumers.get(self._leases.consumer_of(entry))
        return entry in (self._unreturned if consumer is None else consumer.unwritten)

    def give_back(self, entries: list[Unfinished]) -> None:
        """Returns deliveries that never left to their group, uncounted. Another consumer gets them
        at once."""
        in_flight = [entry for entry in entries if entry.state == IN_FLIGHT]
        self._unreturned.update(dict.fromkeys(self.release(in_flight)))

    def release(self, entries: list[Unfinished]) -> list[Unfinished]:
        """Returns deliveries in flight to their places in the order, uncounted. The result lists
        those that stay in flight because their return could not be recorded."""
        by_progress: dict[Progress, list[Unfinished]] = {}
        for entry in entries:
            by_progress.setdefault(entry.progress, []).append(entry)
        kept: list[Unfinished] = []
        for progress, back in by_progress.items():
            offsets = sorted(entry.offset for entry in back)
            if self._ledger.record(returned(progress, offsets, self._ledger.now_ms())):
                for entry in back:
                    self.left_flight(entry)
            else:
                kept += back
        self._ledger.wake()
        return kept

    # -- dispatch -----------------------------------------------------------------------------

    def dispatch(self) -> None:
        """Serves every dirty (group, partition) once. One with more to give is marked again."""
        dirty, self._dirty = self._dirty, {}
        for progress in dirty:
            run = self._active.get(progress.group.id)
            if run is None:
                continue
            if not run.available:
                run.starved[progress] = None
            elif self._serve(run, progress):
                self._dirty[progress] = None
        if self._dirty:
            self._ledger.wake()

    def _serve(self, run: ActiveGroup, progress: Progress) -> bool:
        """Gives out up to a burst. Returns True when there may be more to give at once."""
        room = min(self._state.limits.max_in_flight - progress.in_flight, DISPATCH_BURST)
        if room <= 0:
            return False
        given: Given = {}
        again = self._leases.ready(progress, room)
        more, is_passable = self._give_again(run, progress, again, given)
        room -= len(again)
        if room > 0 and is_passable:
            more = self._give_new(run, progress, room, given)
        is_recorded = self._deliver(progress, given)
        if not run.available:
            run.starved[progress] = None
        return more and is_recorded and bool(run.available)

    def _give_again(
        self, run: ActiveGroup, progress: Progress, entries: list[Unfinished], given: Given
    ) -> tuple[bool, bool]:
        """Assigns entries that came back, oldest first.

        Entries that must be read from disk are skipped; their partition is marked again when they
        have come. Returns whether one was assigned, and whether new messages may follow: they may
        not pass an entry that was never delivered.
        """
        group = run.group
        is_any_given, is_passable = False, not run.feeds[progress.partition].is_set_back
        log = self._window.log(group.topic.id, progress.partition)
        for entry in entries:
            if not run.available:
                break
            message = self._pages.message(log, entry.offset)
            if message is None:
                self._fetch(run, progress, entry.offset)
                is_passable &= entry.attempts > 0
                continue
            if not (entry.attempts or is_passable):
                continue
            item = redelivery(entry)
            if is_effect_committed(group, entry.effect_key, self._ledger.now_ms()):
                if self._skip(progress, item):
                    self._leases.settle(entry)
                    is_any_given = True
                continue
            self._assign(run, item, message, given)
            is_any_given = True
        return is_any_given, is_passable

    def _fetch(self, run: ActiveGroup, progress: Progress, offset: int) -> None:
        """Loads the page of a redelivery, one at a time: it may hold the others too."""
        feed = run.feeds[progress.partition]
        if feed.is_fetching or progress in self._unrecorded:
            return
        feed.is_fetching = True
        log = self._window.log(run.group.topic.id, progress.partition)

        def fetched() -> None:
            feed.is_fetching = False
            self._mark_and_wake(progress)

        self._pages.load(log, offset, fetched)

    def _give_new(
        self,
        run: ActiveGroup,
        progress: Progress,
        room: int,
        given: Given,
    ) -> bool:
        """Assigns first deliveries, in offset order. Returns whether there may be more."""
        group = run.group
        partition = group.topic.partitions[progress.partition]
        feed = run.feeds[progress.partition]
        cursor = progress.cursor
        room = min(room, MAX_UNFINISHED - len(progress.unfinished))
        if room <= 0:
            return False
        while room > 0 and run.available:
            if cursor >= partition.end_offset:
                # An idle group must not keep evicted messages in memory.
                feed.messages = []
                return False
            message = self._next(run, progress, feed, cursor)
            if message is None:
                return False
            cursor = message.offset + 1
            item = first_delivery(message)
            if item.effect_key and is_effect_committed(
                group, item.effect_key, self._ledger.now_ms()
            ):
                # Skipping moves the cursor, so earlier deliveries must be recorded first.
                if not self._deliver(progress, given):
                    return False
                if not self._skip(progress, item):
                    return False
                continue
            self._assign(run, item, message, given)
            room -= 1
        return True

    def _skip(self, progress: Progress, item: DeliveredItem) -> bool:
        is_recorded = self._ledger.record(skip(progress, item, self._ledger.now_ms()))
        if not is_recorded:
            self._unrecorded[progress] = None
        return is_recorded

    def _assign(self, run: ActiveGroup, item: DeliveredItem, message: Stored, given: Given) -> None:
        """Gives the item to the next consumer in turn, which goes to the end of the ring."""
        consumer, _ = run.available.popitem(last=False)
        gives = given.setdefault(consumer, [])
        gives.append((item, message))
        consumer.unwritten_bytes += weight(message)
        consumer.outstanding += 1
        if consumer.can_take():
            run.available[consumer] = None

    def _next(
        self, run: ActiveGroup, progress: Progress, feed: PartitionFeed, cursor: int
    ) -> Stored | None:
        """Returns the first message at or after `cursor`, or None while it is read from disk."""
        message = feed.take(cursor)
        if message is not None:
            return message
        log = self._window.log(run.group.topic.id, progress.partition)
        page = self._pages.page(log, cursor)
        if page is not None:
            return feed.turn_to(page, cursor)
        if not feed.is_loading and progress not in self._unrecorded:
            feed.is_loading = True
            self._pages.load(log, cursor, lambda: self._fed(progress, feed))
        return None

    def _fed(self, progress: Progress, feed: PartitionFeed) -> None:
        feed.is_loading = False
        self._mark_and_wake(progress)

    def _mark_and_wake(self, progress: Progress) -> None:
        self.mark(progress)
        self._ledger.wake()

    def _deliver(self, progress: Progress, given: Given) -> bool:
        """Records what was given, for all consumers in one frame, so that a crash keeps all or
        none: the cursor must never pass an offset that no record names. Returns False without room.
        """
        if not given:
            return True
        now_ms = self._ledger.now_ms()
        for consumer, gives in given.items():
            consumer.outstanding -= len(gives)
            consumer.unwritten_bytes -= sum(weight(message) for _, message in gives)
        records = [
            delivered(
                progress, consumer.owner, [item for item, _ in gives], consumer.lease_ms, now_ms
            )
            for consumer, gives in given.items()
        ]
        is_recorded = self._ledger.record_together(records)
        if is_recorded:
            self._expect(progress, given, now_ms)
        else:
            self._unrecorded[progress] = None
            for consumer in given:
                self._refresh(consumer)
        given.clear()
        return is_recorded

    def _expect(self, progress: Progress, given: Given, now_ms: int) -> None:
        shares = [
            (consumer, self._share(progress, consumer, gives, now_ms))
            for consumer, gives in given.items()
        ]
        feed = shares[0][0].run.feeds[progress.partition]
        feed.shares += 1
        self._ledger.when_durable(lambda error: self._leave(progress, feed, shares, error))

    def _share(
        self,
        progress: Progress,
        consumer: OpenConsumer,
        gives: list[tuple[DeliveredItem, Stored]],
        now_ms: int,
    ) -> list[Leaving]:
        leaving: list[Leaving] = []
        group_id = progress.group.id
        unfinished = progress.unfinished
        for item, message in gives:
            entry = unfinished[item.offset]
            self._leases.give(entry, consumer.id)
            delivery = make_item(entry, message, group_id)
            consumer.expect(entry, delivery)
            leaving.append((entry, delivery))
            if entry.attempts > 1:
                self.redeliveries += 1
            else:
                self.delivery_seconds.observe((now_ms - message.ts) / 1000)
        self.deliveries += len(leaving)
        return leaving

    def _leave(
        self,
        progress: Progress,
        feed: PartitionFeed,
        shares: list[Share],
        error: PenstockError | None,
    ) -> None:
        """Hands the items of a durable record to their connections, or returns them."""
        if error is not None:
            return
        feed.shares -= 1
        if feed.is_set_back or any(consumer.paused for consumer, _ in shares):
            shares, back = divide(feed, shares)
            self.give_back(back)
        for consumer, leaving in shares:
            if not consumer.closed:
                self._start_leases(consumer, leaving)
                consumer.write(leaving)
                self._refresh(consumer)
        if feed.is_set_back and not feed.shares:
            feed.is_set_back = False
            self._mark_and_wake(progress)
