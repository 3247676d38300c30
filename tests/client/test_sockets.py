"""The SDK over one WebSocket, against a real broker."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import uvloop

from penstock.client import AsyncClient, CacheCheck, CacheDelete, CacheIncr, CachePut, Client
from penstock.client.socket_channels import MAX_UNREAD_BYTES, MAX_UNREAD_EVENTS
from penstock.client.socket_exchange import MAX_OUTGOING_BYTES
from penstock.client.sync_handles import CacheHandle
from penstock.client.sync_socket import Socket, SocketCacheHandle, SocketStreamHandle
from penstock.model.caching import CacheValue, WatchEvent, Written
from penstock.model.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PenstockError,
    TooLarge,
    Unauthenticated,
    Unavailable,
    VersionMismatch,
)
from penstock.model.limits import KIB, MIB
from tests.broker_process import SOURCE, BrokerProcess, eventually
from tests.tls_proxy import Certificate, tls_proxy

WAIT_S = 10.0
"""So that what does not come fails a test instead of holding it up."""


@pytest.fixture
def socket(client: Client) -> Iterator[Socket]:
    with client.connect() as socket:
        yield socket


@pytest.fixture
def stream(client: Client, socket: Socket, request: pytest.FixtureRequest) -> SocketStreamHandle:
    """A stream of the test's own."""
    client.create_stream("default", "default", request.node.name)
    return socket.stream(request.node.name)


@pytest.fixture(scope="module")
def other_broker() -> Iterator[BrokerProcess]:
    broker = BrokerProcess(None)
    try:
        yield broker.start()
    finally:
        broker.close()


@pytest.fixture
def own_broker(other_broker: BrokerProcess) -> Iterator[BrokerProcess]:
    """One that may be paused, and has no other sockets."""
    yield other_broker
    other_broker.resume()


def open_sockets(broker: BrokerProcess) -> int:
    found = re.search(r"^penstock_websockets (\d+)", broker.client.get("/metrics").text, re.M)
    assert found is not None
    return int(found[1])


# -- one connection --------------------------------------------------------------------------------


def test_everything_goes_over_one_connection(own_broker: BrokerProcess) -> None:
    """felix-128: publishes, subscriptions, watches and cache operations of many threads."""
    with Client(own_broker.url) as client, client.connect() as socket:
        stream, cache = socket.stream("default"), socket.cache("default")
        feeds = [stream.subscribe(wait_s=WAIT_S) for _ in range(8)]
        with ThreadPoolExecutor(8) as threads, cache.watch(prefix="") as watch:
            assert len(list(threads.map(lambda feed: feed.open(), feeds))) == 8
            list(threads.map(lambda n: cache.put(f"k{n}", str(n)), range(20)))
            list(threads.map(lambda n: stream.publish(f"e{n}"), range(20)))
            reads = [threads.submit(lambda f: {next(f) for _ in range(20)}, f) for f in feeds]
            assert all(read.result() == {b"e%d" % n for n in range(20)} for read in reads)
            assert {next(watch).key for _ in range(20)} == {f"k{n}" for n in range(20)}
            assert open_sockets(own_broker) == 1
    eventually(lambda: open_sockets(own_broker), lambda count: count == 0)


