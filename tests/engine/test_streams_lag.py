"""Subscribers that fall behind: how far, who is told, and when one is given up."""

from __future__ import annotations

import logging

import pytest

from penstock.model.errors import ResourceExhausted
from penstock.model.limits import Limits
from tests.engine.stream_harness import SECOND, Bank, Listener, numbers


def test_the_stages_of_falling_behind():
    """felix-114: nothing is lost up to the depth, then the newest are, for the slow one alone."""
    bank = Bank(event_queue_depth=10)
    slow, fast = bank.stalled(), bank.subscribe()
    bank.publish_each(*numbers(0, 10))
    assert (slow.behind, slow.live.lag().dropped) == (10, 0)
    bank.publish_each(*numbers(10, 15))
    assert (slow.behind, slow.live.lag().dropped) == (10, 5)
    assert fast.events == numbers(0, 15)
    assert (fast.behind, fast.live.lag().dropped) == (0, 0)


def test_lag_is_what_was_offered_and_not_taken():
    """felix-115: 0 when it has caught up; drops are counted apart."""
    bank = Bank(event_queue_depth=8)
    slow = bank.stalled()
    bank.pass_ms(5)
    for end in (1, 3, 6):
        bank.publish(*numbers(0, end))
    assert slow.behind == 8
    slow.read(5)
    lag = slow.live.lag()
    assert (lag.messages_behind, lag.delivered, lag.dropped) == (3, 5, 2)
    assert (lag.subscription_id, lag.event_queue_depth) == (slow.live.id, 8)
    assert lag.since_ms == bank.broker.clock.now_ms() - 5
    slow.read()
    assert (slow.behind, slow.live.lag().delivered) == (0, 8)


def test_subscriptions_are_numbered_and_listed():
    """felix-115."""
    bank = Bank()
    first, second, _ = bank.stalled(), bank.subscribe(), bank.subscribe(SECOND)
    bank.publish(b"1")
    assert (first.live.id, second.live.id) == ("s1", "s2")
    lags = bank.broker.call(bank.streams.subscriptions, ("acme", "prod", "s"))
    assert [(lag.subscription_id, lag.messages_behind) for lag in lags] == [("s1", 1), ("s2", 0)]


def test_the_alert_begins_above_the_threshold_and_ends_at_half_of_it(
    caplog: pytest.LogCaptureFixture,
):
    """felix-116: told once each way, only to who asked, logged and counted."""
    caplog.set_level(logging.INFO)
    bank = Bank(lag_alert_events=10)
    told, untold = bank.stalled(wants_lag=True), bank.stalled()
    bank.publish_each(*numbers(0, 10))
    assert (told.lags, told.live.lag().alert) == ([], False)
    bank.publish_each(*numbers(10, 15))
    [lag] = told.lags
    assert (lag.alert, lag.messages_behind) == (True, 11)
    assert bank.counts().lagging == 2
    told.read(9)
    assert told.live.lag().alert
    told.read(1)
    assert [(lag.alert, lag.messages_behind) for lag in told.lags] == [(True, 11), (False, 5)]
    assert (bank.counts().lagging, bank.counts().lag_alerts) == (1, 2)
    assert untold.lags == []
    lines = [record.getMessage() for record in caplog.records if "lags" in record.getMessage()]
    assert len(lines) == 3
    assert lines[0].startswith("subscription s1 of stream 'acme/prod/s' lags: 11 events behind")
    bank.publish_each(*numbers(0, 6))
    assert [lag.alert for lag in told.lags] == [True, False, True]


def test_1000_behind_is_the_default_of_the_alert():
    """felix-116."""
    bank = Bank()
    slow = bank.stalled(wants_lag=True)
    bank.publish_each(*numbers(0, 1000))
    assert slow.lags == []
    bank.publish(b"1001st")
    assert len(slow.lags) == 1


def test_a_threshold_of_0_is_no_alert():
    """felix-116: an alert that is on ends when the threshold goes."""
    bank = Bank(lag_alert_events=2)
    slow = bank.stalled(wants_lag=True)
    bank.publish(*numbers(0, 5))
    bank.change(lag_alert_events=0)
    assert [lag.alert for lag in slow.lags] == [True, False]
    bank.publish(*numbers(0, 500))
    assert len(slow.lags) == 2
    bank.change(lag_alert_events=100)
    assert [lag.alert for lag in slow.lags] == [True, False, True]


