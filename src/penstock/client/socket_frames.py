"""The frames of the broker's WebSocket: encodes requests, decodes answers and events. No IO.

A publish goes as a binary frame, without base64 and JSON; events come in one. All else is text.
Nothing is taken from a binary frame beyond its end. Must not know connections.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from itertools import chain

import msgspec

from penstock.client.calls import ErrorAnswer, SocketForm, encode, wrong_unicode
from penstock.client.streams import BatchAck
from penstock.model.caching import WatchEvent, WatchKind
from penstock.model.errors import Internal, InvalidArgument
from penstock.model.limits import MAX_BATCH_ITEMS
from penstock.model.tenancy import Path

SOCKET_PATH = "/v1/felix/ws"
SUBPROTOCOL = "felix.v1+binary"

MAX_NUMBER = 2**32
"""Requests are numbered from 1 up to this and then again from 1: binary frames have 4 bytes."""

_EVENTS, _PUBLISH, _KEPT = 1, 2, b"\x03"
_ACKS: tuple[BatchAck, ...] = ("none", "per_message", "per_batch")
_MAX_NAME_BYTES = 255

_events_head = struct.Struct("<BII")
_kept_events_head = struct.Struct("<BIQI")
_publish_head = struct.Struct("<BBI").pack
_u32 = struct.Struct("<I")


class AnswerHead(ErrorAnswer):
    """The members that say what a text frame is for."""

    type: str = ""
    request_id: int | str | None = None
    subscription_id: str = ""
    watch_id: str = ""
    name: str = ""
    owner: str = ""
    offset: int | None = None
    stream_id: int | None = None


class NamedEventFrame(msgspec.Struct):
    """An event of a named subscription."""

    offset: int
    attempt: int
    delivery_id: str
    payload: bytes
    last_error: str = ""


class _CacheEvent(msgspec.Struct):
    event: WatchKind
    version: int
    key: str = ""
    value: bytes | None = None
    from_version: int = 0


_read_head = msgspec.json.Decoder(AnswerHead).decode
_read_named_event = msgspec.json.Decoder(NamedEventFrame).decode
_read_cache_event = msgspec.json.Decoder(_CacheEvent).decode


def encode_message(form: SocketForm, body: bytes, number: int) -> bytes:
    """Encodes a message. `body` is a JSON object, or empty."""
    head = encode({"type": form.type, **form.members, "request_id": number})
    return head if len(body) <= 2 else b"%b,%b" % (head[:-1], body[1:])


def encode_publish(path: Path, payloads: Sequence[bytes], ack: BatchAck, number: int) -> bytes:
    """Encodes a publish as a binary frame."""
    if not 1 <= len(payloads) <= MAX_BATCH_ITEMS:
        raise InvalidArgument(f"a publish has 1 to {MAX_BATCH_ITEMS} payloads, not {len(payloads)}")
    if ack not in _ACKS:
        raise InvalidArgument(f"ack is one of {', '.join(_ACKS)}, not {ack!r}")
    pack = _u32.pack
    head = _publish_head(_PUBLISH, _ACKS.index(ack), number)
    sizes = map(pack, map(len, payloads))
    parts = chain.from_iterable(zip(sizes, payloads, strict=True))
    return b"".join((head, _names(path), pack(len(payloads)), *parts))


@functools.lru_cache(maxsize=1024)
def _names(path: Path) -> bytes:
    parts = []
    for name in path:
        try:
            text = name.encode()
        except UnicodeEncodeError as error:
            raise wrong_unicode(error) from error
        if len(text) > _MAX_NAME_BYTES:
            raise InvalidArgument(f"the name {name[:40]!r}… is too long")
        parts.append(bytes([len(text)]) + text)
    return b"".join(parts)


def decode_head(frame: bytes) -> AnswerHead:
    try:
        return _read_head(frame)
    except (msgspec.DecodeError, ValueError) as error:
        raise Internal(f"cannot read a frame of the broker: {error}") from error


def decode_cache_event(frame: bytes) -> WatchEvent:
    try:
        found = _read_cache_event(frame)
    except (msgspec.DecodeError, ValueError) as error:
        raise Internal(f"cannot read an event of the broker: {error}") from error
    return WatchEvent(found.event, found.version, found.key, found.value, found.from_version)


def decode_named_event(frame: bytes) -> NamedEventFrame:
    try:
        return _read_named_event(frame)
    except (msgspec.DecodeError, ValueError) as error:
        raise Internal(f"cannot read an event of the broker: {error}") from error


def decode_events(frame: bytes) -> tuple[str, int, list[bytes]]:
    """Returns the id of a subscription, the offset of its first event, and its events. The offset
    is -1 if the stream keeps none."""
    try:
        if frame[:1] == _KEPT:
            _, number, offset, count = _kept_events_head.unpack_from(frame)
            return f"s{number}", offset, _payloads(frame, _kept_events_head.size, count)
        kind, number, count = _events_head.unpack_from(frame)
        if kind != _EVENTS:
            raise Internal(f"the broker sent a binary frame of the unknown kind {kind}")
        return f"s{number}", -1, _payloads(frame, _events_head.size, count)
    except struct.error as error:
        raise Internal("a binary frame of the broker ends too early") from error


def _payloads(frame: bytes, at: int, count: int) -> list[bytes]:
    payloads: list[bytes] = []
    end = len(frame)
    size_at, add = _u32.unpack_from, payloads.append
    for _ in range(count):
        (size,) = size_at(frame, at)
        at += 4
        add(frame[at : at + size])
        at += size
    if at != end:
        raise Internal("the payloads of a binary frame do not add up to its length")
    return payloads
