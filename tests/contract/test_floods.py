"""Clients that send without end or read nothing: refused or made to wait, and memory is bounded.

Sentences driftq-24, driftq-65 and driftq-69. The bounds are generous: without a limit each of
these takes several times as much.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.broker_process import PROMPT_S, BrokerProcess
from tests.contract.checks import assert_invalid, new_name
from tests.contract.wire import TIMEOUT_S, Closed, Wire, encode

MIB = 2**20


def peak_bytes(broker: BrokerProcess) -> int:
    assert broker.process is not None
    status = Path(f"/proc/{broker.process.pid}/status").read_text()
    found = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
    assert found is not None, status
    return int(found.group(1)) * 1024


@contextmanager
def at_most(broker: BrokerProcess, nbytes: int) -> Iterator[None]:
    """The broker's memory grows by no more at any moment of the block."""
    assert broker.process is not None
    Path(f"/proc/{broker.process.pid}/clear_refs").write_text("5")  # the peak is counted from here
    before = broker.rss_bytes()
    yield
    grown = peak_bytes(broker) - before
    assert grown < nbytes, f"{grown / MIB:.0f} MiB"


def assert_prompt(broker: BrokerProcess) -> None:
    started = time.monotonic()
    with broker.new_client() as client:
        assert client.get("/v1/healthz").status_code == 200
    assert time.monotonic() - started < PROMPT_S


# -- bodies of many tiny items -----------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/produce/batch", "/v1/ack/batch", "/v1/release/batch"])
@pytest.mark.parametrize(
    "body",
    [
        b"[" + b"1," * 4_000_000 + b"1]",
        b"[" + b"{}," * 4_000_000 + b"{}]",
        b"[" + b'{"topic":"t"},' * 1_000_000 + b"{}]",
        b"[" + b"[]," * 4_000_000 + b"[]]",
        b"\n" * 12_000_000,
        b" \n" * 6_000_000 + b"{}",
        b"{}\n" * 4_000_000,
        b"1\n" * 6_000_000,
    ],
    ids=["numbers", "empty", "partial", "arrays", "newlines", "blank", "lines", "number lines"],
)
def test_a_batch_of_millions_is_refused_at_once(
    broker: BrokerProcess, path: str, body: bytes
) -> None:
    """driftq-69: no more of it is decoded than a batch may have."""
    with at_most(broker, 120 * MIB):
        started = time.monotonic()
        assert_invalid(broker.client.post(path, content=body))
        assert time.monotonic() - started < PROMPT_S


def test_a_line_of_millions_in_a_member_nobody_asked_for_builds_nothing(
    broker: BrokerProcess,
) -> None:
    """driftq-69: also where an item is wrong and is looked at again."""
    body = b'{"topic":1,"else":[' + b"{}," * 5_000_000 + b"{}]}\n"
    with at_most(broker, 150 * MIB):
        reply = broker.client.post("/v1/produce/batch", content=body)
    assert reply.status_code == 200
    assert [item["code"] for item in reply.json()["results"]] == [400]


@pytest.mark.parametrize("line", [b'{"topic":"t","value":"v"', b'"\xff"', b'{"topic":"\xff"}'])
def test_a_line_that_is_no_json_refuses_the_batch(broker: BrokerProcess, line: bytes) -> None:
    """driftq-10: broken bytes are no JSON either."""
    body = b'{"topic":"t","value":"v"}\n' + line + b"\n"
    assert_invalid(broker.client.post("/v1/produce/batch", content=body))


# -- what is neither head nor body -------------------------------------------------------------


@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (b"1\r\n{\r\n0\r\n", b"x-a: " + b"a" * 1000 + b"\r\n"),
        (b"1\r\n{\r\n0\r\nx-a: ", b"a" * 1000),
        (b"1;", b"a" * 1000),
        (b"1;a=", b"a" * 1000),
    ],
    ids=["many trailers", "one endless trailer", "an endless extension", "and its value"],
)
def test_trailers_and_chunk_extensions_have_an_end(
    broker: BrokerProcess, begin: bytes, piece: bytes
) -> None:
    """driftq-69"""
    with at_most(broker, 24 * MIB), Wire(broker.port) as wire:
        wire.send(encode(broker.port, "POST", "/v1/produce", None, "Transfer-Encoding: chunked"))
        wire.send(begin)
        sent = wire.send_until_refused(piece * 100, 64 * MIB)
        assert sent < 64 * MIB
        with suppress(Closed):  # what was still under way may have cost the answer
            assert wire.read().status == 400
        assert wire.is_closed_within(5)
    assert_prompt(broker)


