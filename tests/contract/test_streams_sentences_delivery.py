"""Delivery, order and isolation, sentence by sentence, between real clients and a broker."""

from __future__ import annotations

import socket
import struct
import time
from functools import partial
from statistics import median

import pytest

from tests.broker_process import PROMPT_S, BrokerProcess, eventually
from tests.contract.conftest import StartBroker
from tests.contract.namespaces import Namespace, b64
from tests.contract.stream_clients import Session, at_once, every_kind_of_reader, make_namespace
from tests.websocket import payloads_of

BIG = b"x" * 4000


@pytest.fixture
def ns(broker: BrokerProcess) -> Namespace:
    return Namespace(broker)


@pytest.fixture
def conformance(broker: BrokerProcess) -> Namespace:
    """The namespace of the document's own tests, with the streams that they use."""
    ns = make_namespace(broker, "test", "default")
    for name in ("orders", "stream"):
        assert ns.post(f"{ns.path}/streams", name=name).status_code in (200, 201)
    return ns


def test_the_ordering_test_of_the_document(conformance: Namespace) -> None:
    """felix-128"""
    with Session(conformance) as client, Session(conformance) as publisher:
        client.subscribe("orders")
        messages = [b"msg1", b"msg2", b"msg3"]
        ok = publisher.publish("orders", *messages, ack="per_batch")
        assert ok == {"type": "publish_ok", "count": 3}
        assert client.events(3) == messages


def test_the_isolation_test_of_the_document(conformance: Namespace) -> None:
    """felix-129, 114: the slow one reads nothing; the fast one gets all."""
    with (
        Session(conformance) as fast,
        Session(conformance, receive_buffer=4096) as slow,
        Session(conformance) as publisher,
    ):
        fast.subscribe("stream")
        slow_id = slow.subscribe("stream")
        expected = 4000
        count = 0
        for first in range(0, expected, 200):
            payloads = [b"%d:" % number + BIG for number in range(first, first + 200)]
            assert publisher.publish("stream", *payloads)["type"] == "publish_ok"
            count += len(fast.events(200))
        assert count == expected
        lags = {each["subscription_id"]: each for each in conformance.subscriptions("stream")}
        assert lags[slow_id]["dropped"] > 0


def test_all_kinds_of_readers_see_one_order_and_everything_once(ns: Namespace) -> None:
    """felix-1, 9, 11, 12, 13, 14, 18: of four publishers at once, singly and in batches."""
    stream = ns.create_stream(event_queue_depth=20_000)
    each = 300

    def publish(name: int) -> None:
        with Session(ns) as publisher:
            number = 0
            while number < each:
                some = range(number, min(each, number + 1 + number % 4))
                payloads = [b"%d:%d:\x00\xff" % (name, n) for n in some]
                assert publisher.publish(stream, *payloads)["type"] == "publish_ok"
                number = some.stop

    with every_kind_of_reader(ns, stream) as readers:
        at_once([partial(publish, name) for name in range(4)])
        seen = {kind: read(4 * each) for kind, read in readers.items()}
        ns.publish(stream, b"and nothing more")
        for kind, read in readers.items():
            assert read(1) == [b"and nothing more"], kind
    for kind, payloads in seen.items():
        assert payloads == seen["text"], kind
    for name in range(4):
        own = [int(p.split(b":")[1]) for p in seen["text"] if p.startswith(b"%d:" % name)]
        assert own == list(range(each))


def test_more_workers_per_connection_break_no_order(start_broker: StartBroker) -> None:
    """felix-35, 131: it is shown, and whatever it says the order is that of the publisher."""
    broker = start_broker(memory=True, env={"PENSTOCK_PUB_WORKERS_PER_CONN": "16"})
    ns = Namespace(broker)
    assert broker.client.get(ns.stream_path("default")).json()["pub_workers_per_conn"] == 16
    with Session(ns) as reader, Session(ns) as publisher:
        reader.subscribe("default", event_queue_depth=65_536)
        sent = []
        for number in range(0, 2000, 4):
            some = [b"%d" % n for n in range(number, number + 1 + number % 4)]
            sent += some
            texts = [b64(payload) for payload in some]
            publisher.send(
                publisher.message("publish_batch", stream="default", payloads=texts, ack="none")
            )
        assert reader.events(len(sent)) == sent


def test_a_publish_takes_no_longer_when_every_subscriber_stands_still(ns: Namespace) -> None:
    """felix-27: all succeed, and none waits for anybody."""
    stream = ns.create_stream()

    def publish_times(publisher: Session) -> list[float]:
        times = []
        for _ in range(300):
            began = time.monotonic()
            assert publisher.publish(stream, BIG)["type"] == "publish_ok"
            times.append(time.monotonic() - began)
        return times

    stalled = [Session(ns, receive_buffer=4096) for _ in range(20)]
    with Session(ns) as publisher:
        alone = publish_times(publisher)
        for each in stalled:
            each.subscribe(stream)
        ns.publish(stream, *[BIG] * 3000)
        eventually(
            lambda: ns.subscriptions(stream), lambda lags: all(lag["dropped"] > 0 for lag in lags)
        )
        crowded = publish_times(publisher)
    for each in stalled:
        each.socket.close()
    assert median(crowded) < 10 * median(alone) + 0.005
    assert max(crowded) < 0.5


