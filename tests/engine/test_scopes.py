"""Topics of tenants in the engine: full names, deletions with their namespace, and what an older
broker has written."""

from __future__ import annotations

import logging

import pytest

from penstock.api.messages import Decided, Produce
from penstock.model.envelope import Envelope, RoutingDecision
from penstock.model.errors import FailedPrecondition, NotFound, ResourceExhausted
from penstock.model.limits import Limits
from penstock.model.records import (
    RegistryChanged,
    TopicCreated,
    TopicDeleted,
    decode_record,
    encode_record,
)
from penstock.model.scopes import DEFAULT_SCOPE, Scope, full_name, plain_name
from penstock.model.tenancy import Entry, Path
from penstock.storage.recovery import walk_log
from tests.engine.harness import Broker, on_disk, policy, values
from tests.engine.test_frames import frames
from tests.property.follower import Follower, must_equal, recovered

ACME: Scope = ("acme", "prod")
GLOBEX: Scope = ("globex", "prod")
PATH: Path = ("acme", "prod", "")
ORDERS = full_name(ACME, "orders")


def with_namespaces(broker: Broker, *scopes: Scope) -> Broker:
    for tenant, namespace in scopes or (ACME, GLOBEX):
        broker.must(broker.engine.registry.create, Entry(kind="tenant", tenant_id=tenant))
        broker.must(
            broker.engine.registry.create,
            Entry(kind="namespace", tenant_id=tenant, namespace=namespace),
        )
    return broker


def topics(broker: Broker, scope: Scope) -> list[str]:
    found: list[str] = broker.must(broker.engine.list_topics, scope)
    return found


# -- deleting ------------------------------------------------------------------------------------


def test_a_cascade_deletes_topics_and_namespace_in_one_frame() -> None:
    broker = with_namespaces(on_disk())
    broker.topic(ORDERS, 2)
    broker.topic(full_name(ACME, "other"))
    broker.topic(full_name(GLOBEX, "orders"))
    broker.topic("orders")
    reader = broker.consume(ORDERS)
    broker.put(ORDERS, "a", "b")
    follower = Follower(broker)
    refused = broker.call(broker.engine.registry.delete, "namespace", PATH, False)
    assert isinstance(refused, FailedPrecondition)
    assert "2 topics" in refused.message
    assert topics(broker, ACME) == ["orders", "other"]
    broker.must(broker.engine.registry.delete, "namespace", PATH, True)
    *_, last = frames(broker)
    assert [type(record) for record in last] == [TopicDeleted, TopicDeleted, RegistryChanged]
    assert reader.ended == ["topic 'orders' was deleted"]
    assert topics(broker, ACME) == []
    assert topics(broker, GLOBEX) == topics(broker, DEFAULT_SCOPE) == ["orders"]
    assert ("acme", "prod", "") not in broker.state.registry.namespaces
    follower.compare()
    must_equal(recovered(broker), broker)
    broker.crash()
    assert topics(broker, ACME) == []
    broker.close()


@pytest.mark.parametrize("flavour", ["nothing", "everything"])
def test_a_crash_in_a_cascade_keeps_all_of_it_or_nothing(flavour: str) -> None:
    broker = with_namespaces(on_disk())
    broker.topic(ORDERS)
    broker.hold_writes()
    outcomes = broker.submit(broker.engine.registry.delete, "tenant", ("acme", "", ""), True)
    broker.scheduler.run()
    assert outcomes == []
    broker.crash(flavour)
    has_topic = bool(topics(broker, ACME))
    has_tenant = ("acme", "", "") in broker.state.registry.tenants
    assert has_topic == has_tenant
    broker.close()


def test_topics_of_the_default_namespace_outlive_its_entry() -> None:
    broker = with_namespaces(on_disk(), ("default", "prod"))
    broker.topic("orders")
    broker.topic(full_name(("default", "prod"), "orders"))
    for kind, path in (
        ("tenant", ("default", "", "")),
        ("namespace", ("default", "default", "")),
    ):
        refused = broker.call(broker.engine.registry.delete, kind, path, True)
        assert isinstance(refused, FailedPrecondition)
        assert "topics of the default namespace" in refused.message
    assert topics(broker, ("default", "prod")) == ["orders"]
    broker.must(broker.engine.delete_topic, "orders")
    broker.must(broker.engine.registry.delete, "tenant", ("default", "", ""), True)
    assert topics(broker, ("default", "prod")) == []
    # Plain calls do not need the entry.
    broker.topic("orders")
    broker.close()


def test_another_registry_deletes_no_topics(caplog: pytest.LogCaptureFixture) -> None:
    """A namespace that the control plane no longer has is gone; its messages are not."""
    broker = with_namespaces(on_disk())
    broker.topic(ORDERS)
    broker.put(ORDERS, "kept")
    snapshot = broker.must(broker.engine.registry.snapshot)
    there = [entry for entry in snapshot.entries if entry.tenant_id != "acme"]
    with caplog.at_level(logging.WARNING):
        broker.must(broker.engine.registry.reconcile, there)
    assert "namespace acme/prod is gone from the control plane; its 1 topics" in caplog.text
    assert topics(broker, ACME) == ["orders"]
    assert values(broker.stored(ORDERS)) == ["kept"]
    broker.produce(ORDERS, "more")
    created = broker.call(broker.engine.create_topic, full_name(ACME, "new"), 1)
    assert isinstance(created, NotFound)
    broker.crash()
    assert values(broker.stored(ORDERS)) == ["kept", "more"]
    broker.must(broker.engine.delete_topic, ORDERS)
    broker.close()


