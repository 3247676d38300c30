"""A WebSocket between a client and the owner: bytes pass in both directions, as they are.

A side is read only while the other accepts bytes, and the end of one direction is passed on. The
sizes of the owner's frames are counted, for one reason: if the owner dies between two of them, the
client is told so in a close frame. Must not know what messages mean.
"""

from __future__ import annotations

import asyncio
from collections.abc import MutableSet
from typing import TYPE_CHECKING, Any

from penstock.model.limits import KIB
from penstock.server.http.requests import Notes
from penstock.server.http.tcp_liveness import give_up_when_unreachable, has_ended, probe_when_idle
from penstock.server.websocket.framing import GOING_AWAY, close_frame

if TYPE_CHECKING:
    from penstock.server.forwarding.upstream import UpstreamConnection
    from penstock.server.http.dispatch import RequestDispatch
    from penstock.server.websocket.upgrade import HandOver

LINGER_S = 1.0
HIGH_WATER_BYTES = 64 * KIB
OWNER_LOST = "the broker that owns the data is gone; connect again"


class FrameCounter:
    """Follows the frames of a broker, which are not masked, to tell where they end."""

    def __init__(self) -> None:
        self._head = b""
        self._left = 0
        self.is_closed = False

    def is_between_frames(self) -> bool:
        return not self._left and not self._head and not self.is_closed

    def feed(self, data: bytes) -> None:
        at, end = 0, len(data)
        while at < end:
            if self._left:
                step = min(self._left, end - at)
                self._left -= step
                at += step
                continue
            wanted = _head_bytes(self._head) - len(self._head)
            self._head += data[at : at + wanted]
            at += wanted
            if len(self._head) == _head_bytes(self._head):
                self._left = _payload_bytes(self._head)
                self.is_closed = self.is_closed or self._head[0] & 0x0F == 0x8
                self._head = b""


def _head_bytes(head: bytes) -> int:
    if len(head) < 2:
        return 2
    return 2 + {126: 2, 127: 8}.get(head[1] & 0x7F, 0) + (4 if head[1] & 0x80 else 0)


def _payload_bytes(head: bytes) -> int:
    short = head[1] & 0x7F
    if short < 126:
        return short
    return int.from_bytes(head[2 : 4 if short == 126 else 10], "big")


class TunnelEnd(asyncio.Protocol):
    """One of the two connections."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self.other: TunnelEnd
        self._is_lost = False

    def write(self, data: bytes) -> None:
        if not self._is_lost:
            self.transport.write(data)

    def data_received(self, data: bytes) -> None:
        self.other.write(data)

    def pause_writing(self) -> None:
        self.other.pause(True)

    def resume_writing(self) -> None:
        self.other.pause(False)

    def pause(self, is_paused: bool) -> None:
        if self._is_lost or self.transport.is_closing():
            return
        if is_paused:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

    def eof_received(self) -> bool:
        """Keeps this direction open for what the other side still sends, if it can be told. TLS
        cannot close one direction alone."""
        is_tls = self.transport.get_extra_info("ssl_object") is not None
        return self.other.end_writing() and not is_tls

    def end_writing(self) -> bool:
        """Passes on that the other side sends nothing more. Returns False if that closes."""
        if self._is_lost or not self.transport.can_write_eof():
            self.close()
            return False
        self.transport.write_eof()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        self.other.close()

    def close(self) -> None:
        """Closes when what was written has left, or after a while."""
        if not self._is_lost and not self.transport.is_closing():
            self.transport.close()
            asyncio.get_running_loop().call_later(LINGER_S, self._abort)

    def _abort(self) -> None:
        if not self._is_lost:
            self.transport.abort()


class OwnerEnd(TunnelEnd):
    """The connection to the owner."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self.frames = FrameCounter()
        self._next_look: asyncio.TimerHandle | None = None

    def pause(self, is_paused: bool) -> None:
        super().pause(is_paused)
        if self._next_look is not None:
            self._next_look.cancel()
            self._next_look = None
        if is_paused and not self._is_lost:
            loop = asyncio.get_running_loop()
            self._next_look = loop.call_later(LINGER_S, self._look)

    def _look(self) -> None:
        """Ends a connection whose client accepts nothing, if the owner has ended it: the end is
        behind bytes that are not read."""
        if has_ended(self.transport):
            self.transport.abort()
        else:
            self.pause(True)

    def data_received(self, data: bytes) -> None:
        self.frames.feed(data)
        self.other.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.frames.is_between_frames():
            self.other.write(close_frame(GOING_AWAY, OWNER_LOST))
        super().connection_lost(exc)

    def eof_received(self) -> bool:
        # A broker closes both directions at once: it has ended, or is gone.
        return False


class ClientEnd(TunnelEnd):
    """The connection of the client: one of those that the server has open."""

    def __init__(
        self,
        transport: asyncio.Transport,
        dispatch: RequestDispatch,
        connections: MutableSet[Any],
        notes: Notes,
    ) -> None:
        super().__init__(transport)
        self.credential = notes.credential
        self.notes = notes
        self._dispatch = dispatch
        self._connections = connections
        connections.add(self)
        dispatch.sockets += 1

    def shutdown(self, reason: str = "the broker is stopping") -> None:
        owner = self.other
        if isinstance(owner, OwnerEnd) and owner.frames.is_between_frames():
            self.write(close_frame(GOING_AWAY, reason))
            owner.frames.is_closed = True
        owner.close()
        self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._dispatch.sockets -= 1
        super().connection_lost(exc)


def open_tunnel(
    hand_over: HandOver, upstream: UpstreamConnection, head: bytes, rest: bytes
) -> None:
    """Makes a tunnel of the connections of a client and of the owner, which has sent `head` and
    `rest`. What the client has sent behind its request goes to the owner."""
    connection, early = hand_over.connection, hand_over.rest
    transport, is_write_paused = connection.transport, connection.flow.write_paused
    connection.retire()
    if upstream.transport is None:
        raise RuntimeError("an owner without a connection switched protocols")
    if connection.is_half_closed or transport.is_closing():
        transport.close()
        upstream.abort()
        return
    client = ClientEnd(
        transport, connection.dispatch, connection.connections, hand_over.request.notes
    )
    owner = OwnerEnd(upstream.transport)
    client.other, owner.other = owner, client
    probe_when_idle(transport, connection.dispatch.ws_ping_s)
    give_up_when_unreachable(transport, connection.dispatch.ws_ping_s)
    transport.set_protocol(client)
    upstream.transport.set_protocol(owner)
    transport.set_write_buffer_limits(HIGH_WATER_BYTES)
    client.write(head)
    if rest:
        owner.data_received(rest)
    if early:
        owner.write(early)
    if is_write_paused:
        owner.pause(True)
