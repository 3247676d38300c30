"""A broker without IO that lives through a random history, and a log of all it decided.

A step is four small integers: what to do, two choices, and how much time passes. Whatever they
are, the step means something or does nothing, so that hypothesis can shrink a history.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from penstock.api.effects import EffectCommand
from penstock.api.messages import Produce, Settle
from penstock.api.topics import RetryDefaults
from penstock.api.transactions import (
    AckOperation,
    EffectOperation,
    NackOperation,
    Operation,
    TransactionCommand,
)
from penstock.core.cache_rules import (
    Decision,
    decide_bounds,
    decide_delete,
    decide_increment,
    decide_look,
    decide_put,
    decide_transact,
)
from penstock.core.dead_letters import decide_dead_letter
from penstock.core.deliver import (
    delivered,
    first_delivery,
    is_effect_committed,
    redelivery,
    returned,
    skip,
)
from penstock.core.effect_rules import decide_begin, decide_commit, decide_fail
from penstock.core.effects import Effect
from penstock.core.groups import DYING, IN_FLIGHT, WAITING, Progress, Unfinished
from penstock.core.produce import decide_produce
from penstock.core.progress_rules import ProgressTarget, decide_progress
from penstock.core.settle import decide_ack, decide_lapse, decide_nack, find_leased
from penstock.core.state import BrokerState, apply
from penstock.core.tenancy import decide_change, decide_create
from penstock.core.tenancy import decide_delete as decide_delete_entry
from penstock.core.tokens import decide_create_token, decide_revoke_token, decide_rotate_token
from penstock.core.topic_rules import (
    decide_configure_topic,
    decide_create_group,
    decide_create_topic,
    decide_delete_group,
    decide_delete_topic,
)
from penstock.core.topics import Topic
from penstock.core.transaction_rules import decide_transaction, find_committed
from penstock.core.write_rules import RowColumns, decide_rows
from penstock.model.caching import Check, Delete, Increment, Put, Txn
from penstock.model.envelope import Envelope, RetryPolicy, Routing
from penstock.model.errors import PenstockError
from penstock.model.limits import Limits
from penstock.model.records import (
    DeliveredItem,
    Message,
    Record,
    StagedRows,
    Trimmed,
    WriteCommitted,
    WriteStored,
    decode_record,
    encode_record,
)
from penstock.model.tenancy import CacheConfig, Entry, Kind, Path, StreamConfig
from penstock.model.tokens import Token
from penstock.storage.frames import encode_frame
from penstock.storage.segments import SegmentHeader, encode_header, segment_name
from penstock.storage.vfs import Vfs

LIMITS = Limits(idempotency_ttl_ms=400, max_partition_msgs=40, cache_memory_bytes=4000)
LEASE_MS = 50

Step = tuple[int, int, int, int]
_step = st.tuples(
    st.integers(0, 37), st.integers(0, 11), st.integers(0, 11), st.sampled_from([0, 1, 7, 90])
)
steps = st.lists(_step, max_size=80)
long_histories = st.lists(_step, min_size=60, max_size=160)


class RandomBroker:
    """The live state, every record as it went to the log, and every message ever stored."""

    def __init__(self) -> None:
        self.state = BrokerState(LIMITS)
        self.now_ms = 1_000
        self.log: list[bytes] = []
        # When the lease of each entry in flight ends: volatile, as in the engine.
        self.leases: dict[Unfinished, int] = {}
        self.messages: dict[tuple[int, int, int], Message] = {}
        self._actions: list[Callable[[int, int], None]] = [
            *[self._produce] * 5,
            *[self._produce_with_envelope] * 3,
            *[self._deliver] * 4,
            self._ack,
            self._ack,
            self._nack,
            self._lapse,
            self._release,
            self._bury,
            self._begin_or_commit,
            self._begin_or_commit,
            self._group,
            self._topic,
            self._trim,
            self._advance,
            self._delete,
            self._register,
            self._unregister,
            *[self._put] * 3,
            self._change_entries,
            self._look,
            *[self._write_batch] * 2,
            *[self._transact] * 2,
            self._transact_caches,
            self._token,
        ]
        self._topic(0, 0)
        self._group(0, 0)
        self._register(0, 1)

    def live_through(self, history: list[Step]) -> RandomBroker:
        for action, a, b, passes in history:
            self.now_ms += passes
            self._fire()
            with contextlib.suppress(PenstockError):  # a refusal changes nothing
                self._actions[action % len(self._actions)](a, b)
        return self

    def retained(self) -> dict[tuple[int, int, int], Message]:
        """What a reader must find: every message that is neither trimmed nor of a deleted topic."""
        return {
            place: message
            for place, message in self.messages.items()
            if (topic := self.state.topics_by_id.get(place[0])) is not None
            and place[2] >= topic.partitions[place[1]].first_offset
        }

    def emit(self, record: Record) -> None:
        data = encode_record(record)
        self.log.append(data)
        apply(self.state, record)
        if isinstance(record, Message):
            self.messages[record.topic_id, record.partition, record.offset] = record

    # Steps

    def _fire(self) -> None:
        """Ends leases whose time has come."""
        in_flight = [
            entry
            for group in self.state.groups.values()
            for entry in group.unfinished()
            if entry.state == IN_FLIGHT
        ]
        self.leases = {entry: self.leases[entry] for entry in in_flight}
        for entry, until in sorted(self.leases.items(), key=lambda lease: lease[1]):
            if until <= self.now_ms:
                self.emit(decide_lapse(entry, until, self.now_ms))

    def _topic(self, a: int, b: int) -> None:
        # One of them is in a namespace, which may not exist.
        name = "tenant-1\x1fn\x1ftopic-1" if a % 3 == 2 else f"topic-{a % 3}"
        archive = True if name not in self.state.topics and b % 4 == 0 else None
        created = decide_create_topic(self.state, name, 1 + b % 3, self.now_ms, archive)
        if created is not None:
            self.emit(created)
        else:
            archive = [None, True, False][b % 3]
            self.emit(
                decide_configure_topic(
                    self.state,
                    name,
                    a * 1000,
                    None,
                    self.now_ms,
                    archive,
                    RetryDefaults(max_attempts=b % 3, retry_backoff_ms=a * 5),
                )
            )

    def _group(self, a: int, b: int) -> None:
        topic = self._some_topic(a)
        if topic is not None:
            created = decide_create_group(self.state, topic, f"group-{b % 3}", self.now_ms)
            if created is not None:
                self.emit(created)

    def _delete(self, a: int, b: int) -> None:
        topic = self._some_topic(a)
        if topic is None:
            return
        if b == 0:
            self.emit(decide_delete_topic(self.state, topic.name, self.now_ms))
        elif b < 4:
            self.emit(decide_delete_group(self.state, topic.name, f"group-{b % 3}", self.now_ms))

    def _produce(self, a: int, b: int) -> None:
        topic = self._some_topic(a)
        if topic is not None:
            self._store(Produce(topic.name, f"key-{b}" if b % 4 else "", "välue" * (1 + b)))

    def _produce_with_envelope(self, a: int, b: int) -> None:
        topic = self._some_topic(a)
        if topic is None:
            return
        envelope = Envelope(
            run_id=f"run-{b}",
            tenant_id="tenant" if a % 2 else "",
            idempotency_key=f"once-{b}" if b % 3 else "",
            partition_override=0 if b % 5 == 0 else None,
            retry_policy=RetryPolicy(1 + b % 2, 20 * (b % 4)) if b % 2 else None,
        )
        routing = Routing("label", {"a": "b"}) if b % 6 == 0 else None
        self._store(Produce(topic.name, f"key-{a}", f"value-{b}", envelope, routing))

    def _store(self, command: Produce) -> None:
        decided = decide_produce(self.state, command, self.now_ms)
        if decided is not None:
            self.emit(decided[0])

    def _deliver(self, a: int, b: int) -> None:
        progress = self._some_progress(a)
        if progress is None:
            return
        topic = progress.group.topic
        over = [
            entry
            for entry in progress.unfinished.values()
            if entry.state == WAITING and entry.retry_at <= self.now_ms
        ]
        items = [redelivery(entry) for entry in [*progress.ready.values(), *over][: b % 3]]
        items += [
            first_delivery(self.messages[topic.id, progress.partition, offset])
            for offset in range(progress.cursor, topic.next_offset)
            if (topic.id, progress.partition, offset) in self.messages
        ][: 1 + b % 3]
        kept: list[DeliveredItem] = []
        for item in items:
            if is_effect_committed(progress.group, item.effect_key, self.now_ms) and not kept:
                self.emit(skip(progress, item, self.now_ms))
            else:
                kept.append(item)
        if kept:
            self.emit(delivered(progress, f"owner-{b % 2}", kept, 30_000, self.now_ms))
            for item in kept:
                self.leases[progress.unfinished[item.offset]] = self.now_ms + LEASE_MS

    def _ack(self, a: int, b: int) -> None:
        entry = self._some_entry(a, b)
        if entry is not None:
            done = decide_ack(self.state, _settle(entry), self.now_ms)
            if done is not None and not hasattr(done, "key"):
                self.emit(done)  # type: ignore[arg-type]  # the entry is unfinished

    def _nack(self, a: int, b: int) -> None:
        entry = self._some_entry(a, b)
        if entry is not None:
            delay_ms = [None, 0, 30][a % 3] if b % 4 else None
            self.emit(
                decide_nack(
                    self.state,
                    _settle(entry),
                    f"reason-{b}",
                    self.now_ms,
                    delay_ms=delay_ms,
                    dead=b % 4 == 0,
                )
            )

    def _lapse(self, a: int, b: int) -> None:
        entry = self._some_entry(a, b)
        if entry is not None and entry.state == IN_FLIGHT:
            self.emit(decide_lapse(entry, self.now_ms, self.now_ms))

    def _release(self, a: int, b: int) -> None:
        entry = self._some_entry(a, b)
        if entry is not None:
            found = find_leased(self.state, _settle(entry))
            self.emit(returned(found.progress, [found.offset], self.now_ms))

    def _bury(self, a: int, b: int) -> None:
        progress = self._some_progress(a)
        for entry in list(progress.unfinished.values()) if progress else []:
            place = (entry.progress.group.topic.id, entry.progress.partition, entry.offset)
            if entry.state == DYING:
                body = self.messages[place]
                records, _ = decide_dead_letter(
                    self.state, entry, body, entry.last_error, self.now_ms
                )
                for record in records:
                    self.emit(record)

    def _begin_or_commit(self, a: int, b: int) -> None:
        topic = self._some_topic(a)
        if topic is None:
            return
        tenant = "tenant" if b % 2 else ""
        command = EffectCommand(tenant, topic.name, f"group-{a % 2}", f"once-{b}", "owner")
        decided = decide_begin(self.state, command, LEASE_MS, self.now_ms)
        if not isinstance(decided, Effect):
            self.emit(decided)
        if b % 3 == 1:
            done = decide_commit(self.state, command, "result", self.now_ms)
            if done is not None:
                self.emit(done)
        elif b % 3 == 2:
            self.emit(decide_fail(self.state, command, "reason", self.now_ms))

    def _trim(self, a: int, b: int) -> None:
        topic = self._some_topic(a)
        if topic is None:
            return
        partition = topic.partitions[b % len(topic.partitions)]
        floor = [group.progress[partition.index].floor() for group in topic.groups.values()]
        before = min([partition.first_offset + b, partition.end_offset, *floor])
        gone = [
            message
            for (topic_id, index, offset), message in self.messages.items()
            if topic_id == topic.id
            and index == partition.index
            and partition.first_offset <= offset < before
        ]
        if gone:
            size = sum(len(message.key.encode()) + len(message.value.encode()) for message in gone)
            self.emit(Trimmed(topic.id, partition.index, self.now_ms, before, len(gone), size))

    def _advance(self, a: int, b: int) -> None:
        """Progress that somebody publishes, for a group that may be new."""
        topic = self._some_topic(a)
        if topic is None:
            return
        partition = topic.partitions[b % len(topic.partitions)]
        offset = max(0, partition.end_offset - a)
        below = [
            len(message.key.encode()) + len(message.value.encode())
            for (topic_id, index, at), message in self.messages.items()
            if (topic_id, index) == (topic.id, partition.index) and at < offset
        ]
        target = ProgressTarget(partition.index, offset, len(below), sum(below))
        group = f"group-{b % 3}"
        for record in decide_progress(self.state, topic, group, [target], self.now_ms):
            self.emit(record)

    def _register(self, a: int, b: int) -> None:
        """Tenants, a stream and caches, durable and not, come or are set up anew."""
        tenant = f"tenant-{a % 2}"
        wanted = [
            Entry(kind="tenant", tenant_id=tenant),
            Entry(kind="namespace", tenant_id=tenant, namespace="n"),
            Entry(kind="stream", tenant_id=tenant, namespace="n", name="s", stream=StreamConfig()),
        ]
        cache = CacheConfig(
            max_entries=b % 4,
            max_bytes=1500 * (a % 3),
            eviction_policy="lru" if b % 3 else "best_effort",
            durable=True,
        )
        path = (tenant, "n", f"cache-{b % 2}")
        if path in self.state.registry.caches:
            changed = decide_change(self.state.registry, path, self.now_ms, cache=cache)
            if changed is not None:
                self.emit(changed)
                self._emit_all(decide_bounds(self.state, self.state.caches.values(), self.now_ms))
            return
        wanted.append(
            Entry(kind="cache", tenant_id=tenant, namespace="n", name=path[2], cache=cache)
        )
        ephemeral = CacheConfig()
        wanted.append(
            Entry(kind="cache", tenant_id=tenant, namespace="n", name="e", cache=ephemeral)
        )
        for entry in wanted:
            created = decide_create(self.state.registry, entry, self.now_ms)
            if created is not None:
                self.emit(created)

    def _unregister(self, a: int, b: int) -> None:
        """A cache, or all of a tenant; sometimes it is made anew in the same moment."""
        caches = sorted(self.state.registry.caches)
        if not caches or b % 2:
            return
        path = caches[a % len(caches)]
        kind: Kind = "cache"
        if not b:
            kind, path = "tenant", (path[0], "", "")
        registry = self.state.registry
        for record in decide_delete_entry(registry, kind, path, self.now_ms, cascade=True):
            self.emit(record)
        if b % 4:
            self._register(a, b)

    def _put(self, a: int, b: int) -> None:
        path = self._some_cache(a)
        if path is not None:
            ttl_ms = [None, None, 50, 0][b % 4]
            put = Put(path, f"key-{b % 5}", b"value" * (a * b), ttl_ms, if_not_exists=b % 7 == 0)
            self._emit_all(decide_put(self.state, put, self.now_ms))

    def _change_entries(self, a: int, b: int) -> None:
        path = self._some_cache(a)
        if path is None:
            return
        key = f"key-{b % 5}"
        if a % 3 == 0:
            self._emit_all(decide_delete(self.state, Delete(path, key), self.now_ms))
        elif a % 3 == 1:
            self._emit_all(decide_increment(self.state, Increment(path, key, b, 70), self.now_ms))
        else:
            txn = Txn(
                [Check(path, key, exists=b % 2 == 0)],
                [Put(path, "first", b"1", 80), Delete(path, key), Increment(path, "counter", b)],
            )
            self._emit_all(decide_transact(self.state, txn, self.now_ms))

    def _look(self, a: int, b: int) -> None:
        path = self._some_cache(a)
        if path is not None:
            cache = self.state.caches[self.state.registry.caches[path].id]
            self._emit_all(decide_look(self.state, cache, list(cache.entries), self.now_ms))

    def _write_batch(self, a: int, b: int) -> None:
        """A producer's next batch is committed, or the next rows of its first one are stored."""
        topic, producer = self._some_topic(a), f"producer-{b % 3}"
        writer = self.state.writers.get(producer, self.now_ms)
        storing = next(iter(writer.storing.values()), None) if writer is not None else None
        if storing is None or a % 4 == 0:
            batch = 0 if writer is None else writer.last_batch + 1
            pieces = [StagedRows(self.now_ms, 1 + a), StagedRows(self.now_ms + 1, 1 + b)]
            record = WriteCommitted(self.now_ms, producer, batch, 2 + a + b, pieces, b % 2 == 0)
            self.emit(record)
        elif topic is not None:
            count = min(1 + b, storing.rows - storing.done)
            values = [f"välue-{n}" for n in range(count)]
            sizes = [len(value.encode()) for value in values]
            rows = RowColumns(topic.name, None, [""] * count, values, sizes, None, None)
            for message in decide_rows(self.state, rows, self.now_ms).messages:
                self.emit(message)
            self.emit(WriteStored(self.now_ms, producer, storing.batch, storing.done + count))

    def _transact(self, a: int, b: int) -> None:
        """Messages, an ack or a nack of two deliveries, and the commit of an effect, in one."""
        topic = self._some_topic(b)
        if topic is None:
            return
        once = Envelope(idempotency_key=f"once-{a % 4}")
        operations: list[Operation] = [
            Produce(topic.name, f"key-{n}", f"välue-{a}", once if n == b % 3 else None)
            for n in range(1 + a % 3)
        ]
        for n, choice in enumerate((b, b + 1)):
            entry = self._some_entry(a, choice)
            if entry is not None and (a + n) % 3:
                delivery = _settle(entry)
                is_ack = (a + n) % 2
                operations.append(
                    AckOperation(delivery) if is_ack else NackOperation(delivery, "reason")
                )
        if b % 4 == 0:
            command = EffectCommand("", topic.name, "group-0", f"once-{a}", "owner")
            operations.append(EffectOperation(command, "result"))
        self._commit(operations, f"tx-{a % 5}" if b % 2 else "")

    def _transact_caches(self, a: int, b: int) -> None:
        path = self._some_cache(a)
        if path is not None:
            put, delete = Put(path, f"key-{b % 5}", b"v" * a, 60), Delete(path, f"key-{a % 5}")
            self._commit([put, delete, Increment(path, "counter", b)], f"tx-{a % 5}")

    def _commit(self, operations: list[Operation], transaction_id: str) -> None:
        command = TransactionCommand(operations, transaction_id)
        if find_committed(self.state, command, self.now_ms) is None:
            now_ms = self.now_ms
            draft = decide_transaction(self.state, command, operations, now_ms, now_ms)
            for record, _ in draft.records:
                self.emit(record)
            if draft.caches is not None:
                self._emit_all(draft.caches)

    def _token(self, a: int, b: int) -> None:
        """A token of any reach is created, rotated or revoked."""
        tokens, registry = self.state.tokens, self.state.registry
        found = tokens.get(f"token-{a % 4}")
        digest = bytes([a, b]) * 16
        if found is None:
            tenants = sorted(registry.tenants)
            tenant_id = tenants[b % len(tenants)][0] if b % 3 else None
            inside = [path[1] for path in registry.namespaces if path[0] == tenant_id]
            namespace = inside[0] if inside and b % 2 else None
            expires_ms = self.now_ms + 100 if a % 2 else 0
            wanted = Token(
                f"token-{a % 4}", f"principal-{b}", tenant_id, namespace, ("reader",) * (b % 2),
                b % 4 == 0, 0, expires_ms, digest,
            )  # fmt: skip
            for record in decide_create_token(tokens, registry, wanted, self.now_ms):
                self.emit(record)
        elif b % 2:
            until_ms = self.now_ms + b if b % 3 else 0
            self.emit(decide_rotate_token(tokens, found.id, digest, until_ms, self.now_ms))
        else:
            self.emit(decide_revoke_token(tokens, found.id, self.now_ms))

    def _emit_all(self, decision: Decision[Any]) -> None:
        for record in decision.records:
            self.emit(record)

    # Choices

    def _some_cache(self, choice: int) -> Path | None:
        """A durable one: others have no records."""
        found = [c.path for _, c in sorted(self.state.caches.items()) if c.is_durable]
        return found[choice % len(found)] if found else None

    def _some_topic(self, choice: int) -> Topic | None:
        topics = list(self.state.topics.values())
        return topics[choice % len(topics)] if topics else None

    def _some_progress(self, choice: int) -> Progress | None:
        found = [progress for group in self.state.groups.values() for progress in group.progress]
        return found[choice % len(found)] if found else None

    def _some_entry(self, a: int, b: int) -> Unfinished | None:
        progress = self._some_progress(a)
        entries = list(progress.unfinished.values()) if progress else []
        return entries[b % len(entries)] if entries else None


