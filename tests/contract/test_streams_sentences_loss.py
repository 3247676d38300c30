"""What is lost, who notices, and how it goes on: restarts, kills and a network that is cut."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.broker_process import BrokerProcess, eventually
from tests.contract.conftest import StartBroker
from tests.contract.namespaces import Namespace, unb64
from tests.contract.stream_clients import Network, Session, gauges
from tests.ndjson import ConsumeStream, NoItem, StreamEnded
from tests.websocket import PING, Closed, NoFrame, WebSocket

PING_MS = 300
QUICK = {"PENSTOCK_WS_PING_MS": str(PING_MS)}
GIVEN_UP_S = 30.0
"""Twice the ping, and what a busy machine needs."""


def is_lost(read: Callable[[], object]) -> bool:
    """Is the end of the connection seen, instead of waiting for ever?"""
    try:
        while True:
            read()
    except (Closed, StreamEnded):
        return True
    except (NoFrame, NoItem):
        return False


def is_silent(session: Session) -> bool:
    """Its end of an idle timeout: not even pings come any more, after those on their way."""
    for _ in range(10):
        try:
            session.receive_any(3 * PING_MS / 1000)
        except NoFrame:
            return True
    return False


@pytest.mark.parametrize("kill", [False, True], ids=["stopped", "killed"])
def test_after_a_restart_clients_see_the_loss_and_begin_anew(
    start_broker: StartBroker, kill: bool
) -> None:
    """felix-8, 44, 48, 49, 50, 108: nothing from before comes; what is durable is there."""
    broker = start_broker()
    ns = Namespace(broker)
    durable = ns.create_cache(durable=True)
    lost = ns.put("default", "k", b"ephemeral").json()["version"]
    kept = ns.put(durable, "k", b"durable").json()["version"]
    ws, feed, watch = Session(ns), ns.subscribe("default"), ns.watch("default", "prefix=")
    ws.subscribe("default")
    ns.publish("default", b"before")
    assert ws.events(1) == feed.payloads(1) == [b"before"]
    broker.restart(kill=kill)
    for client in (ws, feed, watch):
        assert is_lost(client.receive if isinstance(client, Session) else client.next)
        client.socket.close()
    assert (feed.clean_end, watch.clean_end) == (not kill, not kill)
    assert gauges(broker) == dict.fromkeys(gauges(broker), 0.0)
    assert ns.value("default", "k") is None
    assert (ns.value(durable, "k"), ns.get(durable, "k")["version"]) == (b"durable", kept)
    with Session(ns) as again:
        ns.publish("default", b"nobody has subscribed")
        again.expect_nothing(50)
        again.subscribe("default")
        ns.publish("default", b"after")
        assert again.events(1) == [b"after"]
    assert ns.put("default", "k", b"new").json()["version"] > lost


def test_a_publisher_whose_network_is_cut_is_given_up_and_can_try_again(
    start_broker: StartBroker,
) -> None:
    """felix-103, 47: what it has no ack for did not happen, until it publishes it again."""
    broker = start_broker(memory=True, env=QUICK)
    ns = Namespace(broker)
    with (
        Network(broker.port) as network,
        Session(ns, network.port) as publisher,
        ns.subscribe("default") as reader,
    ):
        assert publisher.publish("default", b"1")["type"] == "publish_ok"
        network.cut()
        publisher.send(publisher.message("publish", stream="default", payload=""))
        assert is_silent(publisher)
        eventually(lambda: gauges(broker)["penstock_websockets"] == 0, timeout_s=GIVEN_UP_S)
        with Session(ns, network.port) as again:
            assert again.publish("default", b"2")["type"] == "publish_ok"
            assert reader.payloads(2) == [b"1", b"2"]


def test_a_subscriber_whose_network_is_cut_is_given_up_and_begins_at_the_tail(
    start_broker: StartBroker,
) -> None:
    """felix-6, 104, 41, 42, 43: noticed at both ends; what it missed never comes."""
    broker = start_broker(memory=True, env=QUICK)
    ns = Namespace(broker)
    with Network(broker.port) as network, Session(ns, network.port) as cut_off:
        cut_off.subscribe("default")
        assert cut_off.receive_any(3 * PING_MS / 1000)[0] == PING
        network.cut()
        for number in range(100):
            ns.publish("default", b"missed %d" % number)
        assert is_silent(cut_off)
        eventually(lambda: ns.subscriptions("default") == [], timeout_s=GIVEN_UP_S)
        with Session(ns, network.port) as again:
            again.subscribe("default")
            ns.publish("default", b"new")
            assert again.events(1) == [b"new"]
        cut_off.expect_nothing(50)


def test_a_reader_of_plain_http_is_given_up_when_it_is_gone_and_not_when_it_is_slow(
    start_broker: StartBroker,
) -> None:
    """felix-104, 117: who takes nothing but acknowledges is there; who is gone without a word
    acknowledges neither events nor the question whether it is there."""
    broker = start_broker(memory=True, env=QUICK)
    ns = Namespace(broker)
    silent, busy, kept = (ns.create_stream() for _ in range(3))
    gone = [listen(ns, silent, "ndjson"), listen(ns, busy, "sse")]
    with ns.subscribe(kept, receive_buffer=4096) as slow, ns.subscribe(kept) as quiet:
        for feed in gone:
            WebSocket.cut(feed)  # type: ignore[arg-type]
            ns.publish(busy, b"x")
        ns.publish(kept, *[b"x" * 10_000] * 1000)
        assert quiet.payloads(1000)
        for stream in (busy, silent):
            eventually(partial(has_no_subscription, ns, stream), timeout_s=GIVEN_UP_S)
        assert len(ns.subscriptions(kept)) == 2
        slow.payloads(100)
        ns.publish(kept, b"still there")
        assert quiet.payloads(1) == [b"still there"]
    for feed in gone:
        feed.close()


def listen(ns: Namespace, stream: str, form: str) -> ConsumeStream:
    """Without heartbeats."""
    path = f"{ns.stream_path(stream)}/subscribe?heartbeat_ms=0&format={form}"
    feed = ConsumeStream(ns.broker.port, path)
    assert feed.status == 200
    return feed


def has_no_subscription(ns: Namespace, stream: str) -> bool:
    return ns.subscriptions(stream) == []


def test_a_broker_killed_under_load_is_seen_by_all_of_its_clients(
    start_broker: StartBroker,
) -> None:
    """felix-108: publishers, subscribers and watchers; all begin anew with the next process."""
    broker = start_broker()
    ns = Namespace(broker)
    cache = ns.create_cache(durable=True)
    subscribers = [Session(ns) for _ in range(10)]
    for each in subscribers:
        each.subscribe("default")
    publisher = Session(ns)
    publishes = [publisher.message("publish", stream="default", payload="") for _ in range(200)]
    puts = [publisher.message("cache_put", cache=cache, key=f"k{n}", value="") for n in range(200)]
    publisher.send(*publishes, *puts)
    broker.kill()
    acked = acked_puts(publisher)
    publisher.socket.close()
    for each in subscribers:
        assert is_lost(each.receive)
        each.socket.close()
    broker.start()
    for key, version in acked.items():
        assert ns.get(cache, key)["version"] == version
    reconnected = [Session(ns) for _ in range(10)]
    for each in reconnected:
        each.subscribe("default")
    ns.publish("default", b"back")
    for each in reconnected:
        assert each.events(1) == [b"back"]
        each.socket.close()


def acked_puts(publisher: Session) -> dict[str, int]:
    """The answers come in order: 200 of publishes, then those of the puts, up to the loss."""
    answers: list[dict[str, Any]] = []
    try:
        while True:
            answers.append(publisher.receive())
    except Closed:
        return {f"k{n}": answer["version"] for n, answer in enumerate(answers[200:])}


def test_a_watcher_knows_after_a_restart_that_it_may_have_missed_something(
    start_broker: StartBroker,
) -> None:
    """felix-80, 111: a gap from what it knew to what there is, then every change again."""
    broker: BrokerProcess = start_broker()
    ns = Namespace(broker)
    cache = ns.create_cache(durable=True)
    known = ns.put(cache, "k", b"1").json()["version"]
    missed = ns.put(cache, "k", b"2").json()["version"]
    broker.restart(kill=True)
    with ns.watch(cache, f"key=k&since_version={known}") as watch:
        gap = watch.next().members
        assert (gap["event"], gap["from_version"], gap["to_version"]) == ("gap", known, missed)
        assert ns.value(cache, "k") == b"2"
        ns.put(cache, "k", b"3")
        event = watch.next().members
        assert (event["event"], unb64(event["value"])) == ("put", b"3")
