"""Events over WebSockets: what arrives, who suffers from whom, and what ends a subscription."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.broker_process import BrokerProcess, eventually
from tests.contract.conftest import StartBroker
from tests.contract.namespaces import Namespace, b64, unb64
from tests.websocket import (
    BINARY,
    CLOSE,
    CONTINUATION,
    PING,
    TEXT,
    WebSocket,
    frame,
    payloads_of,
)

SCOPE = {"tenant_id": "default", "namespace": "default"}


@pytest.fixture
def ns(broker: BrokerProcess) -> Namespace:
    return Namespace(broker)


@pytest.fixture
def ws(broker: BrokerProcess) -> Iterator[WebSocket]:
    with WebSocket(broker.port) as connection:
        yield connection


def message(kind: str, **members: Any) -> dict[str, Any]:
    return {"type": kind, **SCOPE, **members}


def subscribe(ws: WebSocket, stream: str, **members: Any) -> str:
    answer = ws.ask(message("subscribe", stream=stream, **members))
    assert answer["type"] == "subscribed", answer
    return str(answer["subscription_id"])


def numbers(payloads: list[bytes]) -> list[int]:
    return [int(payload.split(b":")[0]) for payload in payloads]


def publish_numbers(ns: Namespace, stream: str, count: int, size: int = 0, start: int = 0) -> None:
    """Each payload begins with its number; 64 of them a batch."""
    for first in range(start, start + count, 64):
        last = min(first + 64, start + count)
        payloads = [b"%d:" % number + b"x" * size for number in range(first, last)]
        assert ns.publish(stream, *payloads).status_code == 200


# -- what arrives ----------------------------------------------------------------------------------


def test_payloads_arrive_as_they_were_published(ns: Namespace, ws: WebSocket) -> None:
    """felix-9, 14"""
    stream = ns.create_stream()
    subscription_id = subscribe(ws, stream)
    payloads = [b"", b"\x00\xff\r\n", bytes(range(256)), b"x" * 100_000, b""]
    for payload in payloads:
        ws.send(message("publish", stream=stream, payload=b64(payload), ack="none"))
    ws.send(
        message("publish_batch", stream=stream, payloads=[b64(p) for p in payloads], ack="none")
    )
    assert ws.events(10) == payloads * 2
    ws.send(message("publish", stream=stream, payload=b64(b"one"), ack="none"))
    assert ws.receive() == {
        "type": "event",
        "subscription_id": subscription_id,
        "payload": b64(b"one"),
    }


def test_a_batch_comes_in_order_and_may_come_as_one(ns: Namespace, ws: WebSocket) -> None:
    """felix-13, 128"""
    stream = ns.create_stream()
    subscription_id = subscribe(ws, stream)
    ns.publish(stream, b"msg1", b"msg2", b"msg3")
    assert ws.receive() == {
        "type": "event_batch",
        "subscription_id": subscription_id,
        "payloads": [b64(b"msg1"), b64(b"msg2"), b64(b"msg3")],
    }


def test_who_wants_no_batches_gets_every_event_by_itself(ns: Namespace, ws: WebSocket) -> None:
    stream = ns.create_stream()
    subscribe(ws, stream, batch=False)
    ns.publish(stream, *[b"%d" % n for n in range(100)])
    events = ws.receive_all(100)
    assert {each["type"] for each in events} == {"event"}
    assert [unb64(each["payload"]) for each in events] == [b"%d" % n for n in range(100)]


def test_subscribed_is_said_before_the_first_event_even_if_its_answer_is_held(
    ns: Namespace,
) -> None:
    """A durable put before it holds its answer back, while others publish to it already."""
    stream, cache = ns.create_stream(), ns.create_cache(durable=True)
    for _ in range(20):
        with WebSocket(ns.broker.port) as ws:
            ws.send(
                message("cache_put", cache=cache, key="k", value=""),
                message("subscribe", stream=stream),
                message("publish", stream=stream, payload=b64(b"e")),
            )
            kinds = [ws.receive()["type"] for _ in range(4)]
            assert sorted(kinds) == ["event", "ok", "publish_ok", "subscribed"]
            assert kinds.index("subscribed") < kinds.index("event")
            assert kinds.index("ok") < kinds.index("subscribed") < kinds.index("publish_ok")


def test_one_publish_reaches_every_subscription_and_no_other_streams(ns: Namespace) -> None:
    """felix-18, 25"""
    stream, other = ns.create_stream(), ns.create_stream()
    with WebSocket(ns.broker.port) as one, WebSocket(ns.broker.port) as two:
        mine = {subscribe(one, stream), subscribe(one, stream)}
        subscribe(two, stream)
        elsewhere = subscribe(two, other)
        ns.publish(stream, b"x")
        assert {one.receive()["subscription_id"] for _ in range(2)} == mine
        assert two.events(1) == [b"x"]
        ns.publish(other, b"y")
        event = two.receive()
        assert (event["subscription_id"], event["payload"]) == (elsewhere, b64(b"y"))
        one.expect_nothing()


def test_events_and_publishes_in_binary_are_bytes_as_they_are(ns: Namespace) -> None:
    stream = ns.create_stream()
    payloads = [b"", b"\x00\xff", b"x" * 7000]
    with WebSocket(ns.broker.port, subprotocol="felix.v1+binary") as ws:
        number = int(subscribe(ws, stream)[1:])
        body = b"".join(struct.pack("<I", len(p)) + p for p in payloads)
        names = b"".join(bytes((len(n),)) + n for n in (b"default", b"default", stream.encode()))
        request = struct.pack("<BBI", 2, 2, 77) + names + struct.pack("<I", 3) + body
        ws.send_frame(BINARY, request)
        assert ws.receive() == {"type": "publish_ok", "count": 3, "request_id": 77}
        opcode, event = ws.receive_frame()
        assert opcode == BINARY
        assert event == struct.pack("<BII", 1, number, 3) + body
        ws.send_frame(BINARY, request[:-1])
        error = ws.receive()
        assert (error["type"], error["request_id"]) == ("error", 77)
        ws.send_frame(BINARY, request.replace(stream.encode(), b"?" * len(stream)))
        error = ws.receive()
        assert (error["type"], error["error"]) == ("error", "NOT_FOUND")
        ws.send_frame(BINARY, b"\x02\x00" + request[2:])
        assert ws.receive_frame()[0] == BINARY
        assert ws.ask({"type": "ping"}) == {"type": "ok"}


def test_a_watch_sees_every_change_of_its_keys_in_order(ns: Namespace, ws: WebSocket) -> None:
    """felix-80"""
    cache = ns.create_cache()
    begun = ws.ask(message("cache_watch", cache=cache, prefix="a", request_id=1))
    assert (begun["type"], begun["request_id"]) == ("ok", 1)
    for key in ("a1", "b1", "a2"):
        ns.put(cache, key, key.encode())
    ns.broker.client.delete(ns.entry_path(cache, "a1"))
    events = ws.receive_all(3)
    assert [(e["event"], e["key"], e.get("value")) for e in events] == [
        ("put", "a1", b64(b"a1")),
        ("put", "a2", b64(b"a2")),
        ("delete", "a1", None),
    ]
    assert {e["watch_id"] for e in events} == {begun["watch_id"]}
    versions = [begun["version"], *(e["version"] for e in events)]
    assert versions == sorted(set(versions))
    assert ws.ask({"type": "cache_unwatch", "watch_id": begun["watch_id"]}) == {"type": "ok"}
    ns.put(cache, "a3", b"")
    ws.expect_nothing()


def test_the_last_event_of_an_ended_stream_is_an_error_that_names_it(
    ns: Namespace, ws: WebSocket
) -> None:
    stream, cache = ns.create_stream(), ns.create_cache()
    subscription_id = subscribe(ws, stream)
    watch_id = ws.ask(message("cache_watch", cache=cache, prefix=""))["watch_id"]
    assert ns.broker.client.delete(ns.stream_path(stream)).status_code == 204
    ended = ws.receive()
    assert (ended["type"], ended["error"]) == ("error", "NOT_FOUND")
    assert ended["subscription_id"] == subscription_id
    assert ns.broker.client.delete(ns.cache_path(cache)).status_code == 204
    ended = ws.receive()
    assert (ended["type"], ended["watch_id"]) == ("error", watch_id)
    answer = ws.ask({"type": "unsubscribe", "subscription_id": subscription_id})
    assert answer["error"] == "NOT_FOUND"


# -- who suffers from whom -------------------------------------------------------------------------


def test_a_stalled_reader_loses_the_newest_and_only_for_itself(ns: Namespace) -> None:
    """felix-4, 15, 20, 21, 22, 24, 27, 129"""
    stream = ns.create_stream()
    count, size = 6400, 2000
    with (
        WebSocket(ns.broker.port, receive_buffer=4096) as slow,
        WebSocket(ns.broker.port) as fast,
    ):
        slow_id = subscribe(slow, stream)
        fast_id = subscribe(fast, stream)
        seen: list[int] = []
        for start in range(0, count, 640):
            publish_numbers(ns, stream, 640, size, start)
            seen += numbers(fast.events(640))
        assert seen == list(range(count))
        lags = {each["subscription_id"]: each for each in ns.subscriptions(stream)}
        assert lags[fast_id]["dropped"] == 0
        assert lags[slow_id]["messages_behind"] == 1024
        dropped = lags[slow_id]["dropped"]
        assert dropped > 0
        # All that was not dropped arrives: the oldest, without a gap before the first loss.
        kept = numbers(slow.events(count - dropped))
        assert kept == list(range(count - dropped))
        publish_numbers(ns, stream, 10, 0, count)
        assert numbers(slow.events(10)) == list(range(count, count + 10))


def test_a_subscriber_may_ask_for_a_depth_of_its_own(ns: Namespace) -> None:
    """felix-23"""
    stream = ns.create_stream()
    with WebSocket(ns.broker.port, receive_buffer=4096) as slow:
        subscribe(slow, stream, event_queue_depth=100)
        publish_numbers(ns, stream, 3200, 4000)
        [lag] = eventually(lambda: ns.subscriptions(stream), lambda lags: lags[0]["dropped"] > 0)
        assert (lag["event_queue_depth"], lag["messages_behind"]) == (100, 100)


def test_a_backlog_of_one_subscription_does_not_hold_up_another_of_the_socket(
    ns: Namespace,
) -> None:
    """felix-16, 19"""
    busy, calm = ns.create_stream(), ns.create_stream()
    with WebSocket(ns.broker.port, receive_buffer=4096) as ws:
        busy_id = subscribe(ws, busy, event_queue_depth=65_536)
        calm_id = subscribe(ws, calm)
        publish_numbers(ns, busy, 6400, 4000)
        eventually(lambda: ns.subscriptions(busy), lambda lags: lags[0]["messages_behind"] > 4000)
        ns.publish(calm, b"now")
        before = 0
        while (event := ws.receive())["subscription_id"] == busy_id:
            before += len(payloads_of(event))
        assert (event["subscription_id"], payloads_of(event)) == (calm_id, [b"now"])
        # Some are on their way already; the backlog of 25 MB is not.
        [lag] = ns.subscriptions(busy)
        assert lag["messages_behind"] + before < 6400 + 64
        assert lag["messages_behind"] > 1000


def test_a_stalled_reader_costs_no_more_memory_than_its_buffers(
    start_broker: StartBroker,
) -> None:
    """felix-26"""
    broker = start_broker(memory=True)
    ns = Namespace(broker)
    stream = ns.create_stream(event_queue_bytes=2**20)
    sockets = [WebSocket(broker.port, receive_buffer=4096) for _ in range(20)]
    try:
        for ws in sockets:
            subscribe(ws, stream)
        publish_numbers(ns, stream, 640, 10_000)
        before = broker.rss_bytes()
        publish_numbers(ns, stream, 12_800, 10_000)
        assert broker.rss_bytes() - before < 64 * 2**20
    finally:
        for ws in sockets:
            ws.socket.close()


def test_lag_is_told_when_asked_and_pushed_when_wanted(ns: Namespace) -> None:
    """felix-115, 116"""
    stream = ns.create_stream(lag_alert_events=500)
    with WebSocket(ns.broker.port, receive_buffer=4096) as ws:
        subscription_id = subscribe(ws, stream, lag=True)
        asked = ws.ask({"type": "lag", "subscription_id": subscription_id, "request_id": 9})
        assert asked == {
            "type": "lag",
            "subscription_id": subscription_id,
            "messages_behind": 0,
            "dropped": 0,
            "delivered": 0,
            "event_queue_depth": 1024,
            "alert": False,
            "request_id": 9,
        }
        publish_numbers(ns, stream, 3200, 4000)
        lags: list[dict[str, Any]] = []
        while len(lags) < 2:
            if (seen := ws.receive())["type"] == "lag":
                lags.append(seen)
        assert [lag["alert"] for lag in lags] == [True, False]


def test_lag_is_not_sent_to_subscribers_that_did_not_ask(ns: Namespace) -> None:
    """felix-4"""
    stream = ns.create_stream(lag_alert_events=10)
    with WebSocket(ns.broker.port, receive_buffer=4096) as ws:
        subscribe(ws, stream)
        publish_numbers(ns, stream, 3200, 4000)
        [lag] = ns.subscriptions(stream)
        assert lag["alert"]
        assert len(ws.events(3200 - lag["dropped"])) == 3200 - lag["dropped"]
        ws.expect_nothing()


# -- how many, and the end -------------------------------------------------------------------------


def test_a_thousand_subscriptions_fit_on_a_socket_and_no_more(ns: Namespace) -> None:
    streams = [ns.create_stream() for _ in range(8)]
    cache = ns.create_cache()
    with WebSocket(ns.broker.port) as ws:
        ids = set()
        for _ in range(125):
            answers = ws.ask([message("subscribe", stream=stream) for stream in streams])
            ids |= {answer["subscription_id"] for answer in answers}
        for _ in range(24):
            assert ws.ask(message("cache_watch", cache=cache, prefix=""))["type"] == "ok"
        assert len(ids) == 1000
        for kind, members in (
            ("subscribe", {"stream": streams[0]}),
            ("cache_watch", {"cache": cache, "prefix": ""}),
        ):
            refused = ws.ask(message(kind, **members))
            assert (refused["error"], refused["limit"]) == ("RESOURCE_EXHAUSTED", "subscriptions")
        ns.publish(streams[3], b"x")
        assert {ws.receive()["subscription_id"] for _ in range(125)} <= ids
        ws.send({"type": "unsubscribe", "subscription_id": ids.pop()})
        assert ws.receive() == {"type": "ok"}
        assert ws.ask(message("subscribe", stream=streams[0]))["type"] == "subscribed"


def test_what_was_unsubscribed_says_nothing_more(ns: Namespace, ws: WebSocket) -> None:
    stream = ns.create_stream()
    first, second = subscribe(ws, stream), subscribe(ws, stream)
    ended = ws.ask({"type": "unsubscribe", "subscription_id": first, "request_id": 1})
    assert ended == {"type": "ok", "request_id": 1}
    ns.publish(stream, b"x")
    assert ws.receive()["subscription_id"] == second
    ws.expect_nothing()
    assert [each["subscription_id"] for each in ns.subscriptions(stream)] == [second]


def test_a_subscription_is_of_its_connection_alone(ns: Namespace, ws: WebSocket) -> None:
    subscription_id = subscribe(ws, ns.create_stream())
    with WebSocket(ns.broker.port) as other:
        for kind in ("unsubscribe", "lag"):
            answer = other.ask({"type": kind, "subscription_id": subscription_id})
            assert answer["error"] == "NOT_FOUND"


@pytest.mark.parametrize("how", ["close frame", "end of stream", "reset", "garbage"])
@pytest.mark.parametrize("is_stalled", [False, True])
def test_a_disconnected_subscriber_is_removed_at_once(
    ns: Namespace, how: str, is_stalled: bool
) -> None:
    """felix-7, 41, 42, 43, 44, 104"""
    stream = ns.create_stream()
    ws = WebSocket(ns.broker.port, receive_buffer=4096)
    subscribe(ws, stream)
    if is_stalled:
        publish_numbers(ns, stream, 3200, 4000)
        assert ns.subscriptions(stream)[0]["dropped"] > 0
    began = time.monotonic()
    if how == "close frame":
        ws.send_frame(CLOSE, b"\x03\xe8")
    elif how == "garbage":
        ws.send_raw(frame(3))
    elif how == "reset":
        ws.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if how in ("end of stream", "reset"):
        ws.socket.close()
    if is_stalled and how in ("close frame", "garbage"):
        # Nothing is read from a client that does not read; it must do so to say goodbye.
        ws.close_code()
    eventually(lambda: ns.subscriptions(stream), lambda lags: lags == [], timeout_s=5)
    assert time.monotonic() - began < 5
    ws.socket.close()
    with WebSocket(ns.broker.port) as again:
        again.expect_nothing(50)
        subscribe(again, stream)
        ns.publish(stream, b"new")
        assert again.events(1) == [b"new"]


def test_a_peer_that_ends_its_side_and_never_reads_is_not_waited_for(ns: Namespace) -> None:
    stream = ns.create_stream()
    with WebSocket(ns.broker.port, receive_buffer=4096) as ws:
        subscribe(ws, stream)
        publish_numbers(ns, stream, 3200, 4000)
        before = open_sockets(ns)
        assert before >= 1
        ws.socket.shutdown(socket.SHUT_WR)
        eventually(lambda: open_sockets(ns), lambda count: count < before, timeout_s=5)


def open_sockets(ns: Namespace) -> int:
    text = ns.broker.client.get("/metrics").text
    [line] = [each for each in text.splitlines() if each.startswith("penstock_websockets ")]
    return int(float(line.split()[1]))


def test_a_silent_peer_is_pinged_and_kept_while_it_answers(start_broker: StartBroker) -> None:
    broker = start_broker(memory=True, env={"PENSTOCK_WS_PING_MS": "200"})
    ns = Namespace(broker)
    with WebSocket(broker.port) as ws:
        subscribe(ws, "default")
        deadline = time.monotonic() + 1.5
        while time.monotonic() < deadline:
            ws.expect_nothing(100)
        assert 3 <= ws.pings <= 8
        ns.publish("default", b"still")
        assert ws.events(1) == [b"still"]


def test_a_message_that_only_drips_is_not_waited_for(start_broker: StartBroker) -> None:
    """It would hold memory that others need; pings between do not make it quicker."""
    env = {"PENSTOCK_WS_PING_MS": "200", "PENSTOCK_REQUEST_TIMEOUT_MS": "500"}
    broker = start_broker(memory=True, env=env)
    with WebSocket(broker.port) as ws:
        ws.send_frame(TEXT, b"[", fin=False)
        for _ in range(100):
            ws.send_frame(CONTINUATION, b" ", fin=False)
            ws.send_frame(PING, b"")
            if ws.is_ended_within(0.1):
                break
        else:
            pytest.fail("it was waited for")
    with WebSocket(broker.port) as ws:
        for _ in range(12):
            assert ws.ask({"type": "ping"})["type"] == "ok"
            ws.expect_nothing(100)


@pytest.mark.parametrize("how", ["cut off", "cut off with a backlog"])
def test_a_peer_that_vanishes_is_given_up(start_broker: StartBroker, how: str) -> None:
    """felix-103, 104"""
    broker = start_broker(memory=True, env={"PENSTOCK_WS_PING_MS": "300"})
    ns = Namespace(broker)
    with WebSocket(broker.port, receive_buffer=4096) as ws:
        subscribe(ws, "default")
        ws.cut()
        if how == "cut off with a backlog":
            publish_numbers(ns, "default", 3200, 4000)
        eventually(lambda: ns.subscriptions("default"), lambda lags: lags == [], timeout_s=30)


def test_a_reader_that_is_slow_but_there_is_kept(start_broker: StartBroker) -> None:
    """felix-117: slowness alone ends nothing, unless the stream is set so."""
    broker = start_broker(memory=True, env={"PENSTOCK_WS_PING_MS": "200"})
    ns = Namespace(broker)
    with WebSocket(broker.port, receive_buffer=4096) as ws:
        subscribe(ws, "default")
        publish_numbers(ns, "default", 3200, 4000)
        time.sleep(2)
        [lag] = ns.subscriptions("default")
        assert numbers(ws.events(3200 - lag["dropped"])) == list(range(3200 - lag["dropped"]))


@pytest.mark.parametrize("is_stalled", [False, True])
def test_a_broker_that_stops_says_so_and_stops_in_time(
    start_broker: StartBroker, is_stalled: bool
) -> None:
    """felix-8, 49, 50"""
    broker = start_broker(memory=True)
    ns = Namespace(broker)
    with WebSocket(broker.port, receive_buffer=4096) as ws:
        subscribe(ws, "default")
        if is_stalled:
            publish_numbers(ns, "default", 3200, 4000)
        began = time.monotonic()
        assert broker.terminate() == 0
        assert time.monotonic() - began < 3
        if not is_stalled:
            assert ws.close_code() == 1001
    broker.start()
    with WebSocket(broker.port) as ws:
        ws.expect_nothing(50)
        subscribe(ws, "default")
        Namespace(broker).publish("default", b"after")
        assert ws.events(1) == [b"after"]