def _settle(entry: Unfinished) -> Settle:
    group = entry.progress.group
    partition = entry.progress.partition
    return Settle(group.topic.name, group.name, partition, entry.offset, entry.owner)


def replayed(log: list[bytes], state: BrokerState | None = None) -> BrokerState:
    state = state or BrokerState(LIMITS)
    for data in log:
        apply(state, decode_record(data))
    return state


def write_segment(
    vfs: Vfs, directory: str, number: int, first_seq: int, records: list[bytes]
) -> int:
    """A closed segment of small frames; returns the sequence that comes next."""
    header = SegmentHeader(number, first_seq, salt=number * 7)
    parts = [encode_header(header)]
    seq = first_seq
    for at in range(0, len(records), 3):
        parts += encode_frame(seq, seq - 1, header.salt, records[at : at + 3])
        seq += 1
    vfs.write_file_atomically(
        os.path.join(directory, segment_name(number)), b"".join([*parts, bytes(512)])
    )
    return seq


def write_log(vfs: Vfs, directory: str, segments: list[list[bytes]]) -> None:
    seq = 1
    for number, records in enumerate(segments, start=1):
        seq = write_segment(vfs, directory, number, seq, records)


def cut(log: list[bytes], pieces: int) -> list[list[bytes]]:
    """The log as segments of about equal length."""
    step = max(1, -(-len(log) // pieces))
    return [log[at : at + step] for at in range(0, step * pieces, step)]
