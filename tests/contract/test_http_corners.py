"""Unusual HTTP that clients do use, pipelining, and thousands of connections.

Sentences driftq-24, driftq-65 and driftq-69 at the level of bytes: a clear error or a closed
connection, and nobody else is held up.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import time

import pytest

from tests.broker_process import PROMPT_S, BrokerProcess
from tests.contract.conftest import StartBroker
from tests.contract.wire import Wire, encode

MIB = 2**20


def produce_body(topic: str, value: str = "v") -> bytes:
    return json.dumps({"topic": topic, "value": value}).encode()


def assert_alive(broker: BrokerProcess) -> None:
    started = time.monotonic()
    with broker.new_client() as client:
        assert client.get("/v1/healthz").status_code == 200
    assert time.monotonic() - started < PROMPT_S


# -- pipelining --------------------------------------------------------------------------------


def test_pipelined_requests_are_answered_in_order(broker: BrokerProcess, topic: str) -> None:
    """driftq-65: routes of every kind mixed, good and bad."""
    requests: list[tuple[str, str, bytes | None, int]] = []
    for n in range(25):
        requests += [
            ("POST", "/v1/produce", produce_body(topic, str(n)), 200),
            ("GET", "/v1/healthz", None, 200),
            ("POST", "/v1/produce", b"{", 400),
            ("GET", "/v1/topics", None, 200),
            ("POST", "/v1/nothing", b"x", 404),
            ("POST", "/v1/produce/batch", b"[" + produce_body(topic, f"b{n}") + b"]", 200),
            ("GET", f"/v1/topics/{topic}", None, 200),
            ("DELETE", "/v1/ack", None, 405),
        ]
    with Wire(broker.port) as wire:
        wire.send(
            b"".join(
                encode(broker.port, method, path, body, f"X-Request-Id: {n}")
                for n, (method, path, body, _) in enumerate(requests)
            )
        )
        for n, (_, path, _, status) in enumerate(requests):
            response = wire.read()
            assert response.headers["x-request-id"] == str(n)
            assert response.status == status, (path, response)
    with broker.consume(topic) as stream:
        expected = [value for n in range(25) for value in (str(n), f"b{n}")]
        assert [item.value for item in stream.take(50)] == expected


def test_requests_cut_at_every_byte_are_answered(broker: BrokerProcess, topic: str) -> None:
    """driftq-65"""
    request = encode(broker.port, "POST", "/v1/produce", produce_body(topic))
    with Wire(broker.port) as wire:
        wire.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for cut in range(1, len(request)):
            wire.send(request[:cut])
            wire.send(request[cut:])
            assert wire.read().status == 200
    with broker.consume(topic) as stream:
        assert len(stream.take(len(request) - 1)) == len(request) - 1


def test_a_pipeliner_that_does_not_read_takes_no_memory(broker: BrokerProcess) -> None:
    """driftq-24: the answers it does not take are not piled up."""
    before = broker.rss_bytes()
    request = encode(broker.port, "GET", "/v1/topics") * 200
    with Wire(broker.port, receive_buffer=4096) as wire:
        wire.send_until_refused(request, 32 * MIB)
        assert_alive(broker)
        assert broker.rss_bytes() - before < 64 * MIB


def test_requests_behind_a_consume_stream_do_not_break_it(
    broker: BrokerProcess, topic: str
) -> None:
    """driftq-65: a pipelined request waits for a stream that may never end."""
    target = f"/v1/consume?topic={topic}&group=g&owner=o&lease_ms=60000"
    with Wire(broker.port) as wire:
        wire.send(encode(broker.port, "GET", target) + encode(broker.port, "GET", "/v1/healthz"))
        broker.put(topic, "v")
        head = wire._until(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert b'"value":"v"' in wire._until(b"\n\r\n")
    assert_alive(broker)


# -- corners of HTTP that clients use ----------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/v1/topics"), ("POST", "/v1/produce"), ("GET", "/v1/healthz")]
)
def test_connection_close_is_honoured(
    broker: BrokerProcess, topic: str, method: str, path: str
) -> None:
    """driftq-65"""
    body = produce_body(topic) if method == "POST" else None
    with Wire(broker.port) as wire:
        response = wire.request(method, path, body, "Connection: close")
        assert response.status == 200
        assert wire.is_closed_within(5)


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/v1/topics"), ("POST", "/v1/produce"), ("GET", "/v1/healthz")]
)
def test_http_1_0_is_answered_and_closed(
    broker: BrokerProcess, topic: str, method: str, path: str
) -> None:
    """driftq-65: without a Host, which it need not send."""
    body = produce_body(topic) if method == "POST" else b""
    with Wire(broker.port) as wire:
        head = f"{method} {path} HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n"
        wire.send(head.encode() + body)
        response = wire.read()
        assert response.status == 200
        assert "transfer-encoding" not in response.headers
        assert wire.is_closed_within(5)


def test_an_http_1_0_consumer_gets_plain_lines(broker: BrokerProcess, topic: str) -> None:
    """driftq-65: no chunks, which it does not know."""
    with Wire(broker.port) as wire:
        target = f"/v1/consume?topic={topic}&group=g&owner=o"
        wire.send(f"GET {target} HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n".encode())
        head = wire._until(b"\r\n\r\n").lower()
        assert b" 200 " in head.split(b"\r\n")[0]
        assert b"transfer-encoding" not in head
        broker.put(topic, "v")
        assert json.loads(wire._until(b"\n"))["value"] == "v"


@pytest.mark.parametrize("path", ["/v1/produce", "/v1/topics"])
def test_expect_100_continue_is_answered_first(
    broker: BrokerProcess, topic: str, path: str
) -> None:
    """driftq-65"""
    body = produce_body(topic) if path == "/v1/produce" else b'{"name":"%s"}' % topic.encode()
    with Wire(broker.port) as wire:
        head = encode(broker.port, "POST", path, None, "Expect: 100-continue",
                      f"Content-Length: {len(body)}")  # fmt: skip
        wire.send(head)
        assert wire.read().status == 100
        wire.send(body)
        assert wire.read().status == 200


def test_expect_with_a_body_over_the_limit_is_refused_instead(broker: BrokerProcess) -> None:
    """driftq-69"""
    with Wire(broker.port) as wire:
        wire.send(
            encode(broker.port, "POST", "/v1/produce", None, "Expect: 100-continue",
                   f"Content-Length: {100 * MIB}")
        )  # fmt: skip
        assert wire.read().status == 413


@pytest.mark.parametrize("path", ["/v1/topics", "/v1/healthz", "/v1/produce", "/v1/nothing"])
def test_an_answer_to_head_has_no_body(broker: BrokerProcess, path: str) -> None:
    """driftq-64: whatever its status, the connection is fit for the next request."""
    with Wire(broker.port) as wire:
        response = wire.request("HEAD", path)
        assert response.status in (200, 404, 405)
        after = wire.request("GET", "/v1/healthz")
        assert (after.status, after.json()) == (200, {"status": "ok"})


def test_chunked_bodies_with_extensions_and_trailers(broker: BrokerProcess, topic: str) -> None:
    """driftq-12"""
    body = produce_body(topic, "in chunks")
    chunks = b"".join(b"%X;ext=1\r\n%c\r\n" % (1, byte) for byte in body)
    with Wire(broker.port) as wire:
        wire.send(
            b"POST /v1/produce HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
            + chunks + b"0\r\nX-Trailer: y\r\n\r\n"
        )  # fmt: skip
        assert wire.read().status == 200
        assert wire.request("GET", "/v1/healthz").status == 200
    with broker.consume(topic) as stream:
        assert stream.next().value == "in chunks"


def test_an_absolute_request_target_is_understood(broker: BrokerProcess) -> None:
    """driftq-65: HTTP/1.1 servers must accept it."""
    with Wire(broker.port) as wire:
        target = f"http://127.0.0.1:{broker.port}/v1/healthz"
        assert wire.request("GET", target).status == 200


def test_header_names_have_no_case(broker: BrokerProcess, topic: str) -> None:
    """driftq-65"""
    body = produce_body(topic)
    with Wire(broker.port) as wire:
        wire.send(
            b"POST /v1/produce HTTP/1.1\r\nhOST: 127.0.0.1\r\ncONTENT-lENGTH: %d\r\n"
            b"x-REQUEST-id: abc\r\n\r\n%s" % (len(body), body)
        )
        response = wire.read()
        assert (response.status, response.headers["x-request-id"]) == (200, "abc")


def test_a_keep_alive_connection_serves_many_requests(broker: BrokerProcess, topic: str) -> None:
    """driftq-65: after errors too, where the request's end was clear."""
    with Wire(broker.port) as wire:
        for _ in range(50):
            assert wire.request("POST", "/v1/produce", produce_body(topic)).status == 200
            assert wire.request("POST", "/v1/produce", b"nonsense").status == 400
            assert wire.request("GET", "/v1/nothing").status == 404


