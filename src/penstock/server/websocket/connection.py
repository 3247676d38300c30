"""One WebSocket connection: handles messages, sends replies and events, until one side ends it.

Invariants: no message is handled while too many are unanswered or the peer accepts no more bytes;
nothing is taken from the channels then, and soon nothing more is read. All that leaves in one turn
of the loop is one write. Once the end has begun, new messages are ignored, the channels are closed,
and earlier messages are still answered. Must not know what messages do.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, MutableSet
from typing import Any

from penstock.model.errors import Internal, InvalidArgument, PenstockError, TooLarge
from penstock.model.limits import KIB, MIB
from penstock.server.http.answer_budget import Claim
from penstock.server.http.connection_slot import ConnectionSlot
from penstock.server.http.dispatch import RequestDispatch
from penstock.server.http.requests import NO_NOTES, Notes
from penstock.server.http.responses import encode_json, typed_error
from penstock.server.http.tcp_liveness import is_unreachable, reset
from penstock.server.message_access import check_message
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
    Message,
    RefusedMessage,
)
from penstock.server.websocket.response_order import MessageOrder, MessageReply

MAX_UNANSWERED = 1024
MAX_UNANSWERED_BYTES = MIB
"""Messages of one connection that wait for their replies; beyond it, reading stops."""
MAX_UNREAD_BYTES = 64 * KIB
"""Bytes that are read before they can be handled, to notice when a stalled peer hangs up."""
TURN_OPERATIONS = 256
"""Messages that one connection handles before the others do; a KiB counts as one too."""
TURN_BYTES = 64 * KIB
"""Bytes that are written before the connection checks whether the peer accepts them."""
TURN_EVENT_BYTES = 2 * MIB
"""Bytes of events written in one turn to a peer that accepts them. A burst of a stream fits, so
that a peer that reads loses nothing of a batch that is larger than its buffer."""
END_GRACE_S = 5.0
"""How long replies that are due may delay the end."""
LINGER_S = 1.0
LINGER_BYTES = MIB
"""How long, and how much, the broker reads and discards after it has announced the end."""

_log = logging.getLogger("penstock.server")


class WebSocketConnection(asyncio.Protocol):
    """Takes the transport over from an HTTP connection; `start` is given the bytes that were read
    after the request. `connections` are all that the server has open. `_last_frames` are sent at
    the end; None before the end has begun. `notes` are those of the request that opened it, `place`
    is whom it counts for."""

    def __init__(
        self,
        dispatch: RequestDispatch,
        connections: MutableSet[Any],
        transport: asyncio.Transport,
        *,
        is_binary: bool,
        is_write_paused: bool = False,
        notes: Notes = NO_NOTES,
        slot: ConnectionSlot | None = None,
    ) -> None:
        self._slot = slot
        self._principal = principal = notes.principal
        self._dispatch = dispatch
        self._connections = connections
        self.transport = transport
        self.is_binary = is_binary
        self.notes = notes
        self.credential = notes.credential
        self._loop = asyncio.get_running_loop()
        self._answers = Claim(dispatch.answers, transport, self._is_answering)
        self._frames = FrameReader(dispatch.max_body_bytes)
        self._counted_bytes = 0
        self._channels = Channels(dispatch.engine, self, principal)
        self._order = MessageOrder(
            self._answers, self._send_reply, self.has_room, dispatch.max_body_bytes
        )
        self._channel_actions: dict[type, Callable[[Any, Done], None]] = self._channels.actions()
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._is_turn_scheduled = False
        self._is_in_turn = False
        self._turn_left = 0
        self._is_write_paused = is_write_paused
        self._is_read_paused = False
        self._last_frames: bytes | None = None
        self._is_end_sent = False
        self._is_peer_done = False
        self._is_closed = False
        self._discarded_bytes = 0
        self._touched = self._loop.time()
        self._message_timer = MessageTimer(self._allowed_s, self._message_expired)
        self._watchdog: asyncio.TimerHandle | None = None

    def start(self, rest: bytes) -> None:
        if self._is_write_paused:
            self._answers.filled()
        self.transport.set_protocol(self)
        self._connections.add(self)
        if self._principal is not None:
            self._dispatch.open_streams.add(self._channels)
        self._dispatch.sockets += 1
        self._watchdog = self._loop.call_later(self._dispatch.ws_ping_s, self._check_peer)
        if self._dispatch.is_draining:
            self.shutdown()
        elif rest:
            self.data_received(rest)

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_closed = True
        self._channels.close()
        self._dispatch.open_streams.discard(self._channels)
        self._order.clear()
        self._answers.close()
        self._out.clear()
        self._connections.discard(self)
        if self._slot is not None:
            self._slot.leave()
        self._dispatch.sockets -= 1
        self._dispatch.body_bytes -= self._counted_bytes
        self._set_watchdog(None)
        self._message_timer.close()

    def eof_received(self) -> bool:
        """Closes: a peer that has closed its side reads no events either."""
        self._channels.close()
        self._close()
        return self.transport.get_extra_info("ssl_object") is None

    def shutdown(self, reason: str = "the broker is stopping") -> None:
        """Answers what is under way, then closes. Ignores new messages."""
        self._end(GOING_AWAY, reason)

    # -- a turn --------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self._touched = self._loop.time()
        if self._last_frames is not None:
            self._discard(data)
            return
        self._frames.feed(data)
        self._turn()

    def schedule_turn(self) -> None:
        if not (self._is_turn_scheduled or self._is_in_turn):
            self._is_turn_scheduled = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Reads, takes from the channels and writes, as far as there is room for it."""
        self._is_turn_scheduled = False
        if self._is_closed:
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
        if self._last_frames is not None:
            self._send_last_frames()
            self._pause_reading(False)
            if self._order.is_first_answered() and not self._is_write_paused:
                self.schedule_turn()
            return
        self._pause_reading(not is_all_read and self._frames.unread_bytes > MAX_UNREAD_BYTES)
        has_more = not (is_all_read or self._is_full()) or self._channels.is_waiting()
        if (has_more or self._order.is_first_answered()) and not self._is_write_paused:
            self.schedule_turn()

    def pause_writing(self) -> None:
        self._is_write_paused = True
        self._message_timer.stop()
        self._answers.filled()

    def resume_writing(self) -> None:
        self._is_write_paused = False
        self._answers.drained()
        self._answers.hold(0)
        self._touched = self._loop.time()
        self.schedule_turn()

    def _pause_reading(self, is_paused: bool) -> None:
        if is_paused == self._is_read_paused or self._is_closed:
            return
        self._is_read_paused = is_paused
        if is_paused:
            self.transport.pause_reading()
        else:
            self._touched = self._loop.time()
            self.transport.resume_reading()

    # -- input ----------------------------------------------------------------------------------

    def _read(self) -> bool:
        """Handles messages that are whole. Returns False when there may be more that have to
        wait."""
        try:
            self._turn_left = TURN_OPERATIONS
            while self._turn_left > 0:
                if self._is_write_paused or self._is_full():
                    return False
                message = None if self._last_frames is not None else self._frames.next_message()
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
        """Counts messages that are not whole as bodies being received, as those of requests."""
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
            MessageReply(self._order, [RefusedMessage(error)], len(payload)).done(error)
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

    def _perform(self, message: Message | BinaryPublish | RefusedMessage, done: Done) -> None:
        """Runs a message. Every outcome is a reply; a defect is logged."""
        try:
            if self._principal is not None:
                named = message.message if isinstance(message, BinaryPublish) else message
                check_message(self._dispatch.engine.access, self._principal, named)
            action = self._channel_actions.get(type(message))
            if action is not None:
                action(message, done)
            elif not isinstance(message, BinaryPublish):
                perform(self._dispatch.engine, message, done)
            else:
                publish(self._dispatch.engine, message, done)
        except PenstockError as error:
            done(error)
        except Exception:  # noqa: BLE001 - the last resort, logged
            _log.exception("a message failed")
            done(Internal("internal error; the broker's log says more"))

    # -- output ---------------------------------------------------------------------------------

    def has_room(self) -> bool:
        return not self._is_write_paused and self._out_bytes <= TURN_BYTES

    def send_text(self, payload: bytes) -> None:
        self._send(TEXT, payload)
        self.schedule_turn()

    def send_binary(self, payload: bytes) -> None:
        self._send(BINARY, payload)
        self.schedule_turn()

    def _send_reply(self, reply: MessageReply) -> None:
        for frame in reply.data:
            self._send(TEXT, frame)
        for channel_id in reply.channel_ids():
            self._channels.open(channel_id)
        self.schedule_turn()

    def _send(self, opcode: int, payload: bytes) -> None:
        head = frame_head(opcode, len(payload))
        self._out += (head, payload)
        self._out_bytes += len(head) + len(payload)

    def _send_events(self) -> None:
        """Takes from the channels and writes, while the peer accepts bytes."""
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
            self.transport.write(data)
            if self._answers.held_bytes and not self._is_write_paused:
                self._answers.hold(0)

    def _is_answering(self) -> bool:
        """Returns whether the peer must accept bytes within the timeout. A peer that only has
        events to read may stall; one with a large answer, or without subscriptions, may not."""
        return self._answers.held_bytes > 0 or not self._channels

    # -- the end -------------------------------------------------------------------------------

    def _end(self, code: int, reason: str, error: PenstockError | None = None) -> None:
        """Begins the end: the last frames follow the replies that are still due."""
        if self._last_frames is not None:
            return
        self._last_frames = close_frame(code, reason)
        if error is not None:
            last = encode_json(typed_error(error))
            self._last_frames = frame_head(TEXT, len(last)) + last + self._last_frames
        self._channels.close()
        self._set_watchdog(self._loop.call_later(END_GRACE_S, reset, self.transport))
        self.schedule_turn()

    def _send_last_frames(self) -> None:
        if self._is_end_sent or self._order or self._last_frames is None:
            return
        self._is_end_sent = True
        self.transport.write(self._last_frames)
        if self._is_peer_done:
            self._close()
        else:
            self._set_watchdog(self._loop.call_later(LINGER_S, reset, self.transport))

    def _discard(self, data: bytes) -> None:
        """Discards input, but for the peer's close frame."""
        self._discarded_bytes += len(data)
        if self._discarded_bytes > LINGER_BYTES:
            self.transport.abort()
            return
        try:
            self._frames.feed(data)
            while (message := self._frames.next_message()) is not None:
                if message[0] == CLOSE:
                    self._is_peer_done = True
        except Violation:
            return
        if self._is_peer_done and self._is_end_sent:
            self._close()

    def _close(self) -> None:
        """Closes the transport; what was written has a while to leave."""
        self._is_closed = True
        self._set_watchdog(self._loop.call_later(LINGER_S, reset, self.transport))
        self.transport.close()

    # -- a peer that is slow, or silent --------------------------------------------------------

    def _allowed_s(self) -> float:
        return self._dispatch.allowed_s(self._frames.held_bytes)

    def _message_expired(self) -> None:
        text = "the message was not completed in time"
        self._end(POLICY_VIOLATION, text, InvalidArgument(text))

    def _check_peer(self) -> None:
        """Pings a silent peer, and gives up one whose machine does not even acknowledge what is
        sent to it. A peer that answers no ping but reads is still there."""
        if self._last_frames is not None:
            return
        ping_s = self._dispatch.ws_ping_s
        silent_s = self._loop.time() - self._touched
        if silent_s >= 2 * ping_s and is_unreachable(self.transport):
            self.transport.abort()
            return
        if silent_s >= ping_s and not self._is_write_paused:
            self._send(PING, b"")
            self.schedule_turn()
        wait_s = ping_s - silent_s if silent_s < ping_s else ping_s
        self._set_watchdog(self._loop.call_later(wait_s, self._check_peer))

    def _set_watchdog(self, handle: asyncio.TimerHandle | None) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
        self._watchdog = handle
