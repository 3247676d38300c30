"""The WebSocket: who gets one, what is refused on it, and the order of its answers."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

import pytest

from tests.broker_process import BrokerProcess, eventually
from tests.contract.conftest import StartBroker
from tests.contract.namespaces import Namespace, b64
from tests.contract.wire import Wire, encode
from tests.websocket import (
    BINARY,
    CLOSE,
    CONTINUATION,
    PING,
    PONG,
    TEXT,
    Closed,
    NoFrame,
    WebSocket,
    frame,
)

SCOPE = {"tenant_id": "default", "namespace": "default"}
PING_MESSAGE = {"type": "ping", "request_id": "still there"}


@pytest.fixture
def ns(broker: BrokerProcess) -> Namespace:
    return Namespace(broker)


@pytest.fixture
def ws(broker: BrokerProcess) -> Iterator[WebSocket]:
    with WebSocket(broker.port) as socket:
        yield socket


def message(kind: str, **members: Any) -> dict[str, Any]:
    return {"type": kind, **SCOPE, **members}


def assert_alive(ws: WebSocket) -> None:
    assert ws.ask(PING_MESSAGE) == {"type": "ok", "request_id": "still there"}


# -- the handshake ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offered", "chosen"),
    [
        ("felix.v1", "felix.v1"),
        ("felix.v1+binary", "felix.v1+binary"),
        ("chat, felix.v1+binary, felix.v1", "felix.v1+binary"),
    ],
)
def test_the_first_subprotocol_that_the_broker_speaks_is_chosen(
    broker: BrokerProcess, offered: str, chosen: str
) -> None:
    with WebSocket(broker.port, subprotocol=offered) as ws:
        assert ws.status == 101
        assert ws.headers["sec-websocket-protocol"] == chosen
        assert "sec-websocket-extensions" not in ws.headers
        assert_alive(ws)


@pytest.mark.parametrize("offered", [None, "chat", "felix.v2", "felix.v1x"])
def test_a_client_that_offers_none_of_our_subprotocols_is_400(
    broker: BrokerProcess, offered: str | None
) -> None:
    with WebSocket(broker.port, subprotocol=offered) as ws:
        assert ws.status == 400
        assert ws.body["type"] == "error"
        assert ws.body["error"] == "INVALID_ARGUMENT"
        assert "felix.v1" in ws.body["message"]
        assert ws.is_ended_within(5)


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("Sec-WebSocket-Version: 8", 426),
        ("Sec-WebSocket-Version:", 426),
        ("Sec-WebSocket-Key: c2hvcnQ=", 400),
        ("Sec-WebSocket-Key: not base64, is it?!", 400),
        ("Sec-WebSocket-Key:", 400),
        ("Content-Length: 2", 400),
    ],
)
def test_a_handshake_that_is_not_as_it_should_be_is_refused(
    broker: BrokerProcess, header: str, status: int
) -> None:
    after = b"{}" if header.startswith("Content-Length") else b""
    with WebSocket(broker.port, headers=[header], after=after) as ws:
        assert ws.status == status
        assert ws.body["error"] == "INVALID_ARGUMENT"
        if status == 426:
            assert ws.headers["sec-websocket-version"] == "13"


def test_the_path_asked_for_as_an_ordinary_one_says_that_it_speaks_websocket(
    broker: BrokerProcess,
) -> None:
    reply = broker.client.get("/v1/felix/ws")
    assert reply.status_code == 426
    assert reply.headers["upgrade"] == "websocket"
    assert reply.json()["type"] == "error"
    assert "WebSocket" in reply.json()["message"]
    assert broker.client.post("/v1/felix/ws").status_code == 405


@pytest.mark.parametrize("path", ["/v1/felix", "/v1/topics", "/v1/felix/ws/"])
def test_no_other_path_is_upgraded(broker: BrokerProcess, path: str) -> None:
    with WebSocket(broker.port, path=path) as ws:
        assert ws.status != 101


def test_another_upgrade_of_the_path_is_not_granted(broker: BrokerProcess) -> None:
    with WebSocket(broker.port, headers=["Upgrade: h2c"]) as ws:
        assert ws.status == 426


@pytest.mark.parametrize(
    ("header", "status", "code"),
    [
        ("Origin: http://evil.example", 403, "PERMISSION_DENIED"),
        ("Origin: null", 403, "PERMISSION_DENIED"),
        ("Host: evil.example", 403, "PERMISSION_DENIED"),
        ("Sec-Fetch-Site: cross-site", 403, "PERMISSION_DENIED"),
    ],
)
def test_a_page_from_elsewhere_gets_no_websocket(
    broker: BrokerProcess, header: str, status: int, code: str
) -> None:
    """A browser lets any page open one: only the broker can tell."""
    with WebSocket(broker.port, headers=[header]) as ws:
        assert (ws.status, ws.body["error"]) == (status, code)


def test_the_brokers_own_origin_may_come_in(broker: BrokerProcess) -> None:
    with WebSocket(broker.port, headers=[f"Origin: http://127.0.0.1:{broker.port}"]) as ws:
        assert ws.status == 101


def test_without_the_token_there_is_no_websocket(start_broker: StartBroker) -> None:
    broker = start_broker(memory=True, env={"PENSTOCK_TOKEN": "secret"})
    for headers in ([], ["Authorization: Bearer wrong"]):
        with WebSocket(broker.port, headers=headers) as ws:
            assert (ws.status, ws.body["error"]) == (401, "UNAUTHENTICATED")
    with WebSocket(broker.port, headers=["Authorization: Bearer secret"]) as ws:
        assert_alive(ws)


def test_requests_pipelined_before_the_handshake_are_answered_before_it(
    broker: BrokerProcess,
) -> None:
    """And frames in the same packet after it are the socket's."""
    topic = broker.create_topic("before-the-handshake")
    produce = json.dumps({"topic": topic, "value": "held until it is durable"}).encode()
    before = encode(broker.port, "POST", "/v1/produce", produce)
    before += encode(broker.port, "GET", "/metrics") + encode(broker.port, "GET", "/v1/healthz")
    after = frame(TEXT, json.dumps(PING_MESSAGE).encode())
    with WebSocket(broker.port, before=before, after=after) as ws:
        for _ in range(3):
            head = ws.read_head()
            assert head.startswith("HTTP/1.1 200"), head
            sizes = [line for line in head.lower().split("\r\n") if "content-length" in line]
            ws.read_body(int(sizes[0].partition(":")[2]))
        ws.read_handshake()
        assert ws.status == 101
        assert ws.receive() == {"type": "ok", "request_id": "still there"}
        assert_alive(ws)