@pytest.mark.parametrize("run_loop", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_tasks_share_an_async_socket(
    broker: BrokerProcess, run_loop: Callable[[Coroutine[Any, Any, None]], None]
) -> None:
    async def run() -> None:
        async with AsyncClient(broker.url) as client, client.connect() as socket:
            stream, cache = socket.stream("default"), socket.cache("default")
            async with (
                stream.subscribe(wait_s=WAIT_S) as events,
                cache.watch(key="shared") as watch,
            ):
                await asyncio.gather(*(stream.publish(f"{n}", ack="none") for n in range(50)))
                version = await cache.put("shared", b"value")
                assert await cache.get("shared") == CacheValue(b"value", version)
                change = await anext(watch)
                assert (change.event, change.version, change.value) == ("put", version, b"value")
                assert [await anext(events) for _ in range(50)] == [b"%d" % n for n in range(50)]
                assert (await events.lag()).delivered == 50
                assert events.gaps == 0

    run_loop(run())


def test_handles_are_in_the_namespace_of_the_client(own_broker: BrokerProcess) -> None:
    with Client(own_broker.url, tenant="acme", namespace="prod") as client:
        client.apply(
            {
                "tenants": [{"tenant_id": "acme", "namespaces": ["prod"]}],
                "caches": [{"tenant_id": "acme", "namespace": "prod", "name": "c"}],
            }
        )
        with client.connect() as socket:
            socket.cache("c").put("k", "v")
            with pytest.raises(NotFound):
                socket.cache("c", tenant_id="default", namespace="default").get("k")
        assert client.cache("c").get("k") is not None


def test_what_one_thread_sends_arrives_in_its_order(stream: SocketStreamHandle) -> None:
    with stream.subscribe(wait_s=WAIT_S) as events:
        for round_ in range(50):
            stream.publish(f"{round_} none", ack="none")
            stream.publish(f"{round_} acked")
            stream.publish_batch([f"{round_} a", f"{round_} b"], ack="per_message")
            stream.publish_batch([f"{round_} c"], ack="none")
        kinds = ("none", "acked", "a", "b", "c")
        expected = [f"{round_} {kind}".encode() for round_ in range(50) for kind in kinds]
        assert [next(events) for _ in expected] == expected


def test_payloads_are_bytes_of_any_kind(stream: SocketStreamHandle) -> None:
    payloads = [bytes(range(256)), b"", "ü\u2028".encode(), b"x" * MIB]
    with stream.subscribe(wait_s=WAIT_S) as events:
        stream.publish_batch(payloads)
        for payload in payloads:
            stream.publish(payload, ack="none")
        assert [next(events) for _ in range(8)] == payloads + payloads


def test_a_publish_invalidates_keys_with_every_ack(
    stream: SocketStreamHandle, socket: Socket
) -> None:
    cache = socket.cache("default")
    for ack in ("none", "per_message"):
        cache.put("stale", "x")
        stream.publish("changed", ack=ack, invalidate=["cache:default:stale"])
        assert cache.get("stale") is None
    cache.put("stale", "x")
    stream.publish_batch(["1", "2"], ack="per_message", invalidate=["cache:default:stale"])
    assert cache.get("stale") is None


def test_a_subscription_ends_where_the_one_over_http_does(
    client: Client, stream: SocketStreamHandle
) -> None:
    with stream.subscribe(wait_s=0.2) as events:
        stream.publish("one")
        assert list(events) == [b"one"]
        assert events.timed_out
    with stream.subscribe() as events:
        closer = threading.Timer(0.05, events.close)
        closer.start()
        assert list(events) == []
        closer.join()
    with stream.subscribe(wait_s=WAIT_S) as events:
        stream.publish("last")
        client.delete_stream(*stream.path)
        assert next(events) == b"last"
        with pytest.raises(NotFound):
            next(events)
    with pytest.raises(NotFound):
        stream.subscribe().open()


def test_a_closed_subscription_gets_nothing_more(stream: SocketStreamHandle) -> None:
    with stream.subscribe(wait_s=WAIT_S) as events:
        assert len(stream.subscriptions()) == 1
    eventually(stream.subscriptions, lambda found: not found)
    stream.publish("unheard")
    assert events.poll() is None


# -- the same as over HTTP -------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["http", "socket"])
def test_a_cache_answers_the_same_over_both(client: Client, socket: Socket, way: str) -> None:
    """Code can change the way by changing one line."""
    name = f"both-{way}"
    client.create_cache("default", "default", name)
    cache: CacheHandle | SocketCacheHandle
    cache = client.cache(name) if way == "http" else socket.cache(name)
    assert cache.get("k") is None
    version = cache.put("k", "v", ttl_ms=60_000, if_not_exists=True)
    found = cache.get("k")
    assert found is not None
    assert (found.value, found.version, (found.ttl_ms or 0) > 1000) == (b"v", version, True)
    with pytest.raises(AlreadyExists):
        cache.put("k", "w", if_not_exists=True)
    for refused in (
        lambda: cache.put("k", "w", if_version=version + 7),
        lambda: cache.delete("k", if_version=version + 7),
        lambda: cache.txn([CacheCheck("k", exists=False)], [CachePut("k", "w")]),
        lambda: cache.txn([CacheCheck("k", version=1)], [CacheIncr("n")]),
    ):
        with pytest.raises(VersionMismatch):
            refused()
    for refused in (
        lambda: cache.incr("k"),
        lambda: cache.txn([CacheCheck("k", exists=True)], [CacheIncr("k")]),
    ):
        with pytest.raises(FailedPrecondition) as failure:
            refused()
        assert type(failure.value) is FailedPrecondition
    assert cache.incr("n", 5) == 5
    assert cache.get_many(["k", "none"]) == {"k": CacheValue(b"v", version)}
    done = cache.txn([], [CachePut("a", "1"), CacheIncr("n"), CacheDelete("k")])
    assert [type(each) for each in done] == [Written] * 3
    assert (done[1].number, done[2].deleted) == (6, True)
    assert not cache.delete("k")
    with pytest.raises(InvalidArgument):
        cache.put("k", b"x" * (9 * MIB))
    with pytest.raises(InvalidArgument):
        cache.get("")


def test_tenants_do_not_mix(client: Client, socket: Socket) -> None:
    for tenant in ("north", "south"):
        client.create_tenant(tenant)
        client.create_namespace(tenant, "n")
        client.create_stream(tenant, "n", "orders")
    there = {"tenant_id": "north", "namespace": "n"}
    with socket.stream("orders", **there).subscribe(wait_s=WAIT_S) as events:
        socket.stream("orders", tenant_id="south", namespace="n").publish("theirs")
        socket.stream("orders", **there).publish("ours")
        assert next(events) == b"ours"
    with pytest.raises(NotFound):
        socket.cache("none", **there).get("k")


def test_wrong_arguments_are_refused_before_they_are_sent(stream: SocketStreamHandle) -> None:
    with pytest.raises(InvalidArgument, match="payloads"):
        stream.publish_batch([])
    with pytest.raises(InvalidArgument, match="must be a list"):
        stream.publish_batch("text")
    with pytest.raises(InvalidArgument, match="ack is one of"):
        stream.publish("x", ack="maybe")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="not valid Unicode"):
        stream.publish("\ud800")


