"""Order and completeness where messages are not in memory any more."""

from __future__ import annotations

import random

import pytest

from penstock.core.invariants import check
from penstock.engine import window as window_module
from penstock.model.envelope import Envelope
from penstock.model.limits import KIB, Limits
from penstock.storage.errors import CorruptLog
from penstock.storage.log import WalOptions
from tests.engine.harness import LONG_MS, Broker, Reader, on_disk, policy, values

TIGHT = Limits(memory_bytes=20 * KIB, max_in_flight=4, max_partition_msgs=10**6)
SEGMENTS = WalOptions(segment_bytes=32 * KIB, reserve_bytes=0, frame_bytes=16 * KIB)


def filled(count: int = 200, *, limits: Limits = TIGHT, partitions: int = 1) -> Broker:
    """More than memory holds, over many segments."""
    broker = on_disk(limits=limits, options=SEGMENTS)
    broker.topic("t", partitions)
    for n in range(count):
        envelope = Envelope(partition_override=n % partitions)
        broker.produce("t", f"{n} ".ljust(500, "."), envelope=envelope)
    return broker


def drain(broker: Broker, reader: Reader) -> list[int]:
    """Acks everything as it comes, and returns the offsets in the order they came."""
    order = []
    while reader.items:
        for item in reader.take():
            order.append(item.offset)
            assert item.value.split()[0] == str(item.offset)
            assert broker.ack(reader, item) is None
    return order


@pytest.mark.parametrize("partitions", [1, 3])
def test_a_new_group_reads_everything_in_order_from_memory_log_and_history(partitions: int):
    """driftq-21, 22."""
    broker = filled(partitions=partitions)
    sealing = broker.engine.maintenance.sealing
    assert sealing is not None
    assert sealing.runs, "nothing was sealed: the test is void"
    order = drain(broker, broker.consume(lease_ms=LONG_MS))
    assert sorted(order) == list(range(200))
    for partition in range(partitions):
        own = [offset for offset in order if offset % partitions == partition]
        assert own == sorted(own)
    check(broker.state)
    broker.close()


def test_first_deliveries_keep_their_order_while_producers_go_on():
    """driftq-22: the lagging group's page ends where memory begins."""
    broker = filled(100)
    lagging = broker.consume(group="lagging", lease_ms=LONG_MS)
    leading = broker.consume(group="leading", lease_ms=LONG_MS)
    rng = random.Random(1)
    orders: dict[str, list[int]] = {"lagging": [], "leading": []}
    for n in range(100, 300):
        broker.produce("t", f"{n} ".ljust(500, "."))
        for reader in (lagging, leading):
            if rng.random() < 0.6:
                for item in reader.take():
                    orders[reader.group].append(item.offset)
                    assert broker.ack(reader, item) is None
    for reader in (lagging, leading):
        orders[reader.group] += drain(broker, reader)
        assert orders[reader.group] == list(range(300))
    broker.close()


@pytest.mark.parametrize("restart", [Broker.restart, Broker.crash])
def test_a_lagging_group_goes_on_in_order_after_a_restart(restart):
    """driftq-22, 51."""
    broker = filled(150)
    reader = broker.consume(lease_ms=LONG_MS)
    first = reader.take()
    for item in first:
        assert broker.ack(reader, item) is None
    restart(broker)
    again = broker.consume(lease_ms=LONG_MS)
    order = drain(broker, again)
    assert sorted({*order, *range(len(first))}) == list(range(150))
    assert [offset for offset in order if offset >= 2 * len(first)] == list(
        range(2 * len(first), 150)
    )
    broker.close()


