"""One WebSocket connection: messages in, answers and events out, until one side ends it.

Invariants: no more is handled while requests enough are unanswered or the peer takes no more
bytes, nothing is taken from the channels then, and soon no more is read; what leaves in one turn
is one write. Once the end has begun nothing more is understood, the channels are closed, and what
was asked before is still answered. Must not know what messages do.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, MutableSet
from typing import Any

from penstock.model.errors import Internal, InvalidArgument, PenstockError, TooLarge
from penstock.model.limits import KIB, MIB
from penstock.server.http.answer_budget import Claim
from penstock.server.http.dispatch import RequestDispatch
from penstock.server.http.responses import encode_json, typed_error
from penstock.server.http.tcp_liveness import is_unreachable
from penstock.server.message_actions import Done, perform
from penstock.server.websocket.arrays import perform_all
from penstock.server.websocket.binary import BinaryPublish, decode_publish, publish
from penstock.server.websocket.channels import Channels
from penstock.server.websocket.decoding import decode_many, decode_one, is_array
from penstock.server.websocket.framing import (
    BINARY,
    CLOSE,
    GOING_AWAY,
    MESSAGE_TOO_BIG,
    PING,
    POLICY_VIOLATION,
    PONG,
    TEXT,
    TRY_AGAIN_LATER,
    UNSUPPORTED_DATA,
    FrameReader,
    Violation,
    close_frame,
    frame_head,
    read_close,
)
from penstock.server.websocket.message_timer import MessageTimer
from penstock.server.websocket.messages import (
    CacheUnwatchMessage,
    CacheWatchMessage,
    LagMessage,
    Message,
    Refused,
    SubscribeMessage,
    UnsubscribeMessage,
)
from penstock.server.websocket.response_order import MessageOrder, MessageReply

MAX_UNANSWERED = 1024
MAX_UNANSWERED_BYTES = MIB
"""Requests of one connection that wait for their answers; beyond it, reading stops."""
MAX_UNREAD_BYTES = 64 * KIB
"""Read ahead of what can be handled, so that the end of a stalled peer's stream is noticed."""
TURN_OPERATIONS = 256
"""Of one connection, before the others have their turn; a KiB counts as one too."""
TURN_BYTES = 64 * KIB
"""Written before it is seen whether the peer takes it."""
TURN_EVENT_BYTES = 2 * MIB
"""Events written in one turn to a peer that takes them: what a stream's burst becomes on the wire,
so that a peer that reads loses nothing of a batch that is larger than its buffer."""
END_GRACE_S = 5.0
"""How long answers may hold up the end."""
LINGER_S = 1.0
LINGER_BYTES = MIB
"""How long, and how much, of what a peer still sends is read after the end was announced."""

_log = logging.getLogger("penstock.server")