# -- behind a stream ---------------------------------------------------------------------------


def consuming(broker: BrokerProcess, topic: str) -> Wire:
    wire = Wire(broker.port)
    wire.send(encode(broker.port, "GET", f"/v1/consume?topic={topic}&group=g&owner=o"))
    wire._until(b"\r\n\r\n")
    return wire


def send_while_read(wire: Wire, piece: bytes, limit_bytes: int) -> int:
    """Sends the piece over and over, each time whole, until the broker reads no more of it."""
    sent = 0
    wire.socket.settimeout(0.3)
    try:
        while sent < limit_bytes:
            sent += wire.socket.send(memoryview(piece)[sent % len(piece) :])
    except TimeoutError:
        pass
    wire.socket.settimeout(TIMEOUT_S)
    return sent


@pytest.mark.parametrize("headers", [(), ("Origin: http://evil.example",)], ids=["good", "refused"])
def test_requests_behind_a_stream_are_not_taken_in_without_end(
    broker: BrokerProcess, topic: str, headers: tuple[str, ...]
) -> None:
    """driftq-69: beyond some, the connection is not read."""
    requests = encode(broker.port, "GET", "/v1/healthz", None, *headers) * 500
    with at_most(broker, 24 * MIB), consuming(broker, topic) as wire:
        assert send_while_read(wire, requests, 32 * MIB) < 32 * MIB
        assert_prompt(broker)
        broker.put(topic, "still delivered")
        wire._until(b"still delivered")


def test_bodies_behind_a_stream_are_not_taken_in_without_end(
    broker: BrokerProcess, topic: str
) -> None:
    """driftq-69: others have room for theirs."""
    body = b'{"topic":"t","value":"' + b"x" * (8 * MIB - 100) + b'"}'
    request = encode(broker.port, "POST", "/v1/produce", body)
    with at_most(broker, 80 * MIB), consuming(broker, topic) as wire:
        assert send_while_read(wire, request, 400 * MIB) < 400 * MIB
        assert_prompt(broker)


# -- clients that do not read ------------------------------------------------------------------


@pytest.fixture(scope="module")
def wide(broker: BrokerProcess) -> str:
    """A topic whose description is long."""
    return broker.create_topic(new_name("wide"), 1024)


def test_answers_nobody_reads_hold_up_nobody(broker: BrokerProcess, wide: str) -> None:
    """driftq-65, driftq-69: one write asks for a hundred megabytes."""
    requests = encode(broker.port, "GET", f"/v1/topics/{wide}") * 900
    with at_most(broker, 48 * MIB), Wire(broker.port, receive_buffer=4096) as wire:
        wire.send(requests)
        for _ in range(5):
            assert_prompt(broker)


def test_a_consume_behind_answers_nobody_reads_takes_nothing(
    broker: BrokerProcess, topic: str, wide: str
) -> None:
    """driftq-24: what is to be delivered goes to another consumer of the group."""
    values = [f"{n} " + "v" * 50_000 for n in range(100)]
    for value in values:
        broker.put(topic, value)
    describe = encode(broker.port, "GET", f"/v1/topics/{wide}")
    target = f"/v1/consume?topic={topic}&group=g&owner=deaf&lease_ms=200"
    with at_most(broker, 48 * MIB), Wire(broker.port, receive_buffer=4096) as deaf:
        deaf.send(describe * 60 + encode(broker.port, "GET", target))
        assert_prompt(broker)
        with broker.consume(topic, owner="reader") as reader:
            seen: set[str] = set()
            while len(seen) < len(values):
                item = reader.next()
                seen.add(item.value)
                broker.ack(topic, item, owner="reader")
        assert seen == set(values)


def test_a_client_that_reads_again_gets_what_waited(
    broker: BrokerProcess, topic: str, wide: str
) -> None:
    """driftq-65: its requests, in order, and the stream behind them."""
    describe = encode(broker.port, "GET", f"/v1/topics/{wide}")
    target = f"/v1/consume?topic={topic}&group=g&owner=o"
    broker.put(topic, "waited")
    with Wire(broker.port, receive_buffer=4096) as wire:
        wire.send(describe * 40 + encode(broker.port, "GET", target))
        assert_prompt(broker)
        for _ in range(40):
            assert wire.read().status == 200
        wire._until(b"waited")
