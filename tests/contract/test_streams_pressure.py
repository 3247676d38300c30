"""Bursts, batches that do not fit, and peers that send half a message or nothing, over the wire."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.broker_process import BrokerProcess, eventually
from tests.contract.conftest import StartBroker
from tests.contract.namespaces import Namespace
from tests.contract.stream_clients import BinarySession, Session
from tests.ndjson import NoItem
from tests.websocket import (
    BINARY,
    CONTINUATION,
    PING,
    TEXT,
    Closed,
    NoFrame,
    WebSocket,
    frame,
    payloads_of,
)

BATCH = 3000
BATCHES = 4
SIZE = 1000


@pytest.fixture
def ns(broker: BrokerProcess) -> Namespace:
    return Namespace(broker)


def test_a_burst_of_publishes_far_beyond_the_queue_is_accepted(ns: Namespace) -> None:
    """felix-29, 30, 31: in one packet, many times the depth; each waits for room and finds it."""
    stream = ns.create_stream(pub_queue_depth=1)
    with Session(ns) as ws:
        publish = ws.message("publish", stream=stream, payload="eA==")
        ws.send(*[publish | {"request_id": number} for number in range(900)])
        answers = ws.receive_all(900, 30)
    assert {answer["type"] for answer in answers} == {"publish_ok"}
    assert [answer["request_id"] for answer in answers] == list(range(900))


# -- a batch that does not fit -----------------------------------------------------------------


def open_reader(
    ns: Namespace, stream: str, kind: str
) -> tuple[Callable[[], list[bytes]], socket.socket]:
    """How to take what comes next, and the connection."""
    if kind == "ndjson":
        feed = ns.subscribe(stream, receive_buffer=4096)
        return lambda: feed.payloads(1, 1.0), feed.socket
    if kind == "binary":
        binary = BinarySession(ns, receive_buffer=4096)
        binary.subscribe(stream)
        return lambda: binary.events(1, 1.0), binary.socket
    ws = Session(ns, receive_buffer=4096)
    ws.subscribe(stream, batch=kind != "single")
    return lambda: payloads_of(ws.receive(1.0)), ws.socket


def read_slowly(
    take: Callable[[], list[bytes]], found: list[bytes], is_over: threading.Event
) -> None:
    """Until nothing has come for a while after the last publish."""
    while True:
        try:
            found += take()
        except (NoFrame, NoItem):
            if is_over.is_set():
                return
        time.sleep(0.0005)


@pytest.mark.parametrize("kind", ["text", "single", "binary", "ndjson"])
@pytest.mark.parametrize("depth", [16, 256])
def test_of_a_batch_that_does_not_fit_a_reader_gets_the_beginning(
    ns: Namespace, kind: str, depth: int
) -> None:
    """felix-20: over the WebSocket as over HTTP, whatever the reader makes room for meanwhile."""
    stream = ns.create_stream(event_queue_depth=depth)
    take, connection = open_reader(ns, stream, kind)
    found: list[bytes] = []
    is_over = threading.Event()
    reader = threading.Thread(target=read_slowly, args=(take, found, is_over))
    reader.start()
    try:
        for batch in range(BATCHES):
            numbered = [b"%d:%d:" % (batch, number) for number in range(BATCH)]
            assert ns.publish(stream, *[b + b"x" * SIZE for b in numbered]).status_code == 200
    finally:
        is_over.set()
        reader.join()
        connection.close()
    seen = [tuple(map(int, payload.split(b":")[:2])) for payload in found]
    assert seen
    for batch in range(BATCHES):
        got = [number for which, number in seen if which == batch]
        assert got == list(range(len(got))), f"batch {batch} has a hole"


# -- half a message ----------------------------------------------------------------------------

QUICK = {"PENSTOCK_REQUEST_TIMEOUT_MS": "500"}
"""The ping stays at its 20 s: it is not what ends these."""

WHOLE = frame(TEXT, b'{"type": "ping"}')

HALVES = {
    "a byte of a head": WHOLE[:1],
    "a head": WHOLE[:2],
    "a head and half of the mask": WHOLE[:4],
    "half of a text": WHOLE[:-1],
    "half of a large head": frame(BINARY, b"x" * 1000)[:3],
    "half of a large binary message": frame(BINARY, b"x" * 1000)[:500],
    "half of a ping": frame(PING, b"abc")[:-1],
    "a fragment": frame(TEXT, b"[", fin=False),
    "an empty fragment": frame(TEXT, b"", fin=False),
    "fragments": frame(TEXT, b"[", fin=False) + frame(CONTINUATION, b" ", fin=False),
    "a message and half of the next": WHOLE + WHOLE[:-1],
}


@pytest.fixture(scope="module")
def quick() -> Iterator[BrokerProcess]:
    with BrokerProcess(None, env=QUICK) as process:
        yield process
        assert "Traceback" not in process.stderr()


@pytest.mark.parametrize("half", HALVES.values(), ids=HALVES.keys())
def test_half_a_message_is_answered_within_the_request_timeout(
    quick: BrokerProcess, half: bytes
) -> None:
    """Long before the first ping: an error that says so, and the close code of a broken rule."""
    with WebSocket(quick.port, subprotocol="felix.v1+binary") as ws:
        ws.send_raw(half)
        if half.startswith(WHOLE):
            assert ws.receive() == {"type": "ok"}
        began = time.monotonic()
        error = ws.receive(15)
        assert time.monotonic() - began > 0.3
        assert (error["type"], error["error"]) == ("error", "INVALID_ARGUMENT")
        assert "not completed in time" in error["message"]
        assert ws.close_code() == 1008


@pytest.mark.parametrize("is_fragmented", [False, True])
def test_a_byte_now_and_then_does_not_make_a_message_quicker(
    quick: BrokerProcess, is_fragmented: bool
) -> None:
    with WebSocket(quick.port) as ws:
        ws.send_raw(frame(TEXT, b"[", fin=False) if is_fragmented else frame(TEXT, b"x" * 500)[:8])
        for _ in range(150):
            if is_fragmented:
                ws.send_raw(frame(CONTINUATION, b" ", fin=False) + frame(PING))
            else:
                ws.send_raw(b"x")
            try:
                answer = ws.receive(0.1)
            except NoFrame:
                continue
            assert "not completed in time" in answer["message"]
            return
        pytest.fail("it was waited for")


def test_messages_that_come_in_halves_but_in_time_are_fine(quick: BrokerProcess) -> None:
    """Each has its own time, however long the connection has never been between two messages."""
    with WebSocket(quick.port) as ws:
        deadline = time.monotonic() + 1.5
        ws.send_raw(WHOLE[:-1])
        while time.monotonic() < deadline:
            ws.send_raw(WHOLE[-1:] + frame(PING, b"a") + WHOLE[:-1])
            assert ws.receive() == {"type": "ok"}
            time.sleep(0.02)


# -- a peer that sends nothing -----------------------------------------------------------------


def test_a_client_that_reads_and_sends_nothing_is_kept(start_broker: StartBroker) -> None:
    """felix-3: not even an answer to a ping is asked of it."""
    broker = start_broker(memory=True, env={"PENSTOCK_WS_PING_MS": "200"})
    ns = Namespace(broker)
    with Session(ns) as ws:
        ws.answers_pings = False
        ws.subscribe("default")
        deadline = time.monotonic() + 2.0
        published = 0
        while time.monotonic() < deadline:
            assert ns.publish("default", b"%d" % published).status_code == 200
            assert ws.events(1) == [b"%d" % published]
            published += 1
            time.sleep(0.05)
        deadline = time.monotonic() + 1.5
        while time.monotonic() < deadline:
            ws.expect_nothing(100)
        assert ws.pings >= 3
        assert ns.publish("default", b"still").status_code == 200
        assert ws.events(1) == [b"still"]


def test_a_client_that_is_cut_off_is_given_up_while_nothing_is_published(
    start_broker: StartBroker,
) -> None:
    """felix-104: its machine acknowledges nothing, not even a ping."""
    broker = start_broker(memory=True, env={"PENSTOCK_WS_PING_MS": "200"})
    ns = Namespace(broker)
    with Session(ns) as ws:
        ws.subscribe("default")
        ws.cut()
        eventually(lambda: ns.subscriptions("default"), lambda lags: lags == [], timeout_s=30)
        with pytest.raises((NoFrame, Closed)):
            ws.receive_any(0.1)
