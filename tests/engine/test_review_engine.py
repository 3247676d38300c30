"""Leases, pages, runs and defects: where the engine once did more, or less, than it should."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock.api.effects import EffectCommand
from penstock.api.messages import Decided, Produce
from penstock.core.invariants import check
from penstock.engine.opening import open_on_disk
from penstock.engine.scheduler import LoopScheduler
from penstock.model.envelope import Envelope, RoutingDecision
from penstock.model.errors import FailedPrecondition, Unavailable
from penstock.model.limits import KIB, MIB, Limits
from penstock.model.records import Message
from penstock.storage.log import WalOptions
from penstock.storage.vfs import Vfs
from tests.engine.harness import LONG_MS, Broker, Reader, on_disk, values
from tests.engine.test_router import Waiting

LARGE = WalOptions(segment_bytes=16 * MIB, reserve_bytes=0)


# -- the router --------------------------------------------------------------------------------


def keyed(value: str) -> Produce:
    return Broker.command("t", value, envelope=Envelope(idempotency_key="k"))


def test_a_repetition_of_what_is_stored_is_a_duplicate_while_another_is_at_the_router() -> None:
    """driftq-57: nothing is under way that could still decide otherwise."""
    router = Waiting()
    broker = Broker(router=router)
    broker.topic()
    first = broker.submit(broker.engine.produce, keyed("a"))
    router.answer(RoutingDecision())
    broker.settle()
    assert isinstance(first[0], Message)
    second = broker.submit(broker.engine.produce, keyed("b"))
    third = broker.submit(broker.engine.produce, keyed("c"))
    broker.settle()
    assert third == [None], "a duplicate: 200"
    router.answer(RoutingDecision())
    broker.settle()
    assert second == [None]
    assert values(broker.stored("t")) == ["a"]
    broker.close()


class AtOnce:
    """Decides within the call."""

    def route(self, command: Produce, decided: Decided) -> None:
        decided(RoutingDecision("seen " + command.value))


def test_a_batch_of_any_size_passes_a_router_that_decides_at_once() -> None:
    """driftq-54: and in its order."""
    broker = Broker(router=AtOnce())
    broker.topic()
    outcomes = broker.must(
        broker.engine.produce_many, [broker.command("t", str(n)) for n in range(3000)]
    )
    assert [message.value for message in outcomes] == [str(n) for n in range(3000)]
    assert all(message.routing.label == "seen " + message.value for message in outcomes)
    broker.close()


def test_a_batch_is_with_the_router_in_parts() -> None:
    """driftq-55: what waits is never so much that the router turns some away."""
    router = Waiting()
    broker = Broker(router=router)
    broker.topic()
    commands = [broker.command("t", str(n)) for n in range(1500)]
    outcomes = broker.submit(broker.engine.produce_many, commands)
    most = 0
    while router.asked:
        most = max(most, len(router.asked))
        router.answer(RoutingDecision("label"))
    broker.settle()
    assert most <= 512
    assert [message.value for message in outcomes[0]] == [str(n) for n in range(1500)]
    assert all(message.routing is not None for message in outcomes[0])
    broker.close()


# -- effects -----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_restarted", [False, True])
def test_an_effect_is_its_owners_for_the_whole_lease(is_restarted: bool) -> None:
    """driftq-61: also where the lease is longer than what is remembered."""
    broker = on_disk(limits=Limits(idempotency_ttl_ms=1000))
    broker.topic()
    assert broker.begin("k", owner="a", lease_ms=60_000) is None
    broker.pass_ms(30_000)
    if is_restarted:
        broker.restart()
    assert isinstance(broker.begin("k", owner="b", lease_ms=60_000), FailedPrecondition)
    assert broker.commit("k", "done", owner="a") is None
    broker.close()


def test_a_message_that_is_done_ends_no_lease_on_its_effect() -> None:
    """driftq-61: whoever acks it."""
    broker = on_disk(limits=Limits(idempotency_ttl_ms=1000))
    broker.topic()
    broker.produce("t", "v", envelope=Envelope(idempotency_key="k"))
    reader = broker.consume(lease_ms=LONG_MS)
    assert broker.begin("k", owner="a", lease_ms=60_000) is None
    assert broker.ack(reader, 0) is None
    broker.pass_ms(30_000)
    assert isinstance(broker.begin("k", owner="b", lease_ms=60_000), FailedPrecondition)
    broker.pass_ms(40_000)
    assert broker.begin("k", owner="b", lease_ms=60_000) is None
    broker.close()


def test_a_long_lease_keeps_no_other_effect_in_memory() -> None:
    """driftq-60: each is forgotten at its own time, so their number stays bounded."""
    broker = on_disk(limits=Limits(idempotency_ttl_ms=1000, max_idempotency_keys=10))
    broker.topic()
    assert broker.begin("long", lease_ms=LONG_MS) is None
    for n in range(9):
        assert broker.begin(f"short {n}", lease_ms=100) is None
    broker.pass_ms(5000)
    for n in range(9):
        assert broker.begin(f"later {n}", lease_ms=100) is None
    assert len(broker.state.topics["t"].effects) == 10
    broker.close()


def test_renewals_of_a_long_lease_leave_nothing_behind() -> None:
    """driftq-60: the queue of ends has a place an effect, not one a renewal."""
    broker = Broker()
    broker.topic()
    assert broker.begin("k", lease_ms=LONG_MS) is None
    command = EffectCommand("", "t", "g", "k", "o")
    for n in range(5000):
        broker.submit(broker.engine.renew_effect, command, LONG_MS + n)
    broker.settle()
    assert len(broker.state.topics["t"].effects._order) < 2500
    assert isinstance(broker.begin("k", owner="b"), FailedPrecondition)
    check(broker.state)
    broker.close()


# -- leases ------------------------------------------------------------------------------------


class SlowDisk(Vfs):
    def write_at_durable(self, *arguments: Any, **options: Any) -> Any:
        time.sleep(0.06)
        return super().write_at_durable(*arguments, **options)


def test_a_commit_longer_than_the_lease_still_delivers(tmp_path: Path) -> None:
    """driftq-36: a lease runs from the moment the item leaves."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        options = WalOptions(segment_bytes=MIB, reserve_bytes=0)
        engine = open_on_disk(
            str(tmp_path / "data"), options, Limits(), LoopScheduler(loop), vfs=SlowDisk()
        )

        async def call(command: Any, *arguments: Any) -> Any:
            outcome = loop.create_future()
            command(*arguments, outcome.set_result)
            return await outcome

        reader = Reader("t", "g", "o")
        try:
            await call(engine.create_topic, "t", 1)
            await call(engine.produce, Produce("t", "", "v"))
            await call(engine.open_consumer, "t", "g", "o", 20, 0, reader)
            async with asyncio.timeout(2):
                while not reader.items:  # noqa: ASYNC110 - it has no event
                    await asyncio.sleep(0.005)
            assert reader.attempts()[0] == 1
        finally:
            engine.close()

    asyncio.run(run())


