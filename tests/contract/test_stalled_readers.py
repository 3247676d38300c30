"""Clients that ask and never read: what they cost, how long they may stay, and who waits."""

from __future__ import annotations

import re
import time
from contextlib import ExitStack
from functools import partial
from operator import eq

import pytest

from tests.broker_process import BrokerProcess, eventually
from tests.contract.conftest import StartBroker
from tests.contract.stream_clients import Session, make_namespace
from tests.contract.wire import Closed, Wire

MIB = 2**20
BUDGET_BYTES = 32 * MIB
OVERHEAD_BYTES = 128 * MIB
"""Pieces that are being made, sockets, and what allocators keep."""
VALUE_BYTES = 32 * 1024
COUNT = 512
PATIENCE_S = 90.0

SETTINGS = {
    "PENSTOCK_ANSWER_MEMORY_BYTES": str(BUDGET_BYTES),
    "PENSTOCK_STALLED_TIMEOUT_MS": "1000",
}


def fill(broker: BrokerProcess, topic: str) -> None:
    broker.create_topic(topic)
    for first in range(0, COUNT, 128):
        batch = [
            {"topic": topic, "value": f"{n}:".ljust(VALUE_BYTES, "x")}
            for n in range(first, first + 128)
        ]
        assert broker.client.post("/v1/produce/batch", json=batch).status_code == 200