def test_a_client_that_is_gone_before_its_turn_leaves_nothing_behind(
    broker: BrokerProcess,
) -> None:
    with Wire(broker.port) as wire:
        consume = "/v1/consume?topic=left-behind&group=g&owner=o"
        broker.create_topic("left-behind")
        wire.send(encode(broker.port, "GET", consume))
        wire.send(
            b"GET /v1/felix/ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\n"
            b"Connection: Upgrade\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Protocol: felix.v1\r\n\r\n"
        )
    assert broker.client.get("/v1/healthz").status_code == 200


# -- what is wrong ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "invalid JSON"),
        (b"nonsense", "invalid JSON"),
        (b'{"type":"ping"', "invalid JSON"),
        (b"[]", "empty"),
        (b'[{"type":"ping"}', "invalid JSON"),
        (b"null", ""),
        (b"42", ""),
        (b"{}", "type is required"),
        (b'{"type":"dance"}', "unknown type 'dance'"),
        (b'{"type":7}', "type"),
        (b'{"type":"ping","colour":"red"}', "unknown member 'colour'"),
        (b'{"type":"lag"}', "subscription_id is required"),
        (b'{"type":"lag","subscription_id":"s999999999"}', "s999999999"),
        (b'{"type":"unsubscribe","subscription_id":"s999999999"}', "s999999999"),
        (b'{"type":"cache_unwatch","watch_id":"w999999999"}', "w999999999"),
        (b'{"type":"cache_unwatch"}', "watch_id is required"),
        (b'{"type":"ping","request_id":"' + b"x" * 129 + b'"}', "128"),
        (b"[" * 100_000, ""),
    ],
)
def test_a_frame_that_is_no_message_is_an_error_and_the_connection_survives(
    ws: WebSocket, text: bytes, says: str
) -> None:
    ws.send_frame(TEXT, text)
    answer = ws.receive()
    assert answer["type"] == "error", answer
    assert says in answer["message"], answer
    assert "request_id" not in answer
    assert_alive(ws)


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ({"tenant_id": None}, "tenant_id is required"),
        ({"namespace": ""}, "namespace is required"),
        ({"stream": None}, "stream is required"),
        ({"tenant_id": "nobody"}, "unknown tenant 'nobody'"),
        ({"namespace": "nowhere"}, "unknown namespace 'nowhere' of tenant 'default'"),
        ({"stream": "none"}, "stream not found: 'default/default/none'"),
        ({"event_queue_depth": 0}, "event_queue_depth"),
        ({"event_queue_depth": 65_537}, "event_queue_depth"),
        ({"event_queue_depth": "deep"}, "event_queue_depth"),
    ],
)
def test_a_subscription_that_cannot_be_is_refused(
    ws: WebSocket, members: dict[str, Any], says: str
) -> None:
    """felix-85, 87, 88, 89, 92"""
    answer = ws.ask({**message("subscribe", stream="default", request_id=5), **members})
    assert (answer["type"], answer["request_id"]) == ("error", 5)
    assert says in answer["message"]
    assert_alive(ws)


