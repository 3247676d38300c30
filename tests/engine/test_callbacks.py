"""Far ends that fail: an exception of one client's is nobody else's problem."""

from __future__ import annotations

import pytest

from penstock.core.invariants import check
from penstock.model.item import Item
from tests.engine.harness import LONG_MS, Reader, on_disk, values


class Broken(Reader):
    """As a transport does that was closed a moment ago."""

    def write(self, items: list[Item]) -> None:
        super().write(items)
        raise RuntimeError("the transport is closed")

    def end(self, reason: str) -> None:
        super().end(reason)
        raise RuntimeError("the transport is closed")


def fail(_: object) -> None:
    raise RuntimeError("the client is gone")


def test_a_consumer_that_raises_stops_nobody():
    """driftq-24: the others get theirs from the same commit, and the next."""
    broker = on_disk()
    broker.topic()
    broken = broker.consume(owner="broken", lease_ms=500, reader=Broken("t", "g", "broken"))
    good = broker.consume(owner="good", lease_ms=LONG_MS)
    for n in range(6):
        broker.put("t", f"v{n}")
    assert values(broken.items) == ["v0", "v2", "v4"]
    assert values(good.items) == ["v1", "v3", "v5"]
    broken.live.close()
    broker.pass_ms(510)
    assert sorted(values(good.items)) == [f"v{n}" for n in range(6)]
    check(broker.state)
    broker.close()


def test_an_answer_that_raises_stops_nobody():
    broker = on_disk()
    broker.topic()
    command = broker.command("t", "v")
    broker.engine.produce(command, fail)
    outcomes = broker.submit(broker.engine.produce, command)
    broker.settle()
    assert len(outcomes) == 1
    assert len(broker.stored("t")) == 2
    broker.close()


def test_a_refusal_that_raises_stops_nobody():
    """driftq-50."""
    broker = on_disk()
    broker.topic()
    broken = broker.consume(group="b", reader=Broken("t", "b", "o"))
    good = broker.consume()
    broker.disk.fail_call(1, 5, only=["write"], path=broker.log.files.active.path)
    broker.engine.produce(broker.command("t", "v"), fail)
    outcomes = broker.submit(broker.engine.produce, broker.command("t", "v"))
    broker.settle()
    assert len(outcomes) == 1
    assert broken.ended
    assert good.ended
    assert not broker.engine.health().ready
    broker.close()


@pytest.mark.parametrize("what", ["topic", "group"])
def test_a_stream_whose_end_raises_stops_no_deletion(what: str):
    """driftq-70: the other streams end, the command is answered, the name is free."""
    broker = on_disk()
    broker.topic()
    broken = broker.consume(owner="broken", reader=Broken("t", "g", "broken"))
    good = broker.consume(owner="good")
    if what == "topic":
        broker.must(broker.engine.delete_topic, "t")
        assert "t" not in broker.state.topics
        broker.topic()
    else:
        broker.must(broker.engine.delete_group, "t", "g")
    assert broken.ended
    assert good.ended
    assert values(broker.consume(lease_ms=LONG_MS).items) == []
    broker.put("t", "v")
    broker.close()


def test_a_stream_whose_end_raises_stops_no_shutdown():
    """driftq-66."""
    broker = on_disk()
    broker.topic()
    broken = broker.consume(owner="broken", reader=Broken("t", "g", "broken"))
    good = broker.consume(owner="good")
    broker.engine.end_streams("the broker is stopping")
    assert broken.ended
    assert good.ended
    broker.put("t", "v")
    broker.close()
    assert broker.disk.open_files == 0


def test_streams_end_once_when_their_topic_goes():
    """driftq-70: closing them afterwards changes nothing."""
    broker = on_disk()
    broker.topic("t", 2)
    readers = [broker.consume(owner=f"o{n}", prefetch=1) for n in range(3)]
    broker.put("t", "a", "b", "c")
    broker.must(broker.engine.delete_topic, "t")
    for reader in readers:
        assert len(reader.ended) == 1
        reader.live.pause()
        reader.live.resume()
        reader.live.close()
    broker.settle()
    assert all(len(reader.ended) == 1 for reader in readers)
    check(broker.state)
    broker.crash()
    assert not broker.state.topics
    broker.close()
