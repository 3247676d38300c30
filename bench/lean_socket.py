"""A minimal WebSocket client that reads only the headers of frames.

It understands only the broker's own frames. The frames that it sends are built and masked before
the measurement starts.
"""

from __future__ import annotations

import asyncio
from itertools import cycle
from operator import xor

from bench.buffered_socket import BufferedSocket, OnCount
from bench.lean_client import OnError
from bench.rows import BenchFailed

JSON = "felix.v1"
BINARY = "felix.v1+binary"

TEXT_FRAME, BINARY_FRAME = 1, 2
_CONTROL_FRAME = 8
_FINAL, _MASKED = 0x80, 0x80
_LENGTH_IN_2, _LENGTH_IN_8 = 126, 127
_MASK = b"\x37\xfa\x21\x3d"


def text_frame(payload: bytes) -> bytes:
    return _frame(TEXT_FRAME, payload)


def binary_frame(payload: bytes) -> bytes:
    return _frame(BINARY_FRAME, payload)


def upgrade_request(subprotocol: str) -> bytes:
    return (
        "GET /v1/felix/ws HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\n"
        "Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        "Sec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n"
        f"Sec-WebSocket-Protocol: {subprotocol}\r\n\r\n"
    ).encode()


class LeanSocket(BufferedSocket):
    """Becomes ready when the upgrade is done, unless a subclass waits for more."""

    def __init__(self, subprotocol: str, on_error: OnError) -> None:
        super().__init__(on_error)
        self._subprotocol = subprotocol
        self._is_upgraded = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.write(upgrade_request(self._subprotocol))

    def _take(self, end: int) -> int:
        at = 0
        if not self._is_upgraded:
            at = self._buffer.find(b"\r\n\r\n", 0, end) + 4
            if at < 4:
                return 0
            self._check_upgrade(bytes(self._buffer[:at]))
            self._is_upgraded = True
            self._upgraded()
        at = self._take_frames(at, end)
        self._read()
        return at

    def _take_frames(self, at: int, end: int) -> int:
        buffer = self._buffer
        while end - at >= 2:
            length, start = buffer[at + 1], at + 2
            if length == _LENGTH_IN_2:
                start += 2
                length = (buffer[at + 2] << 8) + buffer[at + 3]
            elif length == _LENGTH_IN_8:
                start += 8
                length = int.from_bytes(buffer[at + 2 : start], "big")
            # With a length that has not arrived as a whole, `start` is beyond `end` already.
            if start > end or start + length > end:
                break
            kind = buffer[at] & 0x0F
            if kind < _CONTROL_FRAME:
                self._frame(kind, start, start + length)
            at = start + length
        return at

    def _check_upgrade(self, head: bytes) -> None:
        agreed = f"sec-websocket-protocol: {self._subprotocol}\r\n".encode()
        if not head.startswith(b"HTTP/1.1 101") or agreed not in head.lower():
            raise BenchFailed(f"the WebSocket was refused: {head.decode(errors='replace')}")

    def _upgraded(self) -> None:
        self.ready.set_result(None)

    def _frame(self, kind: int, start: int, stop: int) -> None:
        """A data frame, at that place of the buffer."""
        raise NotImplementedError

    def _read(self) -> None:
        """Called when all frames of a read have been taken."""
        raise NotImplementedError


class AskingSocket(LeanSocket):
    """Counts answer frames; each must contain `expected` exactly `per_frame` times."""

    def __init__(
        self,
        subprotocol: str,
        expected: bytes,
        on_answers: OnCount,
        on_error: OnError,
        *,
        per_frame: int = 1,
    ) -> None:
        super().__init__(subprotocol, on_error)
        self._expected = expected
        self._per_frame = per_frame
        self._on_answers = on_answers
        self._count = 0

    def _frame(self, kind: int, start: int, stop: int) -> None:
        if self._buffer.count(self._expected, start, stop) != self._per_frame:
            raise BenchFailed(f"the broker answered {self._buffer[start:stop].decode()}")
        self._count += 1

    def _read(self) -> None:
        count, self._count = self._count, 0
        if count:
            self._on_answers(count)


def _frame(kind: int, payload: bytes) -> bytes:
    length = len(payload)
    if length < _LENGTH_IN_2:
        size = bytes([_MASKED | length])
    elif length < 1 << 16:
        size = bytes([_MASKED | _LENGTH_IN_2]) + length.to_bytes(2, "big")
    else:
        size = bytes([_MASKED | _LENGTH_IN_8]) + length.to_bytes(8, "big")
    masked = bytes(map(xor, payload, cycle(_MASK)))
    return bytes([_FINAL | kind]) + size + _MASK + masked
