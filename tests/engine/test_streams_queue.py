"""The publish queue: accepted at once, waiting when it is full, refused in time."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.engine import publish_queue
from penstock.model import limits
from penstock.model.errors import InvalidArgument, ResourceExhausted
from penstock.model.limits import MAX_BATCH_ITEMS, Limits
from penstock.model.streams import Publish
from tests.engine.stream_harness import SECOND, Bank, S, numbers


def held(depth: int | None = None, **config: Any) -> Bank:
    """Nothing fans out, until it is released."""
    bank = Bank(**config) if depth is None else Bank(pub_queue_depth=depth, **config)
    bank.streams.hold_fanout()
    return bank


def fill(bank: Bank, count: int) -> None:
    """Publishes that are all accepted: 0, 1, 2, …"""
    for event in numbers(0, count):
        assert bank.send(event) == [None]


def release(bank: Bank) -> None:
    bank.streams.release_fanout()
    bank.settle()


def steps_to_publish(readers: int) -> list[tuple[list[None], int]]:
    """Outcomes of publishing, and the turns it took each time, with that many stalled readers."""
    bank = Bank(event_queue_depth=4)
    for _ in range(readers):
        bank.stalled()
    found = []
    for event in numbers(0, 50):
        outcomes = bank.send(event)
        turns = 0
        while bank.broker.scheduler._turns:
            bank.broker.scheduler._turns.popleft()()
            turns += 1
        found.append((outcomes, turns))
    return found


def test_stalled_subscribers_do_not_change_publishing():
    """felix-27: same outcomes, at once, in as many steps."""
    alone = steps_to_publish(0)
    assert all(outcomes == [None] for outcomes, _ in alone)
    assert steps_to_publish(20) == alone


def test_a_publish_is_acked_before_it_fans_out():
    """felix-28."""
    bank = held()
    reader = bank.subscribe()
    assert bank.send(b"1") == [None]
    bank.pass_ms(10_000)
    assert reader.events == []
    release(bank)
    assert reader.events == [b"1"]


@pytest.mark.parametrize("depth", [1024, 2048])
def test_a_publish_beyond_the_queue_depth_waits(depth: int):
    """felix-29, 34: 1024 unless it is set."""
    bank = held(None if depth == 1024 else depth)
    fill(bank, depth)
    assert bank.send(b"next") == []
    assert bank.queued() == (depth, 1)


def test_the_brokers_depth_and_wait_hold_where_the_stream_has_none():
    """felix-34."""
    bank = held(limits=Limits(pub_queue_depth=2, publish_queue_wait_timeout_ms=700))
    fill(bank, 2)
    waiting = bank.send(b"next")
    bank.pass_ms(699)
    assert waiting == []
    bank.pass_ms(1)
    assert isinstance(waiting[0], ResourceExhausted)


def test_depth_counts_events():
    """felix-29: a batch needs room for all of it."""
    bank = held(10)
    assert bank.send(*numbers(0, 6)) == [None]
    assert bank.send(*numbers(6, 11)) == []
    assert bank.queued() == (6, 1)


@pytest.mark.parametrize(("timeout", "config"), [(2000, {}), (1000, {"wait": 1000})])
def test_a_publish_waits_its_time_and_no_longer(timeout: int, config: dict[str, int]):
    """felix-30, 34: 2000 ms unless it is set."""
    wait = {"publish_queue_wait_timeout_ms": config["wait"]} if config else {}
    bank = held(2, **wait)
    fill(bank, 2)
    waiting = bank.send(b"next")
    bank.pass_ms(timeout - 1)
    assert waiting == []
    bank.pass_ms(1)
    assert len(waiting) == 1
    assert isinstance(waiting[0], ResourceExhausted)


def test_a_publish_that_finds_room_in_time_is_delivered_once():
    """felix-31: and no timer refuses it later."""
    bank = held(2)
    reader = bank.subscribe()
    fill(bank, 2)
    waiting = bank.send(b"2")
    bank.pass_ms(1999)
    release(bank)
    assert waiting == [None]
    bank.pass_ms(10_000)
    assert waiting == [None]
    assert reader.events == numbers(0, 3)


def test_a_publish_that_timed_out_is_never_delivered():
    """felix-32: alone or in a batch; what came before and after it is."""
    bank = held(2)
    reader = bank.subscribe()
    fill(bank, 2)
    refused = bank.send(b"lost", b"lost too")
    bank.pass_ms(1000)
    later = bank.send(b"2")
    bank.pass_ms(1000)
    assert isinstance(refused[0], ResourceExhausted)
    assert later == []
    release(bank)
    bank.pass_ms(10_000)
    assert later == [None]
    assert reader.events == numbers(0, 3)


def test_the_refusal_says_that_the_broker_is_overloaded():
    """felix-33: and is no validation error."""
    bank = held(1)
    fill(bank, 1)
    [refused] = [bank.send(b"next")]
    bank.pass_ms(2000)
    error = refused[0]
    assert isinstance(error, ResourceExhausted)
    assert not isinstance(error, InvalidArgument)
    assert error.retryable
    assert (error.limit, error.reason) == ("pub_queue_depth", "publish_queue_timeout")
    assert "the broker is overloaded" in error.message
    assert "'acme/prod/s'" in error.message
    assert bank.counts().refused_publishes == 1


def test_nothing_overtakes_a_publish_that_waits():
    """felix-12, 35: a small one that would fit stays behind a large one that does not."""
    bank = held(10)
    reader = bank.subscribe()
    fill(bank, 8)
    large = bank.send(*numbers(8, 12))
    small = bank.send(b"12")
    assert (large, small) == ([], [])
    release(bank)
    assert (large, small) == ([None], [None])
    assert reader.events == numbers(0, 13)


def test_waiting_publishes_are_accepted_in_the_order_they_came():
    """felix-12, 31."""
    bank = held(3)
    reader = bank.subscribe()
    fill(bank, 3)
    answered: list[int] = []
    for n in range(3, 12):

        def accepted(outcome: object, n: int = n) -> None:
            assert outcome is None
            answered.append(n)

        bank.streams.publish(Publish(path=S, payloads=[b"%d" % n]), accepted)
    assert answered == []
    release(bank)
    assert answered == list(range(3, 12))
    assert reader.events == numbers(0, 12)


def test_what_times_out_lets_in_who_waited_behind_it():
    """felix-31: if that is small enough."""
    bank = held(4, publish_queue_wait_timeout_ms=1000)
    reader = bank.subscribe()
    fill(bank, 3)
    large = bank.send(*numbers(100, 103))
    bank.pass_ms(500)
    small = bank.send(b"3")
    bank.pass_ms(500)
    assert isinstance(large[0], ResourceExhausted)
    assert small == [None]
    release(bank)
    assert reader.events == numbers(0, 4)


def test_after_the_overload_publishing_works_again():
    """felix-36."""
    bank = held(2)
    fill(bank, 2)
    refused = bank.send(b"lost")
    bank.pass_ms(2000)
    assert isinstance(refused[0], ResourceExhausted)
    release(bank)
    reader = bank.subscribe()
    bank.publish_each(*numbers(0, 10))
    assert reader.events == numbers(0, 10)
    assert bank.queued() == (0, 0)


def test_a_batch_larger_than_the_queue_goes_through_an_empty_one():
    """felix-29: it waits for that, and others wait behind it."""
    bank = held(4)
    reader = bank.subscribe()
    fill(bank, 1)
    batch = bank.send(*numbers(1, 1 + MAX_BATCH_ITEMS))
    assert batch == []
    release(bank)
    assert batch == [None]
    assert reader.events == numbers(0, 1 + MAX_BATCH_ITEMS)


@pytest.mark.parametrize("depth", [5, 1024])
def test_a_burst_far_beyond_the_queue_waits_its_time(depth: int):
    """felix-29, 30: however many times the depth, nobody is refused before the wait is over."""
    bank = held(depth)
    fill(bank, depth)
    waiting = [bank.send(b"w") for _ in range(20 * depth)]
    batch = bank.send(*numbers(0, MAX_BATCH_ITEMS))
    bank.pass_ms(1999)
    assert not any(waiting)
    assert batch == []
    bank.pass_ms(1)
    assert all(isinstance(outcome, ResourceExhausted) for [outcome] in [*waiting, batch])
    assert bank.counts().refused_publishes == 20 * depth + 1
    assert bank.send(b"late") == []


def test_a_burst_that_finds_room_in_time_is_delivered_whole_and_in_order():
    """felix-31, 36."""
    bank = held(4)
    reader = bank.subscribe()
    fill(bank, 4)
    waiting = [bank.send(event) for event in numbers(4, 1000)]
    bank.pass_ms(1999)
    release(bank)
    assert all(outcome == [None] for outcome in waiting)
    assert reader.events == numbers(0, 1000)


def test_how_many_may_wait_is_bounded_for_all_streams_together(monkeypatch: pytest.MonkeyPatch):
    """felix-29: beyond it the refusal comes at once, and says that it is not the queue's."""
    monkeypatch.setattr(limits, "MAX_WAITING_PUBLISHES", 20)
    bank = held(1)
    bank.change(SECOND, pub_queue_depth=1)
    fill(bank, 1)
    assert bank.send(b"x", path=SECOND) == [None]
    waiting = [bank.send(b"w", path=path) for path in (S, SECOND) * 10]
    assert not any(waiting)
    [refused] = bank.send(b"one too many", path=SECOND)
    assert isinstance(refused, ResourceExhausted)
    assert (refused.limit, refused.reason) == ("waiting_publishes", "publish_queue_timeout")
    release(bank)
    assert all(outcome == [None] for outcome in waiting)
    bank.streams.hold_fanout()
    fill(bank, 1)
    assert bank.send(b"waits again") == []


