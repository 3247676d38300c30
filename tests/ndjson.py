"""A consume stream read from a plain socket: items with deadlines, and the raw line of each.

One thread, no hidden reading ahead: nothing is taken from the socket unless a test asks, so the
same class plays the eager reader, the slow one and the one that never reads.
"""

from __future__ import annotations

import json
import select
import socket
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import h11

READ_TIMEOUT_S = 10.0
_CHUNK = 256 * 1024


class NoItem(AssertionError):
    """No item came in time."""


class StreamEnded(AssertionError):
    """The broker ended the stream while an item was awaited."""


@dataclass(frozen=True)
class Item:
    """One delivery. `members` is the JSON object with its members in the order they were sent."""

    members: dict[str, Any]
    raw: bytes = field(repr=False)
    received_at: float = field(repr=False)

    @property
    def partition(self) -> int:
        return int(self.members["partition"])

    @property
    def offset(self) -> int:
        return int(self.members["offset"])

    @property
    def attempts(self) -> int:
        return int(self.members["attempts"])

    @property
    def key(self) -> str:
        return str(self.members["key"])

    @property
    def value(self) -> str:
        return str(self.members["value"])

    @property
    def last_error(self) -> str:
        return str(self.members["last_error"])

    @property
    def envelope(self) -> dict[str, Any] | None:
        return self.members.get("envelope")

    @property
    def routing(self) -> dict[str, Any] | None:
        return self.members.get("routing")