# -- ten thousand connections ------------------------------------------------------------------


def test_thousands_of_idle_connections_cost_little(start_broker: StartBroker) -> None:
    """driftq-24: 10,000 where file descriptors allow; half of them have been used once."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    count = min(10_000, hard - 500)
    if count < 2_000:
        assert "CI" not in os.environ, f"only {hard} file descriptors"
        pytest.skip(f"only {hard} file descriptors")
    broker = start_broker(memory=True)
    topic = broker.create_topic("t")
    broker.put(topic, "warm")
    before = broker.rss_bytes()
    request = encode(broker.port, "GET", "/v1/healthz")
    idle: list[socket.socket] = []
    try:
        for n in range(count):
            connection = socket.create_connection(("127.0.0.1", broker.port), 10)
            idle.append(connection)
            if n % 2:
                connection.sendall(request)
        for connection in idle[1::2]:
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        started = time.monotonic()
        for n in range(50):
            broker.put(topic, str(n))
        with broker.consume(topic) as stream:
            assert len(stream.take(51)) == 51
        assert time.monotonic() - started < PROMPT_S
        grown = broker.rss_bytes() - before
        assert grown < count * 20_000, f"{grown / count:.0f} bytes a connection"
        assert idle[1].fileno() >= 0
        idle[1].sendall(request)
        assert idle[1].recv(4096).startswith(b"HTTP/1.1 200")
    finally:
        for connection in idle:
            connection.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert_alive(broker)
