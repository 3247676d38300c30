"""Durable streams over the SDK's WebSocket: subscriptions with a start or a name, and producers.

A proxy cuts the connection, or the broker is killed, while events flow.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.client import AsyncClient, Client, PositionFile
from penstock.client.socket_channels import MAX_UNREAD_BYTES, MAX_UNREAD_EVENTS
from penstock.client.socket_event_channels import PAUSE_EVENTS
from penstock.client.sync_events import StreamEvent
from penstock.client.sync_socket import Socket, SocketStreamHandle
from penstock.model.errors import (
    FailedPrecondition,
    NotFound,
    NotYet,
    OutcomeUnknown,
    OutOfRange,
    Unavailable,
)
from penstock.model.limits import KIB
from tests.broker_process import BrokerProcess, eventually
from tests.tcp_proxy import TcpProxy, tcp_proxy

WAIT_S = 30.0
"""So that what does not come fails a test instead of holding it up."""

SMALL = {"PENSTOCK_SEGMENT_BYTES": str(8 * 2**20)}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    process = BrokerProcess(tmp_path_factory.mktemp("broker") / "data", env=SMALL)
    try:
        process.start()
        process.keep_port()
        yield process
    finally:
        process.close()


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


@pytest.fixture
def stream(client: Client, socket: Socket, request: pytest.FixtureRequest) -> SocketStreamHandle:
    """A durable stream of the test's own."""
    name = f"s{abs(hash(request.node.name))}"
    client.create_stream("default", "default", name, delivery="at_least_once")
    return socket.stream(name)


def payloads(events: Iterator[StreamEvent]) -> list[bytes]:
    return [event.payload for event in events]


def cut(proxy: TcpProxy, socket: Socket) -> None:
    proxy.cut()
    eventually(lambda: not socket.is_connected)


def cut_and_allow(proxy: TcpProxy, socket: Socket) -> None:
    before = socket.reconnects
    cut(proxy, socket)
    proxy.allow()
    eventually(lambda: socket.reconnects, lambda count: count > before, WAIT_S)


def is_back(socket: Socket, times: int, stop: threading.Event) -> bool:
    return socket.reconnects >= times or stop.is_set()


@contextmanager
def cuts_at_random(proxy: TcpProxy, socket: Socket, seed: int) -> Iterator[None]:
    """Cuts the connection a few times while the block runs. Not more often: the wait before a
    reconnect doubles each time."""
    rng, stop = random.Random(seed), threading.Event()

    def cut_on() -> None:
        for cuts in range(6):
            back = partial(is_back, socket, cuts, stop)
            eventually(back, timeout_s=WAIT_S)
            if stop.wait(rng.uniform(0.02, 0.3)):
                break
            proxy.cut()
            proxy.allow()

    cutter = threading.Thread(target=cut_on)
    cutter.start()
    try:
        yield
    finally:
        stop.set()
        cutter.join()


def unanswered(socket: Socket) -> int:
    return len(socket._core._exchange._sent)


# -- the same as over HTTP -------------------------------------------------------------------------


