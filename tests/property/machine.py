"""A broker and its model, driven together by hypothesis through any history.

Each rule is one thing that happens to a broker; after each the broker comes to rest and is looked
at from outside (the model) and from inside (core.invariants, replay, nobody waits in vain).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.core.effect_rules import EffectCommand
from penstock.core.effects import Effect, effect_key
from penstock.core.groups import Unfinished
from penstock.core.image import comparable, take_image
from penstock.core.invariants import check
from penstock.core.produce import Produce
from penstock.core.settle import Settle
from penstock.core.state import BrokerState, apply
from penstock.model.envelope import Envelope, RetryPolicy
from penstock.model.errors import FailedPrecondition, NotFound, PenstockError
from penstock.model.item import Item
from penstock.model.limits import KIB, Limits
from penstock.model.records import Message, decode_record
from penstock.storage.checkpoint import load_checkpoint
from penstock.storage.log import WalOptions
from penstock.storage.recovery import walk_log
from tests.engine.harness import Broker, Reader
from tests.property.model import Model, TopicModel
from tests.storage.faulty_vfs import FLAVOURS, FaultyVfs

TTL_MS = 4000
TOPICS = ["a", "b"]
GROUPS = ["g", "h"]
OWNERS = ["o", "p"]
POLICIES = [
    None,
    None,
    RetryPolicy(1),
    RetryPolicy(2, 30),
    RetryPolicy(3, 200, 300),
    RetryPolicy(0, 50),
]
choice = st.integers(0, 11)


class Watcher(Reader):
    """A consumer's far end that tells the model what it was given."""

    def __init__(self, machine: BrokerMachine, topic: str, group: str, owner: str, lease_ms: int):
        super().__init__(topic, group, owner)
        self.machine = machine
        self.lease_ms = lease_ms
        self.is_dead = False

    def write(self, items: list[Item]) -> None:
        if self.is_dead:
            return
        super().write(items)
        for item in items:
            self.machine.heard(lambda item=item: self._given(item))  # type: ignore[misc]

    def _given(self, item: Item) -> None:
        machine = self.machine
        assert not machine.is_held, "an item left before its record was durable"
        assert not self.ended
        assert self.consumer is None or not self.consumer.paused, "a full connection was written to"
        machine.hear_of_copies(self.topic, item.offset)
        machine.model.delivered(
            self.topic, self.group, self.owner, self.lease_ms, item, machine.now
        )
        machine.deliveries.append((self, item))