def test_a_lagging_subscription_that_closes_is_no_longer_counted():
    """felix-41, 116."""
    bank = Bank(lag_alert_events=1)
    slow = bank.stalled(wants_lag=True)
    bank.publish(*numbers(0, 5))
    assert bank.counts().lagging == 1
    slow.live.close()
    assert bank.counts().lagging == 0
    assert len(slow.lags) == 1


def test_by_default_nobody_is_disconnected():
    """felix-117, 4."""
    bank = Bank(event_queue_depth=1)
    slow = bank.stalled()
    for _ in range(100):
        bank.publish(b"1")
        bank.pass_ms(60_000)
    assert slow.errors == []
    assert not slow.live.is_closed


def test_a_subscriber_that_is_slow_for_too_long_is_ended_with_a_reason():
    """felix-117: it alone, and not before its time."""
    bank = Bank(event_queue_depth=4, disconnect_slow_ms=5000)
    slow, fast = bank.stalled(), bank.subscribe()
    idle = bank.stalled(event_queue_depth=100)
    bank.publish(*numbers(0, 4))
    bank.pass_ms(60_000)
    assert slow.errors == [], "full is not slow, as long as nothing is lost"
    bank.publish(b"4")
    bank.pass_ms(4999)
    bank.publish(b"5")
    assert slow.errors == []
    bank.pass_ms(1)
    [error] = slow.errors
    assert isinstance(error, ResourceExhausted)
    assert (error.limit, error.reason) == ("event_queue_depth", "slow_subscriber")
    assert "too slow" in error.message
    assert slow.live.is_closed
    assert slow.live.take(10) == []
    bank.publish(b"6")
    assert fast.events == numbers(0, 7)
    assert idle.behind == 7
    assert (bank.counts().subscribers, bank.counts().slow_disconnects) == (2, 1)


def test_a_subscriber_that_reads_a_few_events_now_and_then_is_still_slow():
    """felix-117: a place now and then is not catching up."""
    bank = Bank(event_queue_depth=10, disconnect_slow_ms=1000)
    slow = bank.stalled()
    bank.publish(*numbers(0, 11))
    for _ in range(10):
        bank.pass_ms(99)
        slow.read(1)
        bank.publish(b"x", b"y")
    bank.pass_ms(10)
    assert len(slow.errors) == 1


def test_one_that_catches_up_has_its_time_again():
    """felix-117: down to half of the buffer is caught up."""
    bank = Bank(event_queue_depth=10, disconnect_slow_ms=1000)
    slow = bank.stalled()
    bank.publish(*numbers(0, 11))
    bank.pass_ms(900)
    slow.read(5)
    bank.pass_ms(900)
    bank.publish(*numbers(0, 11))
    bank.pass_ms(999)
    assert slow.errors == []
    bank.pass_ms(1)
    assert len(slow.errors) == 1


def test_a_change_of_the_patience_takes_effect_at_once():
    """felix-117: the time counts from when it became slow."""
    bank = Bank(event_queue_depth=1)
    slow, other = bank.stalled(), bank.stalled()
    bank.publish(*numbers(0, 2))
    bank.pass_ms(3000)
    bank.change(event_queue_depth=1, disconnect_slow_ms=5000)
    bank.pass_ms(1999)
    assert slow.errors == []
    other.read()
    bank.pass_ms(1)
    assert (len(slow.errors), other.errors) == (1, [])


def test_the_brokers_settings_hold_where_the_stream_has_none():
    """felix-116, 117."""
    limits = Limits(event_queue_depth=4, lag_alert_events=2, disconnect_slow_ms=100)
    bank = Bank(limits=limits)
    slow = bank.stalled(wants_lag=True)
    bank.publish(*numbers(0, 5))
    assert len(slow.lags) == 1
    bank.pass_ms(100)
    assert len(slow.errors) == 1


def test_a_reader_that_closes_when_it_is_told_of_its_lag_is_just_gone():
    """felix-41, 116."""
    bank = Bank(lag_alert_events=1)

    class Impatient(Listener):
        def lagging(self, lag: object) -> None:
            self.live.close()

    impatient, other = Impatient(stalled=True), Listener()
    bank.subscribe(listener=impatient, wants_lag=True)
    bank.subscribe(listener=other)
    bank.publish(*numbers(0, 5))
    assert other.events == numbers(0, 5)
    assert (bank.counts().subscribers, bank.counts().lagging) == (1, 0)
    assert impatient.behind == 0
