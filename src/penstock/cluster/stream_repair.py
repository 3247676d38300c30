"""Appends messages again that the stream had stored and lost, from a broker's own copy.

Invariant: a message is appended under its number only, byte for byte as it was, behind the end of
the stream. So several brokers may repair at once: each can only append what all of them have. A
void message, whose bytes nobody kept, becomes VOID, which is void as well. Must not know who owns
the log; nobody must append a fence before every copy is as far as the stream again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import NamedTuple

from penstock.cluster.frame_messages import encode_message
from penstock.cluster.frame_sender import Fate, FrameSender
from penstock.cluster.shared import SharedStream
from penstock.cluster.stream_errors import StreamCutShort, StreamHoldsOthers
from penstock.engine.scheduler import Scheduler
from penstock.model.records import OwnerChanged, decode_record
from penstock.storage.frames import encode_frame

VOID = b"void"

logger = logging.getLogger("penstock.cluster")


class LocalFrame(NamedTuple):
    """A frame of the local files. It is void without records."""

    seq: int
    records: list[bytes]


def message_of(epoch: int, frame: LocalFrame) -> tuple[int, bytes]:
    """Returns the epoch in force after the frame, and the message that it was. `epoch` is the one
    in force before it."""
    records = frame.records
    if not records:
        return epoch, VOID
    first = decode_record(records[0])
    is_fence = len(records) == 1 and isinstance(first, OwnerChanged) and bool(first.owner)
    if is_fence and isinstance(first, OwnerChanged):
        epoch = first.epoch
    _, payload = encode_frame(frame.seq, 0, 0, records)
    return epoch, encode_message(epoch, frame.seq, payload, len(records), is_fence=is_fence)


class StreamRepair:
    """Appends the frames from `first_seq` on. `frames` are the local ones in their order, `epoch`
    the one in force before them. `done` gets None, or why it could not be done."""

    def __init__(
        self,
        stream: SharedStream,
        scheduler: Scheduler,
        frames: Iterator[LocalFrame],
        epoch: int,
        first_seq: int,
        done: Callable[[BaseException | None], None],
    ) -> None:
        self._sender = FrameSender(stream, scheduler)
        self._frames = frames
        self._epoch = epoch
        self._next_seq = first_seq
        self._done = done
        self.appended = 0

    def start(self) -> None:
        logger.error(
            "the cluster's stream ends before message %d, which it had stored: this broker appends "
            "its own copy of that message and all later ones",
            self._next_seq,
        )
        self._send_next()

    def close(self) -> None:
        self._sender.stop()

    def _send_next(self) -> None:
        for frame in self._frames:
            self._epoch, data = message_of(self._epoch, frame)
            if frame.seq > self._next_seq:
                # The first of them are sealed, and no longer there as they were.
                self._done(StreamCutShort(self._next_seq + 1))
                return
            if frame.seq == self._next_seq:
                self._sender.send(frame.seq, data, self._sent)
                return
        logger.warning(
            "the cluster's stream was repaired: this broker has appended %d messages, up to %d",
            self.appended,
            self._next_seq - 1,
        )
        self._done(None)

    def _sent(self, fate: Fate) -> None:
        if fate is Fate.STORED:
            self.appended += 1
            self._next_seq += 1
            self._send_next()
        elif fate is Fate.TAKEN:
            self._done(StreamHoldsOthers(self._next_seq))
        else:
            self._done(StreamCutShort(self._next_seq))
