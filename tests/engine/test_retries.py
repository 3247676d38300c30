"""Retries without a policy, what a nack may ask for, and a topic's own limits, at the seam."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
import pytest

from penstock.api.topics import RetryDefaults
from penstock.core.comparison import comparable
from penstock.core.image import take_image
from penstock.core.invariants import check
from penstock.model.envelope import Envelope, RetryPolicy
from penstock.model.errors import FailedPrecondition, InvalidArgument
from penstock.model.item import Item
from penstock.model.limits import CONTRACT_LIMITS, MAX_BACKOFF_MS, Limits
from penstock.model.records import TopicConfigured, TopicCreated, decode_record, encode_record
from tests.engine.harness import LONG_MS, Broker, Reader, on_disk, policy, values


def configure(broker: Broker, topic: str = "t", **settings: int) -> None:
    retries = RetryDefaults(**settings)
    broker.must(partial(broker.engine.configure_topic, retries=retries), topic, None, None)


def next_after(broker: Broker, reader: Reader, wait_ms: int) -> Item:
    """The one item that comes when `wait_ms` have passed, and not before."""
    broker.pass_ms(wait_ms - 20)
    assert not reader.items, f"it came before {wait_ms} ms"
    broker.pass_ms(40)
    return reader.one()


def waits_of(broker: Broker, reader: Reader, waits: list[int]) -> None:
    """Nacks one message again and again, which must come after each of these waits."""
    item = reader.one()
    for wait_ms in waits:
        assert broker.nack(reader, item) is None
        item = next_after(broker, reader, wait_ms)


def one_message(limits: Limits | None = None, envelope: Envelope | None = None) -> tuple[Any, Any]:
    broker = on_disk(limits=limits or Limits())
    broker.topic()
    reader = broker.consume(lease_ms=LONG_MS)
    broker.produce("t", "a", envelope=envelope)
    return broker, reader


# -- the default backoff -------------------------------------------------------------------------


def test_a_nack_without_a_policy_waits_the_default_backoff_which_doubles():
    """driftq-37: 250 ms, doubling up to 30 s."""
    broker, reader = one_message()
    waits_of(broker, reader, [250, 500, 1000, 2000, 4000, 8000, 16000, 30000, 30000])
    broker.close()


def test_the_profile_contract_waits_250_ms_each_time():
    """driftq-37"""
    broker, reader = one_message(CONTRACT_LIMITS)
    waits_of(broker, reader, [250, 250, 250])
    broker.close()


def test_a_topics_backoff_goes_before_the_brokers_and_0_is_the_brokers():
    """driftq-37"""
    broker, reader = one_message()
    configure(broker, retry_backoff_ms=100, retry_max_backoff_ms=300)
    waits_of(broker, reader, [100, 200, 300, 300])
    configure(broker, retry_backoff_ms=0, retry_max_backoff_ms=0)
    broker.ack(reader, 0)
    broker.produce("t", "b")
    waits_of(broker, reader, [250, 500])
    broker.close()


def test_a_backoff_above_the_longest_wait_is_waited_all_the_same():
    broker, reader = one_message()
    configure(broker, retry_backoff_ms=60_000)
    waits_of(broker, reader, [60_000, 60_000])
    broker.close()


def test_a_lease_that_ends_without_a_policy_comes_again_at_once():
    """driftq-37"""
    broker = on_disk()
    broker.topic()
    broker.put("t", "a")
    reader = broker.consume(lease_ms=100)
    for attempt in range(1, 10):
        assert reader.one().attempts == attempt
        broker.pass_ms(110)
    broker.close()


def test_a_message_that_always_fails_does_not_hold_up_those_behind_it():
    """driftq-38: 20 messages, one in flight at a time, and the handler fails at offset 3."""
    broker = on_disk()
    broker.topic()
    broker.put("t", *map(str, range(20)))
    reader = broker.consume(lease_ms=LONG_MS, prefetch=1)
    done: list[int] = []
    poisoned = 0
    started = broker.clock.now_ms()
    for _ in range(200):
        if len(done) == 19:
            break
        items = reader.take()
        if not items:
            broker.pass_ms(10)
        for item in items:
            if item.offset == 3:
                poisoned += 1
                assert broker.nack(reader, item, "poison") is None
            else:
                assert broker.ack(reader, item) is None
                done.append(item.offset)
    assert done == [n for n in range(20) if n != 3]
    assert broker.clock.now_ms() - started < 250, "the others waited for the poison message"
    assert poisoned == 1
    broker.close()


def test_a_default_backoff_is_the_same_after_a_restart():
    """driftq-44: when the retry comes is in the record, whatever the settings are later."""
    broker, reader = one_message()
    assert broker.nack(reader, reader.one()) is None
    live = comparable(take_image(broker.state), broker.clock.now_ms())
    broker.limits = Limits(retry_backoff_ms=5)
    broker.restart()
    assert comparable(take_image(broker.state), broker.clock.now_ms()) == live
    again = broker.consume(lease_ms=LONG_MS)
    assert next_after(broker, again, 250).attempts == 2
    broker.close()


# -- what a nack may ask for ---------------------------------------------------------------------


@pytest.mark.parametrize("envelope", [None, policy(5, 1000), policy(0, 60_000)])
@pytest.mark.parametrize("delay_ms", [40, 5000])
def test_a_nacks_delay_goes_before_every_backoff(envelope: Envelope | None, delay_ms: int):
    """driftq-37"""
    broker, reader = one_message(envelope=envelope)
    assert broker.nack(reader, reader.one(), delay_ms=delay_ms) is None
    assert next_after(broker, reader, delay_ms).attempts == 2
    broker.close()


@pytest.mark.parametrize("envelope", [None, policy(5, 1000)])
def test_a_nack_with_a_delay_of_0_is_retried_at_once(envelope: Envelope | None):
    broker, reader = one_message(envelope=envelope)
    assert broker.nack(reader, reader.one(), delay_ms=0) is None
    assert reader.one().attempts == 2
    broker.close()


@pytest.mark.parametrize("delay_ms", [-1, MAX_BACKOFF_MS + 1])
def test_a_delay_out_of_range_is_refused_and_the_lease_stays(delay_ms: int):
    broker, reader = one_message()
    item = reader.one()
    assert isinstance(broker.nack(reader, item, delay_ms=delay_ms), InvalidArgument)
    assert isinstance(broker.nack(reader, item, delay_ms=5, dead=True), InvalidArgument)
    assert broker.in_flight() == 1
    assert broker.nack(reader, item, delay_ms=MAX_BACKOFF_MS) is None
    broker.close()


def test_a_delay_gives_no_attempt_beyond_the_last():
    """driftq-39"""
    broker, reader = one_message(envelope=policy(1))
    assert broker.nack(reader, reader.one(), delay_ms=10) is None
    assert values(broker.stored("dlq.t")) == ["a"]
    broker.close()


def test_after_the_lease_ended_a_nack_moves_no_schedule_whatever_it_asks_for():
    broker = on_disk()
    broker.topic()
    reader = broker.consume(lease_ms=100)
    broker.produce("t", "a", envelope=policy(backoff_ms=5000))
    item = reader.one()
    broker.pass_ms(150)
    assert broker.nack(reader, item, "late", delay_ms=0) is None
    broker.pass_ms(4000)
    assert not reader.items
    broker.pass_ms(1000)
    assert reader.one().last_error == "late"
    broker.close()


@pytest.mark.parametrize("envelope", [None, policy(5, 1000), policy(0, 60_000)])
def test_a_dead_nack_moves_the_message_to_the_dead_letters_now(envelope: Envelope | None):
    """As a last attempt does: it is done for the group, and the copy says why."""
    broker, reader = one_message(envelope=envelope)
    assert broker.nack(reader, reader.one(), "cannot be parsed", dead=True) is None
    (copy,) = broker.stored("dlq.t")
    assert copy.envelope is not None
    assert copy.envelope.dlq is not None
    assert (copy.envelope.dlq.attempts, copy.envelope.dlq.last_error) == (1, "cannot be parsed")
    assert copy.envelope.retry_policy is None
    assert copy.envelope.dlq.retry_policy == (envelope.retry_policy if envelope else None)
    broker.pass_ms(LONG_MS)
    assert not reader.items
    assert not broker.state.topics["t"].groups["g"].progress[0].unfinished
    check(broker.state)
    broker.close()


def test_a_dead_nack_after_the_lease_ended_still_gives_the_message_up():
    broker = on_disk()
    broker.topic()
    reader = broker.consume(lease_ms=100)
    broker.produce("t", "a", envelope=policy(backoff_ms=5000))
    item = reader.one()
    broker.pass_ms(150)
    assert broker.nack(reader, item, dead=True) is None
    assert values(broker.stored("dlq.t")) == ["a"]
    broker.close()


def test_a_dead_letter_cannot_die_again():
    """driftq-40: a dead-letter topic has none of its own."""
    broker = on_disk()
    broker.topic("dlq.t")
    broker.put("dlq.t", "a")
    configure(broker, "dlq.t", max_attempts=1)
    reader = broker.consume("dlq.t", lease_ms=LONG_MS)
    item = reader.one()
    assert isinstance(broker.nack(reader, item, dead=True), FailedPrecondition)
    assert broker.nack(reader, item, delay_ms=0) is None
    assert reader.one().attempts == 2
    assert list(broker.state.topics) == ["dlq.t"]
    broker.close()


# -- a topic's max_attempts ----------------------------------------------------------------------


@pytest.mark.parametrize("envelope", [None, policy(0, 50)])
def test_a_topics_max_attempts_is_for_messages_that_name_none(envelope: Envelope | None):
    """driftq-39: by nack and by lapse."""
    broker, reader = one_message(envelope=envelope)
    configure(broker, max_attempts=2)
    assert broker.nack(reader, reader.one(), delay_ms=0) is None
    last = reader.one()
    assert broker.extend(reader, last, 10) is None
    broker.pass_ms(50)
    (copy,) = broker.stored("dlq.t")
    assert copy.envelope is not None
    assert copy.envelope.dlq is not None
    assert (copy.envelope.dlq.attempts, copy.envelope.dlq.last_error) == (2, "ack_timeout")
    broker.close()


def test_a_messages_max_attempts_goes_before_its_topics():
    broker, reader = one_message(envelope=policy(3))
    configure(broker, max_attempts=1)
    for attempt in (1, 2, 3):
        assert reader.one().attempts == attempt
        assert broker.nack(reader, 0) is None
    assert values(broker.stored("dlq.t")) == ["a"]
    broker.close()


def test_a_new_max_attempts_counts_from_the_next_failure_on():
    """It is decided at the failure: a message that has had more deliveries has had its last."""
    broker, reader = one_message()
    for _ in range(5):
        assert broker.nack(reader, reader.one(), delay_ms=0) is None
    configure(broker, max_attempts=3)
    assert reader.one().attempts == 6
    assert broker.nack(reader, 0) is None
    assert values(broker.stored("dlq.t")) == ["a"]
    broker.close()


def test_a_topics_retries_survive_a_restart_and_a_snapshot():
    broker = on_disk()
    retries = RetryDefaults(max_attempts=1, retry_backoff_ms=70, retry_max_backoff_ms=90)
    broker.must(partial(broker.engine.create_topic, retries=retries), "t", 1)
    broker.topic("u")
    configure(broker, "u", max_attempts=4)
    for restart in (broker.restart, broker.seal_and_crash):
        restart()
        report = broker.must(broker.engine.describe_topic, "t")
        found = (report.max_attempts, report.retry_backoff_ms, report.retry_max_backoff_ms)
        assert found == (1, 70, 90)
        assert broker.must(broker.engine.describe_topic, "u").max_attempts == 4
    broker.close()


def test_asking_for_a_topic_with_other_retries_than_it_has_is_refused():
    broker = on_disk()
    broker.topic()
    asked = partial(broker.engine.create_topic, retries=RetryDefaults(max_attempts=3))
    assert isinstance(broker.call(asked, "t", 1), FailedPrecondition)
    configure(broker, max_attempts=3)
    assert broker.must(asked, "t", 1) is False
    for wrong in ({"max_attempts": -1}, {"retry_backoff_ms": MAX_BACKOFF_MS + 1}):
        refused = partial(broker.engine.configure_topic, retries=RetryDefaults(**wrong))
        assert isinstance(broker.call(refused, "t", None, None), InvalidArgument)
    broker.close()


def test_records_of_before_are_topics_without_retries_of_their_own():
    for record in (
        TopicCreated(1, 5, "t", 2, True, 3, 4, 5),
        TopicConfigured(1, 6, 7, 8, True, 3, 4, 5),
    ):
        fields = msgspec.msgpack.decode(encode_record(record))
        old = decode_record(msgspec.msgpack.encode(fields[:-3]))
        none = {"max_attempts": 0, "retry_backoff_ms": 0, "retry_max_backoff_ms": 0}
        assert old == msgspec.structs.replace(record, **none)


# -- dead letters keep their policy --------------------------------------------------------------


def test_a_dead_letter_keeps_its_policy_aside_in_memory_and_sealed():
    """driftq-40: and it does not act there."""
    broker, reader = one_message(envelope=policy(1, 10, 20, run_id="r"))
    assert broker.nack(reader, reader.one()) is None
    for look in (lambda: None, broker.seal_and_crash):
        look()
        (copy,) = broker.stored("dlq.t")
        assert copy.envelope is not None
        assert copy.envelope.dlq is not None
        assert copy.envelope.dlq.retry_policy == RetryPolicy(1, 10, 20)
        assert copy.envelope.retry_policy is None
    readers = broker.consume("dlq.t", lease_ms=LONG_MS)
    for attempt in (1, 2, 3):
        item = readers.one()
        assert item.attempts == attempt
        assert broker.nack(readers, item, delay_ms=0) is None
    broker.close()


def test_at_a_start_leases_that_end_go_before_backoffs_that_are_over() -> None:
    """driftq-44: however long the start took."""
    broker = on_disk()
    broker.topic("t")
    broker.put("t", "waits", "in flight")
    reader = broker.consume()
    waits, _ = reader.take()
    assert broker.nack(reader, waits, delay_ms=500) is None
    broker.close()
    broker.clock.advance(5000)
    broker.open()
    broker.pass_ms(100)
    assert values(broker.consume(owner="next").take()) == ["in flight", "waits"]
    broker.close()