def test_an_item_held_up_by_the_disk_is_delivered_once_and_has_its_whole_lease() -> None:
    """driftq-36"""
    broker = on_disk()
    broker.topic()
    reader = broker.consume(lease_ms=1000)
    broker.hold_writes()
    produced = broker.submit(broker.engine.produce, broker.command("t", "v"))
    broker.scheduler.run_until(lambda: broker.disk.is_held)
    for _ in range(5):
        broker.clock.advance(1000)
        broker.scheduler.advance(1000)
    assert not reader.items
    broker.disk.release()
    broker.settle()
    assert isinstance(produced[0], Message)
    assert reader.attempts() == [1]
    broker.pass_ms(900)
    assert reader.attempts() == [1]
    broker.pass_ms(200)
    assert reader.attempts() == [1, 2]
    broker.close()


# -- pages -------------------------------------------------------------------------------------


def paged(limit_bytes: int, options: WalOptions, partitions: int = 1) -> Broker:
    """A broker whose first messages are long out of memory."""
    broker = on_disk(limits=Limits(memory_bytes=limit_bytes), options=options)
    broker.topic("t", partitions)
    for n in range(10):
        commands = [broker.command("t", "v" * 2000, str(n)) for n in range(100 * n, 100 * n + 100)]
        broker.must(broker.engine.produce_many, commands)
    return broker