# -- where messages go ---------------------------------------------------------------------------


def test_dead_letters_go_to_the_same_namespace() -> None:
    broker = with_namespaces(on_disk())
    for scope in (ACME, GLOBEX):
        broker.topic(full_name(scope, "orders"))
    reader = broker.consume(ORDERS)
    broker.produce(ORDERS, "v", envelope=policy(max_attempts=1))
    assert broker.nack(reader, reader.one()) is None
    [letter] = broker.stored(full_name(ACME, "dlq.orders"))
    assert letter.envelope is not None
    assert letter.envelope.dlq is not None
    assert letter.envelope.dlq.original_topic == "orders"
    assert topics(broker, ACME) == ["dlq.orders", "orders"]
    assert topics(broker, GLOBEX) == ["orders"]
    assert topics(broker, DEFAULT_SCOPE) == []
    assert broker.state.topics[full_name(ACME, "dlq.orders")].is_dead_letter
    broker.close()


class Elsewhere:
    """A router that sends everything to one topic."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.seen: list[str] = []

    def route(self, command: Produce, decided: Decided) -> None:
        self.seen.append(plain_name(command.topic))
        decided(RoutingDecision(target_topic=self.target))


@pytest.mark.parametrize("target", [full_name(GLOBEX, "orders"), "\x1eacme\x1fprod\x1forders"])
def test_a_router_cannot_name_a_topic_of_somebody_else(target: str) -> None:
    broker = with_namespaces(on_disk(router=Elsewhere(target)))
    for name in ("orders", ORDERS, full_name(GLOBEX, "orders")):
        broker.topic(name)
    for name in ("orders", ORDERS):
        broker.produce(name, "v")
        assert values(broker.stored(name)) == ["v"]
    assert broker.stored(full_name(GLOBEX, "orders")) == []
    assert broker.engine.metrics().router_failures == 2
    broker.close()


def test_a_key_that_is_being_routed_blocks_no_other_tenant() -> None:
    held: list[Decided] = []

    class Slow:
        def route(self, command: Produce, decided: Decided) -> None:
            held.append(decided)

    broker = with_namespaces(on_disk(router=Slow()))
    envelope = Envelope(idempotency_key="k")
    names = ["orders", ORDERS, full_name(GLOBEX, "orders")]
    outcomes = []
    for name in names:
        broker.topic(name)
        outcomes.append(broker.submit(broker.engine.produce, Produce(name, "", "v", envelope)))
    again = broker.call(broker.engine.produce, Produce(ORDERS, "", "v", envelope))
    assert isinstance(again, FailedPrecondition)
    for decided in held:
        decided(RoutingDecision())
    broker.settle()
    assert [plain_name(name) for name in names] == ["orders"] * 3
    assert all(values(broker.stored(name)) == ["v"] for name in names)
    broker.close()


def test_a_full_topic_of_one_tenant_leaves_room_for_the_others() -> None:
    broker = with_namespaces(on_disk(limits=Limits(max_partition_msgs=3, max_in_flight=2)))
    for scope in (ACME, GLOBEX):
        broker.topic(full_name(scope, "orders"))
    hoarding = broker.consume(ORDERS)
    broker.put(ORDERS, "1", "2", "3")
    assert isinstance(broker.try_produce(ORDERS, "4"), ResourceExhausted)
    reader = broker.consume(full_name(GLOBEX, "orders"))
    broker.put(full_name(GLOBEX, "orders"), "a", "b", "c")
    assert values(reader.items) == ["a", "b"]
    assert values(hoarding.items) == ["1", "2"]
    rejected = broker.engine.metrics().rejected
    assert {name for name, _, _ in rejected} == {ORDERS}
    broker.close()


# -- on disk -------------------------------------------------------------------------------------


def recorded(broker: Broker) -> list[bytes]:
    found: list[bytes] = []
    walk_log(
        broker.disk,
        broker.directory,
        first_segment=1,
        replay=lambda data, _: found.append(bytes(data)),
    )
    return found


def test_plain_names_are_on_disk_as_they_always_were() -> None:
    broker = on_disk()
    broker.topic("orders")
    broker.must(broker.engine.delete_topic, "orders")
    created, deleted = recorded(broker)
    ts = broker.clock.now_ms()
    assert created == encode_record(TopicCreated(1, ts, "orders", 1))
    assert deleted == encode_record(TopicDeleted(1, ts))
    broker.close()


def test_a_log_of_an_older_broker_is_in_the_default_namespace() -> None:
    broker = on_disk()
    for name in ("orders", "a/b", "dlq.orders"):
        broker.topic(name)
    broker.put("orders", "old")
    assert all(
        b"\x1f" not in record.name.encode()
        for data in recorded(broker)
        if isinstance(record := decode_record(data), TopicCreated)
    )
    broker.seal_and_crash()
    assert topics(broker, DEFAULT_SCOPE) == ["a/b", "dlq.orders", "orders"]
    with_namespaces(broker)
    assert topics(broker, ACME) == []
    broker.topic(ORDERS)
    broker.put(ORDERS, "new")
    broker.seal_and_crash()
    assert values(broker.stored("orders")) == ["old"]
    assert values(broker.stored(ORDERS)) == ["new"]
    broker.close()