def test_the_bytes_that_are_queued_and_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch):
    """felix-26, 29: a thousand large events are a lot of memory."""
    monkeypatch.setattr(publish_queue, "QUEUE_BYTES", 1000)
    monkeypatch.setattr(limits, "MAX_WAITING_PUBLISH_BYTES", 1000)
    bank = held()
    assert bank.send(b"x" * 800) == [None]
    waiting = bank.send(b"x" * 800)
    assert waiting == []
    [refused] = bank.send(b"x" * 800)
    assert isinstance(refused, ResourceExhausted)
    # Many small payloads hold more memory than their bytes.
    [refused] = bank.send(*[b"x"] * 10)
    assert isinstance(refused, ResourceExhausted)
    assert bank.send(b"x" * 20) == []
    release(bank)
    assert waiting == [None]
    assert bank.send(b"x" * 2000) == [None]


def test_a_publish_larger_than_what_may_wait_waits_alone(monkeypatch: pytest.MonkeyPatch):
    """felix-31."""
    monkeypatch.setattr(limits, "MAX_WAITING_PUBLISH_BYTES", 100)
    bank = held(1)
    fill(bank, 1)
    waiting = bank.send(b"x" * 200)
    assert waiting == []
    release(bank)
    assert waiting == [None]


def test_no_time_to_wait_is_a_refusal_at_once():
    """felix-34."""
    bank = held(1, publish_queue_wait_timeout_ms=0)
    fill(bank, 1)
    assert isinstance(bank.send(b"next")[0], ResourceExhausted)


