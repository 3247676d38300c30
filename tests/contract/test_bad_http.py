"""Bad HTTP: sizes, two ends of one request, silence, clients that misbehave.

Sentences driftq-24, driftq-65 and driftq-69 at the level of bytes: a clear error or a closed
connection, and nobody else is held up.
"""

from __future__ import annotations

import json
import random
import socket
import time
from collections.abc import Iterator

import pytest

from tests.broker_process import PROMPT_S, BrokerProcess, wait_until
from tests.contract.checks import assert_nothing_stored, new_name
from tests.contract.conftest import StartBroker
from tests.contract.wire import Closed, Response, Wire, encode

MIB = 2**20


def produce_body(topic: str, value: str = "v") -> bytes:
    return json.dumps({"topic": topic, "value": value}).encode()


def assert_shape(response: Response) -> None:
    """The common error body, also where the HTTP layer itself refuses."""
    body = response.json()
    assert set(body) == {"error", "message"}, body
    assert body["message"], body


def refusal(wire: Wire) -> Response | None:
    """The error response, or None where the broker only closed the connection."""
    try:
        response = wire.read()
    except Closed:
        return None
    assert 400 <= response.status < 500, response
    assert_shape(response)
    return response


def assert_alive(broker: BrokerProcess) -> None:
    started = time.monotonic()
    with broker.new_client() as client:
        assert client.get("/v1/healthz").status_code == 200
    assert time.monotonic() - started < PROMPT_S


# -- sizes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "piece", [b"X-Filler: " + b"x" * 1000 + b"\r\n", b"x" * 1000], ids=["many", "one endless"]
)
def test_a_megabyte_of_headers_is_refused(broker: BrokerProcess, piece: bytes) -> None:
    """driftq-69"""
    before = broker.rss_bytes()
    with Wire(broker.port) as wire:
        wire.send(b"GET /v1/topics HTTP/1.1\r\nHost: 127.0.0.1\r\nX-First: ")
        sent = wire.send_until_refused(piece, MIB)
        response = refusal(wire)
        if response is not None:
            assert response.status in (400, 413, 431)
        assert wire.is_closed_within(5)
    assert sent > 1000
    assert broker.rss_bytes() - before < 8 * MIB
    assert_alive(broker)


def test_headers_without_end_take_no_memory(broker: BrokerProcess) -> None:
    """driftq-69: 64 MB if the broker let it."""
    before = broker.rss_bytes()
    with Wire(broker.port) as wire:
        wire.send(b"POST /v1/produce HTTP/1.1\r\nHost: 127.0.0.1\r\n")
        sent = wire.send_until_refused(b"X-Filler: " + b"x" * 65_000 + b"\r\n", 64 * MIB)
    assert sent < 64 * MIB
    assert broker.rss_bytes() - before < 16 * MIB
    assert_alive(broker)


def test_a_long_request_target_is_refused(broker: BrokerProcess) -> None:
    """driftq-69"""
    with Wire(broker.port) as wire:
        wire.send(b"GET /v1/topics?x=")
        wire.send_until_refused(b"x" * 10_000, MIB)
        refusal(wire)
        assert wire.is_closed_within(5)
    assert_alive(broker)


def test_headers_of_reasonable_size_are_accepted(broker: BrokerProcess) -> None:
    """driftq-69"""
    with Wire(broker.port) as wire:
        filler = [f"X-Filler-{n}: {'x' * 500}" for n in range(60)]
        assert wire.request("GET", "/v1/topics", None, *filler).status == 200


@pytest.mark.parametrize("path", ["/v1/produce", "/v1/topics", "/v1/produce/batch"])
def test_a_body_over_the_limit_is_refused_before_it_is_read(
    broker: BrokerProcess, path: str
) -> None:
    """driftq-69: only the head is sent, and the answer is there."""
    with Wire(broker.port) as wire:
        wire.send(
            f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {100 * MIB}\r\n\r\n"
            .encode()
        )  # fmt: skip
        response = wire.read()
        assert response.status == 413
        assert response.json()["error"] == "INVALID_ARGUMENT"
        assert_shape(response)
        assert wire.is_closed_within(5)


@pytest.mark.parametrize("path", ["/v1/produce", "/v1/topics", "/v1/produce/batch"])
def test_a_chunked_body_over_the_limit_is_refused_on_the_way(
    start_broker: StartBroker, path: str
) -> None:
    """driftq-69"""
    limit = MIB
    broker = start_broker(memory=True, env={"PENSTOCK_MAX_BODY_BYTES": str(limit)})
    before = broker.rss_bytes()
    chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    with Wire(broker.port) as wire:
        wire.send(
            f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
            .encode()
        )  # fmt: skip
        sent = wire.send_until_refused(chunk, 64 * MIB)
        response = refusal(wire)
        if response is not None:
            assert response.status == 413
        assert wire.is_closed_within(5)
    # What sockets hold on either side is not yet read by the broker.
    assert limit <= sent < 32 * MIB
    assert broker.rss_bytes() - before < 24 * MIB
    assert_alive(broker)