def test_redeliveries_and_burials_find_their_bodies_on_disk():
    """driftq-36, 39: long after memory forgot them."""
    broker = on_disk(limits=Limits(memory_bytes=20 * KIB), options=SEGMENTS)
    broker.topic()
    reader = broker.consume(lease_ms=1000)
    broker.produce("t", "dying".ljust(400, "."), envelope=policy(2, 500))
    broker.produce("t", "waiting".ljust(400, "."), envelope=policy(0, 500))
    other = broker.consume(group="other", lease_ms=LONG_MS)
    for n in range(2, 150):
        broker.produce("t", f"{n} ".ljust(500, "."))
    assert other.items
    for _ in range(2):
        for item in reader.take():
            if item.offset < 2:
                assert broker.nack(reader, item) is None
            else:
                assert broker.ack(reader, item) is None
        broker.pass_ms(510)
    broker.pass_ms(510)
    (copy,) = broker.stored("dlq.t")
    assert copy.value.startswith("dying")
    assert any(item.value.startswith("waiting") for item in reader.items)
    check(broker.state)
    broker.close()


def test_a_page_that_cannot_be_read_is_tried_again_and_holds_up_nobody():
    """The messages are still on disk: a reader that fails is logged, and reads again."""
    broker = filled(60)
    history = broker.engine.parts.pages._history
    assert history is not None
    real_read, failures = history.read, [CorruptLog("f", 0, "a bad sector"), OSError("EIO")]

    def read(*arguments, **named):
        if failures:
            raise failures.pop()
        return real_read(*arguments, **named)

    history.read = read  # type: ignore[method-assign]
    reader = broker.consume(lease_ms=LONG_MS)
    assert not reader.items
    broker.topic("u")
    broker.put("u", "quick")
    assert values(broker.consume("u").items) == ["quick"]
    broker.pass_ms(3000)
    assert not failures
    assert drain(broker, reader) == list(range(60))
    broker.close()


def test_deleting_a_topic_while_its_pages_are_read_ends_the_reading():
    """driftq-70: files go, and nothing looks for them for ever."""
    broker = filled(120)
    broker.scheduler.is_holding_reads = True
    reader = broker.consume(lease_ms=LONG_MS)
    assert broker.scheduler.held_reads
    held = broker.scheduler.held_reads
    broker.scheduler.held_reads = []
    broker.must(broker.engine.delete_topic, "t")
    broker.scheduler.is_holding_reads = False
    for path in [path for path in broker.disk.paths() if "history-" in path]:
        broker.disk.unlink(path)
    for read in held:
        read()
    broker.settle()
    broker.pass_ms(3000)
    assert reader.ended
    assert not reader.items
    broker.close()


def test_what_retention_removed_is_not_kept_in_line_for_eviction(
    monkeypatch: pytest.MonkeyPatch,
):
    """driftq-24: a broker that is never short of memory still forgets what is gone."""
    monkeypatch.setattr(window_module, "MOST_REMOVED", 10)
    monkeypatch.setattr(window_module, "CHUNK_MSGS", 4)
    broker = on_disk()
    broker.topic()
    broker.must(broker.engine.configure_topic, "t", None, 100)
    reader = broker.consume(lease_ms=LONG_MS)
    for _ in range(40):
        broker.put("t", *["x" * 50 for _ in range(8)])
        for item in reader.take():
            assert broker.ack(reader, item) is None
        broker.pass_ms(1001)
    assert len(broker.engine.parts.window._resident) < 30
    check(broker.state)
    broker.close()


def test_the_window_keeps_to_its_memory():
    """driftq-24: whatever is produced and read."""
    broker = filled(10)
    window = broker.engine.parts.window
    readers = [broker.consume(group=f"g{n}", lease_ms=LONG_MS) for n in range(3)]
    for n in range(10, 150):
        broker.produce("t", f"{n} ".ljust(500, "."))
        assert window.used_bytes <= TIGHT.memory_bytes
        assert window.used_bytes + window.page_bytes <= TIGHT.memory_bytes
    for reader in readers:
        drain(broker, reader)
    assert window.used_bytes == sum(
        chunk.held for _, chunk in window._resident if chunk.messages is not None
    )
    broker.close()
