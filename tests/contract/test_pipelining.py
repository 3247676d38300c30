"""Many requests on one connection: answers in the order asked, whoever gives them, and an end.

Sentences driftq-65, driftq-68 and driftq-69, where several requests arrive in one write.
"""

from __future__ import annotations

import json
import socket
import threading

import pytest

from tests.broker_process import BrokerProcess, eventually
from tests.contract.checks import new_name
from tests.contract.wire import Closed, Wire, encode
from tests.websocket import WebSocket

FOREIGN = "Origin: http://evil.example"
H2C = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__")


def message(topic: str, value: str) -> bytes:
    return json.dumps({"topic": topic, "value": value}).encode()


def produce(broker: BrokerProcess, topic: str, value: str, *headers: str) -> bytes:
    return encode(broker.port, "POST", "/v1/produce", message(topic, value), *headers)


def get(broker: BrokerProcess, path: str, *headers: str) -> bytes:
    return encode(broker.port, "GET", path, None, *headers)


def stored(broker: BrokerProcess, topic: str) -> list[str]:
    """Every value of the topic, up to one that is put at its end."""
    broker.put(topic, "the end")
    found: list[str] = []
    with broker.consume(topic, group=new_name("audit")) as stream:
        while not found or found[-1] != "the end":
            found.append(stream.next().value)
    return found[:-1]


def statuses(wire: Wire) -> list[int]:
    """Of all answers until the broker closes the connection."""
    found: list[int] = []
    try:
        while True:
            found.append(wire.read().status)
    except Closed:
        return found


# -- a refusal ends the connection -------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (403, ["Content-Length: {length}", FOREIGN]),
        (403, ["Transfer-Encoding: chunked", FOREIGN]),
        (413, ["Content-Length: 99999999999"]),
        (400, ["Content-Length: {length}", "X-Filler: " + "x" * 70_000]),
    ],
    ids=["foreign", "foreign and chunked", "too large", "long headers"],
)
def test_nothing_behind_a_refused_request_is_understood(
    broker: BrokerProcess, topic: str, status: int, headers: list[str]
) -> None:
    """driftq-68, driftq-69: its body may look like a request, and the next may be an honest one;
    the answer before it is still under way when it is refused."""
    hidden = produce(broker, topic, "hidden in the body")
    body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(hidden), hidden)
    if "chunked" not in headers[0]:
        body = hidden
    head = [header.format(length=len(body)) for header in headers]
    with Wire(broker.port) as wire:
        wire.send(
            produce(broker, topic, "first")
            + encode(broker.port, "POST", "/v1/produce", None, *head)
            + body
            + produce(broker, topic, "behind")
            + encode(broker.port, "POST", "/v1/produce/batch", message(topic, "a batch behind"))
        )
        assert statuses(wire) == [200, status]
    assert stored(broker, topic) == ["first"]


def test_a_refused_request_without_a_body_leaves_the_connection_usable(
    broker: BrokerProcess, topic: str
) -> None:
    """driftq-68"""
    with Wire(broker.port) as wire:
        wire.send(
            produce(broker, topic, "first")
            + get(broker, "/v1/topics", FOREIGN)
            + produce(broker, topic, "second")
        )
        assert [wire.read().status for _ in range(3)] == [200, 403, 200]
    assert stored(broker, topic) == ["first", "second"]


def test_an_answer_that_ends_the_connection_is_the_last(broker: BrokerProcess, topic: str) -> None:
    """driftq-65: the client asked for the end; whether the rest was read is not told."""
    with Wire(broker.port) as wire:
        wire.send(produce(broker, topic, "first", "Connection: close") + get(broker, "/v1/healthz"))
        assert statuses(wire) == [200]


@pytest.mark.parametrize("has_body", [True, False])
def test_the_request_id_comes_back_with_a_refusal(broker: BrokerProcess, has_body: bool) -> None:
    """driftq-65"""
    body = b'{"topic":"t","value":"v"}' if has_body else None
    with Wire(broker.port) as wire:
        response = wire.request("POST", "/v1/produce", body, FOREIGN, "X-Request-Id: mine-1")
    assert response.status == 403
    assert response.headers["x-request-id"] == "mine-1"


