"""Ack, nack and extend at the seam: who may, when, and what a delivery_id narrows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from penstock.core.image import take_image
from penstock.core.invariants import check
from penstock.model.envelope import Envelope
from penstock.model.errors import FailedPrecondition, InvalidArgument, NotFound
from tests.engine.harness import LONG_MS, Broker, on_disk, values


def test_extend_moves_the_leases_end():
    """driftq-28."""
    broker = on_disk()
    broker.topic()
    reader = broker.consume(lease_ms=1000)
    broker.put("t", "a")
    reader.take()
    broker.pass_ms(900)
    assert broker.extend(reader, 0, 5000) is None
    broker.pass_ms(4999)
    assert not reader.items
    broker.pass_ms(11)
    assert reader.one().attempts == 2
    broker.close()


def test_extend_may_bring_the_leases_end_nearer():
    broker = on_disk()
    broker.topic()
    reader = broker.consume(lease_ms=LONG_MS)
    broker.put("t", "a")
    reader.take()
    assert broker.extend(reader, 0, 100) is None
    broker.pass_ms(110)
    assert reader.one().attempts == 2
    broker.close()


def test_extend_in_the_very_turn_the_lease_ends_keeps_it():
    """The lease had not been ended: nothing was recorded."""
    broker = on_disk()
    broker.topic()
    reader = broker.consume(lease_ms=1000)
    broker.put("t", "a")
    reader.take()
    broker.clock.advance(1000)
    assert broker.extend(reader, 0, 1000) is None
    broker.scheduler.advance(1000)
    broker.settle()
    assert not reader.items
    broker.close()


def test_another_owner_settles_nothing():
    """driftq-28: ack, nack and extend are refused and change nothing."""
    broker = on_disk()
    broker.topic()
    broker.put("t", "a")
    reader = broker.consume(lease_ms=LONG_MS)
    seq, before = broker.log.seq, take_image(broker.state)
    for outcome in (
        broker.ack(reader, 0, owner="another"),
        broker.nack(reader, 0, owner="another"),
        broker.extend(reader, 0, 1000, owner="another"),
    ):
        assert isinstance(outcome, FailedPrecondition)
    assert broker.log.seq == seq
    assert take_image(broker.state) == before
    broker.close()


def test_a_duplicate_ack_succeeds_and_writes_nothing():
    """driftq-29: in one partition, in several, and after a restart."""
    for partitions in (1, 3):
        broker = on_disk()
        broker.topic("t", partitions)
        broker.put("t", "a")
        reader = broker.consume(lease_ms=LONG_MS)
        assert broker.ack(reader, 0) is None
        for _ in range(2):
            seq = broker.log.seq
            assert broker.ack(reader, 0) is None
            assert broker.ack(reader, 0, owner="another") is None
            assert isinstance(broker.nack(reader, 0), FailedPrecondition)
            assert isinstance(broker.extend(reader, 0, 1), FailedPrecondition)
            assert broker.log.seq == seq
            broker.crash()
        broker.close()


def test_an_offset_of_another_partition_is_not_taken_for_done():
    """driftq-31: offsets are shared among partitions; only the log tells whose one is."""
    broker = on_disk()
    broker.topic("t", 2)
    for n in range(6):
        broker.produce("t", f"v{n}", envelope=Envelope(partition_override=n % 2))
    reader = broker.consume(lease_ms=LONG_MS)
    for item in reader.take():
        assert broker.ack(reader, item) is None
    for n in range(6):
        assert broker.ack(reader, n, partition=n % 2) is None
        assert isinstance(broker.ack(reader, n, partition=1 - n % 2), FailedPrecondition)
    outcomes = broker.call(
        broker.engine.ack_many,
        [broker.naming(reader, 0, partition=0), broker.naming(reader, 0, partition=1)],
    )
    assert outcomes[0] is None
    assert isinstance(outcomes[1], FailedPrecondition)
    broker.close()


def test_what_was_never_delivered_to_the_group_is_refused():
    """driftq-29, 31."""
    broker = on_disk()
    broker.topic()
    broker.put("t", "a")
    reader = broker.consume(group="other", lease_ms=LONG_MS)
    idle = broker.consume(lease_ms=LONG_MS, prefetch=1)
    broker.put("t", "b")
    assert isinstance(broker.ack(idle, 1), FailedPrecondition)
    assert isinstance(broker.ack(idle, 99), FailedPrecondition)
    assert isinstance(broker.ack(idle, 0, group="nobody"), FailedPrecondition)
    assert isinstance(broker.ack(idle, 0, partition=1), InvalidArgument)
    assert isinstance(broker.ack(idle, 0, topic="none"), NotFound)
    assert reader.items
    broker.close()


@pytest.mark.parametrize("command", ["ack", "nack", "extend"])
def test_a_delivery_id_fences_off_an_earlier_delivery_to_the_same_owner(command: str):
    """A paused worker's late answer cannot finish another attempt."""
    broker = on_disk()
    broker.topic()
    broker.put("t", "a")
    reader = broker.consume(lease_ms=500)
    broker.pass_ms(510)
    old, new = reader.take()
    assert old.delivery_id != new.delivery_id
    seq = broker.log.seq
    stale = broker.naming(reader, old, delivery_id=old.delivery_id)
    arguments = {"ack": (), "nack": ("late",), "extend": (1000,)}[command]
    outcome = broker.call(getattr(broker.engine, command), stale, *arguments)
    assert isinstance(outcome, FailedPrecondition)
    assert broker.log.seq == seq
    fresh = broker.naming(reader, new, delivery_id=new.delivery_id)
    assert broker.call(getattr(broker.engine, command), fresh, *arguments) is None
    broker.close()