def test_a_full_queue_does_not_affect_other_streams():
    """felix-16."""
    bank = held(1)
    fill(bank, 1)
    assert bank.send(b"next") == []
    assert bank.send(b"other", path=SECOND) == [None]


def test_one_who_waits_gets_what_was_accepted_after_the_subscription():
    """felix-45: it is acceptance that counts."""
    bank = held(1)
    fill(bank, 1)
    waiting = bank.send(b"waited")
    late = bank.subscribe()
    release(bank)
    assert waiting == [None]
    assert late.events == [b"waited"]


def test_a_deeper_queue_lets_in_who_waits():
    """felix-34: a change of the stream takes effect at once."""
    bank = held(2)
    fill(bank, 2)
    waiting = [bank.send(event) for event in numbers(2, 5)]
    bank.change(pub_queue_depth=4)
    assert waiting == [[None], [None], []]
    bank.change(pub_queue_depth=1)
    assert bank.queued() == (4, 1)
    release(bank)
    assert waiting[2] == [None]


def test_a_publisher_that_is_gone_does_not_keep_the_next_one_waiting():
    """felix-46."""
    bank = held(1)
    reader = bank.subscribe()
    fill(bank, 1)

    def fail(_: object) -> None:
        raise RuntimeError("the client is gone")

    bank.streams.publish(Publish(path=S, payloads=[b"1"]), fail)
    waiting = bank.send(b"2")
    release(bank)
    assert waiting == [None]
    assert reader.events == numbers(0, 3)


def test_a_publisher_may_publish_when_it_is_answered():
    """felix-40: while others wait it takes its place behind them."""
    bank = held(1)
    reader = bank.subscribe()
    fill(bank, 1)

    def again(outcome: object) -> None:
        assert outcome is None
        bank.send(b"3")

    bank.streams.publish(Publish(path=S, payloads=[b"1"]), again)
    bank.send(b"2")
    release(bank)
    assert reader.events == numbers(0, 4)
