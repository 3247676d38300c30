"""The router's turn in a produce, with a router that answers when the test says so."""

from __future__ import annotations

from penstock.api.messages import Decided, Produce
from penstock.model.envelope import Envelope, RoutingDecision
from penstock.model.errors import FailedPrecondition, NotFound
from penstock.model.records import Message
from tests.engine.harness import LONG_MS, Broker, values
from tests.storage.faulty_vfs import FaultyVfs


class Waiting:
    """Keeps what it was asked; a test decides."""

    def __init__(self) -> None:
        self.asked: list[tuple[Produce, Decided]] = []

    def route(self, command: Produce, decided: Decided) -> None:
        self.asked.append((command, decided))

    def answer(self, decision: RoutingDecision | None) -> None:
        self.asked.pop(0)[1](decision)


def routed() -> tuple[Broker, Waiting]:
    router = Waiting()
    broker = Broker(FaultyVfs(), router=router)
    broker.topic("t", 2)
    broker.topic("u", 3)
    return broker, router


def failures(broker: Broker) -> int:
    assert broker.engine.routing is not None
    return broker.engine.routing.failures


def test_the_routers_target_and_partition_beat_the_producers():
    """driftq-54: and label and meta come back with the item."""
    broker, router = routed()
    envelope = Envelope(target_topic="t", partition_override=1)
    outcomes = broker.submit(broker.engine.produce, broker.command("t", "v", envelope=envelope))
    broker.settle()
    assert not outcomes
    assert router.asked[0][0].topic == "t"
    router.answer(RoutingDecision("label", "u", 2, {"a": "b"}))
    broker.settle()
    assert (outcomes[0].topic_id, outcomes[0].partition) == (broker.state.topics["u"].id, 2)
    reader = broker.consume("u", lease_ms=LONG_MS)
    item = reader.one()
    assert (item.routing.label, item.routing.meta) == ("label", {"a": "b"})  # type: ignore[union-attr]
    broker.crash()
    again = broker.consume("u", lease_ms=LONG_MS)
    assert again.one().routing == item.routing
    broker.close()


def test_a_router_that_answers_nonsense_leaves_the_message_unrouted():
    """driftq-55: an unknown target, a partition out of range."""
    broker, router = routed()
    for nonsense in (
        RoutingDecision("label", "nowhere"),
        RoutingDecision("label", "u", 3),
        RoutingDecision("label", None, -1),
    ):
        outcomes = broker.submit(broker.engine.produce, broker.command("t", "v"))
        router.answer(nonsense)
        broker.settle()
        message = outcomes[0]
        assert isinstance(message, Message)
        assert message.routing is None
        assert message.topic_id == broker.state.topics["t"].id
    assert failures(broker) == 3
    broker.close()


def test_while_a_key_is_pending_at_the_router_its_second_produce_is_refused():
    """driftq-58."""
    broker, router = routed()
    envelope = Envelope(idempotency_key="k")
    first = broker.submit(broker.engine.produce, broker.command("t", "a", envelope=envelope))
    second = broker.try_produce("t", "b", envelope=envelope)
    assert isinstance(second, FailedPrecondition)
    other = broker.submit(
        broker.engine.produce,
        broker.command("t", "c", envelope=Envelope(idempotency_key="k", tenant_id="x")),
    )
    router.answer(RoutingDecision())
    router.answer(RoutingDecision())
    broker.settle()
    assert isinstance(first[0], Message)
    assert isinstance(other[0], Message)
    third = broker.submit(broker.engine.produce, broker.command("t", "d", envelope=envelope))
    router.answer(RoutingDecision())
    broker.settle()
    assert third == [None], "committed now"
    broker.close()


def test_a_produce_that_is_refused_after_the_router_leaves_its_key_free():
    """driftq-58."""
    broker, router = routed()
    envelope = Envelope(idempotency_key="k")
    command = broker.command("gone", "a", envelope=envelope)
    for _ in range(2):
        outcomes = broker.submit(broker.engine.produce, command)
        router.answer(RoutingDecision("label"))
        broker.settle()
        assert isinstance(outcomes[0], NotFound)
    broker.close()


