"""Requests made to be read in two ways, or to fail inside the broker.

Sentences driftq-65, driftq-68 and driftq-69: a clear refusal or the right answer for every one, no
request out of another's body, and no traceback (the fixture of the broker looks for one).
"""

from __future__ import annotations

import re
import socket
from itertools import product
from pathlib import Path

import pytest

from tests.broker_process import BrokerProcess
from tests.contract.checks import new_name
from tests.contract.conftest import StartBroker
from tests.contract.wire import Wire, encode

SERVER = Path(__file__).parents[2] / "src/penstock/server"

# -- request smuggling -------------------------------------------------------------------------


@pytest.mark.parametrize("blank", [" ", "\t", "   ", ""])
def test_a_body_is_never_executed_as_a_request(
    broker: BrokerProcess, topic: str, blank: str
) -> None:
    """driftq-65: a blank behind the length is allowed, and the same head comes again and again."""
    victim = broker.create_topic(new_name())
    hidden = encode(broker.port, "DELETE", f"/v1/topics/{victim}")
    length = f"content-length: {len(hidden)}{blank}"
    request = encode(broker.port, "POST", "/v1/produce", None, length) + hidden
    with Wire(broker.port) as wire:
        for data in (request, request, request + request):
            wire.send(data)
        assert [wire.read().status for _ in range(4)] == [400] * 4
        assert wire.request("GET", f"/v1/topics/{victim}").status == 200


@pytest.mark.parametrize(
    "framing",
    [
        "Content-Length: 5\r\nContent-Length: 5",
        "Content-Length: 5, 5",
        "Content-Length: 5\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: chunked\r\nContent-Length: 5",
        "Transfer-Encoding: gzip, chunked",
        "Transfer-Encoding: identity",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
        "Content-Length: 00000000000000000000000000005",
    ],
)
@pytest.mark.parametrize("path", ["/v1/produce", "/metrics", "/v1/felix/ws"])
@pytest.mark.parametrize("wish", ["", "Connection: upgrade\r\nUpgrade: websocket\r\n"])
def test_ambiguous_framing_is_refused(
    broker: BrokerProcess, framing: str, path: str, wish: str
) -> None:
    """driftq-65: on every way into the broker, and the connection is closed."""
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{wish}{framing}\r\n\r\n"
    with Wire(broker.port) as wire:
        wire.send(head.encode() + b"0\r\n\r\n" + encode(broker.port, "GET", "/v1/healthz"))
        response = wire.read()
        assert (response.status, response.json()["error"]) == (400, "INVALID_ARGUMENT")
        assert wire.is_closed_within(30)


