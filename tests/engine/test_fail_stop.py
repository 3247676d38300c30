"""An exception between the append of a record and the end of its apply ends serving.

Nobody is told anything that memory says after that: who waits gets 503, later commands too, and a
restart has what the log has. Sentence driftq-50.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from penstock.api.effects import EffectCommand
from penstock.api.transactions import AckOperation, TransactionCommand
from penstock.core.invariants import check
from penstock.engine import ledger
from penstock.model.caching import Put
from penstock.model.errors import Unavailable
from penstock.model.progress import Reached
from penstock.model.scopes import DEFAULT_SCOPE
from penstock.model.tenancy import CacheConfig, Entry, Path
from penstock.model.writes import CommitBatch, PartCommit
from tests.engine.harness import LONG_MS, Reader, on_disk, values
from tests.engine.write_harness import WriteBroker, write_broker

CACHE: Path = ("x", "n", "c")
STREAM = Entry(kind="tenant", tenant_id="another")
BATCH = CommitBatch("p", 0, [PartCommit(0, "a", 1, 2)], False)

Submit = Callable[[WriteBroker, Reader], list[Any]]

COMMANDS: dict[str, Submit] = {
    "produce": lambda b, r: b.submit(b.engine.produce, b.command("t", "c")),
    "batch": lambda b, r: b.submit(b.engine.produce_many, [b.command("t", "c")] * 3),
    "ack": lambda b, r: b.submit(b.engine.ack, b.naming(r, 0)),
    "nack": lambda b, r: b.submit(b.engine.nack, b.naming(r, 1), "why"),
    "effect": lambda b, r: b.submit(
        b.engine.effects.begin, EffectCommand("", "t", "g", "k", "o"), 1000
    ),
    "topic": lambda b, r: b.submit(b.engine.create_topic, "new", 1),
    "deletion": lambda b, r: b.submit(b.engine.delete_topic, "other"),
    "retention": lambda b, r: b.submit(b.engine.configure_topic, "t", 1000, None),
    "group": lambda b, r: b.submit(
        b.engine.open_consumer, "t", "h", "o", 0, 0, Reader("t", "h", "o")
    ),
    "progress": lambda b, r: b.submit(b.engine.set_progress, "t", "h", [Reached(0, 1)]),
    "tenant": lambda b, r: b.submit(b.engine.registry.create, STREAM),
    "cache": lambda b, r: b.submit(b.engine.caches.put, Put(CACHE, "k", b"new")),
    "commit of a batch": lambda b, r: b.submit(b.engine.writes.commit, BATCH),
    "transaction": lambda b, r: b.submit(
        b.engine.transactions.commit,
        TransactionCommand([b.command("t", "c"), AckOperation(b.naming(r, 0))], "tx"),
    ),
}

APPLIES = ("apply", "apply_message", "apply_messages")


def before(function: Callable[..., Any]) -> Callable[..., Any]:
    def broken(*args: Any) -> None:
        raise ZeroDivisionError("a defect before the change")

    return broken


def after(function: Callable[..., Any]) -> Callable[..., Any]:
    def broken(*args: Any) -> None:
        function(*args)
        raise ZeroDivisionError("a defect after the change")

    return broken


@pytest.fixture
def broker() -> WriteBroker:
    """With two messages delivered, a durable cache and a batch that waits for its commit."""
    broker = write_broker()
    broker.topic("other")
    broker.put("t", "a", "b")
    registry = broker.engine.registry
    broker.must(registry.create, Entry(kind="tenant", tenant_id="x"))
    broker.must(registry.create, Entry(kind="namespace", tenant_id="x", namespace="n"))
    cache = CacheConfig(durable=True)
    entry = Entry(kind="cache", tenant_id="x", namespace="n", name="c", cache=cache)
    broker.must(registry.create, entry)
    broker.must(broker.engine.caches.put, Put(CACHE, "k", b"old"))
    broker.stage(["row 1", "row 2"])
    return broker


def facts(broker: WriteBroker) -> dict[str, Any]:
    """What a client can find out."""
    value = broker.must(broker.engine.caches.get, CACHE, "k")
    tenants = broker.must(broker.engine.registry.tenants)
    check(broker.state)
    return {
        "topics": broker.must(broker.engine.list_topics, DEFAULT_SCOPE),
        "stored": broker.contents("t"),
        "cache": value.value,
        "tenants": [tenant.tenant_id for tenant in tenants],
        "groups": sorted(broker.state.topics["t"].groups),
        "retention": broker.state.topics["t"].retention_ms,
    }


def assert_stopped(broker: WriteBroker, reader: Reader) -> None:
    assert not broker.engine.health().ready
    assert "restart" in broker.engine.health().reason
    assert len(reader.ended) == 1
    for submit in COMMANDS.values():
        outcomes = submit(broker, reader)
        broker.scheduler.run()
        flat = outcomes[0] if isinstance(outcomes[0], list) else outcomes
        assert [type(outcome) for outcome in flat] == [Unavailable] * len(flat)


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "stopped"])
@pytest.mark.parametrize("defect", [before, after])
@pytest.mark.parametrize("name", COMMANDS)
def test_an_apply_that_raises_after_the_append_stops_serving(
    broker: WriteBroker,
    name: str,
    defect: Callable[..., Any],
    is_killed: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """driftq-50: whichever command it is; one line in the log."""
    reader = broker.consume(lease_ms=LONG_MS)
    known = facts(broker)
    waiting = broker.submit(broker.engine.produce, broker.command("t", "waits"))
    caplog.set_level(logging.ERROR)
    with pytest.MonkeyPatch.context() as patch:
        for function in APPLIES:
            patch.setattr(ledger, function, defect(getattr(ledger, function)))
        outcomes = COMMANDS[name](broker, reader)
        broker.scheduler.run()
    flat = outcomes[0] if isinstance(outcomes[0], list) else outcomes
    assert [type(outcome) for outcome in flat] == [Unavailable] * len(flat)
    assert [type(outcome) for outcome in waiting] == [Unavailable]
    assert [record.message for record in caplog.records] == [
        "the broker met a defect of its own and stops serving"
    ]
    assert_stopped(broker, reader)
    if is_killed:
        broker.kill()
    else:
        broker.restart()
    assert facts(broker) == known
    assert broker.engine.health().ready
    broker.put("t", "later")
    assert broker.contents("t") == [*known["stored"], "later"]
    broker.close()


AFTERWARDS: dict[str, tuple[str, Callable[[WriteBroker], tuple[object, str]]]] = {
    "window": ("produce", lambda b: (b.engine.parts.window, "add")),
    "windows of a batch": ("batch", lambda b: (b.engine.parts.window, "add_run")),
    "dispatch of a produce": ("produce", lambda b: (b.engine.parts.dispatcher, "mark_topic")),
    "a place in flight": ("ack", lambda b: (b.engine.parts.dispatcher, "left_flight")),
    "a nack's": ("nack", lambda b: (b.engine.parts.dispatcher, "left_flight")),
    "a topic's window": ("topic", lambda b: (b.engine.parts.window, "open_topic")),
    "a deleted topic's": ("deletion", lambda b: (b.engine.parts.window, "drop_topic")),
    "a countdown": ("cache", lambda b: (b.engine.caches, "_hold")),
    "a transaction's message": ("transaction", lambda b: (b.engine.parts.window, "add")),
    "its dispatch": ("transaction", lambda b: (b.engine.parts.dispatcher, "mark_topic")),
    "its places": ("transaction", lambda b: (b.engine.parts.dispatcher, "left_flight")),
    "a batch's rows": ("commit of a batch", lambda b: (b.engine.writes, "_begin")),
}


@pytest.mark.parametrize("name", AFTERWARDS)
def test_a_command_that_is_recorded_and_breaks_off_stops_serving(
    broker: WriteBroker, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """driftq-50: what belongs to the record beside the state is half done."""
    command, where = AFTERWARDS[name]
    reader = broker.consume(lease_ms=LONG_MS)
    known = facts(broker)
    owner, method = where(broker)
    kind = type(owner)
    with monkeypatch.context() as patch:
        patch.setattr(kind, method, before(getattr(kind, method)))
        outcomes: list[Any] = []
        try:
            outcomes = COMMANDS[command](broker, reader)
        except Unavailable as failure:
            outcomes = [failure]
        broker.scheduler.run()
    assert [type(outcome) for outcome in outcomes] == [Unavailable]
    assert_stopped(broker, reader)
    broker.restart()
    assert facts(broker) == known
    broker.close()


def test_a_refusal_before_the_append_stops_nothing(
    broker: WriteBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """driftq-50: nothing has happened then."""

    def refusing(record: bytes) -> int:
        raise Unavailable("no")

    with monkeypatch.context() as patch:
        patch.setattr(broker.log, "append_one", refusing)
        assert isinstance(broker.try_produce("t", "c"), Unavailable)
    assert broker.engine.health().ready
    broker.put("t", "later")
    assert broker.contents("t") == ["a", "b", "later"]
    broker.close()


def nested(depth: int, act: Callable[[], object]) -> None:
    if depth:
        nested(depth - 1, act)
    else:
        act()


def act_on(broker: WriteBroker, name: str, n: int, outcomes: list[Any]) -> None:
    if name == "produce":
        broker.engine.produce(broker.command("t", f"value {n}"), outcomes.append)
    elif name == "topic":
        broker.engine.create_topic(f"topic-{n}", 1, outcomes.append)
    else:
        entry = Entry(kind="tenant", tenant_id=f"tenant-{n}")
        broker.engine.registry.create(entry, outcomes.append)


@pytest.mark.parametrize("name", ["produce", "topic", "tenant"])
def test_an_exhausted_stack_does_not_part_state_and_log(broker: WriteBroker, name: str) -> None:
    """driftq-50: at whatever depth Python gives up, the broker stops or nothing is amiss."""
    known = None
    for depth in range(800, 1000):
        outcomes: list[Any] = []
        with contextlib.suppress(RecursionError, Unavailable):
            nested(depth, partial(act_on, broker, name, depth, outcomes))
        broker.engine.parts.ledger.wake()
        broker.settle()
        if not broker.engine.health().ready:
            break
        known = facts(broker)
    broker.restart()
    assert facts(broker) == known
    broker.close()


def test_a_defect_in_a_turn_stops_serving_and_keeps_the_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """driftq-50: every waiting command is refused, and readiness is false."""
    broker = on_disk()
    broker.topic()
    broker.put("t", "a", "b")
    reader = broker.consume(lease_ms=LONG_MS)
    engine = broker.engine

    def broken() -> None:
        raise ZeroDivisionError("a broken invariant")

    monkeypatch.setattr(engine.parts.dispatcher, "dispatch", broken)
    waiting = [
        broker.submit(engine.produce, broker.command("t", "c")),
        broker.submit(engine.produce_many, [broker.command("t", "d")]),
        broker.submit(engine.ack, broker.naming(reader, 0)),
        broker.submit(engine.nack, broker.naming(reader, 1), "why"),
        broker.submit(engine.effects.begin, EffectCommand("", "t", "g", "k", "o"), 1000),
        broker.submit(engine.create_topic, "new", 1),
    ]
    assert not any(waiting)
    with pytest.raises(ZeroDivisionError):
        broker.scheduler.run()
    assert all(len(outcomes) == 1 and isinstance(outcomes[0], Unavailable) for outcomes in waiting)
    assert not engine.health().ready
    assert "restart" in engine.health().reason
    assert len(reader.ended) == 1
    for late in (
        broker.submit(engine.produce, broker.command("t", "e")),
        broker.submit(engine.ack, broker.naming(reader, 0)),
        broker.submit(engine.open_consumer, "t", "h", "o", 0, 0, Reader("t", "h", "o")),
    ):
        assert isinstance(late[0], Unavailable)
    monkeypatch.undo()
    broker.kill()
    assert broker.engine.health().ready
    assert values(broker.stored("t"))[:2] == ["a", "b"]
    broker.close()
