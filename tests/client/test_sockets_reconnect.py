"""A socket of the SDK outlives its connections: they are cut, held up, or the broker is killed."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from penstock.client import AsyncClient, Client
from penstock.client.socket_core import FIRST_WAIT_S, MAX_WAIT_S, wait_before
from penstock.client.sync_socket import Socket
from penstock.model.errors import (
    NotFound,
    OutcomeUnknown,
    PenstockError,
    Unauthenticated,
    Unavailable,
)
from penstock.model.limits import KIB
from tests.broker_process import BrokerProcess, eventually
from tests.tcp_proxy import TcpProxy, tcp_proxy

WAIT_S = 30.0
"""So that what does not come fails a test instead of holding it up."""


@pytest.fixture
def proxy(broker: BrokerProcess) -> Iterator[TcpProxy]:
    with tcp_proxy(broker.port) as proxy:
        yield proxy


@pytest.fixture
def socket(proxy: TcpProxy) -> Iterator[Socket]:
    """A socket whose connection can be cut."""
    with Client(proxy.url, timeout_s=WAIT_S) as client, client.connect() as socket:
        yield socket
        proxy.allow()


@pytest.fixture(scope="module")
def own_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """One with durable caches that may be killed, and keeps its port."""
    broker = BrokerProcess(tmp_path_factory.mktemp("broker") / "data")
    try:
        broker.start()
        broker.keep_port()
        with Client(broker.url) as client:
            client.create_cache("default", "default", "kept", durable=True)
        yield broker
    finally:
        broker.close()


def is_back(socket: Socket, times: int = 1) -> None:
    eventually(lambda: socket.reconnects, lambda count: count >= times, WAIT_S)


def cut(proxy: TcpProxy, socket: Socket) -> None:
    proxy.cut()
    eventually(lambda: not socket.is_connected)


def unanswered(socket: Socket) -> int:
    return len(socket._core._exchange._sent)


# -- a broker that is killed -----------------------------------------------------------------------


def test_everything_goes_on_when_the_broker_was_killed(own_broker: BrokerProcess) -> None:
    """felix-43, felix-45: a subscription goes on at the tail, and says that there is a gap; a watch
    of a durable cache goes on without one, because nothing has changed."""
    with Client(own_broker.url, timeout_s=WAIT_S) as client, client.connect() as socket:
        stream, cache = socket.stream("default"), socket.cache("kept")
        one, two = stream.subscribe(wait_s=WAIT_S), stream.subscribe(wait_s=WAIT_S)
        with one, two, cache.watch(prefix="", wait_s=WAIT_S) as watch:
            stream.publish("before")
            first = cache.put("a", "1")
            assert next(watch).version == first
            own_broker.restart(kill=True)
            is_back(socket)
            # Sent after the subscriptions, which are made again before any other request.
            stream.publish("after")
            second = cache.put("b", "2")
            for events in (one, two):
                assert (next(events), events.gaps) == (b"before", 0)
                assert (next(events), events.gaps) == (b"after", 1)
                assert events.lag().delivered == 1
            event = next(watch)
            assert (event.event, event.key, event.version) == ("put", "b", second)
            assert watch.gaps == 0
            found = cache.get("a")
            assert found is not None
            assert found.version == first


def test_an_orderly_restart_ends_no_subscription(own_broker: BrokerProcess) -> None:
    async def run() -> None:
        url = own_broker.url
        async with AsyncClient(url, timeout_s=WAIT_S) as client, client.connect() as socket:
            stream, cache = socket.stream("default"), socket.cache("kept")
            async with (
                stream.subscribe(wait_s=WAIT_S) as events,
                cache.watch(key="k", wait_s=WAIT_S) as watch,
            ):
                await asyncio.to_thread(own_broker.restart)
                await stream.publish("after")
                assert (await anext(events), events.gaps) == (b"after", 1)
                version = await cache.put("k", "v")
                assert (await anext(watch)).version == version
                assert socket.reconnects == 1

    asyncio.run(run())


# -- subscriptions and watches ---------------------------------------------------------------------


def test_a_subscription_that_does_not_resume_ends(socket: Socket, proxy: TcpProxy) -> None:
    stream = socket.stream("default")
    with stream.subscribe(resume=False) as events, stream.subscribe(wait_s=WAIT_S) as other:
        stream.publish("before")
        assert next(other) == b"before"
        cut(proxy, socket)
        assert next(events) == b"before"
        with pytest.raises(Unavailable, match=r"connection|broker"):
            next(events)
        assert list(events) == []
        proxy.allow()
        stream.publish("after")
        assert next(other) == b"after"
        assert len(stream.subscriptions()) == 1


def test_a_subscription_whose_stream_was_deleted_meanwhile_ends(
    socket: Socket, proxy: TcpProxy, client: Client
) -> None:
    client.create_stream("default", "default", "gone")
    with socket.stream("gone").subscribe(wait_s=WAIT_S) as events:
        cut(proxy, socket)
        client.delete_stream("default", "default", "gone")
        proxy.allow()
        with pytest.raises(NotFound):
            next(events)
    assert socket.cache("default").get("none") is None


def test_a_watch_resumes_from_its_version(socket: Socket, proxy: TcpProxy, client: Client) -> None:
    """There is no gap if the cache has not changed meanwhile, and one gap if it has."""
    client.create_cache("default", "default", "resumed")
    cache = socket.cache("resumed")
    with cache.watch(prefix="", wait_s=WAIT_S) as watch:
        first = cache.put("k", "1")
        assert next(watch).version == first
        cut(proxy, socket)
        proxy.allow()
        is_back(socket)
        second = cache.put("k", "2")
        assert ((event := next(watch)).event, event.version) == ("put", second)
        cut(proxy, socket)
        client.cache("resumed").put("k", "missed")
        missed = client.cache("resumed").put("k", "missed too")
        proxy.allow()
        event = next(watch)
        assert (event.event, event.from_version, event.version) == ("gap", second, missed)
        assert watch.gaps == 1
        assert cache.put("k", "3") == next(watch).version


def test_a_watch_that_was_cut_before_its_first_event_misses_nothing(
    socket: Socket, proxy: TcpProxy, client: Client
) -> None:
    client.create_cache("default", "default", "early")
    since = client.cache("early").put("k", "1")
    client.cache("early").put("k", "2")
    with socket.cache("early").watch(key="k", wait_s=WAIT_S, since_version=since) as watch:
        assert next(watch).from_version == since
    with socket.cache("early").watch(key="k", wait_s=WAIT_S) as watch:
        began = watch.version
        cut(proxy, socket)
        missed = client.cache("early").put("k", "3")
        proxy.allow()
        event = next(watch)
        assert (event.event, event.from_version, event.version) == ("gap", began, missed)


# -- requests --------------------------------------------------------------------------------------


def test_a_write_that_is_cut_off_says_that_its_outcome_is_unknown(
    socket: Socket, proxy: TcpProxy
) -> None:
    """felix-46: it may or may not have happened. It is not sent again."""
    cache, stream = socket.cache("default"), socket.stream("default")
    writes: list[Callable[[], object]] = [
        lambda: cache.put("k", "v"),
        lambda: cache.incr("cut-off"),
        lambda: cache.delete("k"),
        lambda: cache.txn([], []),
        lambda: stream.publish("x"),
        lambda: stream.publish_batch(["x", "y"], ack="per_message"),
    ]
    proxy.hold()
    with ThreadPoolExecutor(len(writes)) as threads:
        running: list[Future[object]] = [threads.submit(write) for write in writes]
        eventually(lambda: unanswered(socket), lambda count: count == len(writes))
        proxy.cut()
        for each in running:
            with pytest.raises(OutcomeUnknown, match="unknown whether the broker executed"):
                each.result(WAIT_S)
    proxy.allow()
    is_back(socket)
    assert cache.incr("cut-off") in (1, 2)


def test_a_read_that_is_cut_off_is_sent_again(socket: Socket, proxy: TcpProxy) -> None:
    cache = socket.cache("default")
    version = cache.put("read-again", "v")
    proxy.hold()
    with ThreadPoolExecutor() as threads:
        one = threads.submit(cache.get, "read-again")
        many = threads.submit(cache.get_many, ["read-again"])
        flushed = threads.submit(socket.flush)
        eventually(lambda: unanswered(socket), lambda count: count == 3)
        cut(proxy, socket)
        proxy.allow()
        found = one.result(WAIT_S)
        assert found is not None
        assert found.version == version
        assert many.result(WAIT_S)["read-again"].value == b"v"
        flushed.result(WAIT_S)


def test_requests_wait_for_the_connection_to_come_back(socket: Socket, proxy: TcpProxy) -> None:
    """What has not left is sent on the next connection, writes too, after the subscriptions."""
    stream, cache = socket.stream("default"), socket.cache("default")
    with stream.subscribe(wait_s=WAIT_S) as events, ThreadPoolExecutor() as threads:
        cut(proxy, socket)
        for n in range(100):
            stream.publish(f"{n}", ack="none")
        putting = threads.submit(cache.put, "waited", "v")
        late = stream.subscribe(wait_s=WAIT_S)
        opening = threads.submit(late.open)
        eventually(lambda: len(socket._core._exchange._wanted), lambda count: count == 2)
        proxy.allow()
        assert putting.result(WAIT_S) > 0
        opening.result(WAIT_S)
        assert [next(events) for _ in range(100)] == [b"%d" % n for n in range(100)]
        assert (events.gaps, late.gaps) == (1, 0)
        assert next(late) == b"0"


def test_what_had_not_left_is_sent_on_the_next_connection(proxy: TcpProxy, client: Client) -> None:
    """Here the connection accepts no more, then it is cut. Nobody knows what of it had arrived."""
    failures: list[PenstockError] = []
    events = client.stream("default").subscribe(wait_s=WAIT_S)
    with events, Client(proxy.url, timeout_s=WAIT_S) as cut_off:
        with cut_off.connect(on_error=failures.append) as socket:
            stream = socket.stream("default")
            proxy.hold()
            sent = 0
            while len(socket._core._exchange._outgoing) < 10:
                stream.publish(b"%d" % sent + b"x" * 64 * KIB, ack="none")
                sent += 1
            stream.publish("last", ack="none")
            cut(proxy, socket)
            proxy.allow()
        received = [next(events) for _ in range(11)]
        while received[-1] != b"last":
            received.append(next(events))
        numbers = [int(event.split(b"x")[0]) for event in received[-11:-1]]
        assert numbers == [*range(sent - 10, sent)]
    assert [type(error) for error in failures] == [OutcomeUnknown]


def test_closing_waits_until_everything_accepted_has_left(proxy: TcpProxy, client: Client) -> None:
    events = client.stream("default").subscribe(wait_s=WAIT_S)
    with events, Client(proxy.url, timeout_s=WAIT_S) as cut_off, ThreadPoolExecutor() as threads:
        socket = cut_off.connect().open()
        cut(proxy, socket)
        for n in range(10):
            socket.stream("default").publish(f"{n}", ack="none")
        closing = threads.submit(socket.close)
        eventually(lambda: "closing" in str(socket._core._end))
        with pytest.raises(Unavailable, match="the socket is closing"):
            socket.stream("default").publish("late", ack="none")
        proxy.allow()
        closing.result(WAIT_S)
        assert [next(events) for _ in range(10)] == [b"%d" % n for n in range(10)]


def test_without_a_connection_requests_fail_in_time(proxy: TcpProxy) -> None:
    with Client(proxy.url, timeout_s=0.3) as client:
        socket = client.connect().open()
        cut(proxy, socket)
        with pytest.raises(Unavailable, match="cache_put was not sent") as failure:
            socket.cache("default").put("not-sent", "v")
        assert not isinstance(failure.value, OutcomeUnknown)
        with pytest.raises(Unavailable, match="could not open the subscription"):
            socket.stream("default").subscribe().open()
        proxy.allow()
        is_back(socket)
        assert socket.cache("default").get("not-sent") is None
        cut(proxy, socket)
        socket.stream("default").publish("accepted", ack="none")
        with pytest.raises(OutcomeUnknown, match="ack none just before may be lost"):
            socket.close()


def test_events_that_may_be_lost_with_ack_none_are_counted(proxy: TcpProxy) -> None:
    failures: list[PenstockError] = []
    with Client(proxy.url, timeout_s=WAIT_S) as client:
        with client.connect(on_error=failures.append) as socket:
            stream = socket.stream("default")
            stream.publish("handled", ack="none")
            socket.flush()
            cut(proxy, socket)
            proxy.allow()
            is_back(socket)
            assert failures == []
            proxy.hold()
            stream.publish_batch(["lost", "lost"], ack="none")
            stream.publish("lost", ack="none")
            eventually(lambda: socket._core._exchange._posts_sent == 3)
            cut(proxy, socket)
            proxy.allow()
            is_back(socket, 2)
        assert [type(error) for error in failures] == [OutcomeUnknown]
        assert "up to 3 events published with ack none may be lost" in failures[0].message


# -- connections -----------------------------------------------------------------------------------


def test_a_socket_waits_for_a_token_that_may_change(tmp_path: Path) -> None:
    """The broker closes the connections of an old token. One that was given as text ends there."""
    file = tmp_path / "token"
    file.write_text("first")
    tokens = ["first"]
    broker = BrokerProcess(None, "--token-file", str(file))
    try:
        broker.start()
        fixed = Client(broker.url, token="first", timeout_s=WAIT_S)
        reading = Client(broker.url, token=lambda: tokens[-1], timeout_s=WAIT_S)
        with fixed, reading:
            ending, staying = fixed.connect().open(), reading.connect().open()
            with ending.stream("default").subscribe() as events:
                rotate(broker, file, "second")
                with pytest.raises(Unauthenticated):
                    next(events)
            with pytest.raises(Unauthenticated):
                ending.stream("default").publish("x", ack="none")
            ending.close()
            # It has tried, and was refused.
            eventually(lambda: "not the broker's token" in staying._core._why_away)
            tokens.append("second")
            assert staying.cache("default").get("k") is None
            staying.close()
    finally:
        broker.close()


def rotate(broker: BrokerProcess, file: Path, token: str) -> None:
    file.write_text(token)
    assert broker.process is not None
    broker.process.send_signal(signal.SIGHUP)
    header = {"Authorization": f"Bearer {token}"}

    def ask() -> int:
        try:
            return broker.client.get("/v1/topics", headers=header).status_code
        except httpx.TransportError:
            # A connection that was refused with the new token is closed when the token changes.
            return 0

    eventually(ask, lambda status: status == 200)


def test_a_silent_broker_is_given_up(proxy: TcpProxy) -> None:
    with Client(proxy.url, timeout_s=0.5) as client:
        socket = client.connect(ping_s=0.1).open()
        stream = socket.stream("default")
        with stream.subscribe(wait_s=WAIT_S) as events:
            proxy.hold()
            eventually(lambda: not socket.is_connected)
            proxy.release()
            is_back(socket)
            eventually(lambda: events.subscription_id)
            stream.publish("after")
            assert (next(events), events.gaps) == (b"after", 1)
        socket.close()


def test_an_idle_connection_stays(proxy: TcpProxy) -> None:
    """The broker answers the pings."""
    with Client(proxy.url, timeout_s=0.5) as client, client.connect(ping_s=0.05) as socket:
        with socket.stream("default").subscribe(wait_s=1.5) as events:
            assert list(events) == []
        assert socket.reconnects == 0


def test_the_wait_before_a_reconnect_grows_and_varies() -> None:
    assert all(FIRST_WAIT_S / 2 <= wait_before(0) <= FIRST_WAIT_S for _ in range(100))
    assert all(MAX_WAIT_S / 2 <= wait_before(n) <= MAX_WAIT_S for n in range(10, 2000))
    assert len({wait_before(5) for _ in range(20)}) > 1
