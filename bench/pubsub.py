"""Publishing and subscribing with one interface for the broker and Redis, for use by one load.

This module has the broker's side. All events are the same bytes, so frames of equal length contain
equally many events: only the first frame of each length is decoded.
"""

from __future__ import annotations

import base64
import struct
from typing import Protocol

import msgspec

from bench.buffered_socket import OnCount, open_socket
from bench.lean_client import OnError
from bench.lean_socket import (
    BINARY,
    BINARY_FRAME,
    AskingSocket,
    LeanSocket,
    binary_frame,
    text_frame,
)
from bench.processes import Broker
from bench.rows import BenchFailed

EVENT = b"v" * 100
EVENT_TEXT = base64.b64encode(EVENT).decode()
SCOPE = '"tenant_id":"default","namespace":"default"'
STREAM_PATH = "/v1/tenants/default/namespaces/default/streams/default"
SUBSCRIBE = text_frame(f'{{"type":"subscribe",{SCOPE},"stream":"default"}}'.encode())

_EVENTS_KIND, _PUBLISH_KIND = 1, 2
_PER_BATCH = 2
_EVENTS_HEAD = struct.Struct("<BII")
_LENGTH = struct.Struct("<I")


class Closable(Protocol):
    def close(self) -> None: ...


class Publisher(Closable, Protocol):
    def publish(self, batches: int = 1) -> None: ...


class PubSub(Protocol):
    async def subscribe(self, on_events: OnCount, on_error: OnError) -> Closable: ...

    async def publisher(self, events: int, on_acks: OnCount, on_error: OnError) -> Publisher:
        """It publishes batches of so many events; each is acked as a whole."""
        ...

    def dropped(self) -> int:
        """Events that the present subscriptions have lost, by the server's own account."""
        ...


class Report(msgspec.Struct):
    """The broker's counts for a subscription."""

    subscription_id: str
    dropped: int


class _Reports(msgspec.Struct):
    subscriptions: list[Report]


class _Events(msgspec.Struct):
    type: str
    payload: bytes | None = None
    payloads: list[bytes] | None = None


class BrokerPubSub:
    def __init__(self, broker: Broker, subprotocol: str) -> None:
        self._broker = broker
        self._subprotocol = subprotocol

    async def subscribe(self, on_events: OnCount, on_error: OnError) -> Closable:
        subscriber = Subscriber(self._subprotocol, on_events, on_error)
        return await open_socket(self._broker.port, subscriber)

    async def publisher(self, events: int, on_acks: OnCount, on_error: OnError) -> Publisher:
        frame = publish_frame(events, self._subprotocol)
        socket = SocketPublisher(self._subprotocol, frame, on_acks, on_error)
        return await open_socket(self._broker.port, socket)

    def dropped(self) -> int:
        return sum(report.dropped for report in subscriptions(self._broker))


class SocketPublisher(AskingSocket):
    def __init__(self, subprotocol: str, frame: bytes, on_acks: OnCount, on_error: OnError) -> None:
        super().__init__(subprotocol, b'"publish_ok"', on_acks, on_error)
        self._publish = frame

    def publish(self, batches: int = 1) -> None:
        self.write(self._publish * batches)


class Subscriber(LeanSocket):
    """Ready once it is subscribed."""

    def __init__(self, subprotocol: str, on_events: OnCount, on_error: OnError) -> None:
        super().__init__(subprotocol, on_error)
        self._on_events = on_events
        self._count = 0
        self._events_by_length: dict[int, int] = {}

    def _upgraded(self) -> None:
        self.write(SUBSCRIBE)

    def _frame(self, kind: int, start: int, stop: int) -> None:
        count = self._events_by_length.get(stop - start)
        if count is None:
            count = self._look_into(kind, bytes(self._buffer[start:stop]))
        self._count += count

    def _read(self) -> None:
        count, self._count = self._count, 0
        if count:
            self._on_events(count)

    def _look_into(self, kind: int, frame: bytes) -> int:
        if not self.ready.done():
            if b'"subscribed"' not in frame:
                raise BenchFailed(f"subscribe was refused: {frame.decode(errors='replace')}")
            self.ready.set_result(None)
            return 0
        payloads = _binary_events(frame) if kind == BINARY_FRAME else _text_events(frame)
        if not payloads or any(payload != EVENT for payload in payloads):
            raise BenchFailed(f"not what was published: {frame[:500].decode(errors='replace')}")
        self._events_by_length[len(frame)] = len(payloads)
        return len(payloads)


def subscriptions(broker: Broker) -> list[Report]:
    answer = broker.ask("GET", f"{STREAM_PATH}/subscriptions")
    return msgspec.json.decode(answer, type=_Reports).subscriptions


def publish_frame(events: int, subprotocol: str) -> bytes:
    if subprotocol == BINARY:
        name = bytes([len("default")]) + b"default"
        head = struct.pack("<BBI", _PUBLISH_KIND, _PER_BATCH, 1) + name * 3
        return binary_frame(
            head + _LENGTH.pack(events) + (_LENGTH.pack(len(EVENT)) + EVENT) * events
        )
    if events == 1:
        body = f'"type":"publish",{SCOPE},"stream":"default","payload":"{EVENT_TEXT}"'
    else:
        payloads = ",".join([f'"{EVENT_TEXT}"'] * events)
        body = f'"type":"publish_batch",{SCOPE},"stream":"default","payloads":[{payloads}]'
    return text_frame(f"{{{body}}}".encode())


def _text_events(frame: bytes) -> list[bytes]:
    events = msgspec.json.decode(frame, type=_Events)
    if events.type == "event" and events.payload is not None:
        return [events.payload]
    return events.payloads or []


def _binary_events(frame: bytes) -> list[bytes]:
    kind, _, count = _EVENTS_HEAD.unpack_from(frame)
    payloads, at = [], _EVENTS_HEAD.size
    for _ in range(count if kind == _EVENTS_KIND else 0):
        start = at + _LENGTH.size
        at = start + _LENGTH.unpack_from(frame, at)[0]
        payloads.append(frame[start:at])
    return payloads
