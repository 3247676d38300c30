"""Leases, backoff and dead letters on a clock that moves by the millisecond."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.core.invariants import check
from penstock.core.settle import backoff_ms
from penstock.engine.leases import TICK_MS
from penstock.model.envelope import RetryPolicy
from penstock.model.limits import MAX_BACKOFF_MS, Limits
from penstock.model.records import Message
from tests.engine.harness import LONG_MS, Broker, Reader, on_disk, policy, values

Restart = Callable[[Broker], None]
restarts = pytest.mark.parametrize(
    "restart", [Broker.restart, Broker.crash, Broker.kill, Broker.seal_and_crash]
)


def delay_until_next(broker: Broker, reader: Reader, limit_ms: int = 1_000_000) -> int:
    """How long it takes until the reader is given something."""
    waited = 0
    while not reader.items:
        timers = broker.scheduler._timers
        step = max(1, min(timers[0][0] - broker.scheduler._now_ms, limit_ms))
        broker.pass_ms(step)
        waited += step
        assert waited <= limit_ms
    return waited


def is_in_time(waited: int, due: int) -> bool:
    """Never early, and at most a tick late."""
    return due <= waited <= due + TICK_MS


def test_a_lease_that_ends_is_a_new_delivery_with_its_reason():
    """driftq-36: attempts + 1, ack_timeout, to the next consumer in turn, within 250 ms."""
    broker = on_disk()
    broker.topic()
    first = broker.consume(owner="first", lease_ms=700)
    second = broker.consume(owner="second", lease_ms=700)
    broker.put("t", "a")
    assert first.one().attempts == 1
    assert is_in_time(delay_until_next(broker, second), 700)
    item = second.one()
    assert (item.attempts, item.last_error) == (2, "ack_timeout")
    assert is_in_time(delay_until_next(broker, first), 700)
    assert first.one().attempts == 3
    broker.close()


def test_a_lease_is_the_streams_or_the_default():
    """driftq-18."""
    broker = on_disk(limits=Limits(lease_ms=300))
    broker.topic()
    reader = broker.consume()
    broker.put("t", "a")
    reader.take()
    assert is_in_time(delay_until_next(broker, reader), 300)
    broker.close()


@pytest.mark.parametrize(
    ("first_ms", "max_backoff_ms", "waits"),
    [
        (100, 0, [100, 200, 400, 800, 1600]),
        (100, 350, [100, 200, 350, 350]),
        (1, 0, [1, 2, 4, 8]),
        (7, 7, [7, 7, 7]),
        (500, 100, [100, 100]),
        (0, 1000, [0, 0, 0]),
    ],
)
@pytest.mark.parametrize("by", ["nack", "lapse"])
def test_the_wait_before_retry_n_doubles_up_to_its_cap(
    by: str, first_ms: int, max_backoff_ms: int, waits: list[int]
):
    """driftq-37: counted from the nack, or from the lease's end."""
    broker = on_disk()
    broker.topic()
    lease = 330
    reader = broker.consume(lease_ms=lease)
    broker.produce("t", "a", envelope=policy(0, first_ms, max_backoff_ms))
    for number, wait in enumerate(waits, start=1):
        item = reader.one()
        assert item.attempts == number
        if by == "nack":
            assert broker.nack(reader, item) is None
            due = wait
        else:
            due = lease + wait
        assert is_in_time(delay_until_next(broker, reader, 10**9), due), number
    broker.close()


def test_without_a_cap_the_wait_is_a_day_at_most():
    """Settled: however often it was tried."""
    waits = [backoff_ms(RetryPolicy(0, 50_000_000), attempts) for attempts in (1, 2, 3, 10**9)]
    assert waits == [50_000_000, MAX_BACKOFF_MS, MAX_BACKOFF_MS, MAX_BACKOFF_MS]


def test_what_waits_for_its_backoff_holds_up_nobody():
    """driftq-38."""
    broker = on_disk(limits=Limits(max_in_flight=1))
    broker.topic()
    broker.produce("t", "a", envelope=policy(0, 10_000))
    broker.put("t", "b", "c")
    reader = broker.consume(lease_ms=LONG_MS)
    assert broker.nack(reader, reader.one()) is None
    for value in ("b", "c"):
        item = reader.one()
        assert item.value == value
        assert broker.ack(reader, item) is None
    broker.pass_ms(9_000)
    assert not reader.items
    broker.pass_ms(1_010)
    assert values(reader.items) == ["a"]
    broker.close()


def test_a_late_nack_replaces_the_reason_and_keeps_the_schedule():
    """driftq-37: a nack by the same owner, after the lease ended and before the redelivery."""
    broker = on_disk()
    broker.topic()
    reader = broker.consume(lease_ms=500)
    broker.produce("t", "a", envelope=policy(0, 1000))
    reader.take()
    broker.pass_ms(1000)
    assert broker.nack(reader, 0, "late") is None
    assert is_in_time(delay_until_next(broker, reader), 500)
    item = reader.one()
    assert (item.attempts, item.last_error) == (2, "late")
    broker.close()