def test_chunks_over_http_1_0_are_refused(broker: BrokerProcess) -> None:
    """driftq-65: HTTP/1.0 knows no chunks; a proxy may see another end."""
    with Wire(broker.port) as wire:
        wire.send(
            b"POST /v1/produce HTTP/1.0\r\nHost: 127.0.0.1\r\nConnection: keep-alive\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        )
        assert wire.read().status == 400
        assert wire.is_closed_within(30)


# -- versions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["", " HTTP/0.9", " HTTP/2.0", " HTTP/1.2", " HTTP/3.0"])
@pytest.mark.parametrize("path", ["/v1/healthz", "/v1/topics", "/metrics", "/docs", "/v1/felix/ws"])
@pytest.mark.parametrize("wish", ["", "Connection: upgrade\r\nUpgrade: websocket\r\n"])
def test_only_http_1_0_and_1_1_are_spoken(
    broker: BrokerProcess, path: str, version: str, wish: str
) -> None:
    """driftq-65: others have other rules for where a message ends."""
    with Wire(broker.port) as wire:
        wire.send(f"GET {path}{version}\r\nHost: 127.0.0.1\r\n{wish}\r\n".encode())
        response = wire.read()
        assert (response.status, response.json()["error"]) == (400, "INVALID_ARGUMENT")
        assert wire.is_closed_within(30)


def test_http_1_1_without_a_host_is_refused_after_http_1_0(broker: BrokerProcess) -> None:
    """driftq-65: the same headers on the same connection."""
    old = b"GET /v1/topics HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"
    with Wire(broker.port) as wire:
        statuses = []
        for data in (old, old.replace(b"1.0", b"1.1"), old):
            wire.send(data)
            statuses.append(wire.read().status)
        assert statuses == [200, 400, 200]


# -- hostile values ----------------------------------------------------------------------------

HEADERS = [
    "Host", "Origin", "Authorization", "Content-Length", "Transfer-Encoding", "Sec-Fetch-Site",
    "Accept", "Expect", "X-Request-Id", "Connection", "Upgrade", "HTTP2-Settings",
    "Sec-WebSocket-Key", "Sec-WebSocket-Version", "Sec-WebSocket-Protocol",
    "Sec-WebSocket-Extensions", "Content-Type", "Accept-Encoding", "Range", "If-Match",
    "If-None-Match", "Cookie", "X-Forwarded-For", "Forwarded", "Access-Control-Request-Method",
]  # fmt: skip

VALUES = [
    b"", b" ", b",", b",,,", b";", b"[", b"]", b"http://[", b"http://]", b"http://[::1", b"//[",
    b"http://[v1.x]", b"http://\xe2\x84\xa8", b"http://a:99999999", b"http://:@/", b"%", b"%ff",
    b"\xff\xfe", b"\xc3\x28", b"\x80", b"\"", b"'", b"=", b"====", b"Bearer", b"bearer \xff",
    b"0", b"-1", b"1e9", b"99999999999999999999", b"13, 13", b"websocket, websocket", b"*", b"W/",
    b"x" * 9000, b"localhost:\xb2", b"[::1", b"[]", b"..", b"127.0.0.1:", b"\t\t", b"a\tb",
]  # fmt: skip

ROUTES = {
    "ordinary": "GET /v1/topics HTTP/1.1",
    "with a body": "POST /v1/produce HTTP/1.1",
    "upgrade": "GET /v1/felix/ws HTTP/1.1",
    "events": "GET /v1/tenants/default/namespaces/default/streams/default/subscribe HTTP/1.1",
    "docs": "GET /docs HTTP/1.1",
    "metrics": "GET /metrics HTTP/1.1",
    "old": "GET /v1/topics HTTP/1.0",
}

USUAL = {
    "ordinary": {"Host": b"127.0.0.1"},
    "with a body": {"Host": b"127.0.0.1", "Content-Length": b"0"},
    "upgrade": {
        "Host": b"127.0.0.1",
        "Connection": b"Upgrade",
        "Upgrade": b"websocket",
        "Sec-WebSocket-Version": b"13",
        "Sec-WebSocket-Key": b"dGhlIHNhbXBsZSBub25jZQ==",
        "Sec-WebSocket-Protocol": b"felix.v1",
    },
    "events": {"Host": b"127.0.0.1", "Accept": b"text/event-stream"},
    "docs": {"Host": b"127.0.0.1"},
    "metrics": {"Host": b"127.0.0.1"},
    "old": {},
}


def status_of(port: int, data: bytes) -> int:
    """The status of the first answer; the connection is then left."""
    with socket.create_connection(("127.0.0.1", port), 30) as connection:
        connection.sendall(data)
        answer = b""
        while b"\r\n" not in answer:
            received = connection.recv(65536)
            assert received, f"no answer to {data[:300]!r}"
            answer += received
    return int(answer.split(b" ", 2)[1])


@pytest.mark.parametrize("route", ROUTES)
def test_a_hostile_value_in_any_header_is_answered(broker: BrokerProcess, route: str) -> None:
    """driftq-65: with an answer that is no 500; alone and beside a usual value. Pages of the app
    take long to make, and share the admission with all others: some values are enough there."""
    is_page = route in ("docs", "metrics")
    values = VALUES[: len(VALUES) // 4] if is_page else VALUES
    for name, value, is_added in product(HEADERS, values, (False,) if is_page else (False, True)):
        headers = [(n, v) for n, v in USUAL[route].items() if is_added or n != name]
        headers.append((name, value))
        lines = b"".join(n.encode() + b": " + v + b"\r\n" for n, v in headers)
        status = status_of(broker.port, ROUTES[route].encode() + b"\r\n" + lines + b"\r\n")
        assert status < 500, (name, value, status)


def test_every_header_that_the_broker_reads_is_among_the_hostile_ones() -> None:
    """driftq-65: so that a new one is not forgotten above."""
    known = {name.lower() for name in HEADERS}
    for path in SERVER.rglob("*.py"):
        for name in re.findall(r'name == b"([a-z0-9-]+)"', path.read_text()):
            assert name in known, f"{path} reads {name}"


def test_a_foreign_or_broken_origin_is_refused_with_an_upgrade_too(broker: BrokerProcess) -> None:
    """driftq-65"""
    for origin in ("http://[", "http://evil.example", "null", "http://127.0.0.1:1"):
        headers = USUAL["upgrade"] | {"Origin": origin.encode()}
        lines = b"".join(n.encode() + b": " + v + b"\r\n" for n, v in headers.items())
        data = ROUTES["upgrade"].encode() + b"\r\n" + lines + b"\r\n"
        assert status_of(broker.port, data) == 403


# -- long pipelines ----------------------------------------------------------------------------


def test_thousands_of_pipelined_upgrades_lose_no_command(start_broker: StartBroker) -> None:
    """driftq-50, driftq-65: each is answered in its turn, and the log holds what was answered."""
    broker = start_broker()
    wish = ("Connection: Upgrade", "Upgrade: h2c")
    count = 3000
    data = b"".join(
        encode(broker.port, "POST", "/v1/topics", b'{"name":"n%d"}' % n, *wish)
        if n % 100 == 0
        else encode(broker.port, "GET", "/v1/healthz", None, *wish)
        for n in range(count)
    )
    with Wire(broker.port) as wire:
        wire.send(data)
        statuses = [wire.read().status for _ in range(count)]
    assert statuses == [201 if n % 100 == 0 else 200 for n in range(count)]
    names = broker.client.get("/v1/topics").json()["topics"]
    assert names == sorted(f"n{n}" for n in range(0, count, 100))
    broker.restart(kill=True)
    assert broker.client.get("/v1/topics").json()["topics"] == names
