"""One WebSocket with no socket under it: its turns, its writes, and when it stops reading."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from penstock.engine.opening import open_in_memory
from penstock.engine.scheduler import LoopScheduler
from penstock.model.limits import Limits
from penstock.server.http.admission import Admission
from penstock.server.http.dispatch import RequestDispatch
from penstock.server.routes.table import ROUTES, path_route
from penstock.server.websocket import connection as module
from penstock.server.websocket.connection import WebSocketConnection
from tests.websocket import CLOSE, TEXT, frame

SCOPE = {"tenant_id": "default", "namespace": "default"}
PING = {"type": "ping"}


class Transport(asyncio.Transport):
    """Keeps what is written; pauses its protocol as a full one does, if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self._reads = True
        self.closed = False
        self.protocol: Any = None
        self.high_water = 10**9

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.writes.append(bytes(data))
        if sum(map(len, self.writes)) > self.high_water:
            self.protocol.pause_writing()

    def get_write_buffer_size(self) -> int:
        return sum(map(len, self.writes))

    def drain(self) -> bytes:
        data = b"".join(self.writes)
        self.writes.clear()
        return data

    def pause_reading(self) -> None:
        assert self._reads
        self._reads = False

    def resume_reading(self) -> None:
        assert not self._reads
        self._reads = True

    def is_reading(self) -> bool:
        return self._reads

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True


class SocketInMemory:
    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.engine = open_in_memory(Limits(), LoopScheduler(self.loop))
        self.dispatch = RequestDispatch(
            self.engine,
            Admission(loopback_only=True),
            ROUTES,
            path_route,
            request_timeout_ms=1000,
            idle_timeout_ms=1000,
        )
        self.connections: set[Any] = set()
        self.transport = Transport()
        self.socket = WebSocketConnection(
            self.dispatch, self.connections, self.transport, is_binary=False
        )
        self.socket.start(b"")

    def send(self, *messages: Any) -> None:
        self.socket.data_received(
            b"".join(frame(TEXT, json.dumps(each).encode()) for each in messages)
        )

    def publish(self, count: int, payload: str = "eA==") -> None:
        """By somebody else."""
        with_it = WebSocketConnection(self.dispatch, self.connections, Transport(), is_binary=False)
        with_it.start(b"")
        batch = {"type": "publish_batch", "stream": "default", "payloads": [payload] * count}
        with_it.data_received(frame(TEXT, json.dumps(batch | SCOPE).encode()))

    def subscriptions(self) -> Any:
        found: list[Any] = []
        self.engine.streams.subscriptions(("default", "default", "default"), found.append)
        return found[0]

    async def turns(self, count: int = 1) -> None:
        for _ in range(count):
            await asyncio.sleep(0)


def on_a_loop(test: Callable[[SocketInMemory], Any]) -> None:
    async def run() -> None:
        connection = SocketInMemory()
        try:
            await test(connection)
        finally:
            connection.socket.connection_lost(None)
            connection.engine.close()

    asyncio.run(run())


def test_a_flood_of_small_messages_is_handled_a_bounded_number_a_turn() -> None:
    async def test(connection: SocketInMemory) -> None:
        connection.send(*[PING | {"request_id": "x" * 100}] * 1000)
        assert connection.dispatch.socket_messages == module.TURN_OPERATIONS
        assert not connection.transport.is_reading()
        await connection.turns()
        assert connection.dispatch.socket_messages == 2 * module.TURN_OPERATIONS
        await connection.turns(4)
        assert connection.dispatch.socket_messages == 1000
        assert connection.transport.is_reading()
        assert connection.transport.drain().count(b'"ok"') == 1000

    on_a_loop(test)


def test_operations_of_arrays_count_as_messages_do() -> None:
    async def test(connection: SocketInMemory) -> None:
        connection.send(*[[PING] * module.TURN_OPERATIONS] * 3)
        assert connection.dispatch.socket_messages == 1
        await connection.turns(3)
        assert connection.dispatch.socket_messages == 3

    on_a_loop(test)


def test_what_leaves_in_one_turn_is_one_write() -> None:
    async def test(connection: SocketInMemory) -> None:
        subscribe = {"type": "subscribe", "stream": "default", **SCOPE}
        connection.send(*[subscribe] * 10, *[PING] * 10)
        assert len(connection.transport.writes) == 1
        connection.transport.drain()
        connection.publish(5)
        await connection.turns(3)
        assert connection.transport.writes[0].count(b'"event_batch"') == 10
        assert len(connection.transport.writes) == 1

    on_a_loop(test)


def test_nothing_is_taken_or_read_while_the_peer_takes_nothing() -> None:
    async def test(connection: SocketInMemory) -> None:
        transport, socket = connection.transport, connection.socket
        connection.send({"type": "subscribe", "stream": "default", **SCOPE})
        transport.drain()
        socket.pause_writing()
        connection.publish(100)
        connection.send(PING)
        await connection.turns(5)
        assert not transport.writes
        # A little is read ahead, or nobody would notice that the peer has ended its stream.
        assert transport.is_reading()
        connection.send(PING | {"request_id": "x" * 100}, *[PING] * 3000)
        assert not transport.is_reading()
        socket.resume_writing()
        await connection.turns(2)
        data = transport.drain()
        assert data.count(b'"eA=="') == 100
        await connection.turns(20)
        assert (data + transport.drain()).count(b'"ok"') == 3002
        assert transport.is_reading()

    on_a_loop(test)