# -- ack none ------------------------------------------------------------------------------------


def test_a_publish_with_ack_none_does_not_wait(own_broker: BrokerProcess) -> None:
    """felix-37: nothing is answered while the broker is paused, and the publishes return."""
    with Client(own_broker.url, timeout_s=30) as client, client.connect() as socket:
        stream = socket.stream("default")
        with stream.subscribe(wait_s=WAIT_S) as events:
            own_broker.pause()
            for n in range(500):
                stream.publish(f"{n}", ack="none")
            own_broker.resume()
            assert [next(events) for _ in range(500)] == [b"%d" % n for n in range(500)]


def test_other_acks_wait_for_the_answer(own_broker: BrokerProcess) -> None:
    with Client(own_broker.url, timeout_s=0.3) as client, client.connect() as socket:
        own_broker.pause()
        with pytest.raises(Unavailable, match="unknown whether it executed publish"):
            socket.stream("default").publish("x")
        with pytest.raises(Unavailable, match="did not answer in time"):
            socket.cache("default").get("k")
        own_broker.resume()


def test_the_outgoing_buffer_is_bounded(own_broker: BrokerProcess) -> None:
    """A publish with ack none waits when it is full, and fails if nothing leaves in time."""
    with Client(own_broker.url, timeout_s=0.3) as client:
        socket = client.connect().open()
        own_broker.pause()
        accepted: list[int] = []

        def publish_much() -> None:
            while sum(accepted) < 64 * MIB:
                socket.stream("default").publish(b"x" * 64 * KIB, ack="none")
                accepted.append(64 * KIB)

        with pytest.raises(Unavailable, match=r"outgoing buffer is full: .* does not read"):
            publish_much()
        assert MAX_OUTGOING_BYTES <= sum(accepted) < 32 * MIB
        with pytest.raises(PenstockError):
            socket.close()