def test_a_subscription_has_all_that_was_accepted_since_it_was_confirmed(ns: Namespace) -> None:
    """felix-45: and nothing from before it was asked for, while another publishes all the time."""
    stream = ns.create_stream()
    with Session(ns) as publisher, Session(ns) as reader:
        for round_number in range(50):
            publisher.publish(stream, b"before %d" % round_number)
            subscription_id = reader.subscribe(stream)
            publisher.publish(stream, b"after %d" % round_number)
            assert reader.events(1) == [b"after %d" % round_number]
            ended = reader.ask({"type": "unsubscribe", "subscription_id": subscription_id})
            assert ended == {"type": "ok"}


def test_what_a_publisher_has_an_ack_for_is_delivered_though_it_is_gone(ns: Namespace) -> None:
    """felix-46, 47: what had none may be, once at most; nothing is torn."""
    stream = ns.create_stream(event_queue_depth=65_536)
    acked: set[bytes] = set()
    sent: set[bytes] = set()
    with Session(ns) as reader:
        reader.subscribe(stream)
        for number in range(30):
            publisher = Session(ns)
            for part in range(3):
                payload = b"%d-%d" % (number, part)
                assert publisher.publish(stream, payload)["type"] == "publish_ok"
                acked.add(payload)
            unacked = [b"%d-u%d" % (number, part) for part in range(20)]
            sent.update(unacked)
            publisher.send(
                *[publisher.message("publish", stream=stream, payload=b64(p)) for p in unacked]
            )
            reset = struct.pack("ii", 1, 0)
            publisher.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
            publisher.socket.close()
        ns.publish(stream, b"last")
        seen: list[bytes] = []
        while b"last" not in seen:
            seen += payloads_of(reader.receive())
    assert len(seen) == len(set(seen))
    assert acked <= set(seen) <= acked | sent | {b"last"}


def test_a_backlog_of_one_stream_does_not_delay_another(ns: Namespace) -> None:
    """felix-16, 19"""
    busy, calm = ns.create_stream(), ns.create_stream()
    with (
        Session(ns, receive_buffer=4096) as stalled,
        Session(ns) as reader,
        Session(ns) as publisher,
    ):
        stalled.subscribe(busy, event_queue_depth=65_536)
        reader.subscribe(calm)
        publisher.publish(busy, *[BIG] * 8000)
        began = time.monotonic()
        publisher.publish(calm, b"now")
        assert reader.events(1) == [b"now"]
        assert time.monotonic() - began < PROMPT_S


def test_a_depth_of_4096_keeps_4096(start_broker: StartBroker) -> None:
    """felix-20, 21, 23: set for the broker, and for one stream otherwise."""
    broker = start_broker(memory=True, env={"PENSTOCK_EVENT_QUEUE_DEPTH": "4096"})
    ns = Namespace(broker)
    small = ns.create_stream(event_queue_depth=16)
    for stream, depth in (("default", 4096), (small, 16)):
        with Session(ns, receive_buffer=4096) as slow:
            slow.subscribe(stream)
            for first in range(0, 8000, 1000):
                ns.publish(stream, *[b"%d:" % n + BIG for n in range(first, first + 1000)])
            eventually(partial(is_accounted_for, ns, stream, 8000))
            [lag] = ns.subscriptions(stream)
            assert (lag["messages_behind"], lag["event_queue_depth"]) == (depth, depth)
            kept = 8000 - lag["dropped"]
            numbers = [int(p.split(b":")[0]) for p in slow.events(kept, 20)]
            assert numbers == list(range(kept))


def is_accounted_for(ns: Namespace, stream: str, count: int) -> bool:
    """Of its one subscription: what was taken, what waits and what is lost."""
    [lag] = ns.subscriptions(stream)
    return bool(lag["delivered"] + lag["messages_behind"] + lag["dropped"] == count)


@pytest.mark.parametrize("depth", [1, 4])
def test_a_burst_beyond_the_publish_queue_waits_and_is_accepted_whole(
    ns: Namespace, depth: int
) -> None:
    """felix-29, 31, 34, 36: all of an array arrive before the first of them fans out, and each
    waits for room; that they are refused when their time is up is tested on a driven clock."""
    stream = ns.create_stream(pub_queue_depth=depth, publish_queue_wait_timeout_ms=60_000)
    with Session(ns) as publisher, Session(ns) as reader:
        reader.subscribe(stream)
        for round_number in range(20):
            payloads = [b"%d-%d" % (round_number, n) for n in range(40)]
            answers = publisher.ask(
                [publisher.message("publish", stream=stream, payload=b64(p)) for p in payloads]
            )
            assert [answer["type"] for answer in answers] == ["publish_ok"] * len(payloads)
            assert reader.events(len(payloads)) == payloads
            assert publisher.publish(stream, b"next")["type"] == "publish_ok"
            assert reader.events(1) == [b"next"]
