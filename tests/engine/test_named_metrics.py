"""Metrics of named subscriptions: what was handed over, what is behind, and what is not acked."""

from __future__ import annotations

from penstock.api.metrics import NamedSubscriptionMetrics
from tests.engine.durable_stream_harness import EARLIEST, Streams
from tests.engine.harness import LEASE_MS, Broker

PATH = ("acme", "prod", "orders")


def named_of(broker: Broker) -> list[NamedSubscriptionMetrics]:
    return broker.engine.metrics().named_subscriptions


def delivered(broker: Broker) -> int:
    (stream,) = broker.engine.metrics().streams
    return stream.counts.delivered


def test_an_event_counts_once_for_each_time_it_is_handed_over():
    """felix-131: to a name, to each of two names, and again after its lease."""
    broker = Streams()
    one = broker.named()
    broker.publish(b"a", b"b")
    assert delivered(broker) == 2
    other = broker.named("audit", start=EARLIEST)
    assert delivered(broker) == 4
    broker.ack_all(one)
    broker.ack_all(other)
    broker.listen(EARLIEST)
    assert delivered(broker) == 6
    broker.publish(b"c")
    assert delivered(broker) == 9
    broker.ack_all(other)
    broker.pass_ms(LEASE_MS)
    assert delivered(broker) == 10, "redelivered to the one that did not ack"


def test_what_a_paused_consumer_was_not_given_does_not_count():
    broker = Streams()
    reader = broker.named()
    reader.live.pause()
    broker.publish(b"a")
    assert delivered(broker) == 0
    reader.live.resume()
    broker.settle()
    assert delivered(broker) == 1


def test_lag_and_unacked_are_those_of_each_name_also_after_a_restart():
    """felix-131"""
    broker = Streams()
    reader = broker.named(prefetch=2)
    broker.named("audit", start=EARLIEST).live.close()
    broker.publish(b"a", b"b", b"c", b"d")
    assert broker.ack_item(reader, reader.take()[0]) is None
    billing = NamedSubscriptionMetrics(PATH, "billing", lag=3, unacked=2)
    audit = NamedSubscriptionMetrics(PATH, "audit", lag=4, unacked=0)
    assert sorted(named_of(broker), key=lambda each: each.name) == [audit, billing]
    broker.kill()
    assert sorted(named_of(broker), key=lambda each: each.name) == [audit, billing]


def test_a_name_has_metrics_as_long_as_it_exists():
    """Series stay bounded: a deleted name, and the names of a deleted stream, have none."""
    broker = Streams()
    broker.named()
    broker.named("audit")
    broker.must(broker.engine.delete_group, broker.log_name, "audit")
    assert [each.name for each in named_of(broker)] == ["billing"]
    broker.must(broker.engine.registry.delete, "stream", broker.path, False)
    assert named_of(broker) == []