def test_large_answers_are_written_before_more_is_asked() -> None:
    async def test(connection: SocketInMemory) -> None:
        put = {"type": "cache_put", "cache": "default", "key": "k", "value": "A" * 40_000}
        connection.send({**put, **SCOPE})
        connection.transport.drain()
        connection.transport.high_water = 100_000
        get = {"type": "cache_get", "cache": "default", "key": "k", **SCOPE}
        connection.send(*[get] * 100)
        assert connection.transport.drain().count(b'"cache_value"') < 10

    on_a_loop(test)


def test_events_are_taken_a_bounded_frame_at_a_time() -> None:
    """However many wait: what is taken and not written yet is memory."""

    async def test(connection: SocketInMemory) -> None:
        transport = connection.transport
        connection.send({"type": "subscribe", "stream": "default", **SCOPE})
        connection.publish(10, "A" * 4000)
        await connection.turns(3)
        assert len(transport.drain()) > 40_000
        transport.high_water = 150_000
        connection.socket.pause_writing()
        for _ in range(10):
            connection.publish(100, "A" * 4000)
            await connection.turns(5)
        connection.socket.resume_writing()
        await connection.turns(5)
        assert 150_000 < len(transport.drain()) < 300_000

    on_a_loop(test)


def test_no_more_is_read_while_requests_enough_are_unanswered() -> None:
    async def test(connection: SocketInMemory) -> None:
        connection.engine.streams.hold_fanout()
        depth = connection.engine.limits.pub_queue_depth
        publish = {"type": "publish", "stream": "default", "payload": "", **SCOPE}
        connection.send(*[publish] * 4000)
        await connection.turns(50)
        assert connection.dispatch.socket_messages == depth + module.MAX_UNANSWERED
        assert not connection.transport.is_reading()
        connection.engine.streams.release_fanout()
        await connection.turns(100)
        assert connection.transport.drain().count(b'"publish_ok"') == 4000
        assert connection.transport.is_reading()

    on_a_loop(test)


def test_nor_while_what_is_unanswered_is_large() -> None:
    async def test(connection: SocketInMemory) -> None:
        connection.engine.streams.hold_fanout()
        publish = {"type": "publish", "stream": "default", **SCOPE}
        connection.send({**publish, "type": "publish_batch", "payloads": [""] * 1024})
        connection.send(*[{**publish, "payload": "A" * 400_000}] * 20)
        await connection.turns(50)
        assert connection.dispatch.socket_messages == 1 + 3
        connection.engine.streams.release_fanout()
        await connection.turns(100)
        assert connection.transport.drain().count(b'"publish_ok"') == 21

    on_a_loop(test)


@pytest.mark.parametrize("is_read", [True, False])
def test_large_answers_that_were_held_become_bytes_only_when_there_is_room(is_read: bool) -> None:
    async def test(connection: SocketInMemory) -> None:
        transport = connection.transport
        put = {"type": "cache_put", "cache": "default", "key": "k", "value": "A" * 1_000_000}
        full = {"type": "publish_batch", "stream": "default", "payloads": [""] * 1024}
        connection.engine.streams.hold_fanout()
        connection.send({**put, **SCOPE}, {**full, **SCOPE})
        publish = {"type": "publish", "stream": "default", "payload": "", **SCOPE}
        get = {"type": "cache_get", "cache": "default", "key": "k", **SCOPE}
        connection.send(*[[publish, get]] * 50)
        await connection.turns(5)
        transport.drain()
        if is_read:
            connection.engine.streams.release_fanout()
            await connection.turns(200)
            assert transport.drain().count(b'"cache_value"') == 50
            return
        transport.high_water = 100_000
        connection.engine.streams.release_fanout()
        await connection.turns(20)
        count = 0
        while count < 50:
            data = transport.drain()
            assert 0 < len(data) < 3_000_000
            count += data.count(b'"cache_value"')
            connection.socket.resume_writing()
            await connection.turns(5)

    on_a_loop(test)


@pytest.mark.parametrize("data", [frame(3), frame(CLOSE), frame(TEXT, b"", size=2**40)])
def test_the_channels_are_closed_as_soon_as_the_end_begins(data: bytes) -> None:
    """Even while an answer is still due before it can be said."""

    async def test(connection: SocketInMemory) -> None:
        connection.engine.streams.hold_fanout()
        connection.send({"type": "subscribe", "stream": "default", **SCOPE})
        full = {"type": "publish_batch", "stream": "default", "payloads": [""] * 1024, **SCOPE}
        connection.send(full, full)
        connection.transport.drain()
        connection.socket.data_received(data)
        assert connection.subscriptions() == []
        assert not connection.transport.drain()
        connection.engine.streams.release_fanout()
        await connection.turns(20)
        written = connection.transport.drain()
        assert written.index(b'"publish_ok"') < written.rindex(b"\x88")

    on_a_loop(test)


