"""Clients that come and go, thousands of times: nothing of them stays."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import pytest

from tests.broker_process import BrokerProcess, eventually
from tests.contract.conftest import StartBroker
from tests.contract.namespaces import Namespace, b64
from tests.contract.stream_clients import Session, gauges
from tests.websocket import CLOSE

MIB = 2**20
CYCLES = 2000
RESET = struct.pack("ii", 1, 0)


@pytest.fixture
def ns(start_broker: StartBroker) -> Iterator[Namespace]:
    """Once warm, at the end of the test the broker must be as it was before."""
    broker = start_broker(memory=True)
    ns = Namespace(broker)
    yield ns
    eventually(lambda: gauges(broker), lambda seen: not any(seen.values()), timeout_s=15)


def assert_no_growth(broker: BrokerProcess, before: int) -> None:
    grown = broker.rss_bytes() - before
    assert grown < 8 * MIB, f"{grown / MIB:.1f} MiB for {CYCLES} cycles"


def come_and_go(ns: Namespace, number: int) -> None:
    """A socket that subscribes and watches, is sent something, and ends in one of four ways."""
    with Session(ns) as ws:
        ws.subscribe("default")
        ws.call("cache_watch", cache="default", prefix="")
        if number % 5 == 0:
            ns.publish("default", b"x" * 500)
            ns.put("default", "k", b"x")
        if number % 4 == 0:
            ws.send_frame(CLOSE, b"\x03\xe8")
        elif number % 4 == 1:
            ws.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        elif number % 4 == 2:
            ws.send_raw(b"\xff\xff")


def listen_and_go(ns: Namespace, number: int) -> None:
    """The same over plain HTTP."""
    kind = "&format=sse" if number % 3 == 0 else ""
    if kind:
        with ns.broker.client.stream("GET", f"{ns.stream_path('default')}/subscribe?{kind}"):
            return
    with ns.subscribe("default") as feed:
        if number % 5 == 0:
            ns.publish("default", b"x" * 500)
        if number % 4 == 1:
            feed.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        elif number % 4 == 2:
            feed.socket.shutdown(socket.SHUT_WR)


def test_sockets_that_come_and_go_leave_nothing(ns: Namespace) -> None:
    """felix-41, 42"""
    for number in range(CYCLES):
        come_and_go(ns, number)
    before = ns.broker.rss_bytes()
    for number in range(CYCLES):
        come_and_go(ns, number)
    assert_no_growth(ns.broker, before)


def test_feeds_that_come_and_go_leave_nothing(ns: Namespace) -> None:
    """felix-41, 42"""
    for number in range(CYCLES):
        listen_and_go(ns, number)
    before = ns.broker.rss_bytes()
    for number in range(CYCLES):
        listen_and_go(ns, number)
    assert_no_growth(ns.broker, before)


def test_subscriptions_of_one_socket_that_come_and_go_leave_nothing(ns: Namespace) -> None:
    """felix-41, 42: with events on their way, a hundred at a time."""
    with Session(ns) as ws:

        def storm(rounds: int) -> None:
            for _ in range(rounds):
                ws.send(*[ws.message("subscribe", stream="default") for _ in range(50)])
                subscribed = [answer["subscription_id"] for answer in ws.receive_all(50)]
                watch = ws.message("cache_watch", cache="default", prefix="", include=["expire"])
                ws.send(*[watch for _ in range(50)])
                watched = [answer["watch_id"] for answer in ws.receive_all(50)]
                ws.send(
                    ws.message("publish", stream="default", payload=b64(b"x" * 100), ack="none"),
                    *[{"type": "unsubscribe", "subscription_id": each} for each in subscribed],
                    ws.message("cache_put", cache="default", key="k", value="", request_id=0),
                    *[{"type": "cache_unwatch", "watch_id": each} for each in watched],
                )
                ended = 0
                while ended < 101:
                    ended += ws.receive()["type"] == "ok"

        storm(CYCLES // 400)
        before = ns.broker.rss_bytes()
        storm(CYCLES // 100)
        assert_no_growth(ns.broker, before)
        seen = gauges(ns.broker)
        assert seen["penstock_stream_subscribers"] == seen["penstock_cache_watches"] == 0
        assert ws.ask({"type": "ping"}) == {"type": "ok"}