def test_a_failure_with_ack_none_is_raised_by_the_next_publish(socket: Socket) -> None:
    nowhere = socket.stream("nowhere")
    nowhere.publish("lost", ack="none")
    with pytest.raises(NotFound, match="nowhere"):
        eventually(lambda: nowhere.publish("again", ack="none"))
    eventually(lambda: failing(socket.flush), lambda failed: not failed)


def failing(act: object) -> bool:
    try:
        act()  # type: ignore[operator]
    except NotFound:
        return True
    return False


def test_a_failure_with_ack_none_is_raised_by_flush_and_by_close(client: Client) -> None:
    socket = client.connect().open()
    socket.stream("nowhere").publish("lost", ack="none")
    with pytest.raises(NotFound, match="nowhere"):
        socket.flush()
    socket.flush()
    socket.stream("nowhere").publish_batch(["lost", "too"], ack="none")
    with pytest.raises(NotFound, match="nowhere"):
        socket.close()


def test_the_callback_gets_failures_with_ack_none(client: Client) -> None:
    failures: list[PenstockError] = []

    def note(error: PenstockError) -> None:
        failures.append(error)
        raise ValueError("an error of the application does not end the connection")

    with client.connect(on_error=note) as socket:
        for _ in range(3):
            socket.stream("nowhere").publish("lost", ack="none")
        socket.stream("default").publish("x" * (9 * MIB), ack="none")
        socket.flush()
        assert [type(error) for error in failures[:3]] == [NotFound] * 3
        assert isinstance(failures[3], InvalidArgument | TooLarge)
        assert len(failures) == 4
        assert socket.is_connected


def test_an_error_of_the_block_is_not_hidden(client: Client) -> None:
    def fail() -> None:
        with client.connect() as socket:
            socket.stream("nowhere").publish("lost", ack="none")
            raise KeyError

    with pytest.raises(KeyError):
        fail()


def test_closing_sends_what_was_accepted(client: Client, stream: SocketStreamHandle) -> None:
    with stream.subscribe(wait_s=WAIT_S) as events:
        with client.connect() as other:
            for n in range(900):
                other.stream(stream.path[2]).publish(f"{n}", ack="none")
        assert [next(events) for _ in range(900)] == [b"%d" % n for n in range(900)]
    with pytest.raises(Unavailable, match=r"is closed|not open"):
        other.stream("default").publish("late", ack="none")
    with pytest.raises(Unavailable, match=r"is closed|not open"):
        other.cache("default").get("k")
    with pytest.raises(Unavailable, match="the socket is closed"):
        other.open()
    other.close()
    other.close()


def test_a_reader_is_told_when_another_thread_closes_the_socket(client: Client) -> None:
    with client.connect() as socket, ThreadPoolExecutor() as threads:
        events = socket.stream("default").subscribe().open()
        reading = threads.submit(next, events)
        socket.close()
        with pytest.raises(Unavailable, match="the socket is closed"):
            reading.result(WAIT_S)
        events.close()


# -- slow readers --------------------------------------------------------------------------------


