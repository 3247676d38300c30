"""Publishes with a number: stored once, whatever is repeated, crashes or is forgotten."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.core import publish_rules
from penstock.core.invariants import check
from penstock.model.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from penstock.model.limits import MAX_PUBLISH_ANSWERS, PRODUCER_TTL_MS
from penstock.model.streams import Publish
from tests.engine.durable_stream_harness import EARLIEST, Streams


def numbered(sequence: int, producer: str = "p") -> dict[str, Any]:
    return {"producer_id": producer, "sequence": sequence}


@pytest.fixture
def broker():
    return Streams(delivery="exactly_once")


def stored(broker: Streams) -> list[object]:
    return [event.value for event in broker.stored(broker.log_name)]


def test_a_repeat_is_answered_as_the_first_time(broker):
    """felix-122: in the same life, after a crash, and after a snapshot."""
    assert broker.publish(b"a", **numbered(0)) == 0
    assert broker.publish(b"b", b"c", **numbered(1)) == 1
    for again in (broker.settle, broker.kill, broker.seal_and_crash, broker.restart):
        again()
        assert broker.publish(b"b", b"c", **numbered(1)) == 1
        assert broker.publish(b"a", **numbered(0)) == 0
    assert broker.publish(b"d", **numbered(2)) == 3
    assert stored(broker) == [b"a", b"b", b"c", b"d"]
    check(broker.state)


def test_a_repeat_of_what_is_not_durable_yet_waits_for_it(broker):
    """felix-122: an answer never runs ahead of the disk."""
    broker.hold_writes()
    command = Publish(path=broker.path, payloads=[b"a"], producer_id="p", sequence=0)
    first = broker.submit(broker.engine.streams.publish, command)
    second = broker.submit(broker.engine.streams.publish, command)
    broker.scheduler.run()
    assert (first, second) == ([], [])
    broker.disk.release()
    broker.settle()
    assert (first, second) == ([0], [0])
    assert stored(broker) == [b"a"]


def test_a_number_that_is_used_for_something_else_is_refused(broker):
    broker.publish(b"a", **numbered(0))
    refused = broker.try_publish(b"a", b"b", **numbered(0))
    assert isinstance(refused, FailedPrecondition)


def test_producers_count_by_themselves(broker):
    broker.publish(b"a", **numbered(0))
    broker.publish(b"b", **numbered(0, "q"))
    broker.path = broker.create("other", "exactly_once")
    assert broker.publish(b"c", **numbered(0)) == 0


def test_numbers_are_needed_where_they_count(broker):
    """felix-122: required by exactly_once, allowed on other durable streams, else refused."""
    for wrong in ({}, {"producer_id": "p"}, {"sequence": 0}):
        assert isinstance(broker.try_publish(b"a", **wrong), InvalidArgument)
    assert isinstance(broker.try_publish(b"a", **numbered(-1)), InvalidArgument)
    broker.path = broker.create("plain")
    assert broker.publish(b"a") == 0
    assert broker.publish(b"b", **numbered(0)) == 1
    assert broker.publish(b"b", **numbered(0)) == 1
    broker.path = broker.create("live", "at_most_once", durable=False)
    assert isinstance(broker.try_publish(b"a", **numbered(0)), InvalidArgument)


def test_a_refused_publish_leaves_its_number_free(broker):
    large = bytes(broker.limits.max_message_bytes + 1)
    assert broker.try_publish(large, **numbered(0)).http_status == 413
    assert broker.publish(b"a", **numbered(0)) == 0


def test_old_answers_are_forgotten_before_their_numbers(broker):
    for number in range(MAX_PUBLISH_ANSWERS + 2):
        broker.publish(b"%d" % number, **numbered(number))
    assert broker.publish(b"1", **numbered(1)) is None
    assert broker.publish(b"2", **numbered(2)) == 2
    assert len(stored(broker)) == MAX_PUBLISH_ANSWERS + 2
    check(broker.state)


def test_a_producer_is_forgotten_after_its_time(broker):
    broker.publish(b"a", **numbered(0))
    broker.clock.advance(PRODUCER_TTL_MS)
    refused = broker.try_publish(b"b", **numbered(1))
    assert isinstance(refused, FailedPrecondition)
    assert "begin again with 0" in refused.message
    assert broker.publish(b"b", **numbered(0)) == 1


def test_producers_are_bounded(broker, monkeypatch):
    monkeypatch.setattr(publish_rules, "MAX_STREAM_PRODUCERS", 2)
    broker.publish(b"a", **numbered(0, "p"))
    broker.publish(b"a", **numbered(0, "q"))
    refused = broker.try_publish(b"a", **numbered(0, "r"))
    assert isinstance(refused, ResourceExhausted)
    assert refused.limit == "stream_producers"
    assert broker.publish(b"b", **numbered(1, "p")) == 2
    broker.clock.advance(PRODUCER_TTL_MS)
    assert broker.publish(b"a", **numbered(0, "r")) == 3


def test_plain_subscribers_see_no_repeat(broker):
    """felix-1: a repeat fans out to nobody."""
    listener, replay = broker.listen(), broker.listen(EARLIEST)
    broker.publish(b"a", **numbered(0))
    broker.publish(b"a", **numbered(0))
    assert listener.events == replay.events == [b"a"]


def test_number_and_events_are_in_one_frame(broker):
    """felix-122: a crash keeps both or neither."""
    for flavour in ("nothing", "everything", "torn"):
        end = broker.state.topics[broker.log_name].next_offset
        sequence = len(broker.state.topics[broker.log_name].publishers._by_id) and end // 3
        broker.hold_writes()
        command = Publish(path=broker.path, payloads=[b"x"] * 3, producer_id="p", sequence=sequence)
        broker.submit(broker.engine.streams.publish, command)
        broker.scheduler.run()
        broker.crash(flavour)
        assert broker.publish(b"x", b"x", b"x", **numbered(sequence)) == end
        assert broker.state.topics[broker.log_name].next_offset == end + 3
        check(broker.state)


def test_other_events_under_a_used_number_are_refused() -> None:
    """felix-122: a program that starts again at 0 must not lose its events silently."""
    broker = Streams(delivery="exactly_once")
    assert broker.publish(b"a", producer_id="p", sequence=0) == 0
    for other in ([b"b"], [b"", b"a"], [b"a", b""]):
        refused = broker.try_publish(*other, producer_id="p", sequence=0)
        assert isinstance(refused, FailedPrecondition)
        assert "next number is 1" in refused.message
    broker.restart()
    assert isinstance(broker.try_publish(b"b", producer_id="p", sequence=0), FailedPrecondition)
    assert broker.publish(b"a", producer_id="p", sequence=0) == 0
