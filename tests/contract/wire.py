"""A connection that sends exactly the bytes it is given and reads one response after another."""

from __future__ import annotations

import json
import select
import socket
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any

TIMEOUT_S = 10.0


class Closed(AssertionError):
    """The broker closed the connection where a response was awaited."""


@dataclass(frozen=True)
class Response:
    version: str
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Wire:
    """`with Wire(port) as wire: wire.send(b"GET …")`."""

    def __init__(self, port: int, *, receive_buffer: int | None = None) -> None:
        self.port = port
        self.socket = socket.socket()
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(TIMEOUT_S)
        self.socket.connect(("127.0.0.1", port))
        self._buffer = b""

    def __enter__(self) -> Wire:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def has_input(self) -> bool:
        """Return whether a part of a response has arrived."""
        return bool(self._buffer) or bool(select.select([self.socket], [], [], 0)[0])

    def send_until_refused(self, piece: bytes, limit_bytes: int) -> int:
        """Send the piece over and over, up to the limit or until the broker takes no more."""
        sent = 0
        self.socket.settimeout(0.2)
        while sent < limit_bytes:
            try:
                sent += self.socket.send(piece)
            except TimeoutError:
                break  # the broker no longer reads
            except OSError:
                break  # it closed the connection
        self.socket.settimeout(TIMEOUT_S)
        return sent

    def request(
        self, method: str, target: str, body: bytes | None = None, *headers: str
    ) -> Response:
        self.send(encode(self.port, method, target, body, *headers))
        return self.read(head_only=method == "HEAD")

    def read(self, *, head_only: bool = False) -> Response:
        head = self._until(b"\r\n\r\n").decode("latin-1")
        first, *lines = head.split("\r\n")
        version, status = first.split(" ", 2)[:2]
        headers = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        body = b"" if head_only or status in ("204", "304") or status[0] == "1" else (
            self._body(headers)
        )  # fmt: skip
        return Response(version, int(status), headers, body)

    def is_closed_within(self, seconds: float) -> bool:
        """Reads and drops whatever still comes."""
        deadline = time.monotonic() + seconds
        try:
            while time.monotonic() < deadline:
                self.socket.settimeout(max(0.01, deadline - time.monotonic()))
                if not self.socket.recv(65536):
                    return True
        except TimeoutError:
            return False
        except OSError:
            return True
        return False

    def _body(self, headers: dict[str, str]) -> bytes:
        if headers.get("transfer-encoding") == "chunked":
            body = b""
            while True:
                size = int(self._until(b"\r\n").split(b";")[0], 16)
                body += self._exactly(size)
                self._exactly(2)
                if size == 0:
                    return body
        if "content-length" in headers:
            return self._exactly(int(headers["content-length"]))
        body, self._buffer = self._buffer, b""
        while data := self.socket.recv(65536):
            body += data
        return body

    def _until(self, mark: bytes) -> bytes:
        while mark not in self._buffer:
            self._more()
        found, _, self._buffer = self._buffer.partition(mark)
        return found

    def _exactly(self, size: int) -> bytes:
        while len(self._buffer) < size:
            self._more()
        found, self._buffer = self._buffer[:size], self._buffer[size:]
        return found

    def _more(self) -> None:
        try:
            data = self.socket.recv(65536)
        except ConnectionError as error:
            raise Closed(str(error)) from error
        if not data:
            raise Closed(f"closed after {self._buffer!r}")
        self._buffer += data


def encode(port: int, method: str, target: str, body: bytes | None = None, *headers: str) -> bytes:
    """A plain HTTP/1.1 request."""
    lines = [f"{method} {target} HTTP/1.1", f"Host: 127.0.0.1:{port}", *headers]
    if body is not None:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + (body or b"")