def test_nacks_of_what_is_out_of_memory_are_redelivered_with_few_reads() -> None:
    """driftq-32: a page serves all that it covers."""
    broker = paged(MIB, LARGE)
    reader = broker.consume(lease_ms=LONG_MS)
    given = reader.take()
    assert len(given) == 256
    pages = broker.engine.parts.pages
    before = pages.reads
    nack = partial(broker.engine.nack, delay_ms=0)
    for item in given:
        broker.submit(nack, broker.naming(reader, item), "again")
    broker.pass_ms(10)
    assert sorted(reader.offsets()) == [item.offset for item in given]
    assert set(reader.attempts()) == {2}
    assert pages.reads - before <= 8
    broker.close()


def test_messages_out_of_attempts_are_buried_with_few_reads() -> None:
    """driftq-39: likewise."""
    broker = paged(MIB, LARGE)
    reader = broker.consume(lease_ms=LONG_MS)
    given = reader.take()
    pages = broker.engine.parts.pages
    nack = partial(broker.engine.nack, dead=True)
    for item in given:
        broker.submit(nack, broker.naming(reader, item), "dead")
    reader.live.close()
    before = pages.reads
    broker.pass_ms(100)
    assert len(broker.engine.parts.dead_letters) == 0
    assert broker.state.topics["dlq.t"].partitions[0].end_offset == len(given)
    assert pages.reads - before <= 8
    broker.close()


def test_acks_of_what_is_finished_and_sealed_need_no_page() -> None:
    """driftq-29: offsets are looked up without their messages."""
    broker = paged(MIB, WalOptions(segment_bytes=256 * KIB, reserve_bytes=0), partitions=2)
    reader = broker.consume(lease_ms=LONG_MS)
    acked: list[Any] = []
    while items := reader.take():
        names = [broker.naming(reader, item) for item in items]
        broker.must(broker.engine.ack_many, names)
        acked += names
    broker.pass_ms(3000)
    topic_id = broker.state.topics["t"].id
    ends = [broker.engine.parts.window.log(topic_id, n).sealed_end() for n in range(2)]
    sealed = [name for name in acked if name.offset < ends[name.partition]]
    assert len(sealed) > 300
    pages = broker.engine.parts.pages
    before = pages.reads
    assert broker.must(broker.engine.ack_many, sealed) == [None] * len(sealed)
    assert pages.reads == before
    elsewhere = [broker.naming(reader, n.offset, partition=1 - n.partition) for n in sealed[:50]]
    outcomes = broker.must(broker.engine.ack_many, elsewhere)
    assert all(isinstance(outcome, FailedPrecondition) for outcome in outcomes)
    broker.close()


# -- runs and defects --------------------------------------------------------------------------


def test_a_groups_run_goes_with_its_last_consumer() -> None:
    """driftq-69: with the pages it reads in."""
    broker = Broker()
    broker.topic()
    first = broker.consume(owner="a", lease_ms=LONG_MS)
    second = broker.consume(owner="b", lease_ms=LONG_MS)
    runs = broker.engine.parts.dispatcher._runs
    first.live.close()
    assert len(runs) == 1
    second.live.close()
    assert not runs
    broker.put("t", "later")
    third = broker.consume(owner="c", lease_ms=LONG_MS)
    assert values(third.items) == ["later"]
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
        broker.submit(engine.begin_effect, EffectCommand("", "t", "g", "k", "o"), 1000),
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