class BrokerMachine(RuleBasedStateMachine):
    limits = Limits(max_in_flight=3, idempotency_ttl_ms=TTL_MS)
    options = WalOptions(segment_bytes=64 * KIB, reserve_bytes=0)
    padding = 0

    def __init__(self) -> None:
        super().__init__()
        self.model = Model(TTL_MS, self.limits.max_in_flight)
        self.deliveries: list[tuple[Watcher, Item]] = []
        self.readers: list[Watcher] = []
        self.is_held = False
        self.maybe: set[str] = set()
        self.wrong: list[Exception] = []
        self.count = 0
        self.copies: dict[str, dict[int, Message]] = {}
        self.broker = Broker(_disk(), limits=self.limits, options=self.options)
        self._open()

    def heard(self, judge: Callable[[], object]) -> None:
        """Judges what the broker says as it says it. The broker outlives a far end that raises,
        so what is wrong is kept for the next look."""
        try:
            judge()
        except (AssertionError, LookupError) as error:
            self.wrong.append(error)

    def ask(
        self, command: Callable[..., None], *arguments: Any, judge: Callable[[Any], object]
    ) -> None:
        """Gives a command, judges its answer as it is given, and lets the broker come to rest."""
        answers: list[Any] = []

        def answered(outcome: Any) -> None:
            answers.append(outcome)
            self.heard(lambda: judge(outcome))

        command(*arguments, answered)
        self.broker.settle()
        assert len(answers) == 1, f"{len(answers)} answers"

    def hear_of_copies(self, topic: str, up_to: int) -> None:
        """Dead letters are answered to nobody: they are heard of when they are first seen."""
        known = self.model.topics[topic].messages
        copies = self.copies.get(topic, {})
        new = {o: copy for o, copy in copies.items() if o <= up_to and o not in known}
        self.model.appeared(topic, new, set())

    def _open(self) -> None:
        """The broker is there; dead letters are noted as they are decided."""
        burials = self.broker.engine.parts.burials
        tell = burials.on_buried
        self.copies = {}

        def buried(entry: Unfinished, copy: Message) -> None:
            topic = self.broker.state.topics_by_id[copy.topic_id].name
            self.copies.setdefault(topic, {})[copy.offset] = copy
            tell(entry, copy)

        burials.on_buried = buried

    @property
    def now(self) -> int:
        return self.broker.clock.now_ms()

    # -- topics and groups --------------------------------------------------------------------

    @initialize(partitions=st.integers(1, 3))
    def begin(self, partitions: int) -> None:
        self.create_topic("a", partitions)

    @rule(name=st.sampled_from(TOPICS), partitions=st.integers(1, 3))
    def create_topic(self, name: str, partitions: int) -> None:
        known = self.model.topics.get(name)
        outcome = self.broker.call(self.broker.engine.create_topic, name, partitions)
        if known is None:
            assert outcome is True
            self.model.topics[name] = TopicModel(name, partitions)
        elif known.partitions == partitions:
            assert outcome is False
        else:
            assert isinstance(outcome, FailedPrecondition)

    @rule(pick=choice, is_meant=st.integers(0, 3))
    def delete_topic(self, pick: int, is_meant: int) -> None:
        if not (is_meant == 0 and self.model.topics):
            return
        name = sorted(self.model.topics)[pick % len(self.model.topics)]
        self.broker.must(self.broker.engine.delete_topic, name)
        del self.model.topics[name]
        self.copies.pop(name, None)
        self._ended(lambda reader: reader.topic == name)

    @rule(pick=choice, group=st.sampled_from(GROUPS), is_meant=st.integers(0, 2))
    def delete_group(self, pick: int, group: str, is_meant: int) -> None:
        if not (is_meant == 0 and self.model.topics):
            return
        topic = self._topic(pick)
        outcome = self.broker.call(self.broker.engine.delete_group, topic.name, group)
        if topic.groups.pop(group, None) is None:
            assert isinstance(outcome, NotFound)
        else:
            assert outcome is None
            topic.committed = {k: until for k, until in topic.committed.items() if k[0] != group}
        self._ended(lambda reader: (reader.topic, reader.group) == (topic.name, group))

    @rule(pick=choice, age=st.sampled_from([None, 0, 300]), size=st.sampled_from([None, 0, 30]))
    def configure(self, pick: int, age: int | None, size: int | None) -> None:
        if not self.model.topics:
            return
        topic = self._topic(pick)
        self.broker.must(self.broker.engine.configure_topic, topic.name, age, size)
        topic.has_retention = topic.has_retention or bool(age or size)

    def _ended(self, is_gone: Any) -> None:
        for reader in [reader for reader in self.readers if is_gone(reader)]:
            assert reader.ended, "its stream goes on"
            self.readers.remove(reader)
        self.deliveries = [(r, item) for r, item in self.deliveries if not is_gone(r)]

    # -- produce ------------------------------------------------------------------------------

    @rule(pick=choice, shape=choice, how=choice, once=choice)
    def produce(self, pick: int, shape: int, how: int, once: int) -> None:
        if not self.model.topics:
            return
        self._produce([self._command(pick, shape, how, once)])

    @rule(pick=choice, shapes=st.lists(choice, min_size=2, max_size=5), how=choice, once=choice)
    def produce_batch(self, pick: int, shapes: list[int], how: int, once: int) -> None:
        if not self.model.topics:
            return
        self._produce([self._command(pick, shape, how, once) for shape in shapes])

    def _command(self, pick: int, shape: int, how: int, once: int) -> Produce:
        topic = self._topic(pick)
        self.count += 1
        value = f"value {self.count} ".ljust(self.padding, ".")
        if shape % 4 == 0:
            return Produce(topic.name, f"key {shape}", value)
        target = self._topic(how).name if shape % 5 == 0 else ""
        final = self.model.topics[target or topic.name]
        envelope = Envelope(
            run_id=f"run {how}" if how % 2 else "",
            tenant_id="tenant" if once % 2 else "",
            idempotency_key=f"once {once % 4}" if once < 6 else "",
            target_topic=target,
            partition_override=how % final.partitions if shape % 3 == 0 else None,
            retry_policy=POLICIES[how % len(POLICIES)],
        )
        return Produce(topic.name, "", value, envelope if envelope != Envelope() else None)

    def _produce(self, commands: list[Produce]) -> None:
        self.ask(self.broker.engine.produce_many, commands, judge=self._judge_all(commands))

    def _judge_all(self, commands: list[Produce]) -> Callable[[list[Any]], None]:
        def judge(results: list[Any]) -> None:
            for command, result in zip(commands, results, strict=True):
                self._answered(command, result)

        return judge

    def _answered(self, command: Produce, result: Message | PenstockError | None) -> None:
        assert not self.is_held, "an answer left before its record was durable"
        envelope = command.envelope or Envelope()
        topic = self.model.topics[envelope.target_topic or command.topic]
        key = (envelope.tenant_id, envelope.idempotency_key)
        if key[1] and topic.keys.get(key, 0) > self.now:
            assert result is None, "a committed key was stored again"
            return
        assert isinstance(result, Message), result
        assert (result.key, result.value) == (command.key, command.value)
        assert result.envelope == command.envelope
        topic.add(result, TTL_MS)

    # -- consumers ----------------------------------------------------------------------------

    @rule(
        pick=choice,
        group=st.sampled_from(GROUPS),
        owner=st.sampled_from(OWNERS),
        lease_ms=st.sampled_from([50, 400, 3000]),
        prefetch=st.sampled_from([0, 0, 1, 2]),
    )
    def open_consumer(
        self, pick: int, group: str, owner: str, lease_ms: int, prefetch: int
    ) -> None:
        if not (self.model.topics and len(self.readers) < 5):
            return
        topic = self._topic(pick)
        topic.group(group)
        reader = Watcher(self, topic.name, group, owner, lease_ms)
        self.broker.consume(
            topic.name, group, owner, lease_ms=lease_ms, prefetch=prefetch, reader=reader
        )
        self.readers.append(reader)

    @rule(pick=choice)
    def close_consumer(self, pick: int) -> None:
        if not self.readers:
            return
        reader = self.readers.pop(pick % len(self.readers))
        self._may_come_late(reader)
        reader.live.close()
        self.broker.settle()

    @rule(pick=choice)
    def pause(self, pick: int) -> None:
        if not self.readers:
            return
        self.readers[pick % len(self.readers)].live.pause()
        self.broker.settle()

    @rule(pick=choice)
    def resume(self, pick: int) -> None:
        if not self.readers:
            return
        self.readers[pick % len(self.readers)].live.resume()
        self.broker.settle()

    @rule(pick=choice, shapes=st.lists(choice, min_size=1, max_size=3), how=choice, who=choice)
    def fill_connection(self, pick: int, shapes: list[int], how: int, who: int) -> None:
        """What is decided for a consumer finds its connection full when it is durable."""
        if not (self.model.topics and self.readers):
            return
        commands = [self._command(pick, shape, how, 9) for shape in shapes]
        judge = self._judge_all(commands)
        self.broker.engine.produce_many(
            commands, lambda results: self.heard(lambda: judge(results))
        )
        self.broker.scheduler._turns.popleft()()
        self.readers[who % len(self.readers)].live.pause()
        self.broker.settle()

    def _may_come_late(self, reader: Watcher) -> None:
        """What it has not been given may be given first after later ones were."""
        group = self.model.topics[reader.topic].groups[reader.group]
        group.late |= {entry.offset for entry in reader.live.unwritten}

    def _is_hidden(self, reader: Watcher, offset: int) -> bool:
        return offset in self._unwritten(reader.topic, reader.group)

    def _unwritten(self, topic: str, group: str) -> set[int]:
        """What is decided for somebody whose connection is full."""
        return {
            entry.offset
            for reader in self.readers
            if (reader.topic, reader.group) == (topic, group)
            for entry in reader.live.unwritten
        }

    # -- settling -----------------------------------------------------------------------------

    @precondition(lambda self: self.deliveries)
    @rule(pick=choice, owner=st.sampled_from([None, None, *OWNERS]), is_fenced=st.booleans())
    def ack(self, pick: int, owner: str | None, is_fenced: bool) -> None:
        reader, item = self._delivery(pick)
        command = self._naming(reader, item, owner, is_fenced)
        self.ask(self.broker.engine.ack, command, judge=self._judge_ack(reader, item, command))

    @precondition(lambda self: self.deliveries)
    @rule(picks=st.lists(choice, min_size=1, max_size=4))
    def ack_batch(self, picks: list[int]) -> None:
        named = [self._delivery(pick) for pick in picks]
        commands = [self._naming(reader, item, None, False) for reader, item in named]
        judges = [
            self._judge_ack(reader, item, command)
            for (reader, item), command in zip(named, commands, strict=True)
        ]

        def judge(outcomes: list[Any]) -> None:
            for judge_one, outcome in zip(judges, outcomes, strict=True):
                judge_one(outcome)

        self.ask(self.broker.engine.ack_many, commands, judge=judge)

    def _judge_ack(self, reader: Watcher, item: Item, command: Settle) -> Callable[[Any], None]:
        expected = self._expected(reader, item, command, is_ack=True)

        def judge(outcome: Any) -> None:
            is_done = item.offset in self.model.topics[reader.topic].groups[reader.group].done
            assert (outcome is None) == is_done or expected in (None, outcome is None), outcome
            if outcome is None:
                self.model.acked(reader.topic, reader.group, item.offset, self.now)

        return judge

    @precondition(lambda self: self.deliveries)
    @rule(pick=choice, owner=st.sampled_from([None, None, *OWNERS]), is_fenced=st.booleans())
    def nack(self, pick: int, owner: str | None, is_fenced: bool) -> None:
        reader, item = self._delivery(pick)
        command = self._naming(reader, item, owner, is_fenced)
        expected = self._expected(reader, item, command, is_ack=False)
        reason = f"reason {pick}"

        def judge(outcome: Any) -> None:
            assert expected is None or (outcome is None) == expected, outcome
            if outcome is None:
                self.model.nacked(reader.topic, reader.group, item.offset, reason, self.now)

        self.ask(self.broker.engine.nack, command, reason, judge=judge)

    @precondition(lambda self: self.deliveries)
    @rule(pick=choice, lease_ms=st.sampled_from([20, 700]), is_fenced=st.booleans())
    def extend(self, pick: int, lease_ms: int, is_fenced: bool) -> None:
        reader, item = self._delivery(pick)
        command = self._naming(reader, item, None, is_fenced)
        seen = self.model.topics[reader.topic].groups[reader.group].of(item.offset)
        is_leased = seen.is_leased(self.now) and seen.owner == reader.owner
        is_hidden = self._is_hidden(reader, item.offset)

        def judge(outcome: Any) -> None:
            if outcome is None and not is_hidden:
                assert is_leased, "a lease was extended that had ended"
                self.model.extended(reader.topic, reader.group, item.offset, lease_ms, self.now)

        self.ask(self.broker.engine.extend, command, lease_ms, judge=judge)

    def _expected(self, reader: Watcher, item: Item, command: Settle, *, is_ack: bool) -> Any:
        """True: it must succeed. False: it must be refused. None: an observer cannot know."""
        group = self.model.topics[reader.topic].groups[reader.group]
        if item.offset in group.done:
            return is_ack
        seen = group.of(item.offset)
        if item.offset in group.uncertain or self._is_hidden(reader, item.offset):
            return None
        is_owner = seen.owner == command.owner
        return is_owner and (not command.delivery_id or item.attempts == seen.attempts)

    def _delivery(self, pick: int) -> tuple[Watcher, Item]:
        """One of the latest, or of those before."""
        recent = self.deliveries[-12:]
        return recent[-1 - pick % len(recent)]

    def _naming(self, reader: Watcher, item: Item, owner: str | None, is_fenced: bool) -> Settle:
        return Settle(
            reader.topic,
            reader.group,
            item.partition,
            item.offset,
            owner or reader.owner,
            item.delivery_id if is_fenced else "",
        )

    # -- effects ------------------------------------------------------------------------------

    @rule(
        pick=choice,
        group=st.sampled_from(GROUPS),
        once=choice,
        owner=st.sampled_from(OWNERS),
        then=st.sampled_from(["commit", "commit", "fail", "nothing"]),
    )
    def effect(self, pick: int, group: str, once: int, owner: str, then: str) -> None:
        if not self.model.topics:
            return
        topic = self._topic(pick)
        tenant = "tenant" if once % 2 else ""
        command = EffectCommand(tenant, topic.name, group, f"once {once % 4}", owner)
        key = effect_key(tenant, command.key)
        engine = self.broker.engine
        began = self.broker.call(engine.begin_effect, command, 200)
        if topic.committed.get((group, key), 0) > self.now:
            assert isinstance(began, Effect), "a committed effect is to be run again"
        if began is not None:
            return
        if then == "commit":
            assert self.broker.call(engine.commit_effect, command, "result") is None
            topic.committed[group, key] = self.now + TTL_MS
        elif then == "fail":
            assert self.broker.call(engine.fail_effect, command, "reason") is None

    # -- time and death -----------------------------------------------------------------------

    @rule(ms=st.sampled_from([1, 9, 60, 450, 1100, 5000]))
    def pass_time(self, ms: int) -> None:
        for reader in self.readers:
            self._may_come_late(reader)
        self.broker.pass_ms(ms)

    @rule()
    def restart(self) -> None:
        for reader in self.readers:
            self._may_come_late(reader)
        self.broker.close()
        self.model.restarted(self.now, is_crash=False)
        self._reopen()

    @rule(flavour=st.sampled_from(FLAVOURS), seed=st.integers(0, 3))
    def crash(self, flavour: str, seed: int) -> None:
        self._crash(flavour, seed)

    @precondition(lambda self: self.model.topics)
    @rule(
        flavour=st.sampled_from(FLAVOURS),
        seed=st.integers(0, 5),
        shapes=st.lists(choice, max_size=3),
        acks=st.lists(choice, max_size=2),
        nacks=st.lists(choice, max_size=1),
    )
    def crash_before_the_sync(
        self, flavour: str, seed: int, shapes: list[int], acks: list[int], nacks: list[int]
    ) -> None:
        """Nothing is answered, nothing leaves, and either all of a frame or none of it is left."""
        broker = self.broker
        broker.hold_writes()
        self.is_held = True
        answers: list[Any] = []
        for shape in shapes:
            command = self._command(shape, shape, seed, shape)
            self.maybe.add(command.value)
            broker.engine.produce(command, answers.append)
        doubtful = [self._delivery(pick) for pick in (acks if self.deliveries else [])]
        for reader, item in doubtful:
            command_ = self._naming(reader, item, None, False)
            broker.engine.ack(command_, self._not_yet(answers, reader, item))
        for pick in nacks if self.deliveries else []:
            reader, item = self._delivery(pick)
            seen = self.model.topics[reader.topic].groups[reader.group].of(item.offset)
            seen.errors = seen.errors | {"doubtful"}
            seen.not_before = min(seen.not_before, self.now)
            broker.engine.nack(
                self._naming(reader, item, None, False), "doubtful", lambda outcome: None
            )
        broker.scheduler.run()
        if broker.log.has_pending:
            broker.scheduler.run_until(lambda: broker.disk.is_held)
            broker.scheduler.run()
        assert not [a for a in answers if not isinstance(a, PenstockError) and a is not None]
        self._crash(flavour, seed, doubtful)

    def _not_yet(self, answers: list[Any], reader: Watcher, item: Item) -> Any:
        """A success that needs a record must not be told; a duplicate needs none."""
        group = self.model.topics[reader.topic].groups[reader.group]
        is_done = item.offset in group.done

        def answered(outcome: PenstockError | None) -> None:
            answers.append("early" if outcome is None and not is_done else None)

        return answered

    def _crash(
        self, flavour: str, seed: int, doubtful: list[tuple[Watcher, Item]] | None = None
    ) -> None:
        survivor = self.broker.disk.crash(flavour, seed)
        for reader in self.readers:
            reader.is_dead = True
        self.broker.abandon()
        self.is_held = False
        survivor._dsync_flag = 0
        self.broker.vfs = survivor
        self.model.restarted(self.now, is_crash=True)
        self._reopen(doubtful or [])

    def _reopen(self, doubtful: list[tuple[Watcher, Item]] | None = None) -> None:
        self.readers.clear()
        self.broker.open()
        self._open()
        for reader, item in doubtful or []:
            self.model.topics[reader.topic].groups[reader.group].maybe_done.add(item.offset)

    # -- looking ------------------------------------------------------------------------------

    @invariant()
    def holds_its_promises(self) -> None:
        if self.wrong:
            raise self.wrong[0]
        check(self.broker.state)
        self.looks_right_from_outside()
        self.nobody_waits_in_vain()
        self.replays_to_the_same_state()

    def looks_right_from_outside(self) -> None:
        topics = self.broker.state.topics
        for name in topics:
            if name not in self.model.topics:
                assert name.startswith("dlq."), f"{name} came from nowhere"
                self.model.topics[name] = TopicModel(name, len(topics[name].partitions))
        assert sorted(topics) == sorted(self.model.topics)
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
                for partition in range(topic.partitions):
                    unwritten = self._unwritten(name, group)
                    self.model.in_order(name, group, partition, unwritten)

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
        dispatcher = self.broker.engine.parts.dispatcher
        for run in dispatcher._runs.values():
            able = [consumer for consumer in run.consumers.values() if consumer.can_take()]
            assert set(run.available) == set(able), "the ring is of those who can take"
            for consumer in run.consumers.values():
                assert consumer.outstanding >= len(consumer.unwritten)
            for progress in run.group.progress:
                if able and progress.in_flight < self.limits.max_in_flight:
                    partition = run.group.topic.partitions[progress.partition]
                    assert not progress.ready, f"{list(progress.ready)} wait in vain"
                    assert progress.cursor >= partition.end_offset, "new messages wait in vain"

    def replays_to_the_same_state(self) -> None:
        """From the disk alone: the last snapshot and the log behind it."""
        vfs = self.broker.disk.restarted()
        checkpoint = load_checkpoint(vfs, self.broker.directory, self.limits)
        state: BrokerState = checkpoint.state
        walk_log(
            vfs,
            self.broker.directory,
            first_segment=checkpoint.first_segment,
            replay=lambda data, _: apply(state, decode_record(data)),
        )
        check(state)
        live = comparable(take_image(self.broker.state), self.now)
        assert comparable(take_image(state), self.now) == live

    # -- the end ------------------------------------------------------------------------------

    def teardown(self) -> None:
        try:
            self._drain()
        finally:
            self.broker.close()
            assert self.broker.disk.open_files == 0, "files are left open"

    def _drain(self) -> None:
        """With time and a consumer for every group, everything gets done."""
        for reader in self.readers:
            self._may_come_late(reader)
            reader.live.close()
        self.readers.clear()
        self.broker.settle()
        # Leases of earlier consumers end, and backoffs too.
        for name, topic in list(self.model.topics.items()):
            for group in list(topic.groups):
                reader = Watcher(self, name, group, "drain", 60_000)
                self.broker.consume(name, group, "drain", lease_ms=60_000, reader=reader)
                self.readers.append(reader)
        for _ in range(12):
            for reader in self.readers:
                for item in reader.take():
                    command = self._naming(reader, item, None, False)
                    judge = self._judge_ack(reader, item, command)
                    self.ask(self.broker.engine.ack, command, judge=judge)
            self.broker.pass_ms(1000)
        self.holds_its_promises()
        for name, topic in self.model.topics.items():
            for group_name, known in topic.groups.items():
                left = (known.owed & set(topic.messages)) - known.done
                assert not left, f"{name}/{group_name}: {left} were never delivered"

    def _topic(self, pick: int) -> TopicModel:
        names = sorted(self.model.topics)
        return self.model.topics[names[pick % len(names)]]


def _disk() -> FaultyVfs:
    """A durable write is a write and a sync: a crash may come between them."""
    vfs = FaultyVfs()
    vfs._dsync_flag = 0
    return vfs


class TightMachine(BrokerMachine):
    """Hardly any memory and short segments: evicted, paged, sealed and vacuumed all the time."""

    limits = Limits(max_in_flight=3, idempotency_ttl_ms=TTL_MS, memory_bytes=6 * KIB)
    options = WalOptions(segment_bytes=16 * KIB, reserve_bytes=0, frame_bytes=8 * KIB)
    padding = 1200
