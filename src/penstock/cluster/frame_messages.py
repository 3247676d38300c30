"""A frame as a message of the shared stream, and which messages count.

Invariant: every broker that reads a stream from its beginning agrees on which messages count. A
message that does not count is void: it takes its number and changes nothing. Must not know what a
record means, nor how messages are stored. The layout is in docs/storage-format.md.
"""

from __future__ import annotations

import zlib
from struct import Struct

import msgspec

from penstock.storage.frames import Frame, frame_records

MESSAGE_MAGIC = b"PSM1"
_FIXED = Struct("<4sI")  # magic, CRC
_COVERED = Struct("<QQIB3x")  # epoch, sequence, record count, kind
MESSAGE_HEADER_BYTES = _FIXED.size + _COVERED.size

_FRAME = 0
_FENCE = 1


class FrameMessage(msgspec.Struct, frozen=True):
    """A frame of the owner of `epoch`. A fence is the first frame of its epoch: behind it, no
    frame of an earlier owner counts."""

    epoch: int
    seq: int
    is_fence: bool
    records: list[bytes]


def encode_message(
    epoch: int, seq: int, payload: bytes, count: int, *, is_fence: bool = False
) -> bytes:
    """`payload` has `count` records, as `encode_frame` joins them."""
    covered = _COVERED.pack(epoch, seq, count, _FENCE if is_fence else _FRAME)
    crc = zlib.crc32(payload, zlib.crc32(covered))
    return b"".join((_FIXED.pack(MESSAGE_MAGIC, crc), covered, payload))


def decode_message(data: bytes) -> FrameMessage | None:
    """Returns None for a message that no broker wrote, or that is damaged."""
    if len(data) < MESSAGE_HEADER_BYTES:
        return None
    magic, crc = _FIXED.unpack_from(data)
    if magic != MESSAGE_MAGIC or zlib.crc32(memoryview(data)[_FIXED.size :]) != crc:
        return None
    epoch, seq, count, kind = _COVERED.unpack_from(data, _FIXED.size)
    try:
        _, records = frame_records(data, Frame(0, seq, 0, MESSAGE_HEADER_BYTES, len(data), count))
    except ValueError:
        return None
    return FrameMessage(epoch, seq, kind == _FENCE, records)


class Chain:
    """Decides which messages count, in their order.

    A fence of an epoch that is not lower than the one in force begins a chain. A frame counts if it
    has that epoch and its own number, and follows a message that counts. So a frame that was
    decided on top of a refused one can never count, even if the stream took it.
    """

    def __init__(self, epoch: int, *, is_whole: bool) -> None:
        """`epoch` is in force at the end of what was read before; `is_whole` says whether the last
        message there counted."""
        self.epoch = epoch
        self.is_whole = is_whole

    def counts(self, seq: int, message: FrameMessage | None) -> bool:
        """Judges the message with number `seq`. Called once for each message, in order."""
        if message is None or message.seq != seq:
            self.is_whole = False
        elif message.is_fence and message.epoch >= self.epoch:
            self.epoch = message.epoch
            self.is_whole = True
        elif message.is_fence or message.epoch != self.epoch:
            self.is_whole = False
        return self.is_whole