def test_a_slow_subscription_holds_up_no_other(client: Client, stream: SocketStreamHandle) -> None:
    """felix-43: it loses its own events, which it can notice, and keeps a bounded number."""
    batch = [b"x" * 8] * 1000
    rounds = MAX_UNREAD_EVENTS // 1000 + 4
    with stream.subscribe(wait_s=WAIT_S) as slow, stream.subscribe(wait_s=WAIT_S) as quick:
        for _ in range(rounds):
            stream.publish_batch(batch)
            assert [next(quick) for _ in batch] == batch
        assert (quick.dropped, quick.gaps) == (0, 0)
        missing = rounds * 1000 - MAX_UNREAD_EVENTS
        lag = eventually(slow.lag, lambda lag: lag.dropped == missing)
        assert lag.messages_behind == MAX_UNREAD_EVENTS + 1  # the mark of the gap
        assert slow.dropped == missing
        for _ in range(MAX_UNREAD_EVENTS):
            next(slow)
        assert slow.gaps == 0
        stream.publish("after")
        assert (next(slow), slow.gaps) == (b"after", 1)


def test_a_slow_subscription_keeps_a_bounded_number_of_bytes(stream: SocketStreamHandle) -> None:
    event = b"x" * MIB
    with stream.subscribe(wait_s=WAIT_S) as slow, stream.subscribe(wait_s=WAIT_S) as quick:
        for _ in range(MAX_UNREAD_BYTES // MIB + 4):
            stream.publish(event)
            assert next(quick) == event
        assert eventually(lambda: slow.dropped) == 4


def test_a_slow_watch_gets_a_gap(client: Client, socket: Socket) -> None:
    client.create_cache("default", "default", "watched")
    cache = socket.cache("watched")
    with cache.watch(prefix="") as slow:
        ops = [CachePut(f"k{n}", "v") for n in range(1000)]
        for _ in range(3):
            last = cache.txn([], ops)[-1].version
        events: list[WatchEvent] = []
        while not events or events[-1].version < last:
            event = next(slow)
            events.append(event)
        gaps = [event for event in events if event.event == "gap"]
        assert gaps
        assert slow.gaps == len(gaps)
        at = 0
        for event in events:
            since = event.from_version if event.event == "gap" else event.version - 1
            assert at in (0, since), "nothing is missing but what a gap covers"
            at = event.version


# -- access ----------------------------------------------------------------------------------------


def test_a_token_is_sent_with_the_handshake() -> None:
    broker = BrokerProcess(None, env={"PENSTOCK_TOKEN": "sesame"})
    try:
        broker.start()
        for wrong in ("", "salt"):
            with Client(broker.url, token=wrong) as client, pytest.raises(Unauthenticated):
                client.connect().open()
        tokens = iter(["stale", "sesame"])
        with Client(broker.url, token=lambda: next(tokens)) as client, client.connect() as socket:
            assert socket.cache("default").get("k") is None
    finally:
        broker.close()


def test_a_socket_trusts_the_same_certificates(
    broker: BrokerProcess, certificate: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tls_proxy(broker.port, certificate) as url:
        with Client(url) as client, pytest.raises(InvalidArgument, match="does not hold"):
            client.connect().open()
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate.file))
        with Client(url) as client, client.connect() as socket:
            stream = socket.stream("default")
            with stream.subscribe(wait_s=WAIT_S) as events:
                stream.publish(b"x" * MIB, ack="none")
                assert next(events) == b"x" * MIB
    address = broker.url.replace("http:", "https:")
    with Client(address) as client, pytest.raises(InvalidArgument, match="does not speak TLS"):
        client.connect().open()


def test_without_a_broker_opening_fails_at_once() -> None:
    with Client("http://127.0.0.1:9") as client, pytest.raises(Unavailable, match="no broker answ"):
        client.connect().open()


def test_without_its_library_a_socket_says_what_to_install(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "websockets.client", None)
    with pytest.raises(InvalidArgument, match=r"penstock\[websocket\]"):
        client.connect().open()
    assert "default" in [each.name for each in client.list_streams("default", "default")]


def test_a_client_without_a_socket_does_not_load_one() -> None:
    """The library is an extra, and a command of the command line has to start quickly."""
    code = "import sys, penstock.client.sync; print({'asyncio', 'websockets'} & {*sys.modules})"
    env = os.environ | {"PYTHONPATH": str(SOURCE)}
    found = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert found.stdout == "set()\n", found.stderr