class WebSocketConnection(asyncio.Protocol):
    """Takes the transport over from an HTTP connection: `start` handles the bytes that were read
    behind the request. `connections` are all that the server has open. `_farewell` is the last
    frame, once known."""

    def __init__(
        self,
        dispatch: RequestDispatch,
        connections: MutableSet[Any],
        transport: asyncio.Transport,
        *,
        is_binary: bool,
        is_write_paused: bool = False,
    ) -> None:
        self._dispatch = dispatch
        self._connections = connections
        self._transport = transport
        self.is_binary = is_binary
        self._loop = asyncio.get_running_loop()
        self._answers = Claim(dispatch.answers, transport, self._is_answering)
        self._frames = FrameReader(dispatch.max_body_bytes)
        self._counted_bytes = 0
        self._channels = Channels(dispatch.engine, self)
        self._order = MessageOrder(
            self._answers, self._send_reply, self.has_room, dispatch.max_body_bytes
        )
        self._bound: dict[type, Callable[[Any, Done], None]] = {
            SubscribeMessage: self._channels.subscribe,
            UnsubscribeMessage: self._channels.unsubscribe,
            LagMessage: self._channels.lag,
            CacheWatchMessage: self._channels.watch,
            CacheUnwatchMessage: self._channels.unwatch,
        }
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._is_turn_due = False
        self._is_in_turn = False
        self._turn_left = 0
        self._is_write_paused = is_write_paused
        self._is_read_paused = False
        self._farewell: bytes | None = None
        self._is_said = False
        self._is_peer_done = False
        self._is_lost = False
        self._thrown_bytes = 0
        self._touched = self._loop.time()
        self._message_timer = MessageTimer(self._allowed_s, self._message_expired)
        self._watchdog: asyncio.TimerHandle | None = None

    def start(self, rest: bytes) -> None:
        if self._is_write_paused:
            self._answers.filled()
        self._transport.set_protocol(self)
        self._connections.add(self)
        self._dispatch.sockets += 1
        self._watchdog = self._loop.call_later(self._dispatch.ws_ping_s, self._look)
        if self._dispatch.is_draining:
            self.shutdown()
        elif rest:
            self.data_received(rest)

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        self._channels.close()
        self._order.clear()
        self._answers.close()
        self._out.clear()
        self._connections.discard(self)
        self._dispatch.sockets -= 1
        self._dispatch.body_bytes -= self._counted_bytes
        self._set_watchdog(None)
        self._message_timer.close()

    def eof_received(self) -> bool:
        """A peer that has nothing more to say reads no events either."""
        self._channels.close()
        self._hang_up()
        return True

    def shutdown(self) -> None:
        """The broker stops: what is under way is answered, nothing more is understood."""
        self._end(GOING_AWAY, "the broker is stopping")

    # -- a turn --------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self._touched = self._loop.time()
        if self._farewell is not None:
            self._throw_away(data)
            return
        self._frames.feed(data)
        self._turn()

    def turn_soon(self) -> None:
        if not (self._is_turn_due or self._is_in_turn):
            self._is_turn_due = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Reads, takes from the channels and writes, as far as there is room for it."""
        self._is_turn_due = False
        if self._is_lost:
            return
        self._is_in_turn = True
        try:
            self._order.advance()
            is_all_read = self._read()
            self._count()
            if is_all_read and self._frames.is_begun:
                self._message_timer.begin()
            else:
                self._message_timer.stop()
            self._send_events()
        finally:
            self._is_in_turn = False
        if self._farewell is not None:
            self._say_farewell()
            self._pause_reading(False)
            if self._order.is_first_answered() and not self._is_write_paused:
                self.turn_soon()
            return
        self._pause_reading(not is_all_read and self._frames.unread_bytes > MAX_UNREAD_BYTES)
        has_more = not (is_all_read or self._is_full()) or self._channels.is_waiting()
        if (has_more or self._order.is_first_answered()) and not self._is_write_paused:
            self.turn_soon()

    def pause_writing(self) -> None:
        self._is_write_paused = True
        self._message_timer.stop()
        self._answers.filled()

    def resume_writing(self) -> None:
        self._is_write_paused = False
        self._answers.drained()
        self._answers.hold(0)
        self._touched = self._loop.time()
        self.turn_soon()

    def _pause_reading(self, is_paused: bool) -> None:
        if is_paused == self._is_read_paused or self._is_lost:
            return
        self._is_read_paused = is_paused
        if is_paused:
            self._transport.pause_reading()
        else:
            self._touched = self._loop.time()
            self._transport.resume_reading()

    # -- what comes in -------------------------------------------------------------------------

    def _read(self) -> bool:
        """Handles what is whole. False when there may be more, and something must come first."""
        try:
            self._turn_left = TURN_OPERATIONS
            while self._turn_left > 0:
                if self._is_write_paused or self._is_full():
                    return False
                message = None if self._farewell is not None else self._frames.next_message()
                if message is None:
                    return True
                self._receive(*message)
                if self._out_bytes > TURN_BYTES:
                    self._write()
        except Violation as violation:
            error = TooLarge(violation.message) if violation.code == MESSAGE_TOO_BIG else None
            self._end(violation.code, violation.message, error)
        return False

    def _is_full(self) -> bool:
        order = self._order
        return len(order) >= MAX_UNANSWERED or order.held_bytes > MAX_UNANSWERED_BYTES

    def _count(self) -> None:
        """Messages that are not whole are bodies being received, as those of requests are."""
        dispatch, held_bytes = self._dispatch, self._frames.held_bytes
        dispatch.body_bytes += held_bytes - self._counted_bytes
        is_growing = held_bytes > max(self._counted_bytes, TURN_BYTES)
        self._counted_bytes = held_bytes
        if is_growing and dispatch.body_bytes > dispatch.max_bodies_bytes:
            error = dispatch.too_many_bodies()
            self._end(TRY_AGAIN_LATER, error.message, error)

    def _receive(self, opcode: int, payload: bytes) -> None:
        self._turn_left -= 1 + len(payload) // KIB
        if not self._frames.is_in_message:
            self._message_timer.stop()
        if opcode == TEXT:
            self._receive_text(payload)
        elif opcode == BINARY:
            self._receive_binary(payload)
        elif opcode == PING:
            self._send(PONG, payload)
        elif opcode == CLOSE:
            self._is_peer_done = True
            self._end(read_close(payload), "")

    def _receive_text(self, payload: bytes) -> None:
        self._dispatch.socket_messages += 1
        if not is_array(payload):
            message = decode_one(payload)
            self._perform(message, MessageReply(self._order, [message], len(payload)).done)
            return
        try:
            messages = decode_many(payload)
        except PenstockError as error:
            MessageReply(self._order, [Refused(error)], len(payload)).done(error)
            return
        self._turn_left -= len(messages)
        reply = MessageReply(self._order, messages, len(payload), is_array=True)
        perform_all(messages, self._perform, reply.done_all)

    def _receive_binary(self, payload: bytes) -> None:
        self._dispatch.socket_messages += 1
        if not self.is_binary:
            text = "binary frames need the subprotocol felix.v1+binary"
            self._end(UNSUPPORTED_DATA, text, InvalidArgument(text))
            return
        frame = decode_publish(payload)
        message = frame.message if isinstance(frame, BinaryPublish) else frame
        self._perform(frame, MessageReply(self._order, [message], len(payload)).done)

    def _perform(self, message: Message | BinaryPublish | Refused, done: Done) -> None:
        """Every outcome is an answer; a defect of ours too."""
        try:
            bound = self._bound.get(type(message))
            if bound is not None:
                bound(message, done)
            elif not isinstance(message, BinaryPublish):
                perform(self._dispatch.engine, message, done)
            else:
                publish(self._dispatch.engine, message, done)
        except PenstockError as error:
            done(error)
        except Exception:  # noqa: BLE001 - the last resort, logged
            _log.exception("a message failed")
            done(Internal("internal error; the broker's log says more"))

    # -- what goes out -------------------------------------------------------------------------

    def has_room(self) -> bool:
        return not self._is_write_paused and self._out_bytes <= TURN_BYTES

    def send_text(self, payload: bytes) -> None:
        self._send(TEXT, payload)
        self.turn_soon()

    def send_binary(self, payload: bytes) -> None:
        self._send(BINARY, payload)
        self.turn_soon()

    def _send_reply(self, reply: MessageReply) -> None:
        for frame in reply.data:
            self._send(TEXT, frame)
        for channel_id in reply.channel_ids():
            self._channels.open(channel_id)
        self.turn_soon()

    def _send(self, opcode: int, payload: bytes) -> None:
        head = frame_head(opcode, len(payload))
        self._out += (head, payload)
        self._out_bytes += len(head) + len(payload)

    def _send_events(self) -> None:
        """Takes from the channels and writes, while the peer takes it."""
        left_bytes = TURN_EVENT_BYTES
        while True:
            self._channels.take()
            left_bytes -= self._out_bytes
            self._write()
            if left_bytes <= 0 or self._is_write_paused or not self._channels.is_waiting():
                return

    def _write(self) -> None:
        if self._out:
            data = b"".join(self._out)
            self._out.clear()
            self._out_bytes = 0
            self._transport.write(data)
            if self._answers.held_bytes and not self._is_write_paused:
                self._answers.hold(0)

    def _is_answering(self) -> bool:
        """A socket that only has events to take may stall for as long as it likes; not one that
        does not take a large answer, or has no subscription or watch."""
        return self._answers.held_bytes > 0 or not self._channels

    # -- the end -------------------------------------------------------------------------------

    def _end(self, code: int, reason: str, error: PenstockError | None = None) -> None:
        """Announces the end, after the answers that are still due."""
        if self._farewell is not None:
            return
        self._farewell = close_frame(code, reason)
        if error is not None:
            last = encode_json(typed_error(error))
            self._farewell = frame_head(TEXT, len(last)) + last + self._farewell
        self._channels.close()
        self._set_watchdog(self._loop.call_later(END_GRACE_S, self._transport.abort))
        self.turn_soon()

    def _say_farewell(self) -> None:
        if self._is_said or self._order or self._farewell is None:
            return
        self._is_said = True
        self._transport.write(self._farewell)
        if self._is_peer_done:
            self._hang_up()
        else:
            self._set_watchdog(self._loop.call_later(LINGER_S, self._transport.abort))

    def _throw_away(self, data: bytes) -> None:
        """Nothing is awaited but the peer's own close, which may be in anything that comes."""
        self._thrown_bytes += len(data)
        if self._thrown_bytes > LINGER_BYTES:
            self._transport.abort()
            return
        try:
            self._frames.feed(data)
            while (message := self._frames.next_message()) is not None:
                if message[0] == CLOSE:
                    self._is_peer_done = True
        except Violation:
            return
        if self._is_peer_done and self._is_said:
            self._hang_up()

    def _hang_up(self) -> None:
        """What was written may still leave, for a while."""
        self._is_lost = True
        self._set_watchdog(self._loop.call_later(LINGER_S, self._transport.abort))
        self._transport.close()

    # -- a peer that is slow, or silent --------------------------------------------------------

    def _allowed_s(self) -> float:
        return self._dispatch.allowed_s(self._frames.held_bytes)

    def _message_expired(self) -> None:
        text = "the message was not completed in time"
        self._end(POLICY_VIOLATION, text, InvalidArgument(text))

    def _look(self) -> None:
        """Pings a peer that is silent, and gives up one whose machine does not even acknowledge
        what is sent to it. A peer that only reads, and answers no ping, is there."""
        if self._farewell is not None:
            return
        ping_s = self._dispatch.ws_ping_s
        silent_s = self._loop.time() - self._touched
        if silent_s >= 2 * ping_s and is_unreachable(self._transport):
            self._transport.abort()
            return
        if silent_s >= ping_s and not self._is_write_paused:
            self._send(PING, b"")
            self.turn_soon()
        wait_s = ping_s - silent_s if silent_s < ping_s else ping_s
        self._set_watchdog(self._loop.call_later(wait_s, self._look))

    def _set_watchdog(self, handle: asyncio.TimerHandle | None) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
        self._watchdog = handle
