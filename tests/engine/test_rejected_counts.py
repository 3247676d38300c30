"""Where refused produces are counted: under the topic and partition they would have gone to."""

from __future__ import annotations

from penstock.core.partitioning import partition_of_key
from penstock.model.envelope import Envelope, RoutingDecision
from penstock.model.limits import Limits
from tests.engine.harness import Broker
from tests.engine.test_router import routed


def test_a_refusal_names_the_final_topic_and_partition():
    """By the producer's envelope, and by the key where that says nothing."""
    broker = Broker(limits=Limits(max_partition_msgs=1, max_message_bytes=100))
    broker.topic("asked", 2)
    broker.topic("final", 4)
    target = Envelope(target_topic="final", partition_override=3)
    broker.produce("asked", "v", envelope=target)
    broker.try_produce("asked", "v", envelope=target)
    broker.try_produce("asked", "v" * 200, "key")
    broker.try_produce("nowhere", "v" * 200, "key", Envelope(target_topic="final"))
    asked, final = str(partition_of_key("key", 2)), str(partition_of_key("key", 4))
    assert broker.engine.rejected == {
        ("final", "3", "partition_msgs"): 1,
        ("asked", asked, "invalid_argument"): 1,
        ("final", final, "invalid_argument"): 1,
    }


def test_a_refusal_without_a_topic_or_partition_has_no_empty_topic():
    """Names that anyone makes up do not become labels."""
    broker = Broker()
    broker.topic("t", 2)
    broker.try_produce("nowhere", "v")
    broker.try_produce("t", "v", envelope=Envelope(target_topic="elsewhere"))
    broker.try_produce("t", "v", envelope=Envelope(partition_override=7))
    assert broker.engine.rejected == {
        ("(unknown)", "", "not_found"): 2,
        ("t", "", "invalid_argument"): 1,
    }


def test_a_refusal_names_the_routers_topic_and_partition():
    broker, router = routed()
    size = broker.engine.limits.max_message_bytes + 1
    broker.submit(broker.engine.produce, broker.command("t", "v" * size))
    router.answer(RoutingDecision(target_topic="u", partition_override=2))
    broker.settle()
    assert broker.engine.rejected == {("u", "2", "invalid_argument"): 1}
