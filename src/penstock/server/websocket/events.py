"""Encodes the events of streams and watches as JSON.

A published batch is encoded once, and all its subscribers share the result: the inside of a JSON
array of base64 texts. Base64 has no commas, so one replacement puts the text of a subscription
between the events.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.api.streams import EventRun
from penstock.model.caching import WatchEvent
from penstock.model.limits import KIB
from penstock.server.websocket.answers import CacheEvent

BURST_BYTES = 64 * KIB
"""About as much is taken from one subscription or watch at once; one event at least."""
MAX_BURST_EVENTS = 1024

_KEY = "json"
_EVENT = b'{"type":"event","subscription_id":"%b",%b"payload":'

_encode = msgspec.json.Encoder().encode


class BurstSize:
    """The number of events to take at once, by the size of the events before them."""

    __slots__ = ("events",)

    def __init__(self, first_events: int) -> None:
        self.events = first_events

    def learn(self, events: int, nbytes: int) -> None:
        """Notes the size of the events that were taken last."""
        self.events = max(1, min(MAX_BURST_EVENTS, events * BURST_BYTES // (nbytes or 1)))


def encode_runs(subscription_id: str, runs: Sequence[EventRun]) -> bytes:
    """Returns a single event as `event`, several as one `event_batch`. Those of a durable stream
    must follow each other without a gap."""
    payloads = _joined(runs)
    offset = _offset_member(runs[0])
    if len(runs) == 1 and runs[0].end - runs[0].start == 1:
        return b"%b%b}" % (_EVENT % (subscription_id.encode(), offset), payloads)
    return b'{"type":"event_batch","subscription_id":"%b",%b"payloads":[%b]}' % (
        subscription_id.encode(),
        offset,
        payloads,
    )


def encode_singly(subscription_id: str, runs: Sequence[EventRun]) -> list[bytes]:
    """Returns an `event` for each."""
    if runs[0].batch.offset >= 0:
        return EventLines(subscription_id, b"", b"").each(runs)
    event = _EVENT % (subscription_id.encode(), b"")
    return [b"%b%b}" % (event, payload) for payload in _joined(runs).split(b",")]


def without_gaps(runs: list[EventRun]) -> list[list[EventRun]]:
    """Divides runs of a durable stream where events were dropped between them. Others stay
    together."""
    parts: list[list[EventRun]] = []
    expected = None
    for run in runs:
        if parts and (run.offset < 0 or run.offset == expected):
            parts[-1].append(run)
        else:
            parts.append([run])
        expected = run.offset + run.end - run.start
    return parts


def _offset_member(run: EventRun) -> bytes:
    return b"" if run.offset < 0 else b'"offset":%d,' % run.offset


def encode_watch(watch_id: str, events: Sequence[WatchEvent]) -> list[bytes]:
    """Returns a `cache_event` for each."""
    return [_encode(_cache_event(watch_id, event)) for event in events]


def _cache_event(watch_id: str, event: WatchEvent) -> CacheEvent:
    if event.event == "gap":
        return CacheEvent(
            watch_id,
            event.event,
            event.version,
            from_version=event.from_version,
            to_version=event.version,
        )
    return CacheEvent(watch_id, event.event, event.version, event.key, event.value)


class EventLines:
    """Encodes the events of one subscription as one piece: an `event` for each, with `before` and
    `after` around it. With a `stream_id`, this id and the offset of an event go before it, as the
    `id` of a server-sent event."""

    __slots__ = ("_between", "_has_ids", "_head", "_kept", "_tail")

    def __init__(
        self, subscription_id: str, before: bytes, after: bytes, *, stream_id: int | None = None
    ) -> None:
        name = subscription_id.encode()
        self._head = before + _EVENT % (name, b"")
        self._tail = b"}" + after
        self._between = self._tail + self._head
        self._has_ids = stream_id is not None
        event = before + _EVENT % (name, b'"offset":%d,') + b"%b" + self._tail
        self._kept = event if stream_id is None else b"id: %d-%%d\n" % stream_id + event

    def encode(self, runs: Sequence[EventRun]) -> bytes:
        if runs[0].batch.offset >= 0:
            return b"".join(self.each(runs))
        return b"%b%b%b" % (self._head, _joined(runs).replace(b",", self._between), self._tail)

    def each(self, runs: Sequence[EventRun]) -> list[bytes]:
        """Returns a piece for each event of a durable stream."""
        found: list[bytes] = []
        kept = self._kept
        for run in runs:
            texts = _texts(run).split(b",")
            offsets = range(run.offset, run.offset + len(texts))
            if self._has_ids:
                found += [kept % each for each in zip(offsets, offsets, texts, strict=True)]
            else:
                found += [kept % each for each in zip(offsets, texts, strict=True)]
        return found


def _joined(runs: Sequence[EventRun]) -> bytes:
    """Returns base64 texts in quotes, with commas between them."""
    return _texts(runs[0]) if len(runs) == 1 else b",".join(map(_texts, runs))


def _texts(run: EventRun) -> bytes:
    batch = run.batch
    if run.end - run.start < len(batch.payloads):
        return _encode(batch.payloads[run.start : run.end])[1:-1]
    texts = batch.encoded.get(_KEY)
    if texts is None:
        texts = batch.encoded[_KEY] = _encode(batch.payloads)[1:-1]
    return texts