def metric(broker: BrokerProcess, name: str) -> float:
    found = re.search(rf"^{name} (\S+)$", broker.client.get("/metrics").text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


def closed(broker: BrokerProcess) -> float:
    return metric(broker, "penstock_stalled_connections_total")


@pytest.fixture
def broker(start_broker: StartBroker) -> BrokerProcess:
    process = start_broker(env=SETTINGS)
    fill(process, "t")
    return process


def ask(broker: BrokerProcess, target: str, count: int = 1) -> list[Wire]:
    """Connections that send a request and read nothing."""
    wires = [Wire(broker.port, receive_buffer=4096) for _ in range(count)]
    for wire in wires:
        wire.send(b"GET %b HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n" % target.encode())
    return wires


def records(form: str) -> str:
    return f"/v1/topics/t/partitions/0/records?format={form}"


@pytest.mark.parametrize("form", ["arrow", "ndjson"])
def test_a_hundred_readers_that_never_read_cost_the_budget_and_are_closed(
    broker: BrokerProcess, form: str
):
    """driftq-24: memory stays bounded, produces are answered meanwhile."""
    broker.create_topic("other")
    before = broker.rss_bytes()
    wires = ask(broker, records(form), 100)
    deadline = time.monotonic() + PATIENCE_S
    produced = 0
    while closed(broker) < 100:
        assert time.monotonic() < deadline, f"{closed(broker):.0f} of 100 were closed"
        broker.put("other", "still answered")
        produced += 1
        grown = broker.rss_bytes() - before
        assert grown < BUDGET_BYTES + OVERHEAD_BYTES, f"{grown / MIB:.0f} MiB"
        assert metric(broker, "penstock_answer_bytes") < BUDGET_BYTES + 8 * MIB
    assert produced
    assert metric(broker, "penstock_answer_limit_bytes") == BUDGET_BYTES
    eventually(lambda: metric(broker, "penstock_answer_bytes"), lambda used: used == 0)
    assert metric(broker, "penstock_answers_waiting") == 0
    assert "accepted nothing, or too little, for 1 s" in broker.stderr()
    for wire in wires:
        wire.socket.close()


def test_readers_that_read_get_their_turn_beside_those_that_do_not(broker: BrokerProcess):
    """An answer that waits for memory comes, whole, when others have been closed."""
    wires = ask(broker, records("ndjson"), 40)
    with broker.new_client() as client:
        reply = client.get(records("ndjson"), timeout=PATIENCE_S)
        assert reply.text.count("\n") == COUNT
    for wire in wires:
        wire.socket.close()


def test_a_slow_reader_that_takes_a_little_now_and_then_stays(broker: BrokerProcess):
    """Four seconds of it, with a timeout of one."""
    (wire,) = ask(broker, records("ndjson"))
    taken = 0
    for _ in range(20):
        taken += len(wire.socket.recv(64 * 1024))
        time.sleep(0.2)
    assert closed(broker) == 0
    while data := wire.socket.recv(MIB):
        taken += len(data)
        if data.endswith(b"0\r\n\r\n"):
            break
    assert taken > COUNT * VALUE_BYTES
    wire.socket.close()


def pipelined(broker: BrokerProcess, behind: str) -> Wire:
    """A connection that asks for a large value, with a stream behind it that starts before that."""
    ns = make_namespace(broker, "acme", "pipelined")
    cache = ns.create_cache(max_bytes=None, durable=True)
    path = ns.entry_path(cache, "k") + "?raw=true"
    assert broker.client.put(path, content=bytes(6 * MIB)).status_code == 200
    stream = {
        "consume": "/v1/consume?topic=t&group=g&owner=o",
        "subscribe": f"{ns.path}/streams/{ns.create_stream()}/subscribe",
    }[behind]
    put = f"PUT {ns.entry_path(cache, 'x')}?raw=true HTTP/1.1\r\nhost: 127.0.0.1\r\n"
    gets = [f"GET {target} HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n" for target in (path, stream)]
    wire = Wire(broker.port, receive_buffer=4096)
    wire.send(f"{put}content-length: 1\r\n\r\n1{''.join(gets)}".encode())
    return wire


@pytest.mark.parametrize("behind", ["consume", "subscribe"])
def test_a_stream_behind_a_large_answer_does_not_keep_its_reader_from_being_closed(
    broker: BrokerProcess, behind: str
):
    wire = pipelined(broker, behind)
    eventually(lambda: closed(broker), lambda count: count == 1, timeout_s=PATIENCE_S)
    eventually(lambda: metric(broker, "penstock_answer_bytes"), partial(eq, 0))
    wire.socket.close()


@pytest.mark.parametrize("behind", ["consume", "subscribe"])
def test_a_large_answer_that_was_read_is_no_longer_counted_when_a_stream_is_behind_it(
    broker: BrokerProcess, behind: str
):
    wire = pipelined(broker, behind)
    assert [len(wire.read().body) for _ in range(2)][1] == 6 * MIB
    eventually(lambda: metric(broker, "penstock_answer_bytes"), partial(eq, 0))
    assert closed(broker) == 0
    wire.socket.close()


def test_a_large_value_of_a_cache_is_made_when_there_is_memory_for_it(broker: BrokerProcess):
    """Clients that do not read a large answer take no more memory than the budget."""
    ns = make_namespace(broker, "acme", "stalled")
    cache = ns.create_cache(max_bytes=None)
    value = bytes(6 * MIB)
    path = ns.entry_path(cache, "k") + "?raw=true"
    assert broker.client.put(path, content=value).status_code == 200
    before = broker.rss_bytes()
    wires = ask(broker, path, 30)
    with broker.new_client() as client:
        assert client.get(path, timeout=PATIENCE_S).content == value
    grown = broker.rss_bytes() - before
    assert grown < BUDGET_BYTES + OVERHEAD_BYTES, f"{grown / MIB:.0f} MiB"
    eventually(lambda: closed(broker), lambda count: count == 30, timeout_s=PATIENCE_S)
    for wire in wires:
        wire.socket.close()


def test_consumers_and_subscribers_may_stall_for_as_long_as_they_like(broker: BrokerProcess):
    """felix-4, 20, 24 and driftq-24: they hold a bounded buffer, no answer, and go on later."""
    ns = make_namespace(broker, "acme", "stalled")
    stream = ns.create_stream()
    events = [bytes([n % 256]) * 32_000 for n in range(300)]
    with ExitStack() as stack:
        consumer = stack.enter_context(broker.consume("t", receive_buffer=4096))
        feed = stack.enter_context(ns.subscribe(stream, receive_buffer=4096))
        session = stack.enter_context(Session(ns, receive_buffer=4096))
        session.subscribe(stream)
        for first in range(0, 300, 50):
            assert ns.publish(stream, *events[first : first + 50]).status_code == 200
        # Two that are closed, one after the other: more than twice the timeout has passed.
        for count in (1, 2):
            (wire,) = ask(broker, records("arrow"))
            eventually(partial(closed, broker), partial(eq, count), timeout_s=PATIENCE_S)
            wire.socket.close()
        assert feed.payloads(300, timeout_s=30) == events
        assert session.events(300, timeout_s=30) == events
        assert [item.offset for item in consumer.take(200, timeout_s=30)] == list(range(200))
    assert closed(broker) == 2


def test_a_socket_that_does_not_take_its_answers_is_closed(broker: BrokerProcess):
    """A WebSocket without subscriptions is there for its answers."""
    ns = make_namespace(broker, "acme", "stalled")
    cache = ns.create_cache(max_bytes=None)
    assert ns.put(cache, "k", bytes(4 * MIB)).status_code == 200
    with Session(ns, receive_buffer=4096) as session:
        for _ in range(4):
            session.send(session.message("cache_get", cache=cache, key="k"))
        eventually(lambda: closed(broker), lambda count: count == 1, timeout_s=PATIENCE_S)
    eventually(lambda: metric(broker, "penstock_answer_bytes"), lambda used: used == 0)


def test_a_request_pipelined_behind_an_answer_that_is_not_read_ends_with_it(
    broker: BrokerProcess,
):
    """The connection is reset, and not left half answered."""
    (wire,) = ask(broker, records("arrow"))
    wire.send(b"GET /v1/healthz HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
    eventually(lambda: closed(broker), lambda count: count == 1, timeout_s=PATIENCE_S)
    with pytest.raises((Closed, ConnectionError)):
        wire.read()
    wire.socket.close()
