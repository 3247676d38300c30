"""A write or a sync that fails: everything stops at once, and nothing undurable shows."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from penstock.api.effects import EffectCommand
from penstock.model.errors import Unavailable
from penstock.model.scopes import DEFAULT_SCOPE
from penstock.storage.log import WalOptions
from tests.engine.harness import LONG_MS, SMALL, Broker, Reader, on_disk, values
from tests.storage.faulty_vfs import FaultyVfs

BY_INTERVAL = WalOptions(
    segment_bytes=SMALL.segment_bytes, reserve_bytes=0, fsync="interval", fsync_interval_ms=1
)


def started(kind: str) -> Broker:
    vfs = FaultyVfs()
    if kind == "sync":
        vfs._dsync_flag = 0  # a platform where a durable write is a write and a sync
    return Broker(vfs)


def break_log(broker: Broker, kind: str) -> None:
    """The next commit fails."""
    broker.disk.fail_call(1, errno.EIO, only=[kind], path=broker.log.files.active.path)


both = pytest.mark.parametrize("kind", ["sync", "write"])


@both
def test_a_failed_sync_refuses_every_command_that_waits_for_it(kind: str):
    """driftq-50, 35: whatever it asked for."""
    broker = started(kind)
    broker.topic()
    broker.put("t", "a", "b")
    reader = broker.consume(lease_ms=LONG_MS)
    engine = broker.engine
    break_log(broker, kind)
    effect = EffectCommand("", "t", "g", "key", "o")
    late = Reader("t", "late", "o")
    waiting: list[list[Any]] = [
        broker.submit(engine.produce, broker.command("t", "lost")),
        broker.submit(engine.produce_many, [broker.command("t", f"lost {n}") for n in range(3)]),
        broker.submit(engine.ack, broker.naming(reader, 0)),
        broker.submit(engine.ack_many, [broker.naming(reader, 0)]),
        broker.submit(engine.nack, broker.naming(reader, 1), "why"),
        broker.submit(engine.effects.begin, effect, 1000),
        broker.submit(engine.create_topic, "new", 1),
        broker.submit(engine.configure_topic, "t", 1, 1),
        broker.submit(engine.delete_topic, "t"),
        broker.submit(engine.list_topics, DEFAULT_SCOPE),
    ]
    assert not any(waiting), "answered before it was durable"
    broker.settle()
    assert broker.disk.faults_hit == 1
    assert all(len(outcomes) == 1 and isinstance(outcomes[0], Unavailable) for outcomes in waiting)
    opening = broker.submit(engine.open_consumer, "t", "late", "o", 0, 0, late)
    broker.settle()
    assert isinstance(opening[0], Unavailable)
    broker.close()


@both
def test_after_a_failed_sync_nothing_succeeds_until_a_restart(kind: str):
    """driftq-50: and readiness is false."""
    broker = started(kind)
    broker.topic()
    broker.put("t", "a", "b")
    reader = broker.consume(lease_ms=2000)
    assert values(reader.take()) == ["a", "b"]
    break_log(broker, kind)
    assert isinstance(broker.try_produce("t", "lost"), Unavailable)
    assert not broker.engine.health().ready
    assert "restart" in broker.engine.health().reason
    assert reader.ended, "streams end"
    for _ in range(3):
        broker.pass_ms(5000)
        assert isinstance(broker.try_produce("t", "lost"), Unavailable)
        assert isinstance(broker.ack(reader, 0), Unavailable)
        assert isinstance(broker.nack(reader, 1), Unavailable)
        assert isinstance(broker.call(broker.engine.list_topics, DEFAULT_SCOPE), Unavailable)
        assert isinstance(broker.call(broker.engine.describe_topic, "t"), Unavailable)
    assert not broker.engine.health().ready
    assert not reader.items, "something held back was released"
    broker.close()


@both
def test_nothing_held_back_is_released_by_a_failed_sync(kind: str):
    """driftq-45: no consumer sees a message whose append failed."""
    broker = started(kind)
    broker.topic()
    readers = [broker.consume(group=f"g{n}", lease_ms=LONG_MS) for n in range(2)]
    broker.put("t", "kept")
    assert [values(reader.take()) for reader in readers] == [["kept"], ["kept"]]
    break_log(broker, kind)
    assert isinstance(broker.try_produce("t", "lost"), Unavailable)
    broker.pass_ms(3000)
    assert not any(reader.items for reader in readers)
    broker.close()


@both
@pytest.mark.parametrize("flavour", ["nothing", "everything", "prefix", "sectors"])
def test_after_a_failed_sync_a_start_finds_what_was_durable(kind: str, flavour: str):
    """driftq-45, 46, 50: every answer given before is honoured, every ack stays, and nothing of
    what was refused is there."""
    broker = started(kind)
    broker.topic()
    broker.put("t", "a", "b")
    reader = broker.consume(lease_ms=LONG_MS)
    assert broker.ack(reader, 0) is None
    break_log(broker, kind)
    broker.submit(broker.engine.produce, broker.command("t", "lost"))
    broker.submit(broker.engine.ack, broker.naming(reader, 1))
    broker.settle()
    broker.crash(flavour, seed=3)
    assert broker.engine.health().ready
    assert values(broker.stored("t")) == ["a", "b"]
    again = broker.consume(lease_ms=LONG_MS)
    assert again.offsets() == [1]
    assert broker.produce("t", "c").offset == 2
    broker.close()


def test_readiness_says_when_what_was_refused_may_be_there_later():
    """The disk fails, and takes no zeros over what the failed write left either."""
    broker = started("write")
    broker.topic()
    broker.disk.fail_call(1, errno.EIO, thread="penstock-wal-writer", then_all_after=0)
    refusal = broker.try_produce("t", "perhaps")
    assert isinstance(refusal, Unavailable)
    assert "refused requests may take effect at the next start" in str(refusal)
    assert "may take effect at the next start" in broker.engine.health().reason
    broker.close()


def test_a_failed_background_sync_ends_writing_too():
    """driftq-50: in the mode that answers before the sync."""
    broker = Broker(FaultyVfs(), options=BY_INTERVAL)
    broker.topic()
    broker.disk.fail_call(1, errno.EIO, only=["sync"], path=broker.log.files.active.path)
    broker.submit(broker.engine.produce, broker.command("t", "a"))
    broker.scheduler.run_until(lambda: broker.log.failed is not None)
    assert isinstance(broker.try_produce("t", "b"), Unavailable)
    assert not broker.engine.health().ready
    broker.close()


def test_a_broker_whose_log_failed_stops_without_a_fuss():
    """driftq-66, 50."""
    broker = on_disk()
    broker.topic()
    reader = broker.consume()
    break_log(broker, "write")
    broker.submit(broker.engine.produce, broker.command("t", "lost"))
    broker.settle()
    broker.close()
    assert broker.disk.open_files == 0
    assert not reader.items


def test_nothing_leaves_while_the_sync_is_under_way():
    """driftq-17, 45: not an answer, not an item, not a listing."""
    broker = on_disk()
    broker.topic()
    broker.put("t", "a")
    reader = broker.consume(lease_ms=LONG_MS)
    reader.take()
    broker.hold_writes()
    waiting = [
        broker.submit(broker.engine.produce, broker.command("t", "b")),
        broker.submit(broker.engine.ack, broker.naming(reader, 0)),
        broker.submit(broker.engine.create_topic, "u", 1),
    ]
    broker.scheduler.run_until(lambda: broker.disk.is_held)
    waiting.append(broker.submit(broker.engine.list_topics, DEFAULT_SCOPE))
    waiting.append(broker.submit(broker.engine.produce, broker.command("t", "c")))
    broker.scheduler.run()
    assert not any(waiting)
    assert not reader.items
    broker.disk.release()
    broker.settle()
    assert all(waiting)
    assert values(reader.items) == ["b", "c"]
    broker.close()
