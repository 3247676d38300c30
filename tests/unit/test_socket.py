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
from penstock.server.felix import socket as module
from penstock.server.felix.socket import Socket
from penstock.server.gate import Gate
from penstock.server.hub import Hub
from penstock.server.routes import ROUTES, path_route
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


class Connection:
    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.engine = open_in_memory(Limits(), LoopScheduler(self.loop))
        self.hub = Hub(
            self.engine,
            Gate(loopback_only=True),
            ROUTES,
            path_route,
            request_timeout_ms=1000,
            idle_timeout_ms=1000,
        )
        self.connections: set[Any] = set()
        self.transport = Transport()
        self.socket = Socket(self.hub, self.connections, is_binary=False)
        self.socket.take_over(self.transport, b"", is_write_paused=False)

    def send(self, *messages: Any) -> None:
        self.socket.data_received(
            b"".join(frame(TEXT, json.dumps(each).encode()) for each in messages)
        )

    def publish(self, count: int, payload: str = "eA==") -> None:
        """By somebody else."""
        with_it = Socket(self.hub, self.connections, is_binary=False)
        with_it.take_over(Transport(), b"", is_write_paused=False)
        batch = {"type": "publish_batch", "stream": "default", "payloads": [payload] * count}
        with_it.data_received(frame(TEXT, json.dumps(batch | SCOPE).encode()))

    def subscriptions(self) -> Any:
        found: list[Any] = []
        self.engine.streams.subscriptions(("default", "default", "default"), found.append)
        return found[0]

    async def turns(self, count: int = 1) -> None:
        for _ in range(count):
            await asyncio.sleep(0)


def on_a_loop(test: Callable[[Connection], Any]) -> None:
    async def run() -> None:
        connection = Connection()
        try:
            await test(connection)
        finally:
            connection.socket.connection_lost(None)
            connection.engine.close()

    asyncio.run(run())


def test_a_flood_of_small_messages_is_handled_a_bounded_number_a_turn() -> None:
    async def test(connection: Connection) -> None:
        connection.send(*[PING | {"request_id": "x" * 100}] * 1000)
        assert connection.hub.socket_messages == module.TURN_OPERATIONS
        assert not connection.transport.is_reading()
        await connection.turns()
        assert connection.hub.socket_messages == 2 * module.TURN_OPERATIONS
        await connection.turns(4)
        assert connection.hub.socket_messages == 1000
        assert connection.transport.is_reading()
        assert connection.transport.drain().count(b'"ok"') == 1000

    on_a_loop(test)


def test_operations_of_arrays_count_as_messages_do() -> None:
    async def test(connection: Connection) -> None:
        connection.send(*[[PING] * module.TURN_OPERATIONS] * 3)
        assert connection.hub.socket_messages == 1
        await connection.turns(3)
        assert connection.hub.socket_messages == 3

    on_a_loop(test)


def test_what_leaves_in_one_turn_is_one_write() -> None:
    async def test(connection: Connection) -> None:
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
    async def test(connection: Connection) -> None:
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
    async def test(connection: Connection) -> None:
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

    async def test(connection: Connection) -> None:
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
    async def test(connection: Connection) -> None:
        connection.engine.streams.hold_fanout()
        depth = connection.engine.limits.pub_queue_depth
        publish = {"type": "publish", "stream": "default", "payload": "", **SCOPE}
        connection.send(*[publish] * 4000)
        await connection.turns(50)
        assert connection.hub.socket_messages == depth + module.MAX_UNANSWERED
        assert not connection.transport.is_reading()
        connection.engine.streams.release_fanout()
        await connection.turns(100)
        assert connection.transport.drain().count(b'"publish_ok"') == 4000
        assert connection.transport.is_reading()

    on_a_loop(test)


def test_nor_while_what_is_unanswered_is_large() -> None:
    async def test(connection: Connection) -> None:
        connection.engine.streams.hold_fanout()
        publish = {"type": "publish", "stream": "default", **SCOPE}
        connection.send({**publish, "type": "publish_batch", "payloads": [""] * 1024})
        connection.send(*[{**publish, "payload": "A" * 400_000}] * 20)
        await connection.turns(50)
        assert connection.hub.socket_messages == 1 + 3
        connection.engine.streams.release_fanout()
        await connection.turns(100)
        assert connection.transport.drain().count(b'"publish_ok"') == 21

    on_a_loop(test)


@pytest.mark.parametrize("is_read", [True, False])
def test_large_answers_that_were_held_become_bytes_only_when_there_is_room(is_read: bool) -> None:
    async def test(connection: Connection) -> None:
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

    async def test(connection: Connection) -> None:
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
    async def test(connection: Connection) -> None:
        connection.send({"type": "subscribe", "stream": "default", **SCOPE})
        connection.socket.data_received(frame(TEXT, b"x" * 10_000)[:-1])
        assert connection.hub.body_bytes > 9000
        assert connection.connections == {connection.socket}
        assert connection.hub.sockets == 1
        connection.socket.connection_lost(ConnectionResetError())
        assert (connection.hub.body_bytes, connection.hub.sockets) == (0, 0)
        assert not connection.connections
        assert connection.subscriptions() == []
        connection.hub.sockets = 1

    on_a_loop(test)


@pytest.mark.parametrize("frames", [[frame(CLOSE, b"\x03\xe8")], [frame(3), frame(CLOSE)]])
def test_after_the_end_was_announced_nothing_is_understood(frames: list[bytes]) -> None:
    async def test(connection: Connection) -> None:
        for each in frames:
            connection.socket.data_received(each)
        connection.transport.drain()
        connection.send(PING)
        await connection.turns(3)
        assert connection.transport.drain() == b""
        assert connection.hub.socket_messages == 0

    on_a_loop(test)
