"""A broker with its model beside it, and the looks that are taken at both after every step.

From outside: what is stored, delivered and done is what the model says. From inside: the core's
invariants hold, nobody who can take something waits in vain, and both the disk alone and a follower
of the log give the same state. The rules that make things happen are in machine.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import inf
from typing import Any

from hypothesis.stateful import RuleBasedStateMachine, invariant

from penstock.api.messages import Settle
from penstock.core.groups import IN_FLIGHT, WAITING, Unfinished
from penstock.core.invariants import check
from penstock.engine.leases import NO_TICK, TICK_MS
from penstock.model.item import Item
from penstock.model.limits import KIB, Limits
from penstock.model.records import Message
from penstock.storage.log import WalOptions
from tests.engine.harness import Broker, Reader
from tests.property.follower import Follower, must_equal, recovered
from tests.property.model import Model, TopicModel
from tests.storage.faulty_vfs import FaultyVfs

TTL_MS = 4000
Judge = Callable[[Any], object]


class Watcher(Reader):
    """A consumer's far end that tells the model what it was given."""

    def __init__(self, seen_by: Observed, topic: str, group: str, owner: str, lease_ms: int):
        super().__init__(topic, group, owner)
        self.seen_by = seen_by
        self.lease_ms = lease_ms
        self.is_dead = False

    def write(self, items: list[Item]) -> None:
        if self.is_dead:
            return
        super().write(items)
        for item in items:
            self.seen_by.heard(self._given, item)

    def _given(self, item: Item) -> None:
        observed = self.seen_by
        assert not observed.is_held, "an item left before its record was durable"
        assert not self.ended, "an item came after the end"
        assert self.consumer is None or not self.consumer.paused, "a full connection was written to"
        observed.hear_of_copies(self.topic, item.offset)
        observed.model.delivered(
            self.topic, self.group, self.owner, self.lease_ms, item, observed.now
        )
        observed.deliveries.append((self, item))


