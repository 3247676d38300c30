"""WebSocket frames (RFC 6455), server side: bytes to messages, messages to bytes. No IO.

Invariants: nothing over the limit is held; a message is handed out only when it is whole. Frames
are handed out one at a time, so that the reader can stop between two of them. Must not know what
the messages mean.

The library picows was tried instead. Its buffer grows with what a client sends and never shrinks,
and it hands out all frames in it at once, which breaks the limits here.
"""

from __future__ import annotations

import struct

import pyarrow as pa
import pyarrow.compute as pc

from penstock.model.limits import KIB

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0x0, 0x1, 0x2, 0x8, 0x9, 0xA

NORMAL = 1000
GOING_AWAY = 1001
PROTOCOL_ERROR = 1002
UNSUPPORTED_DATA = 1003
NO_STATUS = 1005
INVALID_TEXT = 1007
POLICY_VIOLATION = 1008
MESSAGE_TOO_BIG = 1009
INTERNAL_ERROR = 1011
TRY_AGAIN_LATER = 1013

MAX_CONTROL_BYTES = 125

_FIN, _MASKED = 0x80, 0x80
_UNMASK_IN_COLUMNS_BYTES = 4 * KIB
"""From this size on, Arrow is faster than one long integer."""

_SMALL = {
    opcode: tuple(bytes((_FIN | opcode, size)) for size in range(MAX_CONTROL_BYTES + 1))
    for opcode in (TEXT, BINARY, CLOSE, PING, PONG)
}
_PEER_CODES = frozenset({1000, 1001, 1002, 1003, 1007, 1008, 1009, 1010, 1011, 1012, 1013, 1014})


class Violation(Exception):
    """The peer broke the protocol or a limit. `code` is the close code."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class FrameReader:
    """`feed` it the input, then take whole messages with `next_message`.

    `_held` is unread input. `_partial` is the payload of a frame that is not whole: `_missing`
    bytes are to come. `_message` holds the fragments of a message so far.
    """

    def __init__(self, max_message_bytes: int) -> None:
        self._max_bytes = max_message_bytes
        self._held = b""
        self._at = 0
        self._partial = bytearray()
        self._missing = 0
        self._head = (0, True, b"")
        self._message = bytearray()
        self._opcode = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of messages that are not whole yet."""
        return len(self._partial) + len(self._message)

    @property
    def is_in_message(self) -> bool:
        """Whether fragments of a message have come, but not its last one."""
        return self._opcode != 0

    @property
    def is_begun(self) -> bool:
        """Whether a frame or a message has begun that is not whole. Only valid after `next_message`
        has returned None."""
        is_in_frame = self._missing > 0 or self._at < len(self._held)
        return is_in_frame or self.is_in_message

    @property
    def unread_bytes(self) -> int:
        """Bytes that were fed and not parsed yet."""
        return len(self._held) - self._at

    def feed(self, data: bytes) -> None:
        if self._missing:
            taken = data[: self._missing]
            self._partial += taken
            self._missing -= len(taken)
            data = data[len(taken) :]
        if self._at < len(self._held):
            self._held = self._held[self._at :] + data
        else:
            self._held = data
        self._at = 0

    def next_message(self) -> tuple[int, bytes] | None:
        """Returns the next whole message or control frame as (opcode, payload), or None for now. A
        fragment with more to come is (CONTINUATION, b""), so that the caller can count it."""
        if self._missing:
            return None
        if self._partial:
            payload = bytes(self._partial)
            self._partial = bytearray()
        else:
            found = self._next_payload()
            if found is None:
                return None
            payload = found
        opcode, is_final, mask = self._head
        payload = unmask(mask, payload)
        if is_final and opcode:
            return opcode, _checked_text(payload) if opcode == TEXT else payload
        return self._add_fragment(opcode, is_final, payload)

    def _next_payload(self) -> bytes | None:
        """Returns the payload of the next frame, still masked, or None when it is not whole."""
        held, at = self._held, self._at
        room = len(held) - at
        if room < 2:
            return None
        first, second = held[at], held[at + 1]
        size = second & 0x7F
        start = at + 6
        if size > MAX_CONTROL_BYTES:
            wide = 2 if size == 126 else 8
            _check_wide(first)
            if room < 2 + wide:
                return None
            start += wide
            size = _wide_size(held[at + 2 : at + 2 + wide])
        self._check(first, second, size)
        if len(held) < start:
            return None
        self._head = (first & 0x0F, first >= _FIN, held[start - 4 : start])
        end = start + size
        if end > len(held):
            self._partial += held[start:]
            self._missing = end - len(held)
            self._held, self._at = b"", 0
            return None
        self._at = end
        return held[start:end]

    def _check(self, first: int, second: int, size: int) -> None:
        opcode = first & 0x0F
        if first & 0x70:
            raise Violation(PROTOCOL_ERROR, "a reserved bit is set, and no extension is in use")
        if second < _MASKED:
            raise Violation(PROTOCOL_ERROR, "a client's frame must be masked")
        if opcode >= CLOSE:
            if opcode > PONG:
                raise Violation(PROTOCOL_ERROR, f"unknown opcode {opcode}")
            if first < _FIN:
                raise Violation(PROTOCOL_ERROR, "a control frame must not be fragmented")
            return
        if opcode > BINARY:
            raise Violation(PROTOCOL_ERROR, f"unknown opcode {opcode}")
        if (opcode == CONTINUATION) != bool(self._opcode):
            wrong = "no message to continue" if self._opcode == 0 else "the message is not ended"
            raise Violation(PROTOCOL_ERROR, wrong)
        if len(self._message) + size > self._max_bytes:
            raise Violation(
                MESSAGE_TOO_BIG,
                f"the message has {len(self._message) + size} bytes or more; "
                f"max_body_bytes is {self._max_bytes}",
            )

    def _add_fragment(self, opcode: int, is_final: bool, payload: bytes) -> tuple[int, bytes]:
        self._message += payload
        self._opcode = self._opcode or opcode
        if not is_final:
            return CONTINUATION, b""
        whole, opcode = bytes(self._message), self._opcode
        self._message, self._opcode = bytearray(), 0
        return opcode, _checked_text(whole) if opcode == TEXT else whole


