"""Nonsense, and pages from elsewhere: refused in the common shape, and nobody else notices."""

from __future__ import annotations

import random

import pytest

from tests.broker_process import BrokerProcess, eventually
from tests.contract.namespaces import Namespace, assert_typed_error
from tests.contract.stream_clients import Session, gauges
from tests.websocket import TEXT, Closed, NoFrame, frame

PING_WITH = b'{"type":"ping","request_id":%b}'
AT = b'"tenant_id":"default","namespace":"default",'
PUT_WITH = b'{"type":"cache_put",' + AT + b'"cache":"default","key":"k","value":"","ttl_ms":%b}'
PUBLISH_WITH = b'{"type":"publish",' + AT + b'"stream":"default","payload":"%b"}'
GET_WITH = b'{"type":"cache_get",' + AT + b'"cache":"default","key":"%b"}'


@pytest.fixture
def ns(broker: BrokerProcess) -> Namespace:
    return Namespace(broker)


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 100_000,
        b'{"a":' * 100_000,
        PING_WITH % (b"[" * 50_000),
        PING_WITH % b"NaN",
        PING_WITH % b"Infinity",
        PING_WITH % b"1e400",
        PING_WITH % (b"9" * 5000),
        PING_WITH % b"-0.5",
        PING_WITH % b'{"x":1}',
        PING_WITH % b'"\\ud800"',
        b'{"type":"ping","type":"poke"}',
        b'{"type":{"type":"ping"}}',
        b'{"TYPE":"ping"}',
        b'{"type":"ping","\\u0000":1}',
        GET_WITH % b"\\u0000",
        GET_WITH % b"\\udfff",
        GET_WITH % b"\\u0085",
        GET_WITH % (b"x" * 1025),
        GET_WITH.replace(b'"tenant_id":"default"', b'"tenant_id":"\\ud800"') % b"k",
        GET_WITH.replace(b'"tenant_id":"default"', b'"tenant_id":"default\\u0000"') % b"k",
        GET_WITH.replace(b'"tenant_id":"default"', b'"tenant_id":"\xd0\xb5default"') % b"k",
        GET_WITH.replace(b'"tenant_id":"default"', b'"tenant_id":["default"]') % b"k",
        PUT_WITH % b"1e999",
        PUT_WITH % b"NaN",
        PUT_WITH % b"-1",
        PUT_WITH % b"9007199254740993",
        PUT_WITH % b"0.5",
        PUT_WITH % b'"60000"',
        PUBLISH_WITH % b"QQ",
        PUBLISH_WITH % b"-_==",
        PUBLISH_WITH % b"QQ==\\n",
        b"\x00",
        b"null",
        b"true",
        b'"ping"',
        b"{}",
        b"\xef\xbb\xbf{}",
        b"{'type':'ping'}",
    ],
)
def test_nonsense_is_an_error_of_the_common_shape(ns: Namespace, text: bytes) -> None:
    """On the socket, which survives it, and posted."""
    members = {"type", "error", "message", "request_id"}
    with Session(ns) as ws:
        ws.send_frame(TEXT, text)
        answer = ws.receive()
        assert answer["error"] in ("INVALID_ARGUMENT", "NOT_FOUND"), answer
        assert set(answer) <= members
        assert answer["type"] == "error"
        assert len(answer["message"]) < 400
        assert ws.ask({"type": "ping"}) == {"type": "ok"}
    reply = ns.broker.client.post("/v1/felix", content=text)
    assert reply.status_code in (400, 404, 413), reply.text
    assert set(reply.json()) <= members
    assert reply.json()["type"] == "error"


def test_random_bytes_never_do_more_than_end_a_connection(ns: Namespace) -> None:
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    print(f"seed {seed}")
    with Session(ns) as good:
        good.subscribe("default")
        for _ in range(300):
            with Session(ns) as bad:
                data = chance.randbytes(chance.choice([1, 2, 7, 60, 700, 9000]))
                if chance.random() < 0.5:
                    data = frame(TEXT, data.hex().encode()) + data
                try:
                    bad.send_raw(data)
                    bad.receive_any(0.001)
                except (Closed, NoFrame, OSError):
                    pass
        ns.publish("default", b"still here")
        assert good.events(1) == [b"still here"]
    eventually(lambda: gauges(ns.broker)["penstock_websockets"] == 0)


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://127.0.0.1.evil.example"]
)
def test_a_page_from_elsewhere_hears_no_events(ns: Namespace, origin: str) -> None:
    """An EventSource needs no preflight: it must be refused by itself."""
    for path in (
        f"{ns.stream_path('default')}/subscribe?format=sse",
        f"{ns.cache_path('default')}/watch?prefix=&format=sse",
    ):
        reply = ns.broker.client.get(path, headers={"origin": origin})
        assert_typed_error(reply, 403, "PERMISSION_DENIED")
        assert "access-control-allow-origin" not in reply.headers
        for site in ("cross-site", "same-site"):
            reply = ns.broker.client.get(path, headers={"sec-fetch-site": site})
            assert_typed_error(reply, 403, "PERMISSION_DENIED")
