"""A WebSocket client on a plain socket, for tests: it sends any frame, right or wrong, and reads
only when it is asked to, so that it plays the eager reader, the slow one and the one that is gone.

Knows RFC 6455 and nothing of the broker's code; the frames it makes are its own.
"""

from __future__ import annotations

import base64
import ctypes
import hashlib
import json
import os
import select
import socket
import struct
import time
import zlib
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

TIMEOUT_S = 10.0

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0x0, 0x1, 0x2, 0x8, 0x9, 0xA

PATH = "/v1/felix/ws"
_SALT = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_SO_ATTACH_FILTER = 26


class NoFrame(AssertionError):
    """No frame came in time."""


class Closed(AssertionError):
    """The connection ended where a frame was awaited; `code` is that of the close frame, if any."""

    def __init__(self, code: int | None, reason: str = "") -> None:
        super().__init__(f"closed with {code}: {reason}")
        self.code = code
        self.reason = reason


class WebSocket:
    """`before` and `after` are bytes sent with the handshake, in the same packet. `wrap` puts TLS
    on the socket."""

    def __init__(
        self,
        port: int,
        *,
        subprotocol: str | None = "felix.v1",
        headers: Sequence[str] = (),
        path: str = PATH,
        receive_buffer: int | None = None,
        before: bytes = b"",
        after: bytes = b"",
        wrap: Callable[[socket.socket], socket.socket] | None = None,
    ) -> None:
        self.socket = socket.socket()
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(TIMEOUT_S)
        self.socket.connect(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if wrap is not None:
            self.socket = wrap(self.socket)
        self._buffer = bytearray()
        self.answers_pings = True
        self.pings = 0
        self.key = base64.b64encode(os.urandom(16))
        self.socket.sendall(before + self._request(port, path, subprotocol, headers) + after)
        if not before:
            self.read_handshake()

    def _request(
        self, port: int, path: str, subprotocol: str | None, headers: Sequence[str]
    ) -> bytes:
        every = [
            f"Host: 127.0.0.1:{port}",
            "Upgrade: websocket",
            "Connection: keep-alive, Upgrade",
            f"Sec-WebSocket-Key: {self.key.decode()}",
            "Sec-WebSocket-Version: 13",
        ]
        if subprotocol is not None:
            every.append(f"Sec-WebSocket-Protocol: {subprotocol}")
        names = {header.partition(":")[0].lower() for header in headers}
        kept = [header for header in every if header.partition(":")[0].lower() not in names]
        # A header without a value takes out the usual one.
        given = [header for header in headers if header.partition(":")[2].strip()]
        return "\r\n".join([f"GET {path} HTTP/1.1", *kept, *given, "", ""]).encode()

    def read_handshake(self) -> None:
        head = self.read_head()
        self.status = int(head.split(" ", 2)[1])
        self.headers = {}
        for line in head.split("\r\n")[1:]:
            name, _, value = line.partition(":")
            self.headers[name.strip().lower()] = value.strip()
        if self.status == 101:
            expected = base64.b64encode(hashlib.sha1(self.key + _SALT).digest()).decode()
            assert self.headers["sec-websocket-accept"] == expected
            self.body: Any = None
        else:
            size = int(self.headers.get("content-length", "0"))
            self._need(size, time.monotonic() + TIMEOUT_S)
            self.body = json.loads(self._take(size))

    def read_head(self) -> str:
        deadline = time.monotonic() + TIMEOUT_S
        while b"\r\n\r\n" not in self._buffer:
            self._more(deadline)
        head, _, rest = bytes(self._buffer).partition(b"\r\n\r\n")
        self._buffer = bytearray(rest)
        return head.decode("latin-1")

    def read_body(self, size: int) -> bytes:
        self._need(size, time.monotonic() + TIMEOUT_S)
        return self._take(size)

    def __enter__(self) -> WebSocket:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.socket.close()

    # -- sending ------------------------------------------------------------------------------

    def send(self, *messages: Any) -> None:
        """Each as a text frame of JSON, all in one packet."""
        self.socket.sendall(b"".join(frame(TEXT, json.dumps(each).encode()) for each in messages))

    def send_frame(self, opcode: int, payload: bytes = b"", **options: Any) -> None:
        self.socket.sendall(frame(opcode, payload, **options))

    def send_raw(self, data: bytes) -> None:
        self.socket.sendall(data)

    def send_until_refused(self, piece: bytes, limit_bytes: int) -> int:
        """Sends the piece over and over, up to the limit or until the broker takes no more."""
        sent = 0
        self.socket.settimeout(0.3)
        while sent < limit_bytes:
            try:
                sent += self.socket.send(piece)
            except OSError:
                break
        self.socket.settimeout(TIMEOUT_S)
        return sent

    def cut(self) -> None:
        """From now on the kernel drops what the broker sends, unacknowledged: a lost network."""
        drop_incoming(self.socket)

    # -- receiving ----------------------------------------------------------------------------

    def ask(self, message: Any, timeout_s: float = TIMEOUT_S) -> Any:
        self.send(message)
        return self.receive(timeout_s)

    def receive(self, timeout_s: float = TIMEOUT_S) -> Any:
        """The next text frame as JSON."""
        opcode, payload = self.receive_frame(timeout_s)
        assert opcode == TEXT, (opcode, payload)
        return json.loads(payload)

    def receive_all(self, count: int, timeout_s: float = TIMEOUT_S) -> list[Any]:
        return [self.receive(timeout_s) for _ in range(count)]

    def receive_frame(self, timeout_s: float = TIMEOUT_S) -> tuple[int, bytes]:
        """The next data frame; a ping is answered, a close frame is the end."""
        while True:
            opcode, payload = self.receive_any(timeout_s)
            if opcode == PING:
                self.pings += 1
                if self.answers_pings:
                    self.send_frame(PONG, payload)
            elif opcode == CLOSE:
                code = int.from_bytes(payload[:2], "big") if payload else None
                raise Closed(code, payload[2:].decode())
            elif opcode != PONG:
                return opcode, payload

    def receive_any(self, timeout_s: float = TIMEOUT_S) -> tuple[int, bytes]:
        deadline = time.monotonic() + timeout_s
        self._need(2, deadline)
        first, second = self._buffer[0], self._buffer[1]
        assert first & 0xF0 == 0x80, "the broker sends whole frames without extensions"
        assert second < 0x80, "the broker's frames are not masked"
        at, size = 2, second
        if size > 125:
            at += 2 if size == 126 else 8
            self._need(at, deadline)
            size = int.from_bytes(self._buffer[2:at], "big")
        self._need(at + size, deadline)
        self._take(at)
        return first & 0x0F, self._take(size)

    def events(self, count: int, timeout_s: float = TIMEOUT_S) -> list[bytes]:
        """The payloads of the next events, whichever way they are batched."""
        found: list[bytes] = []
        deadline = time.monotonic() + timeout_s
        while len(found) < count:
            try:
                message = self.receive(max(0.0, deadline - time.monotonic()))
            except NoFrame:
                raise NoFrame(f"{len(found)} of {count} events") from None
            found += payloads_of(message)
        assert len(found) == count, f"{len(found)} events, not {count}"
        return found

    def expect_nothing(self, ms: int = 150) -> None:
        """No frame for so long. Costs its time: use it only where nothing else can show it."""
        try:
            seen = self.receive_frame(ms / 1000)
        except NoFrame:
            return
        raise AssertionError(f"a frame came that should not: {seen!r}")

    def close_code(self, timeout_s: float = TIMEOUT_S) -> int | None:
        """Reads up to the end; None when there was no close frame."""
        try:
            while True:
                self.receive_frame(timeout_s)
        except Closed as closed:
            return closed.code

    def is_ended_within(self, seconds: float) -> bool:
        """Does the broker end the connection itself? Drops whatever still comes."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                self._more(deadline)
            except Closed:
                return True
            except NoFrame:
                return False

    def _need(self, size: int, deadline: float) -> None:
        while len(self._buffer) < size:
            self._more(deadline)

    def _more(self, deadline: float) -> None:
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise NoFrame("no frame in time")
        try:
            data = self.socket.recv(256 * 1024)
        except ConnectionError as error:
            raise Closed(None, str(error)) from error
        if not data:
            raise Closed(None, "end of stream")
        self._buffer += data

    def _take(self, size: int) -> bytes:
        taken = bytes(self._buffer[:size])
        del self._buffer[:size]
        return taken


def frame(
    opcode: int,
    payload: bytes = b"",
    *,
    fin: bool = True,
    masked: bool = True,
    rsv: int = 0,
    size: int | None = None,
    wide: int = 0,
) -> bytes:
    """A client's frame. `size` lies about the payload's; `wide` is the number of length bytes."""
    size = len(payload) if size is None else size
    wide = wide or (0 if size < 126 else 2 if size < 2**16 else 8)
    length = {0: size, 2: 126, 8: 127}[wide]
    head = bytes((0x80 * fin | rsv << 4 | opcode, 0x80 * masked | length))
    head += size.to_bytes(wide, "big") if wide else b""
    if not masked:
        return head + payload
    # The same for the same frame: it is part of tests' names, which must not change.
    mask = zlib.crc32(head + payload).to_bytes(4, "big")
    key = mask * (len(payload) // 4 + 1)
    body = int.from_bytes(payload, "big") ^ int.from_bytes(key[: len(payload)], "big")
    return head + mask + body.to_bytes(len(payload), "big")


def drop_incoming(connection: socket.socket) -> None:
    """Lets the kernel drop every packet that comes for the socket, without acknowledging it."""
    program = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
    address = ctypes.addressof(program)
    connection.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", 1, address))


def payloads_of(message: Any) -> list[bytes]:
    if message["type"] == "event":
        return [base64.b64decode(message["payload"])]
    assert message["type"] == "event_batch", message
    return [base64.b64decode(payload) for payload in message["payloads"]]
