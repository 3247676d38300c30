"""The text protocol of NATS: what a client writes, and a parser for what a server sends.

Has no IO. A length that the server names is checked before anything of that size is kept. Must not
know JetStream: to NATS its requests and messages are like any others.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from penstock.cluster.jetstream.errors import NatsProtocolError

LINE_BYTES_MAX = 1024 * 1024
"""The longest line without a payload. INFO lists every server of a large cluster."""
PAYLOAD_BYTES_MAX = 128 * 1024 * 1024
"""Twice the largest `max_payload` that a server can be configured with: the server's own answers
may be larger than what it accepts."""
NUMBER_DIGITS_MAX = 19
COMPACT_BYTES = 256 * 1024
"""How much of the buffer is consumed before the rest moves to its front."""

PING = b"PING\r\n"
PONG = b"PONG\r\n"
NO_RESPONDERS = b"NATS/1.0 503"
CONTROL = b"NATS/1.0 100"
_STATUS_AT = len(b"NATS/1.0 ")


class NatsInfo(msgspec.Struct, frozen=True):
    """The first line of a server, sent again when something changes."""

    server_name: str = ""
    version: str = ""
    max_payload: Annotated[int, msgspec.Meta(ge=0)] = 1024 * 1024
    headers: bool = False
    jetstream: bool = False
    tls_required: bool = False
    tls_available: bool = False
    ldm: bool = False
    """Lame-duck mode: the server will end soon, and closes its connections one after another."""


class NatsMessage(msgspec.Struct, frozen=True):
    sid: int
    subject: bytes
    reply: bytes
    headers: bytes
    data: bytes

    @property
    def is_no_responders(self) -> bool:
        return self.headers.startswith(NO_RESPONDERS) and not self.data

    @property
    def is_control(self) -> bool:
        """Whether it is a heartbeat of a consumer, or a question of its flow control."""
        return self.headers.startswith(CONTROL) and not self.data

    def header(self, name: bytes) -> bytes | None:
        """Returns the value of a header. JetStream writes each name in one way only."""
        for line in self.headers.split(b"\r\n")[1:]:
            found, separator, value = line.partition(b":")
            if separator and found == name:
                return value.strip()
        return None


class NatsRefusal(msgspec.Struct, frozen=True):
    """The server says -ERR. It closes the connection after most of them."""

    text: str


class NatsPing(msgspec.Struct, frozen=True):
    """The server wants a PONG."""


class NatsPong(msgspec.Struct, frozen=True):
    """The server answers a PING."""


NatsEvent = NatsInfo | NatsMessage | NatsRefusal | NatsPing | NatsPong
_PING_EVENT = NatsPing()
_PONG_EVENT = NatsPong()
_info = msgspec.json.Decoder(NatsInfo)


class NatsParser:
    """Turns the bytes of one connection into events."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._start = 0
        self._wanted = 0
        """How long the buffer must be before the message at `_start` is complete."""

    @property
    def is_amid_message(self) -> bool:
        return self._wanted > 0

    def feed(self, data: bytes) -> list[NatsEvent]:
        buffer = self._buffer
        buffer += data
        events: list[NatsEvent] = []
        while len(buffer) >= self._wanted:
            end = buffer.find(b"\r\n", self._start, self._start + LINE_BYTES_MAX)
            if end < 0:
                if len(buffer) - self._start >= LINE_BYTES_MAX:
                    raise NatsProtocolError("the server sent a line without an end")
                break
            event = self._event(end)
            if event is None:
                break
            events.append(event)
        if self._start >= COMPACT_BYTES or self._start == len(buffer):
            del buffer[: self._start]
            self._wanted = max(0, self._wanted - self._start)
            self._start = 0
        return events

    def _event(self, end: int) -> NatsEvent | None:
        """Takes the line that ends at `end`, with its payload. None if that is not there yet."""
        line = bytes(self._buffer[self._start : end])
        word, _, rest = line.partition(b" ")
        if word in (b"MSG", b"HMSG"):
            return self._message(rest.split(), end + 2, has_headers=word == b"HMSG")
        self._start = end + 2
        if word == b"PING":
            return _PING_EVENT
        if word == b"PONG":
            return _PONG_EVENT
        if word == b"INFO":
            try:
                return _info.decode(rest)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise NatsProtocolError(f"the server's INFO is not readable: {error}") from error
        if word == b"-ERR":
            return NatsRefusal(rest.decode("utf-8", "replace").strip().strip("'"))
        raise NatsProtocolError(f"the server sent something unknown: {line[:40]!r}")

    def _message(self, words: list[bytes], body: int, *, has_headers: bool) -> NatsMessage | None:
        sizes = 2 if has_headers else 1
        if len(words) not in (2 + sizes, 3 + sizes):
            raise NatsProtocolError("the server sent a message without its sizes")
        sid, total = _number(words[1]), _number(words[-1])
        headers = _number(words[-2]) if has_headers else 0
        if not 0 <= headers <= total <= PAYLOAD_BYTES_MAX:
            raise NatsProtocolError(f"the server sent a message of {total} bytes")
        buffer, split, end = self._buffer, body + headers, body + total
        if len(buffer) < end + 2:
            self._wanted = end + 2
            return None
        if buffer[end : end + 2] != b"\r\n":
            raise NatsProtocolError("the server sent a message that is longer than its size")
        self._wanted = 0
        self._start = end + 2
        with memoryview(buffer) as view:
            return NatsMessage(
                sid,
                words[0],
                words[2] if len(words) == 3 + sizes else b"",
                bytes(view[body:split]),
                bytes(view[split:end]),
            )


def _number(word: bytes) -> int:
    if not word.isdigit() or len(word) > NUMBER_DIGITS_MAX:
        raise NatsProtocolError("the server sent a size that is no number")
    return int(word)


def publish(subject: bytes, reply: bytes, headers: bytes, data: bytes) -> bytes:
    """`headers` are complete lines, each with its end."""
    if not headers:
        return b"PUB %b %b %d\r\n%b\r\n" % (subject, reply, len(data), data)
    block = b"NATS/1.0\r\n%b\r\n" % headers
    return b"HPUB %b %b %d %d\r\n%b%b\r\n" % (
        subject, reply, len(block), len(block) + len(data), block, data,
    )  # fmt: skip


def subscribe(subject: bytes, sid: int) -> bytes:
    return b"SUB %b %d\r\n" % (subject, sid)


def unsubscribe(sid: int) -> bytes:
    return b"UNSUB %d\r\n" % sid


def connect(options: dict[str, object]) -> bytes:
    return b"CONNECT " + msgspec.json.encode(options) + b"\r\n"