def test_two_keys_that_the_router_sends_to_one_topic_are_one_key_there():
    """driftq-59: the final topic counts."""
    broker, router = routed()
    envelope = Envelope(idempotency_key="k")
    outcomes = [
        broker.submit(broker.engine.produce, broker.command(topic, "v", envelope=envelope))
        for topic in ("t", "u")
    ]
    router.answer(RoutingDecision("", "u"))
    router.answer(RoutingDecision("", "u"))
    broker.settle()
    assert isinstance(outcomes[0][0], Message)
    assert outcomes[1] == [None]
    broker.close()


def test_a_batch_is_stored_in_order_when_its_last_message_is_routed():
    """driftq-71, 54: whatever the order of the router's answers."""
    broker, router = routed()
    commands = [
        broker.command("t", f"v{n}", envelope=Envelope(partition_override=0)) for n in range(3)
    ]
    outcomes = broker.submit(broker.engine.produce_many, commands)
    for index in (2, 0, 1):
        router.asked[index][1](RoutingDecision(f"label {index}"))
        broker.settle()
    assert [message.offset for message in outcomes[0]] == [0, 1, 2]
    assert [message.routing.label for message in outcomes[0]] == ["label 0", "label 1", "label 2"]
    broker.close()


def test_an_empty_batch_is_answered():
    """driftq-71: every item of a batch may be refused before it comes here."""
    broker, _ = routed()
    assert broker.must(broker.engine.produce_many, []) == []
    assert broker.must(broker.engine.ack_many, []) == []
    broker.close()


def test_a_topic_deleted_while_the_router_thinks_is_not_found():
    """driftq-11, 70: an answer, not an accident."""
    broker, router = routed()
    outcomes = broker.submit(broker.engine.produce, broker.command("t", "v"))
    broker.must(broker.engine.delete_topic, "t")
    router.answer(RoutingDecision())
    broker.settle()
    assert isinstance(outcomes[0], NotFound)
    broker.close()


def keyed(value: str) -> Produce:
    return Broker.command("t", value, envelope=Envelope(idempotency_key="k"))


def test_a_repetition_of_what_is_stored_is_a_duplicate_while_another_is_at_the_router() -> None:
    """driftq-57: the stored message decides, not the one that is at the router."""
    router = Waiting()
    broker = Broker(router=router)
    broker.topic()
    first = broker.submit(broker.engine.produce, keyed("a"))
    router.answer(RoutingDecision())
    broker.settle()
    assert isinstance(first[0], Message)
    second = broker.submit(broker.engine.produce, keyed("b"))
    third = broker.submit(broker.engine.produce, keyed("c"))
    broker.settle()
    assert third == [None], "a duplicate: 200"
    router.answer(RoutingDecision())
    broker.settle()
    assert second == [None]
    assert values(broker.stored("t")) == ["a"]
    broker.close()


class AtOnce:
    """Decides within the call."""

    def route(self, command: Produce, decided: Decided) -> None:
        decided(RoutingDecision("seen " + command.value))


def test_a_batch_of_any_size_passes_a_router_that_decides_at_once() -> None:
    """driftq-54: and in its order."""
    broker = Broker(router=AtOnce())
    broker.topic()
    outcomes = broker.must(
        broker.engine.produce_many, [broker.command("t", str(n)) for n in range(3000)]
    )
    assert [message.value for message in outcomes] == [str(n) for n in range(3000)]
    assert all(message.routing.label == "seen " + message.value for message in outcomes)
    broker.close()


def test_a_large_batch_is_given_to_the_router_in_parts() -> None:
    """driftq-55: at most 512 messages wait for a router at once."""
    router = Waiting()
    broker = Broker(router=router)
    broker.topic()
    commands = [broker.command("t", str(n)) for n in range(1500)]
    outcomes = broker.submit(broker.engine.produce_many, commands)
    most = 0
    while router.asked:
        most = max(most, len(router.asked))
        router.answer(RoutingDecision("label"))
    broker.settle()
    assert most <= 512
    assert [message.value for message in outcomes[0]] == [str(n) for n in range(1500)]
    assert all(message.routing is not None for message in outcomes[0])
    broker.close()
