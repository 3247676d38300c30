"""The things that happen to a broker, as rules: hypothesis makes any history of them.

What is alike is one rule with a choice, so that a history is mostly produce, consume, ack, nack
and time, with a deletion or a crash here and there.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from penstock.api.effects import BegunEffect, EffectCommand
from penstock.api.messages import Produce, Settle
from penstock.api.topics import RetryDefaults
from penstock.core.effects import effect_key
from penstock.model.access import AccessRule, Role
from penstock.model.envelope import Envelope, RetryPolicy
from penstock.model.errors import FailedPrecondition, NotFound, PenstockError
from penstock.model.item import Item
from penstock.model.limits import KIB, Limits
from penstock.model.progress import Reached
from penstock.model.records import Message
from penstock.storage.log import WalOptions
from tests.property.model import TopicModel
from tests.property.observed import TTL_MS, Judge, Observed, Watcher
from tests.storage.faulty_vfs import FLAVOURS

TOPICS = ["a", "b"]
GROUPS = ["g", "h"]
OWNERS = ["o", "p"]
SOME = ["produce", "consume"]
POLICIES = [
    None,
    RetryPolicy(1),
    RetryPolicy(2),
    RetryPolicy(2, 30),
    RetryPolicy(3, 200, 300),
    RetryPolicy(0, 50, 400),
]
choice = st.integers(0, 11)
shapes = st.lists(choice, min_size=1, max_size=6)
owners = st.sampled_from([None, None, None, *OWNERS])
has_topics = precondition(lambda self: self.model.topics)
has_deliveries = precondition(lambda self: self.deliveries)
has_readers = precondition(lambda self: self.readers)


class BrokerMachine(Observed):
    padding = 0

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    @initialize(partitions=st.integers(1, 3), group=st.sampled_from(GROUPS))
    def begin(self, partitions: int, group: str) -> None:
        self._create_topic("a", partitions)
        self.open_consumer(0, group, "o", 400, 0)

    # -- produce ------------------------------------------------------------------------------

    @has_topics
    @rule(pick=choice, shapes=shapes, how=choice, once=choice)
    def produce(self, pick: int, shapes: list[int], how: int, once: int) -> None:
        commands = [self._command(pick, shape, how, once) for shape in shapes]
        self.ask(self.broker.engine.produce_many, commands, judge=self._judge_stored(commands))

    @has_topics
    @rule(pick=choice, shape=choice, how=choice, once=choice)
    def produce_one(self, pick: int, shape: int, how: int, once: int) -> None:
        command = self._command(pick, shape, how, once)
        judge = self._judge_stored([command])
        self.ask(self.broker.engine.produce, command, judge=lambda outcome: judge([outcome]))

    @has_readers
    @rule(pick=choice, shapes=shapes, how=choice, who=choice)
    def produce_for_a_full_connection(
        self, pick: int, shapes: list[int], how: int, who: int
    ) -> None:
        """What is decided for a consumer finds its connection full when it is durable."""
        commands = [self._command(pick, shape, how, 9) for shape in shapes]
        judge = self._judge_stored(commands)
        self.broker.engine.produce_many(commands, lambda outcome: self.heard(judge, outcome))
        self.broker.scheduler._turns.popleft()()
        self.readers[who % len(self.readers)].live.pause()
        self.broker.settle()

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
            idempotency_key=f"once {once % 4} {shape % 2}" if once < 6 else "",
            target_topic=target,
            partition_override=how % final.partitions if shape % 3 == 0 else None,
            retry_policy=POLICIES[(how + shape) % len(POLICIES)],
        )
        return Produce(topic.name, "", value, envelope if envelope != Envelope() else None)

    def _judge_stored(self, commands: list[Produce]) -> Judge:
        def judge(outcomes: list[Any]) -> None:
            for command, outcome in zip(commands, outcomes, strict=True):
                self._stored(command, outcome)

        return judge

    def _stored(self, command: Produce, outcome: Message | PenstockError | None) -> None:
        envelope = command.envelope or Envelope()
        topic = self.model.topics[envelope.target_topic or command.topic]
        key = (envelope.tenant_id, envelope.idempotency_key)
        if key[1] and topic.keys.get(key, 0) > self.now:
            assert outcome is None, "a committed key was stored again"
            return
        assert isinstance(outcome, Message), outcome
        assert (outcome.key, outcome.value) == (command.key, command.value)
        assert outcome.envelope == command.envelope
        topic.add(outcome, TTL_MS)

    # -- consumers ----------------------------------------------------------------------------

    @has_topics
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
        if len(self.readers) == 5:
            return
        topic = self._topic(pick)
        topic.group(group)
        reader = Watcher(self, topic.name, group, owner, lease_ms)
        self.broker.consume(
            topic.name, group, owner, lease_ms=lease_ms, prefetch=prefetch, reader=reader
        )
        self.readers.append(reader)

    @has_readers
    @rule(pick=choice, what=st.sampled_from(["pause", "resume", "resume", "close"]))
    def connection(self, pick: int, what: str) -> None:
        reader = self.readers[pick % len(self.readers)]
        if what == "close":
            self.may_come_late(reader)
            self.readers.remove(reader)
        getattr(reader.live, what)()
        self.broker.settle()

    # -- settling -----------------------------------------------------------------------------

    @has_deliveries
    @rule(pick=choice, owner=owners, is_fenced=st.booleans())
    def ack(self, pick: int, owner: str | None, is_fenced: bool) -> None:
        reader, item = self._delivery(pick)
        command = self._naming(reader, item, owner, is_fenced)
        self.ask(self.broker.engine.ack, command, judge=self.judge_ack(reader, item, command))

    @has_deliveries
    @rule(picks=st.lists(choice, min_size=1, max_size=5))
    def ack_batch(self, picks: list[int]) -> None:
        named = [self._delivery(pick) for pick in picks]
        commands = [self._naming(reader, item) for reader, item in named]
        judges = [
            self.judge_ack(reader, item, command)
            for (reader, item), command in zip(named, commands, strict=True)
        ]

        groups = [self.model.topics[reader.topic].groups[reader.group] for reader, _ in named]
        for group, (_, item) in zip(groups, named, strict=True):
            group.settling.add(item.offset)

        def judge(outcomes: list[Any]) -> None:
            for judge_one, outcome in zip(judges, outcomes, strict=True):
                judge_one(outcome)
            for group in groups:
                group.settling.clear()

        self.ask(self.broker.engine.ack_many, commands, judge=judge)

    @has_deliveries
    @rule(
        pick=choice,
        owner=owners,
        is_fenced=st.booleans(),
        delay_ms=st.sampled_from([None, None, None, 0, 40, 900]),
        dead=st.sampled_from([False, False, False, True]),
    )
    def nack(
        self, pick: int, owner: str | None, is_fenced: bool, delay_ms: int | None, dead: bool
    ) -> None:
        reader, item = self._delivery(pick)
        command = self._naming(reader, item, owner, is_fenced)
        expected = self.expected(reader, item, command, is_ack=False)
        reason = f"reason {pick}"
        if dead:
            delay_ms = None
            if reader.topic.startswith("dlq."):
                expected = False

        def judge(outcome: Any) -> None:
            assert expected in (None, outcome is None), outcome
            if outcome is None:
                how = (reader.topic, reader.group, item.offset, reason, self.now)
                self.model.nacked(*how, delay_ms=delay_ms, dead=dead)

        nack = partial(self.broker.engine.nack, delay_ms=delay_ms, dead=dead)
        if dead:
            self.model.condemned(reader.topic, reader.group, item.offset)
        self.ask(nack, command, reason, judge=judge)

    @has_deliveries
    @rule(picks=st.lists(choice, min_size=1, max_size=4), owner=owners, is_fenced=st.booleans())
    def release(self, picks: list[int], owner: str | None, is_fenced: bool) -> None:
        named = [self._delivery(pick) for pick in picks]
        named = list(
            {
                (reader.topic, reader.group, item.offset): (reader, item) for reader, item in named
            }.values()
        )
        commands = [self._naming(reader, item, owner, is_fenced) for reader, item in named]
        expected = [
            self._is_releasable(reader, item, command)
            for (reader, item), command in zip(named, commands, strict=True)
        ]

        def judge(outcomes: list[Any]) -> None:
            for (reader, item), wanted, outcome in zip(named, expected, outcomes, strict=True):
                assert wanted in (None, outcome is None), outcome
                if outcome is None and wanted:
                    self.model.released(reader.topic, reader.group, item.offset, self.now)

        self.ask(self.broker.engine.release_many, commands, judge=judge)

    def _is_releasable(self, reader: Watcher, item: Item, command: Settle) -> bool | None:
        expected = self.expected(reader, item, command, is_ack=False)
        seen = self.model.topics[reader.topic].groups[reader.group].of(item.offset)
        return expected and seen.is_leased(self.now)

    @has_deliveries
    @rule(pick=choice, lease_ms=st.sampled_from([20, 700]), is_fenced=st.booleans())
    def extend(self, pick: int, lease_ms: int, is_fenced: bool) -> None:
        reader, item = self._delivery(pick)
        command = self._naming(reader, item, None, is_fenced)
        seen = self.model.topics[reader.topic].groups[reader.group].of(item.offset)
        is_leased = seen.is_leased(self.now) and seen.owner == reader.owner
        is_hidden = item.offset in self.unwritten(reader.topic, reader.group)

        def judge(outcome: Any) -> None:
            if outcome is None and not is_hidden:
                assert is_leased, "a lease was extended that had ended"
                self.model.extended(reader.topic, reader.group, item.offset, lease_ms, self.now)

        self.ask(self.broker.engine.extend, command, lease_ms, judge=judge)

    @has_topics
    @rule(pick=choice, group=st.sampled_from(GROUPS), backs=st.lists(choice, min_size=1))
    def publish_progress(self, pick: int, group: str, backs: list[int]) -> None:
        """All up to so many offsets before the end is done, as somebody says."""
        topic = self._topic(pick)
        ends = self.broker.must(self.broker.engine.ranges.offsets, topic.name, None).partitions
        reached = [
            Reached(end.partition, max(0, end.next - back))
            for end, back in zip(ends, backs, strict=False)
        ]
        topic.group(group)

        def judge(outcome: Any) -> None:
            assert [each.partition for each in outcome] == [each.partition for each in reached]
            for each, wanted in zip(outcome, reached, strict=True):
                assert each.next >= wanted.next, "it is not as far as it was said to be"
                self.model.progressed(topic.name, group, wanted, self.now)

        self.ask(self.broker.engine.set_progress, topic.name, group, reached, judge=judge)

    def _delivery(self, pick: int) -> tuple[Watcher, Item]:
        """One of the latest, or of those before."""
        recent = self.deliveries[-12:]
        return recent[-1 - pick % len(recent)]

    def _naming(
        self, reader: Watcher, item: Item, owner: str | None = None, is_fenced: bool = False
    ) -> Settle:
        changes = {"owner": owner or reader.owner}
        if is_fenced:
            changes["delivery_id"] = item.delivery_id
        return self.broker.naming(reader, item, **changes)

    # -- effects ------------------------------------------------------------------------------

    @has_topics
    @rule(
        pick=choice,
        group=st.sampled_from(GROUPS),
        once=choice,
        owner=st.sampled_from(OWNERS),
        then=st.sampled_from(["commit", "commit", "fail", "nothing"]),
    )
    def effect(self, pick: int, group: str, once: int, owner: str, then: str) -> None:
        topic = self._topic(pick)
        tenant = "tenant" if once % 2 else ""
        command = EffectCommand(tenant, topic.name, group, f"once {once % 4} {once % 3}", owner)
        key = effect_key(tenant, command.key)
        engine = self.broker.engine
        began = self.broker.call(engine.effects.begin, command, 200)
        if topic.committed.get((group, key), 0) > self.now:
            assert isinstance(began, BegunEffect)
            assert began.is_committed, "a committed effect is to be run again"
        if not isinstance(began, BegunEffect) or began.is_committed:
            return
        if then == "commit":
            assert self.broker.call(engine.effects.commit, command, "result") is None
            topic.committed[group, key] = self.now + TTL_MS
        elif then == "fail":
            assert self.broker.call(engine.effects.fail, command, "reason") is None

    # -- topics and groups --------------------------------------------------------------------

    @rule(
        what=st.sampled_from(
            ["create", "create", "configure", "delete group", "delete topic", "access"]
        ),
        pick=choice,
        other=choice,
    )
    def administer(self, what: str, pick: int, other: int) -> None:
        if what == "create":
            self._create_topic(TOPICS[pick % 2], 1 + other % 3)
        elif what == "access":
            self._change_access(pick, other)
        elif self.model.topics:
            topic = self._topic(pick)
            if what == "configure":
                age, size = [(None, 0), (0, None), (300, None), (None, 100)][other % 4]
                retries = RetryDefaults(max_attempts=other // 4, retry_backoff_ms=other // 4 * 70)
                configure = partial(self.broker.engine.configure_topic, retries=retries)
                self.broker.must(configure, topic.name, age, size)
                topic.has_retention = topic.has_retention or bool(age or size)
                topic.max_attempts.add(other // 4)
                topic.backoff_ms = other // 4 * 70
            elif what == "delete group":
                self._delete_group(topic, GROUPS[other % 2])
            elif other < 4:
                self._delete_topic(topic)

    def _change_access(self, pick: int, other: int) -> None:
        """Grants a rule, revokes one, or changes a role."""
        access, rules = self.broker.engine.access, self.broker.state.access.rules
        role = Role(tenant_id="default", name="team", permissions=("read", SOME[other % 2]))
        if other % 3 == 0 and rules:
            self.broker.must(access.revoke, sorted(rules)[pick % len(rules)], None)
        elif other % 3 == 1:
            self.broker.must(access.set_role, role, None)
        else:
            resource = f"topic:{TOPICS[pick % 2]}*"
            rule = AccessRule(
                tenant_id="default",
                resource=resource,
                principal=OWNERS[other % 2],
                permissions=(SOME[pick % 2],),
            )
            self.broker.must(access.grant, rule, None)

    def _create_topic(self, name: str, partitions: int) -> None:
        known = self.model.topics.get(name)
        outcome = self.broker.call(self.broker.engine.create_topic, name, partitions)
        if known is None:
            assert outcome is True
            self.model.topics[name] = TopicModel(name, partitions)
        elif known.partitions == partitions:
            assert outcome is False
        else:
            assert isinstance(outcome, FailedPrecondition)

    def _delete_topic(self, topic: TopicModel) -> None:
        self.broker.must(self.broker.engine.delete_topic, topic.name)
        del self.model.topics[topic.name]
        self.copies.pop(topic.name, None)
        self._ended(topic.name, list(topic.groups))

    def _delete_group(self, topic: TopicModel, group: str) -> None:
        outcome = self.broker.call(self.broker.engine.delete_group, topic.name, group)
        if topic.groups.pop(group, None) is None:
            assert isinstance(outcome, NotFound)
        else:
            assert outcome is None
            topic.committed = {k: until for k, until in topic.committed.items() if k[0] != group}
        self._ended(topic.name, [group])

    def _ended(self, topic: str, groups: list[str]) -> None:
        def is_gone(reader: Watcher) -> bool:
            return reader.topic == topic and reader.group in groups

        for reader in [reader for reader in self.readers if is_gone(reader)]:
            assert reader.ended, "its stream goes on"
            self.readers.remove(reader)
        self.deliveries = [(r, item) for r, item in self.deliveries if not is_gone(r)]

    # -- time and death -----------------------------------------------------------------------

    @rule(ms=st.sampled_from([1, 9, 60, 60, 450, 450, 1100, 5000]))
    def pass_time(self, ms: int) -> None:
        for reader in self.readers:
            self.may_come_late(reader)
        self.broker.pass_ms(ms)

    @has_readers
    @rule(ms=st.sampled_from([20, 300, 1500]), pick=choice, closes=st.booleans())
    def lack_room(self, ms: int, pick: int, closes: bool) -> None:
        """Nothing can be recorded for a while; when it can, all goes on by itself."""
        for reader in self.readers:
            self.may_come_late(reader)
        self.broker.log.has_room = lambda nbytes, *, reserve=False: False
        if closes:
            self.readers.pop(pick % len(self.readers)).live.close()
        self.broker.pass_ms(ms)
        del self.broker.log.has_room
        self.broker.pass_ms(2600)

    @has_deliveries
    @rule(pick=choice, restarts=st.booleans(), dead=st.booleans())
    def nack_without_room(self, pick: int, restarts: bool, dead: bool) -> None:
        """No room for new messages: what dies waits for some, over a restart too."""
        self.broker.log.has_room = lambda nbytes, *, reserve=False: reserve
        self.nack(pick, None, False, None, dead)
        if restarts:
            self.die("restart", 0, [])
        else:
            del self.broker.log.has_room

    @has_topics
    @rule(
        how=st.sampled_from(["restart", *FLAVOURS]),
        seed=st.integers(0, 5),
        doubtful=st.lists(
            st.tuples(st.sampled_from(["produce", "ack", "nack", "progress"]), choice)
        ),
    )
    def die(self, how: str, seed: int, doubtful: list[tuple[str, int]]) -> None:
        """A clean stop; or a crash, which may come before the sync of the last commands."""
        if how == "restart":
            for reader in self.readers:
                self.may_come_late(reader)
            self.broker.close()
        else:
            if doubtful:
                self._fall_silent(doubtful)
                self.doubt_copies()
            survivor = self.broker.disk.crash(how, seed)
            survivor._dsync_flag = 0
            for reader in self.readers:
                reader.is_dead = True
            self.broker.abandon()
            self.is_held = False
            self.broker.vfs = survivor
        self.model.restarted(self.now, is_crash=how != "restart")
        self.readers.clear()
        self.broker.open()
        self.opened()

    def _fall_silent(self, doubtful: list[tuple[str, int]]) -> None:
        """Commands whose sync does not end: nothing is answered, nothing leaves."""
        broker = self.broker
        broker.hold_writes()
        self.is_held = True
        answers: list[str] = []
        for what, pick in doubtful:
            if what == "produce":
                command = self._command(pick, pick, pick, pick)
                self.maybe.add(command.value)
                broker.engine.produce(command, lambda o: answers.append("produce") if o else None)
            elif self.deliveries:
                self._settle_in_doubt(what, pick, answers)
        broker.scheduler.run()
        if broker.log.has_pending:
            broker.scheduler.run_until(lambda: broker.disk.is_held)
            broker.scheduler.run()
        assert not answers, f"{answers} were answered before they were durable"

    def _settle_in_doubt(self, what: str, pick: int, answers: list[str]) -> None:
        reader, item = self._delivery(pick)
        group = self.model.topics[reader.topic].groups[reader.group]
        needs_record = item.offset not in group.done | group.maybe_done

        def answered(outcome: PenstockError | None) -> None:
            if outcome is None and needs_record:
                answers.append(what)

        command = self._naming(reader, item)
        if what == "progress":
            reached = Reached(item.partition, item.offset + 1)
            group.maybe_done |= self.model.topics[reader.topic].below(reached)
            self.broker.engine.set_progress(
                reader.topic,
                reader.group,
                [reached],
                lambda outcome: answered(outcome if isinstance(outcome, PenstockError) else None),
            )
        elif what == "ack":
            group.maybe_done.add(item.offset)
            self.broker.engine.ack(command, answered)
        else:
            seen = group.of(item.offset)
            seen.errors = seen.errors | {"doubtful"}
            seen.not_before = min(seen.not_before, self.now)
            self.broker.engine.nack(command, "doubtful", answered)

    def _topic(self, pick: int) -> TopicModel:
        names = sorted(self.model.topics)
        return self.model.topics[names[pick % len(names)]]


class TightMachine(BrokerMachine):
    """Hardly any memory and short segments: evicted, paged, sealed and vacuumed all the time."""

    limits = Limits(max_in_flight=3, idempotency_ttl_ms=TTL_MS, memory_bytes=6 * KIB)
    options = WalOptions(segment_bytes=16 * KIB, reserve_bytes=0, frame_bytes=8 * KIB)
    padding = 1200