def test_a_connection_that_is_lost_leaves_nothing_behind() -> None:
    async def test(connection: SocketInMemory) -> None:
        connection.send({"type": "subscribe", "stream": "default", **SCOPE})
        connection.socket.data_received(frame(TEXT, b"x" * 10_000)[:-1])
        assert connection.dispatch.body_bytes > 9000
        assert connection.connections == {connection.socket}
        assert connection.dispatch.sockets == 1
        connection.socket.connection_lost(ConnectionResetError())
        assert (connection.dispatch.body_bytes, connection.dispatch.sockets) == (0, 0)
        assert not connection.connections
        assert connection.subscriptions() == []
        connection.dispatch.sockets = 1

    on_a_loop(test)


@pytest.mark.parametrize("frames", [[frame(CLOSE, b"\x03\xe8")], [frame(3), frame(CLOSE)]])
def test_after_the_end_was_announced_nothing_is_understood(frames: list[bytes]) -> None:
    async def test(connection: SocketInMemory) -> None:
        for each in frames:
            connection.socket.data_received(each)
        connection.transport.drain()
        connection.send(PING)
        await connection.turns(3)
        assert connection.transport.drain() == b""
        assert connection.dispatch.socket_messages == 0

    on_a_loop(test)


# -- time ------------------------------------------------------------------------------------------


class ManualLoop(asyncio.SelectorEventLoop):
    """One whose time passes when a test says so."""

    now = 1000.0

    def time(self) -> float:
        return self.now


def by_hand(test: Callable[[SocketInMemory, ManualLoop], Any]) -> None:
    async def run() -> None:
        connection, loop = SocketInMemory(), asyncio.get_running_loop()
        assert isinstance(loop, ManualLoop)
        try:
            await test(connection, loop)
        finally:
            connection.socket.connection_lost(None)
            connection.engine.close()

    with asyncio.Runner(loop_factory=ManualLoop) as runner:
        runner.run(run())


async def pass_s(connection: SocketInMemory, loop: ManualLoop, seconds: float) -> bytes:
    """What is written meanwhile."""
    loop.now += seconds
    await connection.turns(3)
    return connection.transport.drain()


WHOLE = frame(TEXT, b'{"type": "ping"}')


@pytest.mark.parametrize(
    "half", [WHOLE[:1], WHOLE[:-1], frame(TEXT, b"", fin=False), frame(TEXT, b"[", fin=False)]
)
def test_a_message_that_has_begun_has_the_request_timeout_to_be_whole(half: bytes) -> None:
    """Not less, not more; an error says so before the close."""

    async def test(connection: SocketInMemory, loop: ManualLoop) -> None:
        loop.now += 500
        connection.socket.data_received(WHOLE + half)
        assert b'"ok"' in await pass_s(connection, loop, 0.999)
        written = await pass_s(connection, loop, 0.002)
        assert b"was not completed in time" in written
        assert written.index(b'"error"') < written.index(b"\x88")
        assert b"\x03\xf0" in written

    by_hand(test)


def test_what_comes_of_it_meanwhile_gives_it_time_by_its_size_alone() -> None:
    async def test(connection: SocketInMemory, loop: ManualLoop) -> None:
        large = frame(TEXT, b"x" * 100_000)
        connection.socket.data_received(large[: 32 * 1024 + 14])
        for _ in range(29):
            connection.socket.data_received(b"x")
            assert await pass_s(connection, loop, 0.1) == b""
        assert b"was not completed in time" in await pass_s(connection, loop, 0.2)

    by_hand(test)


def test_a_message_is_not_timed_while_the_broker_does_not_read_on() -> None:
    async def test(connection: SocketInMemory, loop: ManualLoop) -> None:
        connection.socket.data_received(WHOLE[:-1])
        connection.socket.pause_writing()
        assert await pass_s(connection, loop, 100) == b""
        connection.socket.resume_writing()
        connection.socket.data_received(WHOLE[-1:])
        assert b'"ok"' in await pass_s(connection, loop, 0.1)

    by_hand(test)


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_silent_peer_is_given_up_only_if_its_machine_does_not_answer(
    is_gone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """felix-3, 104"""
    monkeypatch.setattr(module, "is_unreachable", lambda transport: is_gone)

    async def test(connection: SocketInMemory, loop: ManualLoop) -> None:
        connection.send({"type": "subscribe", "stream": "default", **SCOPE})
        connection.transport.drain()
        for number in range(1, 20):
            written = await pass_s(connection, loop, connection.dispatch.ws_ping_s)
            assert connection.transport.closed == (is_gone and number > 1)
            if connection.transport.closed:
                return
            assert written == b"\x89\x00"
        connection.publish(1)
        assert b'"event"' in await pass_s(connection, loop, 0.1)

    by_hand(test)