class ConsumeStream:
    """Sends the request and waits for the response's head; items are read when asked for."""

    def __init__(
        self,
        port: int,
        target: str,
        *,
        body: bytes | None = None,
        headers: Sequence[tuple[str, str]] = (),
        receive_buffer: int | None = None,
    ) -> None:
        self.socket = socket.socket()
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(READ_TIMEOUT_S)
        self.socket.connect(("127.0.0.1", port))
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=2**20)
        self._partial = bytearray()
        self._lines: deque[tuple[bytes, float]] = deque()
        self.blank_lines = 0
        self.ended = False
        self.clean_end = False
        self._send(target, body, headers)
        self.status, self.headers = self._read_head()

    def next(self, timeout_s: float = READ_TIMEOUT_S) -> Item:
        deadline = time.monotonic() + timeout_s
        while not self._lines:
            if self.ended:
                raise StreamEnded("the stream ended before an item came")
            if not self._wait(deadline):
                raise NoItem(f"no item within {timeout_s} s")
        line, received_at = self._lines.popleft()
        return Item(json.loads(line), line, received_at)

    def take(self, count: int, timeout_s: float = READ_TIMEOUT_S) -> list[Item]:
        """`count` items, all within the one timeout."""
        deadline = time.monotonic() + timeout_s
        items: list[Item] = []
        while len(items) < count:
            try:
                items.append(self.next(max(0.0, deadline - time.monotonic())))
            except NoItem:
                raise NoItem(f"{len(items)} of {count} items within {timeout_s} s") from None
        return items

    def expect_nothing(self, ms: int = 150) -> None:
        """No item for so long. Costs its time: use it only where nothing else can show it."""
        try:
            item = self.next(ms / 1000)
        except NoItem:
            return
        raise AssertionError(f"an item came that should not: {item}")

    def wait_for_end(self, timeout_s: float = READ_TIMEOUT_S) -> list[Item]:
        """The items up to the end of the stream."""
        deadline = time.monotonic() + timeout_s
        while not self.ended:
            if not self._wait(deadline):
                raise AssertionError(f"the stream did not end within {timeout_s} s")
        return [self.next(0) for _ in range(len(self._lines))]

    def wait_for_blank_lines(self, count: int, timeout_s: float = READ_TIMEOUT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while self.blank_lines < count:
            if self.ended or not self._wait(deadline):
                raise AssertionError(f"{self.blank_lines} of {count} blank lines")

    def rest_of_body(self, timeout_s: float = READ_TIMEOUT_S) -> bytes:
        """For a response that is not a stream of items."""
        self.wait_for_end_of_bytes(timeout_s)
        return b"\n".join([line for line, _ in self._lines] + [bytes(self._partial)])

    def wait_for_end_of_bytes(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.ended and self._wait(deadline):
            pass

    @property
    def has_item(self) -> bool:
        return bool(self._lines)

    def fileno(self) -> int:
        return self.socket.fileno()

    def close(self) -> None:
        self.ended = True
        self.socket.close()

    # -- inside -------------------------------------------------------------------------------

    def _send(self, target: str, body: bytes | None, headers: Sequence[tuple[str, str]]) -> None:
        every = [("Host", f"127.0.0.1:{self.socket.getpeername()[1]}"), *headers]
        if body is not None:
            every.append(("Content-Length", str(len(body))))
        request = h11.Request(method="GET", target=target, headers=every)
        data = self._http.send(request) or b""
        if body is not None:
            data += self._http.send(h11.Data(data=body)) or b""
        data += self._http.send(h11.EndOfMessage()) or b""
        self.socket.sendall(data)

    def _read_head(self) -> tuple[int, dict[str, str]]:
        deadline = time.monotonic() + READ_TIMEOUT_S
        while True:
            event = self._http.next_event()
            if isinstance(event, h11.Response):
                head = {k.decode().lower(): v.decode() for k, v in event.headers}
                self._parse(time.monotonic())
                return event.status_code, head
            if event is not h11.NEED_DATA:
                raise AssertionError(f"expected the response's head, saw {event!r}")
            if not self._receive(deadline):
                raise AssertionError("no response head in time")

    def _wait(self, deadline: float) -> bool:
        """Take in what has arrived, or what arrives before the deadline; False when nothing did."""
        if not self._receive(deadline):
            return False
        self._parse(time.monotonic())
        return True

    def _receive(self, deadline: float) -> bool:
        remaining = max(0.0, deadline - time.monotonic())
        if not _readable([self], remaining):
            return False
        try:
            data = self.socket.recv(_CHUNK)
        except ConnectionResetError:
            self.ended = True
            return True
        self._http.receive_data(data)
        return True

    def _parse(self, now: float) -> None:
        while not self.ended:
            try:
                event = self._http.next_event()
            except h11.RemoteProtocolError:
                self.ended = True  # closed in the middle of a chunk
                return
            if event is h11.NEED_DATA:
                return
            if isinstance(event, h11.Data):
                self._split(bytes(event.data), now)
            elif isinstance(event, h11.EndOfMessage):
                self.ended = self.clean_end = True
            else:
                self.ended = True

    def _split(self, data: bytes, now: float) -> None:
        self._partial += data
        *whole, rest = bytes(self._partial).split(b"\n")
        self._partial = bytearray(rest)
        for line in whole:
            if line.strip():
                self._lines.append((line, now))
            else:
                self.blank_lines += 1


def next_of(
    streams: Sequence[ConsumeStream], timeout_s: float = READ_TIMEOUT_S
) -> tuple[int, Item]:
    """The next item on any of the streams, and the index of the stream it came on."""
    deadline = time.monotonic() + timeout_s
    while True:
        for index, stream in enumerate(streams):
            if stream.has_item:
                return index, stream.next(0)
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise NoItem(f"no item on any of {len(streams)} streams within {timeout_s} s")
        for stream in _readable([s for s in streams if not s.ended], remaining):
            stream._wait(time.monotonic())


def _readable(streams: Sequence[ConsumeStream], timeout_s: float) -> list[ConsumeStream]:
    """Those with something to read; poll, since select knows only the first 1024 descriptors."""
    poll = select.poll()
    for stream in streams:
        poll.register(stream.socket, select.POLLIN)
    ready = {fd for fd, _ in poll.poll(timeout_s * 1000)}
    return [stream for stream in streams if stream.fileno() in ready]
