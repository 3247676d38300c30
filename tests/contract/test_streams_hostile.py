"""Clients that mean harm: memory stays bounded, nobody else waits, errors keep their shape.

What a client may cost is measured against a bystander who asks a small question all the time.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.broker_process import BrokerProcess, eventually
from tests.contract.conftest import StartBroker
from tests.contract.namespaces import Namespace, assert_typed_error, b64
from tests.contract.stream_clients import Session, gauges
from tests.websocket import CONTINUATION, PING, PONG, TEXT, WebSocket, frame

MIB = 2**20
PATIENCE_S = 1.0
"""The broker's work for which a bystander waits at most; what is defended against here took from
two to twenty seconds."""


@pytest.fixture
def ns(broker: BrokerProcess) -> Namespace:
    return Namespace(broker)


@contextmanager
def nobody_waits(broker: BrokerProcess) -> Iterator[None]:
    """While this goes on, every small request of another client is answered soon, however long
    the broker waits for a processor."""
    waits: list[float] = []
    has_begun, is_over = threading.Event(), threading.Event()

    def ask() -> None:
        with broker.new_client() as client:
            while not is_over.is_set():
                before = broker.cpu_s()
                assert client.get("/v1/livez").status_code == 200
                waits.append(broker.cpu_s() - before)
                has_begun.set()
                is_over.wait(0.005)

    bystander = threading.Thread(target=ask)
    bystander.start()
    try:
        assert has_begun.wait(60), "the bystander was never answered"
        yield
    finally:
        is_over.set()
        bystander.join()
    assert max(waits) < PATIENCE_S, f"{max(waits):.1f} s"


# -- memory --------------------------------------------------------------------------------------


def refused_puts(ns: Namespace, size: int) -> list[Callable[[], Any]]:
    """Ways to send so many bytes for nothing."""
    client, value = ns.broker.client, b"x" * size
    text = value.decode()
    key, none = ns.entry_path("default", "k"), ns.entry_path("none", "k")
    txn = {"checks": [{"key": "q", "exists": True}], "ops": [{"op": "put", "key": "k",
                                                             "value": b64(value)}]}  # fmt: skip
    return [
        lambda: client.put(f"{key}?raw=true&if_version=7", content=value),
        lambda: client.put(f"{none}?raw=true", content=value),
        lambda: client.put(f"{ns.cache_path('default')}/entries/%00?raw=true", content=value),
        lambda: client.post(f"{ns.cache_path('default')}/txn", json=txn),
        lambda: client.post("/v1/felix", content=b'{"type":"publish","payload":"' + value),
        lambda: client.post("/v1/felix", content=b'{"type":"poke","payload":"' + value + b'"}'),
        lambda: client.post(f"{ns.stream_path('none')}/publish?raw=true", content=value),
        lambda: client.post("/v1/produce", json={"topic": "none", "value": text}),
        lambda: client.post("/v1/produce/batch", json=[{"topic": "none", "value": text}, 1]),
    ]


def test_what_was_refused_does_not_stay_in_memory(start_broker: StartBroker) -> None:
    """felix-42, 132: errors must not keep the request that they are about."""
    broker = start_broker(memory=True)
    ns = Namespace(broker)
    size = 4 * MIB
    for refused in refused_puts(ns, size):
        assert refused().status_code in (200, 400, 404, 412)
    before = broker.rss_bytes()
    for refused in refused_puts(ns, size):
        for _ in range(12):
            refused()
    # 12 of each would be 430 MB and more.
    assert broker.rss_bytes() - before < 64 * MIB


def test_small_requests_that_are_refused_leave_nothing_behind(start_broker: StartBroker) -> None:
    """Forty thousand of each kind, posted and over the socket."""
    broker = start_broker(memory=True)
    ns = Namespace(broker)
    with Session(ns) as ws:
        wrong: list[Any] = [
            1,
            {"type": "poke"},
            ws.message("publish", stream="none", payload=""),
            ws.message("cache_put", cache="default", key="k", value="", if_version=7),
            ws.message("cache_get", cache="default", key=""),
        ]

        def refuse_many(arrays: int) -> None:
            for message in wrong:
                array = json.dumps([message] * 5000).encode()
                for _ in range(arrays):
                    assert broker.client.post("/v1/felix", content=array).status_code == 200
                    ws.send_frame(TEXT, array)
                    ws.receive()

        refuse_many(1)
        before = broker.rss_bytes()
        refuse_many(4)
        assert broker.rss_bytes() - before < 24 * MIB


def test_large_values_asked_for_at_once_are_told_one_after_the_other(
    start_broker: StartBroker,
) -> None:
    """A durable put holds back the reads behind it; all are released in one moment."""
    broker = start_broker()
    ns = Namespace(broker)
    cache = ns.create_cache(durable=True)
    assert ns.put(cache, "big", b"x" * 6 * MIB).status_code == 200
    before = broker.rss_bytes()
    put = {"type": "cache_put", **ns.scope, "cache": cache, "key": "k", "value": ""}
    get = {"type": "cache_get", **ns.scope, "cache": cache, "key": "big"}
    with nobody_waits(broker), Session(ns, receive_buffer=4096) as ws:
        ws.send(put, *[get] * 100)
        lanes = [held_back(ns, cache, get) for _ in range(3)]
        eventually(lambda: broker.client.get("/v1/readyz").status_code == 200)
        time.sleep(0.5)
        assert broker.rss_bytes() - before < 200 * MIB
        assert ws.receive()["type"] == "ok"
        assert ws.receive()["value"] == b64(b"x" * 6 * MIB)
        for lane in lanes:
            lane.close()


def held_back(ns: Namespace, cache: str, get: dict[str, Any]) -> socket.socket:
    """A connection with large answers to come, of which it reads none."""
    many = json.dumps({"keys": ["big"] * 8}).encode()
    body = json.dumps([get] * 8).encode()
    host = "Host: 127.0.0.1\r\n"
    value = f"GET {ns.entry_path(cache, 'big')} HTTP/1.1\r\n{host}\r\n".encode()
    put = f"PUT {ns.entry_path(cache, 'k')}?raw=1 HTTP/1.1\r\n{host}Content-Length: 0\r\n\r\n"
    requests = [put.encode(), *[value, value.replace(b"/big ", b"/big?raw=true ")] * 8]
    for path, content in ((f"{ns.cache_path(cache)}/get_many", many), ("/v1/felix", body)):
        head = f"POST {path} HTTP/1.1\r\n{host}Content-Length: {len(content)}\r\n\r\n"
        requests += [head.encode() + content] * 8
    connection = socket.create_connection(("127.0.0.1", ns.broker.port))
    connection.sendall(b"".join(requests))
    return connection


@pytest.mark.parametrize(
    ("kind", "members", "count"),
    [
        ("cache_get_many", {"cache": "default", "keys": ["k"] * 10_000}, 200),
        ("cache_txn", {"cache": "default", "ops": [{"op": "incr", "key": "k"}] * 1000}, 300),
        ("cache_txn", {"cache": "default", "checks": [{"key": "k", "exists": False}] * 1000,
                       "ops": [{"op": "delete", "key": "k"}]}, 300),
        ("publish_batch", {"stream": "default", "payloads": [""] * 10_000}, 200),
    ],
)  # fmt: skip
def test_an_array_is_no_way_around_the_limits_of_its_operations(
    ns: Namespace, kind: str, members: dict[str, Any], count: int
) -> None:
    """Its lists count by their items: all of it is decided in one turn."""
    one = {"type": kind, **ns.scope, **members}
    before = ns.broker.rss_bytes()
    with nobody_waits(ns.broker), Session(ns) as ws:
        array = json.dumps([one] * count).encode()
        reply = ns.broker.client.post("/v1/felix", content=array)
        # Not what it says, if it is an answer after all: that is tens of megabytes.
        assert reply.status_code == 400, len(reply.content)
        refused = assert_typed_error(reply, 400, "INVALID_ARGUMENT")
        assert "10000" in refused["message"]
        ws.send_frame(TEXT, array)
        assert ws.receive()["error"] == "INVALID_ARGUMENT"
        assert ws.ask({"type": "ping"}) == {"type": "ok"}
    assert ns.broker.rss_bytes() - before < 100 * MIB
    assert ns.value("default", "k") is None
    assert len(ns.broker.client.post("/v1/felix", json=[one]).json()) == 1
    ns.broker.client.delete(ns.entry_path("default", "k"))


# -- time ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "again"),
    [
        (frame(TEXT, b"", fin=False), frame(CONTINUATION, b"", fin=False)),
        (frame(TEXT, b"", fin=False), frame(CONTINUATION, b" ", fin=False)),
        (b"", frame(PING, b"x" * 125)),
        (b"", frame(PONG)),
        (b"", frame(TEXT)),
        (b"", frame(TEXT, b'{"type":"cache_get","tenant_id":"nobody"}')),
    ],
    ids=["empty fragments", "tiny fragments", "pings", "pongs", "empty texts", "refusals"],
)
def test_a_flood_of_small_frames_holds_up_nobody_else(
    ns: Namespace, first: bytes, again: bytes
) -> None:
    before = ns.broker.rss_bytes()
    floods = [Session(ns) for _ in range(6)]
    with nobody_waits(ns.broker):
        threads = [threading.Thread(target=flood, args=(ws, first, again)) for ws in floods]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert ns.broker.rss_bytes() - before < 48 * MIB


def flood(ws: WebSocket, first: bytes, again: bytes) -> None:
    """As fast as it goes; whatever comes back is read and forgotten."""
    deadline = time.monotonic() + 0.8
    data = again * (128 * 1024 // len(again))
    ws.send_raw(first)
    ws.socket.settimeout(0.05)
    while time.monotonic() < deadline:
        for step in (lambda: ws.socket.send(data), lambda: ws.socket.recv(MIB)):
            try:
                step()
            except TimeoutError:
                continue
    ws.socket.close()


def test_handshakes_that_never_end_are_ended(start_broker: StartBroker) -> None:
    """A header now and then is no progress."""
    broker = start_broker(memory=True, env={"PENSTOCK_REQUEST_TIMEOUT_MS": "1000"})
    slow = [socket.create_connection(("127.0.0.1", broker.port)) for _ in range(200)]
    for each in slow:
        each.sendall(b"GET /v1/felix/ws HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\n")
    with nobody_waits(broker):
        deadline = time.monotonic() + 8
        while time.monotonic() < deadline and any(is_open(each) for each in slow):
            time.sleep(0.2)
    assert not any(is_open(each) for each in slow)
    for each in slow:
        each.close()


def is_open(connection: socket.socket) -> bool:
    """Sends a bit more of a head that has no end."""
    try:
        connection.sendall(b"X-More: of the same\r\n")
        connection.setblocking(False)
        return bool(connection.recv(4096)) and False
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        connection.setblocking(True)


def test_tens_of_thousands_of_watches_hold_up_nobody(start_broker: StartBroker) -> None:
    """felix-80, 22: 20 sockets with a thousand each, and everybody is told of every put."""
    broker = start_broker(memory=True)
    ns = Namespace(broker)
    sockets = [Session(ns) for _ in range(20)]
    with nobody_waits(broker):
        for ws in sockets:
            ws.ask([ws.message("cache_watch", cache="default", prefix="") for _ in range(1000)])
        assert gauges(broker)["penstock_cache_watches"] == 20_000
        for number in range(3):
            assert ns.put("default", "k", b"%d" % number).status_code == 200
        for ws in sockets:
            told = [ws.receive()["watch_id"] for _ in range(3000)]
            assert len(set(told)) == 1000
    for ws in sockets:
        ws.socket.close()
    eventually(lambda: gauges(broker)["penstock_cache_watches"] == 0)


# -- under the feet of others --------------------------------------------------------------------


def test_what_is_deleted_while_it_is_used_ends_for_all_and_comes_back_empty(
    ns: Namespace,
) -> None:
    """felix-41, 87, 92: again and again, while others publish, put and subscribe."""
    is_over = threading.Event()
    seen: list[str] = []
    stream, cache = ns.create_stream(), ns.create_cache(durable=True)

    def use() -> None:
        while not is_over.is_set():
            with Session(ns) as client:
                for kind, members in (
                    ("subscribe", {"stream": stream}),
                    ("cache_watch", {"cache": cache, "prefix": ""}),
                    ("publish", {"stream": stream, "payload": ""}),
                    ("cache_incr", {"cache": cache, "key": "k"}),
                ):
                    client.send(client.message(kind, **members, request_id=kind))
                    while (answer := client.receive()).get("request_id") != kind:
                        seen.append(answer["type"])
                    seen.append(answer.get("error", answer["type"]))

    users = [threading.Thread(target=use) for _ in range(3)]
    with nobody_waits(ns.broker):
        for user in users:
            user.start()
        for _ in range(15):
            for path, kind, name, more in (
                (ns.stream_path(stream), "streams", stream, {}),
                (ns.cache_path(cache), "caches", cache, {"durable": True}),
            ):
                assert ns.broker.client.delete(path).status_code == 204
                made = ns.post(f"{ns.path}/{kind}", name=name, **more)
                assert made.status_code == 201
        is_over.set()
        for user in users:
            user.join()
    assert set(seen) <= {"subscribed", "ok", "publish_ok", "cache_value", "event", "event_batch",
                         "cache_event", "error", "NOT_FOUND"}  # fmt: skip
    assert {"publish_ok", "event", "cache_event", "error"} <= set(seen)
    eventually(lambda: gauges(ns.broker)["penstock_cache_watches"] == 0)
    eventually(lambda: ns.subscriptions(stream) == [])