@pytest.mark.parametrize("length", ["-1", "1e3", "0x10", "abc", "9" * 40, "1, 2", "+5", ""])
def test_a_nonsense_content_length_is_refused(broker: BrokerProcess, length: str) -> None:
    """driftq-65"""
    with Wire(broker.port) as wire:
        wire.send(
            f"POST /v1/produce HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {length}\r\n\r\n"
            .encode()
        )  # fmt: skip
        refusal(wire)
        assert wire.is_closed_within(5)
    assert_alive(broker)


# -- request smuggling -------------------------------------------------------------------------

SMUGGLING = {
    "two lengths": "Content-Length: {n}\r\nContent-Length: 5\r\n",
    "length and chunked": "Content-Length: {n}\r\nTransfer-Encoding: chunked\r\n",
    "chunked and length": "Transfer-Encoding: chunked\r\nContent-Length: {n}\r\n",
    "chunked is not last": "Transfer-Encoding: chunked, identity\r\n",
    "unknown coding": "Transfer-Encoding: xchunked\r\n",
    "chunked twice": "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
    "space before the colon": "Content-Length : {n}\r\n",
    "folded header": "X-A: b\r\n Content-Length: 5\r\nContent-Length: {n}\r\n",
}


@pytest.mark.parametrize("name", SMUGGLING)
def test_a_request_with_two_ends_is_refused_and_nothing_hides_behind_it(
    broker: BrokerProcess, topic: str, name: str
) -> None:
    """driftq-65: neither the request nor what a proxy may take for the next one is served."""
    inner = encode(broker.port, "POST", "/v1/produce", produce_body(topic, "smuggled"))
    chunked = b"0\r\n\r\n" + inner
    headers = SMUGGLING[name].format(n=len(chunked))
    with Wire(broker.port) as wire:
        head = f"POST /v1/produce HTTP/1.1\r\nHost: 127.0.0.1\r\n{headers}\r\n"
        wire.send(head.encode() + chunked)
        refusal(wire)
        assert wire.is_closed_within(5)
    assert_nothing_stored(broker, topic)


@pytest.mark.parametrize("chunk", [b"zz\r\n", b"-1\r\nx\r\n", b"5\r\nabcdefgh\r\n", b"\r\n"])
def test_broken_chunks_are_refused(broker: BrokerProcess, topic: str, chunk: bytes) -> None:
    """driftq-65"""
    with Wire(broker.port) as wire:
        wire.send(
            b"POST /v1/produce HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
            + chunk + b"0\r\n\r\n"
        )  # fmt: skip
        refusal(wire)
        assert wire.is_closed_within(5)
    assert_nothing_stored(broker, topic)


@pytest.mark.parametrize("hosts", [[], ["127.0.0.1", "127.0.0.1"], ["127.0.0.1", "evil.example"]])
def test_a_missing_or_doubled_host_is_refused(broker: BrokerProcess, hosts: list[str]) -> None:
    """driftq-65: HTTP/1.1 wants exactly one."""
    for method, path in [("GET", "/v1/topics"), ("POST", "/v1/produce")]:
        with Wire(broker.port) as wire:
            lines = [f"{method} {path} HTTP/1.1", *[f"Host: {host}" for host in hosts]]
            wire.send(("\r\n".join(lines) + "\r\nContent-Length: 0\r\n\r\n").encode())
            response = wire.read()
            assert response.status in (400, 403)
            assert_shape(response)


# -- silence -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def impatient() -> Iterator[BrokerProcess]:
    """A broker that waits half a second for a request it has seen the beginning of."""
    with BrokerProcess(None, env={"PENSTOCK_REQUEST_TIMEOUT_MS": "500"}) as process:
        yield process


START = b"POST /v1/produce HTTP/1.1\r\nHost: 127.0.0.1\r\n"

HALVES = {
    "half a line": b"POST /v1/pro",
    "half the headers": START + b"X-A",
    "half a body": START + b'Content-Length: 50\r\n\r\n{"to',
    "half a chunk": START + b"Transfer-Encoding: chunked\r\n\r\n5\r\nab",
    "half a body of an admin route": (
        b"POST /v1/topics HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 50\r\n\r\n{"
    ),
}


@pytest.mark.parametrize("name", HALVES)
def test_half_a_request_then_silence_is_closed(impatient: BrokerProcess, name: str) -> None:
    """driftq-65: within a bound, but not at once."""
    with Wire(impatient.port) as wire:
        started = time.monotonic()
        wire.send(HALVES[name])
        assert wire.is_closed_within(5)
        assert time.monotonic() - started >= 0.4
    assert_alive(impatient)