class Observed(RuleBasedStateMachine):
    limits = Limits(max_in_flight=3, idempotency_ttl_ms=TTL_MS)
    options = WalOptions(segment_bytes=64 * KIB, reserve_bytes=0)

    def __init__(self) -> None:
        super().__init__()
        self.model = Model(TTL_MS, self.limits.max_in_flight)
        self.deliveries: list[tuple[Watcher, Item]] = []
        self.readers: list[Watcher] = []
        self.is_held = False
        self.maybe: set[str] = set()
        self.wrong: list[Exception] = []
        self.copies: dict[str, dict[int, Message]] = {}
        vfs = FaultyVfs()
        vfs._dsync_flag = 0  # a write and a sync: a crash may come between them
        self.broker = Broker(vfs, limits=self.limits, options=self.options)
        self.opened()

    @property
    def now(self) -> int:
        return self.broker.clock.now_ms()

    # -- listening ----------------------------------------------------------------------------

    def heard(self, judge: Judge, outcome: Any) -> None:
        """Judges what the broker says as it says it. The broker outlives a far end that raises,
        so what is wrong is kept for the next look."""
        try:
            judge(outcome)
        except (AssertionError, LookupError) as error:
            self.wrong.append(error)

    def ask(self, command: Callable[..., None], *arguments: Any, judge: Judge) -> None:
        """Gives a command, judges its answer as it is given, and lets the broker come to rest."""
        answers: list[Any] = []

        def answered(outcome: Any) -> None:
            answers.append(outcome)
            self.heard(judge, outcome)

        command(*arguments, answered)
        self.broker.settle()
        assert len(answers) == 1, f"{len(answers)} answers"

    def opened(self) -> None:
        """A broker is there. Dead letters are answered to nobody: they are noted as decided."""
        self.follower = Follower(self.broker)
        dispatcher: Any = self.broker.engine.parts.dispatcher
        tell = dispatcher.dead_lettered
        self.copies = {}

        def buried(entry: Unfinished, copy: Message) -> None:
            topic = self.broker.state.topics_by_id[copy.topic_id].name
            self.copies.setdefault(topic, {})[copy.offset] = copy
            tell(entry, copy)

        dispatcher.dead_lettered = buried

    def hear_of_copies(self, topic: str, up_to: float = inf) -> None:
        """Each once: retention may have taken it since, before anyone looked."""
        copies = self.copies.get(topic, {})
        new = [offset for offset in copies if offset <= up_to]
        self.model.appeared(topic, {offset: copies.pop(offset) for offset in new}, set())

    def doubt_copies(self) -> None:
        """A crash came before their sync: what is buried now may be trimmed by the next start."""
        for topic, copies in self.copies.items():
            graveyard = self.model.topics.get(topic)
            if graveyard is not None and graveyard.has_retention:
                for copy in copies.values():
                    self.model.maybe_buried(copy)

    def judge_ack(self, reader: Watcher, item: Item, command: Settle) -> Judge:
        expected = self.expected(reader, item, command, is_ack=True)

        def judge(outcome: Any) -> None:
            is_done = item.offset in self.model.topics[reader.topic].groups[reader.group].done
            is_repeated = outcome is None and is_done
            assert is_repeated or expected in (None, outcome is None), outcome
            if outcome is None:
                self.model.acked(reader.topic, reader.group, item.offset, self.now)

        return judge

    def expected(
        self, reader: Watcher, item: Item, command: Settle, *, is_ack: bool
    ) -> bool | None:
        """True: it must succeed. False: it must be refused. None: an observer cannot know."""
        group = self.model.topics[reader.topic].groups[reader.group]
        if item.offset in group.done:
            return is_ack
        seen = group.of(item.offset)
        if item.offset in group.uncertain | self.unwritten(reader.topic, reader.group):
            return None
        is_owner = seen.owner == command.owner
        return is_owner and (not command.delivery_id or item.delivery_id == seen.delivery_id)

    def unwritten(self, topic: str, group: str) -> set[int]:
        """What is decided for somebody whose connection is full."""
        return {
            entry.offset
            for reader in self.readers
            if (reader.topic, reader.group) == (topic, group)
            for entry in reader.live.unwritten
        }

    def may_come_late(self, reader: Watcher) -> None:
        """What it has not been given may be given first after later ones were."""
        group = self.model.topics[reader.topic].groups[reader.group]
        group.late |= {entry.offset for entry in reader.live.unwritten}

    # -- looking ------------------------------------------------------------------------------

    @invariant()
    def holds_its_promises(self) -> None:
        if self.wrong:
            raise self.wrong[0]
        check(self.broker.state)
        self.looks_right_from_outside()
        self.nobody_waits_in_vain()
        self.leases_are_those_of_the_state()
        self.replays_to_the_same_state()
        self.follower.compare()

    def looks_right_from_outside(self) -> None:
        topics = self.broker.state.topics
        for name in topics:
            if name not in self.model.topics:
                assert name.startswith("dlq."), f"{name} came from nowhere"
                self.model.topics[name] = TopicModel(name, len(topics[name].partitions))
        assert sorted(topics) == sorted(self.model.topics)
        for name in topics:
            self.hear_of_copies(name)
        held = {name: self._held(name) for name in topics}
        for name in sorted(topics, key=lambda name: name.startswith("dlq.")):
            self.model.appeared(name, held[name], self.maybe)
        for name, topic in self.model.topics.items():
            assert sorted(topics[name].groups) == sorted(topic.groups)
            for group in topic.groups:
                finished = self._finished(name, group) & set(held[name])
                self.model.finished(name, group, finished, set(held[name]))
            self.model.vanished(name, held[name])
            for group in topic.groups:
                self.model.in_order(name, group, self.unwritten(name, group))

    def _held(self, name: str) -> dict[int, Message]:
        """Every message of the topic, read in pages."""
        found: dict[int, Message] = {}
        for partition in range(self.model.topics[name].partitions):
            messages = self.broker.stored(name, partition)
            offsets = [message.offset for message in messages]
            assert offsets == sorted(offsets)
            assert all(message.partition == partition for message in messages)
            found.update(zip(offsets, messages, strict=True))
        return found

    def _finished(self, topic: str, group: str) -> set[int]:
        done: set[int] = set()
        for progress in self.broker.state.topics[topic].groups[group].progress:
            done |= {
                offset
                for offset, message in self.model.topics[topic].messages.items()
                if message.partition == progress.partition
                and progress.first_offset <= offset < progress.cursor
                and offset not in progress.unfinished
            }
        return done

    def nobody_waits_in_vain(self) -> None:
        """Whoever can take something has taken what there is."""
        for run in self.broker.engine.parts.dispatcher._active.all():
            able = {consumer for consumer in run.consumers.values() if consumer.can_take()}
            assert set(run.available) == able, "the ring is of those who can take"
            leases = self.broker.engine.parts.leases
            held = Counter(
                leases.consumer_of(entry)
                for progress in run.group.progress
                for entry in progress.unfinished.values()
            )
            for consumer in run.consumers.values():
                assert consumer.outstanding == held[consumer.id], "its credit is not right"
                assert consumer.outstanding >= len(consumer.unwritten)
                assert not consumer.prefetch or consumer.outstanding <= consumer.prefetch
            for progress in run.group.progress:
                assert progress.in_flight <= self.limits.max_in_flight
                if able and progress.in_flight < self.limits.max_in_flight:
                    partition = run.group.topic.partitions[progress.partition]
                    assert not leases.ready(progress, 1), "what came back waits in vain"
                    assert progress.cursor >= partition.end_offset, "new messages wait in vain"

    def replays_to_the_same_state(self) -> None:
        """From the disk alone: the last snapshot and the log behind it."""
        must_equal(recovered(self.broker), self.broker)

    def leases_are_those_of_the_state(self) -> None:
        """What only the process knows covers what is in flight and what waits, and no more."""
        leases = self.broker.engine.parts.leases
        state = self.broker.state
        entries = {entry for group in state.groups.values() for entry in group.unfinished()}
        timed = {entry for entry in entries if entry.state in (IN_FLIGHT, WAITING)}
        assert set(leases._of) == timed, "a lease or an alarm is missing, or left over"
        due = {alarm.entry for alarms in leases._due.values() for alarm in alarms.values()}
        for entry, lease in leases._of.items():
            is_set = lease.tick != NO_TICK
            assert lease.entry is entry
            assert not is_set or lease.tick == -(-lease.until // TICK_MS)
            assert not is_set or lease in leases._timers._buckets[lease.tick]
            if entry.state == WAITING:
                assert lease.until == entry.retry_at or entry in due
                assert is_set != (entry in due), "it rings, or it has rung"
        assert due <= timed
        assert all(leases._timers._buckets.values())
        kept = sum(map(len, leases._timers._buckets.values()))
        assert kept == sum(lease.tick != NO_TICK for lease in leases._of.values())

    # -- the end ------------------------------------------------------------------------------

    def teardown(self) -> None:
        try:
            self._drain()
        finally:
            self.broker.close()
            assert self.broker.disk.open_files == 0, "files are left open"

    def _drain(self) -> None:
        """With time, and a consumer for every group, everything gets done."""
        for reader in self.readers:
            self.may_come_late(reader)
            reader.live.close()
        self.readers.clear()
        self.broker.settle()
        # Until the leases of those before have ended, and their backoffs too.
        ends_ms = self.model.last_due(self.now) + 12_000
        for name, topic in list(self.model.topics.items()):
            for group in list(topic.groups):
                reader = Watcher(self, name, group, "drain", 60_000)
                self.broker.consume(name, group, "drain", lease_ms=60_000, reader=reader)
                self.readers.append(reader)
        while self.now < ends_ms:
            while items := [(reader, item) for reader in self.readers for item in reader.take()]:
                for reader, item in items:
                    command = self.broker.naming(reader, item)
                    judge = self.judge_ack(reader, item, command)
                    self.ask(self.broker.engine.ack, command, judge=judge)
            self.broker.pass_ms(1000)
        self.holds_its_promises()
        for name, topic in self.model.topics.items():
            for group_name, known in topic.groups.items():
                left = (known.owed & set(topic.messages)) - known.done
                assert not left, f"{name}/{group_name}: {left} were never delivered"