def test_the_refusal_of_a_head_request_has_no_body(broker: BrokerProcess) -> None:
    """driftq-65: a byte of one would be read as the next answer."""
    with Wire(broker.port) as wire:
        refused = wire.request("HEAD", "/v1/healthz", None, FOREIGN)
        assert refused.status == 403
        assert int(refused.headers["content-length"]) > 0
        assert wire.request("GET", "/v1/healthz").status == 200
    with Wire(broker.port) as wire:
        wire.send(encode(broker.port, "HEAD", "/v1/healthz", b"body", FOREIGN))
        assert wire.read(head_only=True).status == 403
        assert statuses(wire) == []


# -- order -------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_a_large_request_and_the_beginning_of_the_next_are_both_answered(
    broker: BrokerProcess, topic: str, cut: int
) -> None:
    """driftq-69: one write, more than any headers may be; a body is no header."""
    following = get(broker, "/v1/healthz")
    with Wire(broker.port) as wire:
        wire.send(produce(broker, topic, "v" * 300_000) + following[:cut])
        assert wire.read().status == 200
        wire.send(following[cut:])
        assert wire.read().status == 200


def test_thousands_of_requests_in_few_writes_are_answered_in_order(
    broker: BrokerProcess, topic: str
) -> None:
    """driftq-65: plain ones, those that wait for the disk, and those of the app."""
    count = 4000
    requests = []
    for n in range(count):
        mine = f"X-Request-Id: n{n}"
        if n % 1000 == 500:
            requests.append(get(broker, "/metrics", mine))
        elif n % 4 == 1:
            requests.append(produce(broker, topic, "v", mine))
        else:
            requests.append(get(broker, "/v1/healthz", mine))
    with Wire(broker.port) as wire:
        sender = threading.Thread(target=wire.send, args=(b"".join(requests),))
        sender.start()
        for n in range(count):
            response = wire.read()
            assert response.status == 200, (n, response)
            assert n % 1000 == 500 or response.headers["x-request-id"] == f"n{n}"
        sender.join()


@pytest.mark.parametrize("refused", ["topic=nowhere&group=g&owner=o", "topic={topic}&group=g"])
def test_what_comes_behind_a_refused_consume_is_answered(
    broker: BrokerProcess, topic: str, refused: str
) -> None:
    """driftq-65: refused when its turn comes, or at once."""
    with Wire(broker.port) as wire:
        wire.send(
            produce(broker, topic, "first")
            + get(broker, "/v1/consume?" + refused.format(topic=topic))
            + get(broker, "/v1/healthz")
            + produce(broker, topic, "second")
            + get(broker, "/metrics")
            + get(broker, "/v1/healthz")
        )
        first, consume, *rest = [wire.read().status for _ in range(6)]
    assert (first, rest) == (200, [200, 200, 200, 200])
    assert consume in (400, 404)
    assert stored(broker, topic) == ["first", "second"]


@pytest.mark.parametrize(
    ("behind", "expected"),
    [
        (b"GARBAGE\r\n\r\n", [200, 400]),
        (b"POST /v1/produce HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}", [200, 403]),
        (b"GET /v1/healthz HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", [200, 403]),
    ],
    ids=["garbage", "refused with a body", "refused without"],
)
def test_what_is_refused_behind_metrics_is_answered_after_them(
    broker: BrokerProcess, behind: bytes, expected: list[int]
) -> None:
    """driftq-65"""
    with Wire(broker.port) as wire:
        wire.send(get(broker, "/metrics") + behind + b"POST /v1/nothing HTTP/1.1\r\n\r\n")
        assert wire.read().body.count(b"penstock_") > 1
        assert statuses(wire) == expected[1:]