@pytest.mark.parametrize("rest", ["body", "chunks"])
def test_a_body_that_only_drips_is_closed(impatient: BrokerProcess, rest: str) -> None:
    """driftq-65: it would hold memory that others need for as long as it likes."""
    framing = b"Content-Length: 5000" if rest == "body" else b"Transfer-Encoding: chunked"
    drop = b"x" if rest == "body" else b"1\r\nx\r\n"
    with Wire(impatient.port) as wire:
        wire.send(START + framing + b"\r\n\r\n")
        started = time.monotonic()
        while time.monotonic() - started < 10 and not wire.is_closed_within(0.1):
            wire.send(drop)
        assert 0.4 <= time.monotonic() - started < 10
    assert_alive(impatient)


def test_a_stream_and_an_idle_connection_outlive_the_request_timeout(
    impatient: BrokerProcess,
) -> None:
    """driftq-65: the bound is for requests that have begun and not ended."""
    topic = impatient.create_topic(new_name())
    with impatient.consume(topic) as stream, Wire(impatient.port) as idle:
        assert idle.request("GET", "/v1/healthz").status == 200
        opened = time.monotonic()
        wait_until(opened + 1.2)
        impatient.put(topic, "v")
        assert stream.next().value == "v"
        assert idle.request("GET", "/v1/healthz").status == 200


# -- clients that misbehave --------------------------------------------------------------------


def test_a_client_that_never_reads_its_stream_holds_up_nobody(broker: BrokerProcess) -> None:
    """driftq-24"""
    topic = broker.create_topic(new_name())
    target = f"/v1/consume?topic={topic}&group=silent&owner=o&lease_ms=60000"
    with Wire(broker.port, receive_buffer=4096) as silent:
        silent.send(encode(broker.port, "GET", target))
        value = "x" * 100_000
        with broker.consume(topic, "reading") as stream:
            for n in range(100):
                broker.put(topic, value)
                assert stream.next(5).offset == n
        assert_alive(broker)


def test_a_client_that_vanishes_mid_request_is_forgotten(broker: BrokerProcess, topic: str) -> None:
    """driftq-65: with and without a reset."""
    request = encode(broker.port, "POST", "/v1/produce", produce_body(topic))
    for cut in (1, 20, len(request) - 1):
        for reset in (False, True):
            with Wire(broker.port) as wire:
                if reset:
                    linger = (1).to_bytes(4, "little") + (0).to_bytes(4, "little")
                    wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                wire.send(request[:cut])
    assert_nothing_stored(broker, topic)


def test_producers_that_leave_before_their_answer_stop_nobody(
    broker: BrokerProcess, topic: str
) -> None:
    """driftq-65: a reply to a closed connection must not break the commit."""
    request = encode(broker.port, "POST", "/v1/produce", produce_body(topic))
    for _ in range(100):
        with Wire(broker.port) as wire:
            linger = (1).to_bytes(4, "little") + (0).to_bytes(4, "little")
            wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            wire.send(request * 3)
    broker.put(topic, "answered")
    assert_alive(broker)


def test_garbage_is_refused_or_closed(broker: BrokerProcess) -> None:
    """driftq-65: bytes of every kind, from a fixed seed; the broker lives."""
    chance = random.Random(65)
    samples = [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\x00" * 1000,
        b"\r\n\r\n\r\n\r\nGARBAGE\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /v1/topics\r\n\r\n",
        b"GET /v1/topics HTTP/9.9\r\nHost: 127.0.0.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"get /v1/topics http/1.1\r\n\r\n",
        b"GET /v1/topics HTTP/1.1\r\nHost: 127.0.0.1\r\nno colon here\r\n\r\n",
        b"GET /v1/topics HTTP/1.1\r\nHost: 127.0.0.1\r\nX: a\x00b\r\n\r\n",
        *[chance.randbytes(chance.randrange(1, 3000)) + b"\r\n\r\n" for _ in range(50)],
    ]
    for sample in samples:
        with Wire(broker.port) as wire:
            wire.send(sample)
            wire.socket.shutdown(socket.SHUT_WR)
            assert wire.is_closed_within(5), sample[:50]
    assert_alive(broker)


def test_mutated_requests_never_stop_the_broker(broker: BrokerProcess, topic: str) -> None:
    """driftq-65: one byte of a good request changed, 300 times."""
    chance = random.Random(66)
    requests = [
        encode(broker.port, "POST", "/v1/produce", produce_body(topic)),
        encode(broker.port, "GET", "/v1/topics?x=%20y"),
        encode(broker.port, "POST", "/v1/ack", b'{"topic":"t","group":"g"}'),
    ]
    for _ in range(300):
        mutant = bytearray(chance.choice(requests))
        mutant[chance.randrange(len(mutant))] = chance.randrange(256)
        with Wire(broker.port) as wire:
            wire.send(bytes(mutant))
            wire.socket.shutdown(socket.SHUT_WR)
            assert wire.is_closed_within(5), bytes(mutant)
    assert_alive(broker)
