"""The embedded engine: core and log in one process, driven from one thread.

Each command is decided, recorded and applied in one step, then answered when durable (ledger),
while what it made deliverable is dispatched in the same turn and shares its commit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

from penstock.api.consumers import Sink
from penstock.api.durability import Health
from penstock.api.messages import Produce, ProduceOutcome, Settle, SettleOutcome
from penstock.api.metrics import EngineMetrics
from penstock.api.outcomes import Done
from penstock.api.topics import NO_RETRIES, RetryDefaults, TopicReport
from penstock.core.groups import Unfinished
from penstock.core.produce import find_topic
from penstock.core.settle import (
    NOT_DELIVERED,
    AlreadyDone,
    decide_ack,
    decide_extend,
    decide_nack,
    find_leased,
)
from penstock.core.topic_rules import (
    decide_configure_topic,
    decide_create_group,
    decide_create_topic,
    decide_delete_group,
    decide_delete_topic,
)
from penstock.engine.consumers import OpenConsumer
from penstock.engine.ledger import disk_full
from penstock.engine.maintenance import Maintenance
from penstock.engine.metrics import measure
from penstock.engine.quotas import Reservation
from penstock.engine.report import report_topic
from penstock.engine.routing import route_many
from penstock.engine.wiring import Parts
from penstock.model.errors import FailedPrecondition, PenstockError, Unavailable
from penstock.model.progress import Reached
from penstock.model.records import DEAD, Message
from penstock.model.scopes import Scope, is_stream_log, names_within, plain_name, split_name


class EmbeddedEngine:
    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.capabilities = parts.capabilities
        self.limits = parts.state.limits
        self.routing = parts.routing
        self.maintenance = Maintenance(parts)
        self._state = parts.state
        self._ledger = parts.ledger
        self._dispatcher = parts.dispatcher
        self._producing = parts.producing
        self.rejected = self._producing.rejected
        self.ranges = parts.ranges
        self.journal = parts.journal
        self.registry = parts.registry
        self.caches = parts.caches
        self.streams = parts.streams
        self.writes = parts.writes
        self.effects = parts.effects
        self.transactions = parts.transactions
        self.quotas = parts.quotas
        self.tokens = parts.tokens
        self.access = parts.access
        self.audit = parts.audit
        self._is_closed = False
        self._ledger.start(self.maintenance)
        parts.start()
        self.maintenance.start()

    # -- produce -------------------------------------------------------------------------------

    def produce(self, command: Produce, done: Done[Message | None]) -> None:
        if self.routing is None:
            self._ledger.answer(done, self._producing.store(command))
            return
        try:
            self.routing.pass_through(
                command, lambda final: self._ledger.answer(done, self._producing.store(final))
            )
        except PenstockError as error:
            self._ledger.answer(done, error)

    def produce_many(self, commands: list[Produce], done: Done[list[ProduceOutcome]]) -> None:
        if self.routing is None:
            self._ledger.answer(done, self._producing.store_many(commands))
        else:
            route_many(
                self.routing,
                commands,
                lambda routed: self._ledger.answer(done, self._producing.store_many(routed)),
            )

    # -- settle --------------------------------------------------------------------------------

    def ack(self, command: Settle, done: Done[None]) -> None:
        outcome = self._ack(command, self._ledger.now_ms())
        if isinstance(outcome, AlreadyDone):
            self._confirm(outcome, partial(self._ledger.answer, done))
        else:
            self._ledger.answer(done, outcome)

    def ack_many(self, commands: list[Settle], done: Done[list[SettleOutcome]]) -> None:
        now_ms = self._ledger.now_ms()
        outcomes: list[SettleOutcome] = []
        unsure: list[tuple[int, AlreadyDone]] = []
        for command in commands:
            outcome = self._ack(command, now_ms)
            if isinstance(outcome, AlreadyDone):
                unsure.append((len(outcomes), outcome))
                outcome = None
            outcomes.append(outcome)
        left = len(unsure)
        if not left:
            self._ledger.answer(done, outcomes)

        def settled(index: int, outcome: SettleOutcome) -> None:
            nonlocal left
            outcomes[index] = outcome
            left -= 1
            if not left:
                self._ledger.answer(done, outcomes)

        for index, decision in unsure:
            self._confirm(decision, partial(settled, index))

    def _ack(self, command: Settle, now_ms: int) -> AlreadyDone | PenstockError | None:
        """Returns None once the ack is recorded, now or earlier."""
        mark = self._ledger.position
        try:
            self._check_writable()
            decision = decide_ack(self._state, command, now_ms)
            if decision is None or isinstance(decision, AlreadyDone):
                return decision
            progress = self._state.groups[decision.group_id].progress[decision.partition]
            entry = progress.unfinished[decision.offset]
            self._ledger.must_record(decision)
            self._dispatcher.left_flight(entry)
            self._ledger.wake()
        except PenstockError as error:
            return error
        except BaseException as error:  # noqa: BLE001 - raised again unless it is told
            return self._ledger.break_off(error, mark)
        return None

    def _confirm(
        self, decision: AlreadyDone, settled: Callable[[PenstockError | None], None]
    ) -> None:
        """Checks that the offset is in the partition that was named: partitions share their
        offsets."""
        log = self.parts.window.log(decision.topic_id, decision.partition)
        if decision.offset < log.first_offset:
            settled(None)
            return
        self.parts.pages.contains(
            log,
            decision.offset,
            lambda is_there: settled(None if is_there else FailedPrecondition(NOT_DELIVERED)),
        )

    def nack(
        self,
        command: Settle,
        reason: str,
        done: Done[None],
        *,
        delay_ms: int | None = None,
        dead: bool = False,
    ) -> None:
        def decide() -> None:
            now_ms = self._ledger.now_ms()
            decision = decide_nack(
                self._state, command, reason, now_ms, delay_ms=delay_ms, dead=dead
            )
            topic = self._state.topics_by_id[decision.topic_id]
            progress = topic.groups[command.group].progress[command.partition]
            entry = progress.unfinished[command.offset]
            self._ledger.must_record(decision)
            self._dispatcher.left_flight(entry)
            if decision.retry_at == DEAD:
                self.parts.dead_letters.add(entry)
            self._ledger.wake()

        self._ledger.decide(decide, done)

    def release(self, command: Settle, done: Done[None]) -> None:
        self.release_many([command], lambda outcome: done(_only(outcome)))

    def release_many(self, commands: list[Settle], done: Done[list[SettleOutcome]]) -> None:
        entries: dict[Unfinished, None] = {}

        def find(command: Settle) -> Unfinished | PenstockError:
            try:
                entry = find_leased(self._state, command)
                if entry in entries:
                    raise FailedPrecondition("this delivery is named twice in the batch")
            except PenstockError as error:
                return error
            entries[entry] = None
            return entry

        def decide() -> list[PenstockError | None]:
            found = [find(command) for command in commands]
            kept = self._dispatcher.release(list(entries))
            return [_released(outcome, kept) for outcome in found]

        self._ledger.decide(decide, done)

    def extend(self, command: Settle, lease_ms: int, done: Done[None]) -> None:
        def decide() -> None:
            entry = find_leased(self._state, command)
            if self._ledger.log.is_shared:
                self._ledger.must_record(decide_extend(entry, lease_ms, self._ledger.now_ms()))
            self.parts.leases.extend(entry, self._ledger.now_ms() + lease_ms)
            self._ledger.wake()

        self._ledger.decide(decide, done)

    # -- topics and groups ---------------------------------------------------------------------

    def create_topic(
        self,
        name: str,
        partitions: int,
        done: Done[bool],
        *,
        after_archive: bool | None = None,
        retries: RetryDefaults = NO_RETRIES,
    ) -> None:
        def decide() -> bool:
            now_ms = self._ledger.now_ms()
            record = decide_create_topic(
                self._state, name, partitions, now_ms, after_archive, retries
            )
            if record is None:
                return False
            if self.quotas.is_active:
                self.quotas.check_topic(split_name(name)[0])
            self._ledger.must_record(record)
            self.parts.window.open_topic(record.topic_id, record.partitions)
            self._note("topic.create", name, f"{record.partitions} partitions")
            return True

        self._ledger.decide(decide, done)

    def delete_topic(self, name: str, done: Done[None]) -> None:
        def decide() -> None:
            record = decide_delete_topic(self._state, name, self._ledger.now_ms())
            self.parts.topic_removal.record([record])
            self._note("topic.delete", name)

        self._ledger.decide(decide, done)

    def configure_topic(
        self,
        name: str,
        retention_ms: int | None,
        retention_bytes: int | None,
        done: Done[None],
        *,
        after_archive: bool | None = None,
        retries: RetryDefaults = NO_RETRIES,
    ) -> None:
        def decide() -> None:
            now_ms = self._ledger.now_ms()
            record = decide_configure_topic(
                self._state, name, retention_ms, retention_bytes, now_ms, after_archive, retries
            )
            self._ledger.must_record(record)
            self._note("topic.configure", name)

        self._ledger.decide(decide, done)

    def delete_group(self, topic: str, group: str, done: Done[None]) -> None:
        def decide() -> None:
            record = decide_delete_group(self._state, topic, group, self._ledger.now_ms())
            entries = list(self._state.groups[record.group_id].unfinished())
            self._ledger.must_record(record)
            self.parts.leases.drop(entries)
            kind, what = ("stream", "subscription") if is_stream_log(topic) else ("topic", "group")
            self._dispatcher.end_group(record.group_id, f"{what} {group!r} was deleted")
            self._note(f"{what}.delete", topic, f"{what} {group}", kind)

        self._ledger.decide(decide, done)

    def set_progress(
        self,
        topic: str,
        group: str,
        reached: Sequence[Reached],
        done: Done[list[Reached]],
        *,
        topic_id: int | None = None,
    ) -> None:
        self.parts.progress.advance(topic, group, reached, done, topic_id)

    def list_topics(self, scope: Scope, done: Done[list[str]]) -> None:
        self._ledger.decide(
            lambda: sorted(map(plain_name, names_within(scope, self._state.topics))), done
        )

    def describe_topic(self, name: str, done: Done[TopicReport]) -> None:
        self._ledger.decide(
            lambda: report_topic(find_topic(self._state, name), self._dispatcher.consumer_count),
            done,
        )

    # -- consumers -----------------------------------------------------------------------------

    def open_consumer(
        self,
        topic: str,
        group: str,
        owner: str,
        lease_ms: int,
        prefetch: int,
        sink: Sink,
        done: Done[OpenConsumer],
    ) -> None:
        reserved: list[Reservation] = []

        def opened(outcome: int | PenstockError) -> None:
            for each in reserved:
                each.end()
            if isinstance(outcome, PenstockError):
                done(outcome)
            elif outcome not in self._state.groups:
                place = f"group {group!r} of topic {plain_name(topic)!r}"
                done(
                    FailedPrecondition(f"{place} was deleted meanwhile; consume again to create it")
                )
            else:
                lease = lease_ms or self.limits.lease_ms
                done(self._dispatcher.open(outcome, owner, lease, prefetch, sink))

        def decide() -> int:
            found = find_topic(self._state, topic)
            if self.quotas.is_active:
                reserved.append(self.quotas.reserve(found.scope))
            record = decide_create_group(self._state, found, group, self._ledger.now_ms())
            if record is not None:
                if self.quotas.is_active:
                    self.quotas.check_group(found.scope)
                self._ledger.must_record(record)
            return found.groups[group].id

        self._ledger.decide(decide, opened)

    def end_streams(self, reason: str) -> None:
        self._dispatcher.end_all(reason)
        self.streams.end_all(reason)
        self.caches.end_watches(Unavailable(reason))
        self.writes.end_waits()

    # -- the whole -----------------------------------------------------------------------------

    def health(self) -> Health:
        if self._ledger.failure is not None:
            return Health(False, self._ledger.failure.message)
        if self._is_closed:
            return Health(False, "the broker is stopping")
        sealing = self.maintenance.sealing
        return Health(True, warning=sealing.warning if sealing is not None else "")

    def metrics(self) -> EngineMetrics:
        failures = self.routing.failures if self.routing is not None else 0
        return measure(self.parts, self.maintenance, failures)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self.end_streams("the broker is stopping")
        self.maintenance.stop()
        self._ledger.log.close()

    def _note(self, action: str, full: str, detail: str = "", kind: str = "topic") -> None:
        scope, name = split_name(full)
        self.audit.changed(action, kind, scope, name, detail)

    def _check_writable(self) -> None:
        if self._ledger.failure is not None:
            raise self._ledger.failure


def _released(
    outcome: Unfinished | PenstockError, kept: Collection[Unfinished]
) -> PenstockError | None:
    if isinstance(outcome, PenstockError):
        return outcome
    return disk_full() if outcome in kept else None


def _only(outcome: list[PenstockError | None] | PenstockError) -> PenstockError | None:
    """Returns the outcome of a batch of one."""
    return outcome if isinstance(outcome, PenstockError) else outcome[0]