# -- wishes nobody grants ----------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/healthz", "/metrics"])
def test_an_upgrade_to_http_2_is_ignored(broker: BrokerProcess, path: str) -> None:
    """driftq-65: some clients ask for it with every first request."""
    with Wire(broker.port) as wire:
        assert wire.request("GET", path, None, *H2C).status == 200
        assert wire.request("GET", path).status == 200


@pytest.mark.parametrize("cut", [1, 40, 100_000])
def test_an_upgrade_to_http_2_leaves_the_body_whole(
    broker: BrokerProcess, topic: str, cut: int
) -> None:
    """driftq-65: in one write or two, and with another request behind it."""
    value = "v" * 150_000
    data = produce(broker, topic, value, *H2C)
    with Wire(broker.port) as wire:
        wire.send(data[:-cut])
        wire.send(data[-cut:] + produce(broker, topic, "next"))
        assert [wire.read().status for _ in range(2)] == [200, 200]
    assert stored(broker, topic) == [value, "next"]


def test_an_upgrade_to_another_protocol_keeps_the_other_connection_options(
    broker: BrokerProcess,
) -> None:
    """driftq-65"""
    with Wire(broker.port) as wire:
        response = wire.request(
            "GET", "/v1/healthz", None, "Connection: close, Upgrade", "Upgrade: websocket"
        )
        assert response.status == 200
        assert statuses(wire) == []
    with Wire(broker.port) as wire:
        assert wire.request("GET", "/v1/topics", None, *H2C, FOREIGN).status == 403


def test_connect_is_refused_and_the_connection_closed(broker: BrokerProcess) -> None:
    """driftq-65: the broker is no proxy."""
    with Wire(broker.port) as wire:
        wire.send(get(broker, "/v1/healthz"))
        wire.send(encode(broker.port, "CONNECT", f"127.0.0.1:{broker.port}"))
        assert statuses(wire) == [200, 400]


# -- half-closed connections -------------------------------------------------------------------


def test_a_client_that_closes_its_side_still_gets_its_answers(
    broker: BrokerProcess, topic: str
) -> None:
    """driftq-65: then the connection is closed."""
    requests = [
        produce(broker, topic, "one"),
        produce(broker, topic, "one") + produce(broker, topic, "two"),
        produce(broker, topic, "one") + get(broker, "/metrics"),
        get(broker, "/metrics"),
        produce(broker, topic, "one") + b"GET /v1/healthz HT",
    ]
    for data, expected in zip(requests, ([200], [200] * 2, [200] * 2, [200], [200]), strict=True):
        with Wire(broker.port) as wire:
            wire.send(data)
            wire.socket.shutdown(socket.SHUT_WR)
            assert statuses(wire) == expected


def test_a_consumer_that_closes_its_side_at_once_is_no_consumer(
    broker: BrokerProcess, topic: str
) -> None:
    """driftq-65: nothing would tell the broker that it is gone."""
    target = f"/v1/consume?topic={topic}&group=g&owner=o"
    with Wire(broker.port) as wire:
        wire.send(get(broker, target))
        wire.socket.shutdown(socket.SHUT_WR)
        assert wire.is_closed_within(5)
    eventually(lambda: consumers(broker, topic), lambda count: count == 0)


def consumers(broker: BrokerProcess, topic: str) -> int:
    groups = broker.client.get(f"/v1/topics/{topic}").json()["groups"]
    return sum(group["consumers"] for group in groups)


@pytest.mark.parametrize("before", [["/metrics"], ["/metrics", "/v1/topics"], ["/metrics"] * 3])
def test_a_websocket_behind_other_requests_has_its_turn(
    broker: BrokerProcess, before: list[str]
) -> None:
    lines = "".join(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" for path in before)
    with WebSocket(broker.port, before=lines.encode()) as socket:
        received = b""
        while b"HTTP/1.1 101" not in received:
            data = socket.socket.recv(65536)
            assert data, received[-500:]
            received += data
        assert received.count(b"HTTP/1.1 200") == len(before)