@pytest.mark.parametrize(
    "members",
    [
        {},
        {"key": "a", "prefix": "a"},
        {"prefix": "", "include": ["everything"]},
        {"prefix": "", "include": 3},
        {"prefix": "", "since_version": -1},
        {"prefix": "", "cache": "none"},
    ],
)
def test_a_watch_that_cannot_be_is_refused(ws: WebSocket, members: dict[str, Any]) -> None:
    answer = ws.ask({**message("cache_watch", cache="default"), **members})
    assert answer["type"] == "error"
    assert_alive(ws)


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (frame(TEXT, b"{}", masked=False), 1002),
        (frame(TEXT, b"{}", rsv=4), 1002),
        (frame(3, b"{}"), 1002),
        (frame(PING, b"x" * 126), 1002),
        (frame(PING, b"", fin=False), 1002),
        (frame(CONTINUATION, b"{}"), 1002),
        (frame(TEXT, b"{", fin=False) + frame(TEXT, b"}"), 1002),
        (frame(TEXT, b"\xc3\x28"), 1007),
        (frame(CLOSE, b"\x03"), 1002),
        (frame(CLOSE, b"\x03\xee"), 1002),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", 1002),
    ],
)
def test_a_frame_against_the_protocol_closes_the_connection(
    ws: WebSocket, data: bytes, code: int
) -> None:
    ws.send_raw(data)
    assert ws.close_code() == code
    assert ws.is_ended_within(5)


def test_requests_before_a_broken_frame_are_still_answered(ns: Namespace, ws: WebSocket) -> None:
    cache = ns.create_cache(durable=True)
    put = frame(TEXT, json.dumps(message("cache_put", cache=cache, key="k", value="")).encode())
    ws.send_raw(put + frame(3))
    assert ws.receive()["type"] == "ok"
    assert ws.close_code() == 1002


@pytest.mark.parametrize("is_fragmented", [False, True])
def test_a_message_over_max_body_bytes_is_an_error_and_then_1009(
    start_broker: StartBroker, is_fragmented: bool
) -> None:
    broker = start_broker(memory=True, env={"PENSTOCK_MAX_BODY_BYTES": "10000"})
    with WebSocket(broker.port) as ws:
        if is_fragmented:
            ws.send_frame(TEXT, b"[" + b" " * 8000, fin=False)
            ws.send_frame(CONTINUATION, b" " * 2000)
        else:
            ws.send_raw(frame(TEXT, b"", size=10_001))
        answer = ws.receive()
        assert (answer["type"], answer["error"]) == ("error", "INVALID_ARGUMENT")
        assert "max_body_bytes is 10000" in answer["message"]
        assert ws.close_code() == 1009