@pytest.mark.parametrize("by", ["nack", "lapse"])
def test_after_max_attempts_a_copy_is_in_the_dead_letters_with_its_history(by: str):
    """driftq-39, 40, 43: with no consumer connected, too."""
    broker = on_disk()
    broker.topic("t", 3)
    broker.produce(
        "t",
        "a",
        key="k",
        envelope=policy(
            2,
            100,
            run_id="r",
            step_id="s",
            parent_step_id="p",
            tenant_id="tenant",
            idempotency_key="i",
            partition_override=2,
            deadline="2099-01-01T00:00:00Z",
        ),
    )
    reader = broker.consume(lease_ms=500)
    for _ in range(2):
        item = reader.one()
        if by == "nack":
            assert broker.nack(reader, item, "bad") is None
        if item.attempts == 2:
            reader.live.close()
        broker.pass_ms(110 if by == "nack" else 620)
    assert not reader.items
    assert len(broker.state.topics["dlq.t"].partitions) == 3
    (copy,) = broker.stored("dlq.t", 2)
    assert (copy.key, copy.value) == ("k", "a")
    envelope = copy.envelope
    assert envelope is not None
    assert (envelope.run_id, envelope.step_id, envelope.parent_step_id) == ("r", "s", "p")
    assert (envelope.tenant_id, envelope.idempotency_key) == ("tenant", "i")
    assert (envelope.retry_policy, envelope.partition_override) == (None, None)
    assert envelope.target_topic == ""
    story = envelope.dlq
    assert story is not None
    assert (story.original_topic, story.original_partition, story.original_offset) == ("t", 2, 0)
    assert (story.group, story.attempts) == ("g", 2)
    assert story.last_error == ("bad" if by == "nack" else "ack_timeout")
    assert story.routed_at_ms == copy.ts
    assert broker.state.topics["t"].groups["g"].progress[2].floor() == 1
    check(broker.state)
    broker.close()


def test_a_copy_is_neither_refused_by_limits_nor_taken_for_a_produce_of_its_key():
    """driftq-41, 59."""
    broker = on_disk(limits=Limits(max_partition_msgs=2, max_partition_bytes=20))
    broker.topic()
    reader = broker.consume()
    for n in range(6):
        broker.produce("t", f"v{n}", envelope=policy(1, idempotency_key=f"k{n}"))
        assert broker.nack(reader, reader.one()) is None
    assert len(broker.stored("dlq.t")) == 6
    broker.close()


def test_expiry_and_retry_need_no_consumer():
    """driftq-43: what came due meanwhile is there when one comes."""
    broker = on_disk()
    broker.topic()
    broker.produce("t", "a", envelope=policy(0, 300))
    gone = broker.consume(owner="gone", lease_ms=500)
    gone.live.close()
    broker.pass_ms(815)
    reader = broker.consume(owner="other", lease_ms=LONG_MS)
    item = reader.one()
    assert (item.attempts, item.last_error) == (2, "ack_timeout")
    broker.close()


@restarts
def test_attempts_and_reasons_survive_a_restart_and_leases_do_not(restart: Restart):
    """driftq-44."""
    broker = on_disk()
    broker.topic()
    broker.put("t", "a", "b")
    reader = broker.consume(lease_ms=LONG_MS)
    for attempt in range(1, 4):
        assert broker.nack(reader, 0, f"reason {attempt}", delay_ms=0) is None
    assert reader.items[-1].attempts == 4
    restart(broker)
    again = broker.consume(owner="other", lease_ms=LONG_MS)
    found = {item.value: (item.attempts, item.last_error) for item in again.items}
    assert found == {"a": (5, "ack_timeout"), "b": (2, "ack_timeout")}
    check(broker.state)
    broker.close()


@restarts
def test_a_pending_backoff_survives_a_restart(restart: Restart):
    """driftq-44: it is due when it was due."""
    broker = on_disk()
    broker.topic()
    broker.produce("t", "a", envelope=policy(0, 5000))
    reader = broker.consume(lease_ms=LONG_MS)
    assert broker.nack(reader, reader.one(), "why") is None
    broker.pass_ms(2000)
    restart(broker)
    again = broker.consume(lease_ms=LONG_MS)
    assert is_in_time(delay_until_next(broker, again), 3000)
    item = again.one()
    assert (item.attempts, item.last_error) == (2, "why")
    broker.close()


@restarts
def test_a_restart_ends_the_last_lease_and_buries_once(restart: Restart):
    """driftq-39, 44."""
    broker = on_disk()
    broker.topic()
    broker.produce("t", "a", envelope=policy(1))
    broker.consume(lease_ms=LONG_MS)
    restart(broker)
    assert values(broker.stored("dlq.t")) == ["a"]
    for _ in range(2):
        restart(broker)
        assert len(broker.stored("dlq.t")) == 1
    reader = broker.consume(lease_ms=LONG_MS)
    assert not reader.items
    assert broker.ack(reader, 0) is None, "a late ack of something done"
    broker.close()


@restarts
def test_the_last_owner_may_ack_after_a_restart(restart: Restart):
    """driftq-29: the last owner is durable; another's ack is refused."""
    broker = on_disk()
    broker.topic()
    broker.put("t", "a")
    reader = broker.consume(lease_ms=LONG_MS)
    restart(broker)
    assert broker.ack(reader, 0, owner="another") is not None
    assert broker.ack(reader, 0) is None
    assert not broker.consume(lease_ms=LONG_MS).items
    broker.close()


def test_a_mass_of_leases_that_end_together_is_dealt_with_in_bursts():
    """driftq-36: more than one burst's worth, none forgotten."""
    broker = on_disk(limits=Limits(max_in_flight=3000))
    broker.topic()
    commands = [broker.command("t", f"v{n}") for n in range(2500)]
    broker.must(broker.engine.produce_many, commands)
    reader = broker.consume(lease_ms=1000)
    assert len(reader.take()) == 2500
    broker.pass_ms(1010)
    assert sorted(reader.offsets()) == list(range(2500))
    assert set(reader.attempts()) == {2}
    check(broker.state)
    broker.close()


def test_an_item_held_up_by_the_disk_is_delivered_once_and_has_its_whole_lease() -> None:
    """driftq-36: the lease begins when the item is sent, however long the commit takes."""
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