def test_delivery_ids_differ_over_a_restart():
    """No token is ever given twice: a crash must not bring one back."""
    broker = on_disk()
    broker.topic()
    broker.put("t", "a")
    seen = set()
    for _ in range(4):
        reader = broker.consume(lease_ms=LONG_MS)
        seen.add(reader.one().delivery_id)
        broker.crash()
    assert len(seen) == 4
    broker.close()


def test_delivery_ids_differ_between_a_group_and_its_successor_of_the_same_name():
    broker = on_disk()
    broker.topic()
    broker.put("t", "a")
    old = broker.consume(lease_ms=LONG_MS).one()
    broker.must(broker.engine.delete_group, "t", "g")
    reader = broker.consume(lease_ms=LONG_MS)
    assert reader.one().delivery_id != old.delivery_id
    stale = broker.naming(reader, old, delivery_id=old.delivery_id)
    assert isinstance(broker.call(broker.engine.ack, stale), FailedPrecondition)
    broker.close()


def test_an_answer_to_an_item_not_yet_written_cannot_let_the_next_delivery_out_early():
    """driftq-44, 46: the owner answers blindly, and the redelivery's record is not durable yet."""
    broker = on_disk()
    broker.topic()
    reader = broker.consume(lease_ms=LONG_MS)
    broker.hold_writes()
    broker.submit(broker.engine.produce, broker.command("t", "a"))
    broker.scheduler.run_until(lambda: broker.disk.is_held)
    nack = partial(broker.engine.nack, delay_ms=0)
    broker.submit(nack, broker.naming(reader, 0), "blind")
    broker.scheduler.run()
    path = broker.log.files.active.path
    first_frame_only = _release_one(broker, path)
    first_frame_only()
    assert all(item.attempts == 1 for item in reader.items), "attempt 2 left before its record"
    broker.disk.release()
    broker.settle()
    assert reader.attempts()[-1] == 2
    check(broker.state)
    broker.close()


def _release_one(broker: Broker, path: str):
    """Lets the write under way end, and holds the next one."""

    def release() -> None:
        durable = broker.log.durable_seq
        disk = broker.disk
        held = disk._released
        disk.hold(path, lambda: broker.scheduler.post(lambda: None))
        held.set()
        broker.scheduler.run_until(lambda: broker.log.durable_seq > durable)

    return release


@pytest.mark.parametrize("crash", [Broker.crash, Broker.kill, Broker.seal_and_crash])
def test_acks_in_any_order_are_exact_after_a_crash(crash: Callable[[Broker], None]):
    """driftq-30: what was not acked is delivered again, whatever was acked above it."""
    broker = on_disk()
    broker.topic()
    broker.put("t", *[f"v{n}" for n in range(8)])
    reader = broker.consume(lease_ms=LONG_MS)
    for offset in (7, 0, 3, 5):
        assert broker.ack(reader, offset) is None
    for _ in range(2):
        crash(broker)
        again = broker.consume(lease_ms=LONG_MS)
        assert values(again.items) == ["v1", "v2", "v4", "v6"]
    broker.close()