def test_a_message_of_exactly_max_body_bytes_is_taken(start_broker: StartBroker) -> None:
    broker = start_broker(memory=True, env={"PENSTOCK_MAX_BODY_BYTES": "10000"})
    with WebSocket(broker.port) as ws:
        ws.send_frame(TEXT, json.dumps({"type": "ping"}).encode().ljust(10_000))
        assert ws.receive() == {"type": "ok"}


def test_a_binary_frame_that_was_not_negotiated_is_an_error_and_then_1003(ws: WebSocket) -> None:
    ws.send_frame(BINARY, b"\x02")
    assert ws.receive()["error"] == "INVALID_ARGUMENT"
    assert ws.close_code() == 1003


def test_a_message_in_fragments_is_one_message(ws: WebSocket) -> None:
    text = json.dumps({"type": "ping", "request_id": "straße"}, ensure_ascii=False).encode()
    for at, byte in enumerate(text):
        opcode = CONTINUATION if at else TEXT
        ws.send_frame(opcode, bytes((byte,)), fin=at == len(text) - 1)
        if at == 5:
            ws.send_frame(PING, b"between")
    assert ws.receive_any() == (PONG, b"between")
    assert ws.receive() == {"type": "ok", "request_id": "straße"}


def test_a_close_frame_is_answered_with_its_code_and_the_connection_ends(ws: WebSocket) -> None:
    ws.send_frame(CLOSE, struct.pack(">H", 4001) + b"done")
    with pytest.raises(Closed) as closed:
        ws.receive_frame()
    assert closed.value.code == 4001
    assert ws.is_ended_within(1)


def test_many_large_messages_that_are_never_finished_are_refused_together(
    start_broker: StartBroker,
) -> None:
    """Memory is bounded over all connections, as it is for requests."""
    broker = start_broker(memory=True)
    before = broker.rss_bytes()
    sockets = [WebSocket(broker.port) for _ in range(12)]
    try:
        piece = b"x" * 2**20
        for ws in sockets:
            ws.send_raw(frame(TEXT, b"", size=64 * 2**20))
            ws.send_until_refused(piece, 63 * 2**20)
        assert 1013 in [code_of(ws) for ws in sockets]
        assert broker.rss_bytes() - before < 800 * 2**20
    finally:
        for ws in sockets:
            ws.socket.close()
    eventually(lambda: broker.client.get("/v1/healthz").status_code == 200)
    with WebSocket(broker.port) as ws:
        ws.send_frame(TEXT, json.dumps({"type": "ping"}).encode().ljust(2**20))
        assert ws.receive() == {"type": "ok"}


def code_of(ws: WebSocket) -> int | None:
    try:
        return ws.close_code(0.2)
    except NoFrame:
        return None


# -- the order of answers --------------------------------------------------------------------------


def test_answers_keep_the_order_of_requests_even_if_one_is_held(ns: Namespace) -> None:
    """felix-40: a durable put is answered when it is on disk; what comes after it waits."""
    cache = ns.create_cache(durable=True)
    with WebSocket(ns.broker.port) as ws:
        for _ in range(20):
            ws.send(
                message("cache_put", cache=cache, key="k", value=b64(b"v")),
                message("cache_get", cache=cache, key="k"),
                {"type": "nonsense"},
                message("cache_put", cache="none", key="k", value=""),
                [message("cache_incr", cache=cache, key="n"), {"type": "ping"}],
                {"type": "ping"},
            )
            put, got, wrong, unknown, array, ping = ws.receive_all(6)
            assert put["type"] == "ok"
            assert (got["type"], got["value"]) == ("cache_value", b64(b"v"))
            assert got["version"] == put["version"]
            assert (wrong["type"], unknown["type"]) == ("error", "error")
            assert [each["type"] for each in array] == ["cache_value", "ok"]
            assert ping == {"type": "ok"}


def test_a_request_id_is_echoed_as_it_was(ws: WebSocket) -> None:
    for request_id in ("a", "", "x" * 128, 0, -5, 2**63 - 1):
        assert ws.ask({"type": "ping", "request_id": request_id}) == {
            "type": "ok",
            "request_id": request_id,
        }
        error = ws.ask(message("publish", stream="none", payload="", request_id=request_id))
        assert (error["type"], error["request_id"]) == ("error", request_id)