def _check_wide(first: int) -> None:
    if first & 0x0F >= CLOSE:
        raise Violation(PROTOCOL_ERROR, f"a control frame has at most {MAX_CONTROL_BYTES} bytes")


def _wide_size(encoded: bytes) -> int:
    size = int.from_bytes(encoded, "big")
    if size <= MAX_CONTROL_BYTES or (len(encoded) == 8 and size < 2**16) or size >= 2**63:
        raise Violation(PROTOCOL_ERROR, "a length is not encoded in the shortest way")
    return size


def _checked_text(payload: bytes) -> bytes:
    if not payload.isascii():
        try:
            payload.decode()
        except UnicodeDecodeError as error:
            raise Violation(INVALID_TEXT, "a text message is not UTF-8") from error
    return payload


def unmask(mask: bytes, payload: bytes) -> bytes:
    """Unmasks a payload. Masking is the same operation."""
    size = len(payload)
    if size >= _UNMASK_IN_COLUMNS_BYTES:
        return _unmask_in_columns(mask, payload)
    key = (mask * (size // 4 + 1))[:size]
    return (int.from_bytes(payload, "little") ^ int.from_bytes(key, "little")).to_bytes(
        size, "little"
    )


def _unmask_in_columns(mask: bytes, payload: bytes) -> bytes:
    words = len(payload) // 8
    column = pa.Array.from_buffers(pa.uint64(), words, [None, pa.py_buffer(payload)])
    key = pa.scalar(int.from_bytes(mask * 2, "little"), pa.uint64())
    body: bytes = pc.bit_wise_xor(column, key).buffers()[1].to_pybytes()
    return body[: words * 8] + unmask(mask, payload[words * 8 :])


def read_close(payload: bytes) -> int:
    """Returns the code of a close frame; raises if a peer may not send it."""
    if not payload:
        return NO_STATUS
    code = int.from_bytes(payload[:2], "big")
    if len(payload) == 1 or not (code in _PEER_CODES or 3000 <= code < 5000):
        raise Violation(PROTOCOL_ERROR, "the close frame has no valid code")
    _checked_text(payload[2:])
    return code


def frame_head(opcode: int, size: int) -> bytes:
    """Returns the head of a frame with `size` bytes of payload. A server does not mask."""
    if size <= MAX_CONTROL_BYTES:
        return _SMALL[opcode][size]
    if size < 2**16:
        return struct.pack(">BBH", _FIN | opcode, 126, size)
    return struct.pack(">BBQ", _FIN | opcode, 127, size)


def close_frame(code: int, reason: str) -> bytes:
    payload = b""
    if code != NO_STATUS:
        text = reason.encode()[: MAX_CONTROL_BYTES - 2].decode(errors="ignore").encode()
        payload = code.to_bytes(2, "big") + text
    return frame_head(CLOSE, len(payload)) + payload
