"""The binary frames of subprotocol `felix.v1+binary`: events and publishes with raw payloads.

All numbers are little-endian. Nothing is allocated for a count or length before the frame is known
to have as many bytes. Must not know connections.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Literal

import msgspec

from penstock.api.engine import Engine
from penstock.api.streams import EventRun
from penstock.model.errors import InvalidArgument
from penstock.model.limits import MAX_BATCH_ITEMS
from penstock.model.streams import Publish
from penstock.server.commands import path_of
from penstock.server.message_actions import Done, answer_publish, published
from penstock.server.websocket.messages import PublishBatchMessage, RefusedMessage

Ack = Literal["none", "per_message", "per_batch"]

EVENTS, PUBLISH, KEPT_EVENTS = 1, 2, 3
ACKS: tuple[Ack, ...] = ("none", "per_message", "per_batch")

_ENCODED = "binary"
"""The key under which a batch keeps its events in this encoding."""

_events_head = struct.Struct("<BII").pack
_kept_head = struct.Struct("<BIQI").pack
_u32 = struct.Struct("<I")
_publish_head = struct.Struct("<BBI")


class BinaryPublish(msgspec.Struct, gc=False):
    """`message` has the fields that a JSON publish has, without the payloads."""

    message: PublishBatchMessage
    payloads: list[bytes]


def encode_events(number: int, runs: Sequence[EventRun]) -> bytes:
    """Encodes events of the subscription `s<number>` as the payload of one frame. Those of a
    durable stream must follow each other without a gap."""
    count = 0
    parts = [b""]
    for run in runs:
        count += run.end - run.start
        parts.append(_encode_run(run))
    offset = runs[0].offset
    if offset < 0:
        parts[0] = _events_head(EVENTS, number, count)
    else:
        parts[0] = _kept_head(KEPT_EVENTS, number, offset, count)
    return b"".join(parts)


def _encode_run(run: EventRun) -> bytes:
    batch = run.batch
    if run.end - run.start < len(batch.payloads):
        return _encode_payloads(batch.payloads[run.start : run.end])
    encoded = batch.encoded.get(_ENCODED)
    if encoded is None:
        encoded = batch.encoded[_ENCODED] = _encode_payloads(batch.payloads)
    return encoded


def _encode_payloads(payloads: list[bytes]) -> bytes:
    sizes = map(_u32.pack, map(len, payloads))
    return b"".join(chain.from_iterable(zip(sizes, payloads, strict=True)))


def publish(engine: Engine, frame: BinaryPublish, done: Done) -> None:
    """Publishes, with the same outcome as a JSON publish; raises if the frame is refused."""
    message, payloads = frame.message, frame.payloads
    path = path_of(message.tenant_id, message.namespace, message.stream, "stream")
    answer = partial(published, message.ack or "per_batch", len(payloads), message.request_id)
    engine.streams.publish(
        Publish(path=path, payloads=payloads), partial(answer_publish, done, answer)
    )


def decode_publish(frame: bytes) -> BinaryPublish | RefusedMessage:
    if len(frame) < _publish_head.size or frame[0] != PUBLISH:
        error = InvalidArgument(f"a binary frame begins with kind {PUBLISH}, ack and number")
        return RefusedMessage(error)
    _, ack, request_id = _publish_head.unpack_from(frame)
    try:
        return _decode_rest(frame, ack, request_id)
    except (struct.error, IndexError):
        error = InvalidArgument("the binary frame ends too early")
    except UnicodeDecodeError:
        error = InvalidArgument("a name in the binary frame is not UTF-8")
    except InvalidArgument as found:
        error = found
    return RefusedMessage(error, request_id)


def _decode_rest(frame: bytes, ack: int, request_id: int) -> BinaryPublish:
    if ack >= len(ACKS):
        raise InvalidArgument(f"ack is 0 to {len(ACKS) - 1}, not {ack}")
    at = _publish_head.size
    names: list[str] = []
    for _ in range(3):
        size = frame[at]
        names.append(_slice(frame, at + 1, size).decode())
        at += 1 + size
    (count,) = _u32.unpack_from(frame, at)
    tenant_id, namespace, stream = names
    message = PublishBatchMessage(
        request_id=request_id,
        ack=ACKS[ack],
        tenant_id=tenant_id,
        namespace=namespace,
        stream=stream,
    )
    return BinaryPublish(message, _decode_payloads(frame, at + _u32.size, count))


def _decode_payloads(frame: bytes, at: int, count: int) -> list[bytes]:
    if not 1 <= count <= MAX_BATCH_ITEMS:
        raise InvalidArgument(f"a frame has 1 to {MAX_BATCH_ITEMS} payloads, not {count}")
    payloads: list[bytes] = []
    size_at = _u32.unpack_from
    for _ in range(count):
        (size,) = size_at(frame, at)
        at += _u32.size
        payloads.append(_slice(frame, at, size))
        at += size
    if at != len(frame):
        raise InvalidArgument("the binary frame has bytes after its last payload")
    return payloads


def _slice(frame: bytes, at: int, size: int) -> bytes:
    if at + size > len(frame):
        raise IndexError
    return frame[at : at + size]