def test_an_array_is_answered_as_one_array(ns: Namespace, ws: WebSocket) -> None:
    stream = ns.create_stream()
    answer = ws.ask(
        [
            message("publish", stream=stream, payload="", request_id=1),
            message("publish", stream=stream, payload="", ack="none"),
            message("publish", stream="none", payload="", ack="none", request_id=2),
            {"type": "nonsense", "request_id": 3},
            message("subscribe", stream=stream),
            {"type": "ping", "request_id": 4},
        ]
    )
    assert answer[0] == {"type": "publish_ok", "request_id": 1}
    assert answer[1] is None
    assert (answer[2]["type"], answer[2]["request_id"]) == ("error", 2)
    assert (answer[3]["type"], answer[3]["request_id"]) == ("error", 3)
    assert answer[4]["type"] == "subscribed"
    assert answer[5] == {"type": "ok", "request_id": 4}
    ws.send(message("publish", stream=stream, payload=b64(b"later"), ack="none"))
    assert ws.events(1) == [b"later"]


def test_ack_none_is_silent_and_its_error_is_not(ns: Namespace, ws: WebSocket) -> None:
    """felix-37, 87: an error is not an ack."""
    stream = ns.create_stream()
    ws.send(
        message("publish", stream=stream, payload="", ack="none", request_id=1),
        message("publish_batch", stream=stream, payloads=["", ""], ack="none"),
        message("publish", stream="none", payload="", ack="none", request_id=2),
        message("publish", tenant_id="nobody", stream=stream, payload="", ack="none")
        | {"tenant_id": "nobody"},
        {"type": "ping"},
    )
    first, second, third = ws.receive_all(3)
    assert (first["type"], first["request_id"]) == ("error", 2)
    assert second["type"] == "error"
    assert "unknown tenant 'nobody'" in second["message"]
    assert third == {"type": "ok"}


def test_a_batch_is_acked_once_or_once_for_each(ns: Namespace, ws: WebSocket) -> None:
    """felix-38, 39"""
    batch = message("publish_batch", stream=ns.create_stream(), payloads=["", "", ""])
    assert ws.ask(batch) == {"type": "publish_ok", "count": 3}
    ws.send(batch | {"ack": "per_message", "request_id": "b"}, {"type": "ping"})
    expected = [{"type": "publish_ok", "index": n, "request_id": "b"} for n in range(3)]
    assert ws.receive_all(4) == [*expected, {"type": "ok"}]


def test_a_client_that_does_not_read_its_answers_is_not_read_from(ns: Namespace) -> None:
    """Answers are bounded: who does not take them may not ask for more."""
    cache = ns.create_cache()
    ns.put(cache, "large", b"x" * 2**20)
    get = frame(TEXT, json.dumps(message("cache_get", cache=cache, key="large")).encode())
    before = ns.broker.rss_bytes()
    with WebSocket(ns.broker.port, receive_buffer=4096) as ws:
        sent = ws.send_until_refused(get * 100, 64 * 2**20)
        assert sent < 32 * 2**20
        assert ns.broker.rss_bytes() - before < 64 * 2**20
        assert ns.value(cache, "large") == b"x" * 2**20
        for _ in range(20):
            assert ws.receive()["type"] == "cache_value"


@pytest.mark.parametrize(("count", "size"), [(3000, 10), (30, 200_000)])
def test_more_requests_than_may_be_unanswered_are_all_answered_in_order(
    ns: Namespace, count: int, size: int
) -> None:
    """Reading stops while too many, or too large ones, wait for the disk; and goes on."""
    cache = ns.create_cache(durable=True)
    value = b64(b"x" * size)
    puts = [message("cache_put", cache=cache, key="k", value=value) for _ in range(count)]
    with WebSocket(ns.broker.port) as ws:
        ws.send(*puts)
        versions = [answer["version"] for answer in ws.receive_all(count)]
    assert versions == sorted(set(versions))