def test_events_come_until_they_are_acked(
    stream: SocketStreamHandle, socket: Socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """felix-110, 119, 121: and nothing of it goes over HTTP."""

    def refuse(_: object) -> None:
        raise AssertionError("this went over HTTP")

    monkeypatch.setattr(socket.client, "send", refuse)
    stream.publish_batch(["a", "b", "c"])
    with stream.subscribe(name="n", start="earliest", lease_ms=60_000) as events:
        a, b, c = next(events), next(events), next(events)
        assert [each.payload for each in (a, b, c)] == [b"a", b"b", b"c"]
        assert (a.offset, a.attempt, a.last_error) == (0, 1, "")
        a.ack()
        a.ack()
        b.extend(90_000)
        b.nack("no", delay_ms=0)
        again = next(events)
        assert (again.offset, again.attempt, again.last_error) == (1, 2, "no")
        with pytest.raises(FailedPrecondition):
            b.nack()
        again.ack()
        c.ack()
    with stream.subscribe(name="n", wait_s=0.5) as events:
        assert payloads(events) == []


def test_a_start_is_an_offset_or_a_time(stream: SocketStreamHandle) -> None:
    stream.publish_batch(["a", "b"])
    assert payloads(stream.subscribe(start=1, wait_s=0.5)) == [b"b"]
    assert payloads(stream.subscribe(start="latest", wait_s=0.5)) == []
    before = datetime.now(UTC) - timedelta(hours=1)
    assert payloads(stream.subscribe(start=before, wait_s=0.5)) == [b"a", b"b"]
    with stream.events(wait_s=0.5) as events:
        assert [(each.offset, each.payload) for each in events] == [(0, b"a"), (1, b"b")]
        assert (events.timed_out, events.gaps, events.dropped) == (True, 0, 0)
    with pytest.raises(NotYet, match="ends at offset 2"), stream.subscribe(start=3):
        pass
    with pytest.raises(FailedPrecondition, match="named"), socket_of_kept(stream):
        pass


def socket_of_kept(stream: SocketStreamHandle) -> Any:
    """A named subscription of a stream that has none."""
    name = f"{stream.path[2]}-kept"
    stream.socket.client.create_stream("default", "default", name, durable=True)
    return stream.socket.stream(name).subscribe(name="n")


def test_an_ack_after_the_end_of_its_subscription_goes_over_http(
    stream: SocketStreamHandle, client: Client
) -> None:
    stream.publish_batch(["a", "b"])
    with stream.subscribe(name="n", start="earliest", lease_ms=60_000) as events:
        first, second = next(events), next(events)
    first.ack()
    stream.socket.close()
    second.ack()
    over_http = client.stream(stream.path[2])
    with over_http.subscribe(name="n", wait_s=0.5) as events:
        assert payloads(events) == []


def test_repeats_are_dropped_on_receipt(stream: SocketStreamHandle, tmp_path: Path) -> None:
    """felix-124"""
    stream.publish_batch(["a", "b", "c"])
    handled = PositionFile(tmp_path / "position")
    handled.add(1)
    with stream.subscribe(name="n", start="earliest", once=handled, wait_s=1) as events:
        seen = []
        for event in events:
            seen.append(event.payload)
            event.ack()
    assert seen == [b"a", b"c"]
    handled.close()
    assert PositionFile(tmp_path / "position").ranges == [(0, 3)]
    with stream.subscribe(name="n", wait_s=0.5) as events:
        assert payloads(events) == []


def test_the_async_socket_has_the_same_and_leaves_no_task(broker: BrokerProcess) -> None:
    async def run() -> None:
        async with AsyncClient(broker.url) as client:
            await client.create_stream("default", "default", "async", delivery="exactly_once")
            async with client.connect() as socket:
                stream = socket.stream("async")
                producer = stream.producer("p")
                assert await producer.publish("a") == 0
                assert await producer.publish_batch(["b", "c"]) == 1
                async with stream.subscribe(name="n", start="earliest") as events:
                    first = await anext(events)
                    assert first.payload == b"a"
                    await first.ack()
                async with stream.subscribe(start=0) as events:
                    assert [(await anext(events)).offset for _ in range(3)] == [0, 1, 2]
                    waiting = asyncio.create_task(anext(events))
                    await asyncio.sleep(0)
                    waiting.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await waiting
                    assert await producer.publish("d") == 3
                    assert (await anext(events)).payload == b"d"
            assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


# -- a connection that breaks --------------------------------------------------------------------


@pytest.mark.parametrize("how", ["plain", "start"])
def test_a_subscription_goes_on_behind_its_last_event(
    how: str, stream: SocketStreamHandle, socket: Socket, proxy: TcpProxy, client: Client
) -> None:
    """felix-110: also one that was cut before its first event, which began at the end."""
    over_http = client.stream(stream.path[2])
    stream.publish("before")

    def read(count: int) -> list[bytes]:
        return [getattr(each := next(events), "payload", each) for _ in range(count)]

    options: dict[str, Any] = {"start": "latest"} if how == "start" else {}
    with stream.subscribe(**options, wait_s=WAIT_S) as events:
        cut(proxy, socket)
        over_http.publish("a")
        proxy.allow()
        assert read(1) == [b"a"]
        over_http.publish("b")
        assert read(1) == [b"b"]
        cut(proxy, socket)
        over_http.publish_batch(["c", "d"])
        proxy.allow()
        over_http.publish("e")
        assert read(3) == [b"c", b"d", b"e"]
        assert (events.gaps, events.dropped) == (0, 0)


def test_an_ephemeral_stream_still_reports_a_gap(
    socket: Socket, proxy: TcpProxy, client: Client
) -> None:
    client.create_stream("default", "default", "ephemeral")
    with socket.stream("ephemeral").subscribe(wait_s=WAIT_S) as events:
        cut_and_allow(proxy, socket)
        eventually(lambda: events.subscription_id, timeout_s=WAIT_S)
        client.stream("ephemeral").publish("after")
        assert (next(events), events.gaps) == (b"after", 1)


@pytest.mark.parametrize("how", ["plain", "start"])
def test_retention_that_passes_a_subscription_ends_it(
    how: str, stream: SocketStreamHandle, socket: Socket, proxy: TcpProxy, client: Client
) -> None:
    """felix-126: with the error of the position, not with a gap."""
    over_http = client.stream(stream.path[2])
    options: dict[str, Any] = {"start": "earliest"} if how == "start" else {}
    with stream.subscribe(**options, wait_s=WAIT_S) as events:
        stream.publish("a")
        next(events)
        cut(proxy, socket)
        over_http.publish_batch(["x" * 1000] * 50)
        client.change_stream(*stream.path, retention_bytes=1000)

        def first_kept() -> object:
            try:
                with over_http.subscribe(start=1):
                    return None
            except OutOfRange as error:
                return error

        eventually(first_kept, timeout_s=WAIT_S)
        proxy.allow()
        with pytest.raises(OutOfRange, match="no longer kept"):
            next(events)
    assert socket.is_connected


def test_a_start_gives_every_event_once_while_connections_break(
    stream: SocketStreamHandle, socket: Socket, proxy: TcpProxy, client: Client
) -> None:
    over_http = client.stream(stream.path[2])
    count = 3000
    with stream.subscribe(start="earliest", wait_s=WAIT_S) as events, ThreadPoolExecutor() as pool:

        def publish() -> None:
            for n in range(0, count, 5):
                over_http.publish_batch([f"{each}" for each in range(n, n + 5)])

        with cuts_at_random(proxy, socket, seed=1):
            publishing = pool.submit(publish)
            found = [next(events) for _ in range(count)]
            publishing.result(WAIT_S)
        assert [each.offset for each in found] == list(range(count))
        assert [each.payload for each in found] == [b"%d" % n for n in range(count)]
        assert socket.reconnects > 0
        assert events.gaps == 0


@pytest.mark.parametrize("is_once", [False, True], ids=["named", "once"])
def test_a_name_gets_every_event_while_connections_break(
    is_once: bool,
    stream: SocketStreamHandle,
    socket: Socket,
    proxy: TcpProxy,
    client: Client,
    tmp_path: Path,
) -> None:
    """felix-118, 124: at least once, and with `once` exactly once. An ack that has returned stays:
    nothing is left for the next subscriber."""
    over_http = client.stream(stream.path[2])
    count = 300
    handled = PositionFile(tmp_path / "position") if is_once else None
    seen: list[int] = []
    with (
        stream.subscribe(
            name="n", start="earliest", lease_ms=1000, once=handled, wait_s=WAIT_S
        ) as events,
        ThreadPoolExecutor() as pool,
    ):
        with cuts_at_random(proxy, socket, seed=2):
            publishing = pool.submit(lambda: [over_http.publish(f"{n}") for n in range(count)])
            while len(set(seen)) < count:
                event = next(events)
                seen.append(event.offset)
                try:
                    event.ack()
                except (FailedPrecondition, OutcomeUnknown):
                    assert not is_once or handled is not None
            publishing.result(WAIT_S)
        assert socket.reconnects > 0
    assert set(seen) == set(range(count))
    if is_once:
        assert sorted(seen) == list(range(count))
    with over_http.subscribe(name="n", once=handled, wait_s=3) as rest:
        left = [event.offset for event in rest]
    assert not is_once or left == []


def test_everything_goes_on_when_the_broker_was_killed(
    stream: SocketStreamHandle, socket: Socket, broker: BrokerProcess
) -> None:
    """felix-118, 122: subscriptions, acks and a producer."""
    producer = stream.producer()
    with (
        stream.subscribe(start="earliest", wait_s=WAIT_S) as replay,
        stream.subscribe(name="n", start="earliest", lease_ms=60_000, wait_s=WAIT_S) as named,
        stream.subscribe(wait_s=WAIT_S) as plain,
    ):
        assert producer.publish("a") == 0
        assert (next(replay).payload, next(named).payload, next(plain)) == (b"a", b"a", b"a")
        broker.restart(kill=True)
        assert producer.publish("b") == 1
        # A broker that starts takes back what was not acked.
        again = [next(named), next(named)]
        assert sorted((each.payload, each.attempt) for each in again) == [(b"a", 2), (b"b", 1)]
        for each in again:
            each.ack()
        assert (next(replay).payload, next(plain)) == (b"b", b"b")
        assert (replay.gaps, plain.gaps) == (0, 0)


# -- acks whose answer is lost ---------------------------------------------------------------------


def held_back(
    proxy: TcpProxy, socket: Socket, pool: ThreadPoolExecutor, act: Callable[[], None]
) -> Future[None]:
    """Lets a request leave and not arrive, and cuts the connection."""
    proxy.hold()
    running = pool.submit(act)
    eventually(lambda: unanswered(socket), lambda count: count == 1)
    cut(proxy, socket)
    return running


def test_an_ack_that_was_cut_off_is_sent_again(
    stream: SocketStreamHandle, socket: Socket, proxy: TcpProxy, client: Client
) -> None:
    """The new connection has the same owner, so that acks of events from before it count."""
    stream.publish_batch(["a", "b"])
    with (
        ThreadPoolExecutor() as pool,
        stream.subscribe(name="n", start="earliest", lease_ms=60_000, wait_s=WAIT_S) as events,
    ):
        a, b = next(events), next(events)
        acking = held_back(proxy, socket, pool, a.ack)
        late = pool.submit(b.ack)
        eventually(lambda: len(socket._core._exchange._settling), lambda count: count == 1)
        proxy.allow()
        acking.result(WAIT_S)
        late.result(WAIT_S)
    with client.stream(stream.path[2]).subscribe(name="n", wait_s=0.5) as rest:
        assert payloads(rest) == []


def test_a_nack_that_was_cut_off_says_that_its_outcome_is_unknown(
    stream: SocketStreamHandle, socket: Socket, proxy: TcpProxy
) -> None:
    stream.publish("a")
    with (
        ThreadPoolExecutor() as pool,
        stream.subscribe(name="n", start="earliest", lease_ms=60_000, wait_s=WAIT_S) as events,
    ):
        event = next(events)
        nacking = held_back(proxy, socket, pool, event.nack)
        with pytest.raises(OutcomeUnknown, match="event_nack"):
            nacking.result(WAIT_S)
        proxy.allow()
        event.ack()


def test_an_ack_without_a_connection_fails_in_time(broker: BrokerProcess, proxy: TcpProxy) -> None:
    with Client(proxy.url, timeout_s=0.5) as client, client.connect() as socket:
        client.create_stream("default", "default", "in-time", delivery="at_least_once")
        stream = socket.stream("in-time")
        stream.publish("a")
        with stream.subscribe(name="n", start="earliest", lease_ms=60_000) as events:
            event = next(events)
            cut(proxy, socket)
            with pytest.raises(Unavailable, match="event_ack was not sent") as failure:
                event.ack()
            assert not isinstance(failure.value, OutcomeUnknown)
            proxy.allow()
            eventually(lambda: socket.is_connected, timeout_s=WAIT_S)
            event.ack()


# -- other ends ------------------------------------------------------------------------------------


def test_a_name_that_is_deleted_ends_its_subscriptions(
    stream: SocketStreamHandle, client: Client
) -> None:
    """It is not made again by those who had joined it."""
    with stream.subscribe(name="n", wait_s=WAIT_S) as events:
        client.stream(stream.path[2]).delete_subscription("n")
        with pytest.raises(NotFound, match="deleted"):
            next(events)
    with client.stream(stream.path[2]).subscribe(name="m", wait_s=WAIT_S) as others:
        client.stream(stream.path[2]).delete_subscription("m")
        with pytest.raises(NotFound, match="deleted"):
            next(others)
    path = f"/v1/tenants/default/namespaces/default/streams/{stream.path[2]}/subscriptions"
    found = httpx.get(client.url + path, trust_env=False)
    assert found.json()["named"] == []


def test_a_subscription_that_does_not_resume_ends(
    stream: SocketStreamHandle, socket: Socket, proxy: TcpProxy
) -> None:
    stream.publish("a")
    with stream.subscribe(start=0, resume=False, wait_s=WAIT_S) as events:
        eventually(lambda: events._channel.unread(), lambda count: count == 1)
        cut(proxy, socket)
        assert next(events).payload == b"a"
        with pytest.raises(Unavailable):
            next(events)


# -- producers -------------------------------------------------------------------------------------


def test_a_producer_stores_each_event_once_while_connections_break(
    socket: Socket, proxy: TcpProxy, client: Client
) -> None:
    """felix-122: in order, and every publish returns the offset that it was stored at."""
    client.create_stream("default", "default", "cut-producer", delivery="exactly_once")
    producer = socket.stream("cut-producer").producer()
    count = 400
    with cuts_at_random(proxy, socket, seed=3):
        offsets = [producer.publish(f"{n}") for n in range(count)]
    assert offsets == list(range(count))
    assert socket.reconnects > 0
    with client.stream("cut-producer").subscribe(start=0, wait_s=1) as events:
        assert payloads(events) == [b"%d" % n for n in range(count)]


def test_a_publish_whose_answer_was_lost_is_repeated_with_its_number(
    socket: Socket, proxy: TcpProxy, client: Client
) -> None:
    client.create_stream("default", "default", "lost-answer", delivery="exactly_once")
    producer = socket.stream("lost-answer").producer()
    with ThreadPoolExecutor() as pool:
        proxy.hold_answers()
        publishing = pool.submit(producer.publish, "a")
        over_http = client.stream("lost-answer")
        with over_http.subscribe(start=0, wait_s=WAIT_S) as events:
            assert next(events).payload == b"a"
        cut(proxy, socket)
        proxy.allow()
        assert publishing.result(WAIT_S) == 0
    assert producer.publish("b") == 1
    with over_http.subscribe(start=0, wait_s=0.5) as events:
        assert payloads(events) == [b"a", b"b"]


def test_a_producer_of_a_closed_socket_does_not_try_again(client: Client) -> None:
    socket = client.connect().open()
    producer = socket.stream("default").producer(retry_s=600)
    socket.close()
    with pytest.raises(Unavailable, match=r"closed|not open"):
        producer.publish("a")


# -- slow readers ----------------------------------------------------------------------------------


def test_a_slow_reader_loses_nothing_and_keeps_a_bounded_number(
    stream: SocketStreamHandle, client: Client
) -> None:
    """felix-43: the broker is asked to wait, and other subscriptions go on."""
    count = 40_000
    over_http = client.stream(stream.path[2])
    for first in range(0, count, 10_000):
        over_http.publish_batch([f"{n}" for n in range(first, first + 10_000)])
    with stream.subscribe(start="earliest", wait_s=WAIT_S) as slow:
        channel = slow._channel
        eventually(lambda: channel.is_paused, timeout_s=WAIT_S)
        stream.publish("other")
        with stream.subscribe(start=count, wait_s=WAIT_S) as quick:
            assert next(quick).payload == b"other"
        assert PAUSE_EVENTS <= channel.unread() <= MAX_UNREAD_EVENTS
        found = [next(slow) for _ in range(count + 1)]
        assert [each.offset for each in found] == list(range(count + 1))
        assert slow.dropped == 0


def test_a_slow_reader_of_a_name_keeps_a_bounded_number_of_bytes(
    stream: SocketStreamHandle, client: Client
) -> None:
    """Acks go on meanwhile; what the broker holds back has not been delivered to anybody."""
    count, size = 200, 64 * KIB
    for _ in range(count // 20):
        client.stream(stream.path[2]).publish_batch(["x" * size] * 20)
    with stream.subscribe(name="n", start="earliest", lease_ms=600_000, wait_s=WAIT_S) as slow:
        first = next(slow)
        channel = slow._channel
        eventually(lambda: channel.is_paused, timeout_s=WAIT_S)
        first.ack()
        assert channel.unread() * size <= MAX_UNREAD_BYTES
        rest = [next(slow) for _ in range(count - 1)]
        assert [each.offset for each in rest] == list(range(1, count))
        assert {each.attempt for each in rest} == {1}
        assert slow.dropped == 0
