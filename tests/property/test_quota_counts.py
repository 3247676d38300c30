"""The use of quotas against a plain recount, after every step of random histories."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from penstock.core.invariants import check
from penstock.model.caching import Delete, Put, Watch
from penstock.model.envelope import Envelope
from penstock.model.errors import PenstockError
from penstock.model.progress import Reached
from penstock.model.scopes import Scope, full_name, is_stream_log, stream_log_name
from penstock.model.streams import Publish, Start, Subscribe, SubscribeNamed
from penstock.model.tenancy import CacheConfig, Entry, Kind, StreamConfig
from tests.engine.cache_harness import Watcher
from tests.engine.harness import Reader
from tests.engine.quota_harness import OTHER, PROD, Tenants
from tests.engine.stream_harness import Listener
from tests.storage.faulty_vfs import FaultyVfs

TEST: Scope = ("acme", "test")
SCOPES = (PROD, TEST, OTHER)
STEPS = 120
LIMITED = {"groups": 4, "streams": 5, "caches": 4}
"""Limits that nothing may pass: what counts for these is created by commands only."""


class History:
    """Random commands. `open` are the subscriptions, consumers and watches that nobody closed, each
    with its scope; the broker may have ended some."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.tenants = Tenants(FaultyVfs())
        for scope in SCOPES:
            self.tenants.add_durable(scope)
        self.open: list[tuple[Scope, Any]] = []
        self.readers: list[Reader] = []
        limits = {"topics": 4, "idempotency_keys": 5, "subscribe_connections": 4}
        limits |= LIMITED | {"disk_bytes": 4000, "backlog_msgs": 30, "publish_rate_limit": 50}
        for scope in (*SCOPES, ("acme", "")):
            self.tenants.limit(scope, **limits)

    def step(self) -> None:
        actions = [
            self.produce, self.produce, self.publish, self.settle_some, self.put, self.drop_key,
            self.consume, self.subscribe, self.watch, self.close, self.topic, self.drop_topic,
            self.drop_group, self.drop_namespace, self.restart, self.fail, self.wait, self.stream,
            self.name, self.advance, self.drop_name, self.cache,
        ]  # fmt: skip
        self.dice.choice(actions)()

    def call(self, command: Any, *arguments: Any) -> Any:
        """Any outcome will do: refused commands must not count."""
        return self.tenants.call(command, *arguments)

    def scope(self) -> Scope:
        return self.dice.choice(SCOPES)

    def topic_name(self) -> str:
        return full_name(self.scope(), self.dice.choice(["t", "u", "v"]))

    def produce(self) -> None:
        key = self.dice.choice(["", "", "a", "b", "c"])
        envelope = Envelope(idempotency_key=key) if key else None
        value = "x" * self.dice.randint(1, 60)
        self.tenants.try_produce(self.topic_name(), value, "", envelope)

    def publish(self) -> None:
        payloads = [b"y" * self.dice.randint(1, 40)] * self.dice.randint(1, 3)
        command = Publish(path=(*self.scope(), "d"), payloads=payloads)
        self.call(self.tenants.engine.streams.publish, command)

    def settle_some(self) -> None:
        for reader in self.readers:
            for item in reader.take():
                self.tenants.ack(reader, item)

    def put(self) -> None:
        path = (*self.scope(), self.dice.choice(["c", "kept"]))
        key, size = self.dice.choice("abc"), self.dice.randint(0, 300)
        self.call(self.tenants.engine.caches.put, Put(path, key, b"v" * size))

    def drop_key(self) -> None:
        path = (*self.scope(), self.dice.choice(["c", "kept"]))
        self.call(self.tenants.engine.caches.delete, Delete(path, self.dice.choice("abc")))

    def consume(self) -> None:
        scope, group = self.scope(), self.dice.choice("gh")
        name = full_name(scope, "t")
        reader = Reader(name, group, "o")
        self.readers.append(reader)
        open_consumer = self.tenants.engine.open_consumer
        self.keep(scope, self.call(open_consumer, name, group, "o", 1000, 5, reader))

    def name(self) -> None:
        """Joins a named subscription, which is created if it is new."""
        scope, name = self.scope(), self.dice.choice("mn")
        start = Start(self.dice.choice(["earliest", "latest", "offset"]), self.dice.randint(0, 9))
        command = SubscribeNamed(
            path=(*scope, "d"), name=name, owner="o", start=start, lease_ms=1000, prefetch=5
        )
        reader = Reader(stream_log_name((*scope, "d")), name, "o")
        self.keep(scope, self.call(self.tenants.engine.streams.consume, command, reader))

    def advance(self) -> None:
        """Publishes the progress of a group or a name, which is created if it is new."""
        scope, reached = self.scope(), self.dice.randint(0, 5)
        if self.dice.random() < 0.5:
            name = self.dice.choice("mn")
            self.call(self.tenants.engine.streams.advance, (*scope, "d"), name, reached)
        else:
            topic, group = full_name(scope, "t"), self.dice.choice("gh")
            self.call(self.tenants.engine.set_progress, topic, group, [Reached(0, reached)])

    def drop_name(self) -> None:
        log = stream_log_name((*self.scope(), "d"))
        self.call(self.tenants.engine.delete_group, log, self.dice.choice("mn"))

    def cache(self) -> None:
        """Deletes a cache, or creates it."""
        scope = self.scope()
        registry = self.tenants.engine.registry
        if isinstance(self.call(registry.delete, "cache", (*scope, "x"), False), PenstockError):
            entry = Entry(kind="cache", tenant_id=scope[0], namespace=scope[1], name="x")
            entry = msgspec.structs.replace(entry, cache=CacheConfig())
            self.call(registry.create, entry)

    def subscribe(self) -> None:
        scope = self.scope()
        command = Subscribe(path=(*scope, self.dice.choice("sd")))
        subscribe = self.tenants.engine.streams.subscribe
        self.keep(scope, self.call(subscribe, command, Listener(stalled=True)))

    def watch(self) -> None:
        scope = self.scope()
        command = Watch(path=(*scope, "c"), key="k")
        self.keep(scope, self.call(self.tenants.engine.caches.watch, command, Watcher()))

    def keep(self, scope: Scope, outcome: Any) -> None:
        if not isinstance(outcome, PenstockError):
            self.open.append((scope, outcome))

    def close(self) -> None:
        if self.open:
            self.open.pop(self.dice.randrange(len(self.open)))[1].close()

    def topic(self) -> None:
        self.call(self.tenants.engine.create_topic, self.topic_name(), self.dice.randint(1, 3))

    def drop_topic(self) -> None:
        self.call(self.tenants.engine.delete_topic, self.topic_name())

    def drop_group(self) -> None:
        self.call(self.tenants.engine.delete_group, self.topic_name(), self.dice.choice("gh"))

    def stream(self) -> None:
        """Deletes the durable stream, or creates it."""
        scope = self.scope()
        registry = self.tenants.engine.registry
        gone = self.call(registry.delete, "stream", (*scope, "d"), False)
        if not isinstance(gone, PenstockError):
            return
        config = StreamConfig(delivery="at_least_once", durable=True)
        entry = Entry(kind="stream", tenant_id=scope[0], namespace=scope[1], name="d")
        self.call(registry.create, msgspec.structs.replace(entry, stream=config))

    def drop_namespace(self) -> None:
        """Deletes a namespace with all in it, and creates it again."""
        registry = self.tenants.engine.registry
        scope = self.scope()
        if self.dice.random() < 0.3:
            self.call(registry.delete, "namespace", (*scope, ""), True)
            tenant, namespace = scope
            place: dict[str, Any] = {"tenant_id": tenant, "namespace": namespace}
            self.call(registry.create, Entry(kind="namespace", **place))
        for name, durable in (("c", False), ("kept", True)):
            config = CacheConfig(durable=durable)
            entry = Entry(
                kind="cache", tenant_id=scope[0], namespace=scope[1], name=name, cache=config
            )
            self.call(registry.create, entry)

    def restart(self) -> None:
        again = self.dice.choice(
            [self.tenants.restart, self.tenants.kill, self.tenants.seal_and_crash]
        )
        again()
        self.open.clear()
        self.readers.clear()

    def fail(self) -> None:
        """The log has no room for one command."""
        log = self.tenants.log
        has_room = log.has_room
        log.has_room = lambda *_, **__: False
        self.dice.choice([self.produce, self.publish, self.put, self.consume, self.topic])()
        log.has_room = has_room

    def wait(self) -> None:
        self.tenants.pass_ms(self.dice.choice([10, 100, 1000]))

    # -- the plain recount ---------------------------------------------------------------------

    def check(self) -> None:
        state = self.tenants.state
        check(state)
        living = [(scope, each) for scope, each in self.open if _is_open(each)]
        for scope in (*SCOPES, ("acme", ""), ("globex", "")):
            report = self.call(self.tenants.engine.quotas.report, scope)
            topics = [t for t in state.topics.values() if _is_in(t.scope, scope)]
            caches = [c for c in state.caches.values() if _is_in(c.path[:2], scope)]
            backlogs = [p.backlog for topic in topics for p in topic.partitions]
            durable = [cache for cache in caches if cache.is_durable]
            expected = {
                "topics": sum(not is_stream_log(topic.name) for topic in topics),
                "cache_memory": sum(cache.bytes for cache in caches),
                "backlog_msgs": sum(backlog.buffered_msgs() for backlog in backlogs),
                "backlog_bytes": sum(backlog.buffered_bytes() for backlog in backlogs),
                "disk_bytes": sum(backlog.retained_bytes() for backlog in backlogs)
                + sum(cache.bytes for cache in durable),
                "subscribe_connections": sum(_is_in(each, scope) for each, _ in living),
                "connections": 0,
                "groups": sum(len(topic.groups) for topic in topics),
                "streams": self.registered("stream", scope),
                "caches": self.registered("cache", scope),
            }
            found = {name: report.used[name] for name in expected}
            assert found == expected, scope
            for name, limit in LIMITED.items():
                assert found[name] <= limit or scope == ("globex", ""), (name, scope)

    def registered(self, kind: Kind, scope: Scope) -> int:
        entries = self.tenants.state.registry.by_kind[kind].values()
        return sum(_is_in((entry.tenant_id, entry.namespace), scope) for entry in entries)


def _is_open(each: Any) -> bool:
    for name, value in (("is_open", True), ("is_closed", False), ("closed", False)):
        if hasattr(each, name):
            return bool(getattr(each, name) is value)
    raise AssertionError(each)


def _is_in(scope: Scope, of: Scope) -> bool:
    return scope == of or (not of[1] and scope[0] == of[0])


@pytest.mark.parametrize("seed", range(12))
def test_use_is_what_a_plain_recount_finds(seed: int) -> None:
    """felix-98, 99, 100, 102: counters do not drift, whatever is refused, deleted or restarted."""
    history = History(seed)
    for _ in range(STEPS):
        history.step()
        history.check()
    for _, each in history.open:
        each.close()
    history.open.clear()
    history.check()
