"""The negotiated binary frames, byte by byte."""

from __future__ import annotations

import struct

import msgspec
import pytest

from penstock.api.streams import EventBatch, EventRun
from penstock.server.websocket.binary import BinaryPublish, decode_publish, encode_events
from penstock.server.websocket.messages import RefusedMessage


def u32(number: int) -> bytes:
    return struct.pack("<I", number)


def text(name: bytes) -> bytes:
    return bytes((len(name),)) + name


def publish(
    payloads: list[bytes], *, kind: int = 2, ack: int = 2, number: int = 7, count: int | None = None
) -> bytes:
    body = b"".join(u32(len(payload)) + payload for payload in payloads)
    count = len(payloads) if count is None else count
    head = bytes((kind, ack)) + u32(number)
    return head + text(b"acme") + text(b"prod") + text("straße".encode()) + u32(count) + body


def run(payloads: list[bytes], start: int = 0, end: int | None = None) -> EventRun:
    return EventRun(EventBatch(payloads), start, len(payloads) if end is None else end, 0)


def test_events_are_their_lengths_and_bytes() -> None:
    frame = encode_events(258, [run([b"", b"ab"]), run([b"x", b"y", b"z"], 1, 3)])
    assert frame == b"\x01" + u32(258) + u32(4) + u32(0) + u32(2) + b"ab" + u32(1) + b"y" + (
        u32(1) + b"z"
    )


def test_a_whole_batch_is_encoded_once_for_all() -> None:
    shared = run([b"a", b"b"])
    encode_events(1, [shared])
    before = dict(shared.batch.encoded)
    assert len(before) == 1
    encode_events(2, [shared])
    assert shared.batch.encoded == before
    part = run([b"a", b"b"], 0, 1)
    encode_events(1, [part])
    assert not part.batch.encoded


def test_a_publish_is_read_back() -> None:
    frame = decode_publish(publish([b"", b"\x00\xff", b"x" * 300]))
    assert isinstance(frame, BinaryPublish)
    assert frame.payloads == [b"", b"\x00\xff", b"x" * 300]
    message = frame.message
    assert (message.tenant_id, message.namespace, message.stream) == ("acme", "prod", "straße")
    assert (message.ack, message.request_id) == ("per_batch", 7)


@pytest.mark.parametrize(("number", "ack"), [(0, "none"), (1, "per_message"), (2, "per_batch")])
def test_the_ack_is_a_number(number: int, ack: str) -> None:
    frame = decode_publish(publish([b"x"], ack=number))
    assert isinstance(frame, BinaryPublish)
    assert frame.message.ack == ack


WHOLE = publish([b"ab", b"c"])


@pytest.mark.parametrize("size", range(len(WHOLE)))
def test_a_frame_that_was_cut_anywhere_is_refused(size: int) -> None:
    frame = decode_publish(WHOLE[:size])
    assert isinstance(frame, RefusedMessage)
    assert frame.error.code == "INVALID_ARGUMENT"
    assert frame.request_id == (7 if size >= 6 else None)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        publish([b"x"], kind=1),
        publish([b"x"], ack=3),
        publish([]),
        publish([b"x"], count=10_001),
        publish([b"x"], count=2**32 - 1),
        publish([b"x"]) + b"y",
        b"\x02\x02" + u32(1) + text(b"\xff") * 3 + u32(1) + u32(0),
    ],
)
def test_nonsense_is_refused(data: bytes) -> None:
    frame = decode_publish(data)
    assert isinstance(frame, RefusedMessage)
    assert msgspec.json.encode(frame.error.message)
