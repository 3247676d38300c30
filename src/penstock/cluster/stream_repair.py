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

from penstock.cluster.frame_messages import decode_message, encode_message
from penstock.cluster.frame_sender import Fate, FrameSender
from penstock.cluster.shared import Found, LookUpOutcome, SharedStream, Unanswered
from penstock.cluster.stream_errors import StreamCutShort, StreamHoldsOthers
from penstock.engine.scheduler import Scheduler
from penstock.model.records import OwnerChanged, decode_record
from penstock.storage.frames import encode_frame

VOID = b"void"
RETRY_MS = 500

logger = logging.getLogger("penstock.cluster")


class LocalFrame(NamedTuple):
    """A frame of the local files. It is void without records. `epoch` is the one in force before
    it, 0 if the files do not say."""

    seq: int
    records: list[bytes]
    epoch: int

    def fence(self) -> OwnerChanged | None:
        """Returns the record of a fence; None for any other frame."""
        if len(self.records) != 1:
            return None
        record = decode_record(self.records[0])
        return record if isinstance(record, OwnerChanged) and record.owner else None

    def epoch_after(self, epoch: int) -> int:
        fence = self.fence()
        return epoch if fence is None else fence.epoch


def message_of(frame: LocalFrame, epoch: int) -> bytes | None:
    """Returns the message that the frame was. `epoch` is the one in force before it; 0 if nobody
    knows, which may mean that the message is not known either."""
    if not frame.records:
        return VOID
    fence = frame.fence()
    epoch = epoch if fence is None else fence.epoch
    if not epoch:
        return None
    _, payload = encode_frame(frame.seq, 0, 0, frame.records)
    count = len(frame.records)
    return encode_message(epoch, frame.seq, payload, count, is_fence=fence is not None)


class StreamRepair:
    """Appends the frames from `first_seq` on. `frames` are the local ones in their order. `done`
    gets None, or why it could not be done."""

    def __init__(
        self,
        stream: SharedStream,
        scheduler: Scheduler,
        frames: Iterator[LocalFrame],
        first_seq: int,
        done: Callable[[BaseException | None], None],
    ) -> None:
        self._stream = stream
        self._scheduler = scheduler
        self._sender = FrameSender(stream, scheduler)
        self._frames = frames
        self._epoch = 0
        self._next_seq = first_seq
        self._done = done
        self._is_closed = False
        self.appended = 0

    def start(self) -> None:
        """Reads the epoch in force from the message before."""
        self._stream.look_up(self._next_seq - 1, self._found_last)

    def _found_last(self, outcome: LookUpOutcome) -> None:
        if self._is_closed:
            return
        if isinstance(outcome, Unanswered):
            self._scheduler.later(RETRY_MS, self.start)
            return
        message = decode_message(outcome.data) if isinstance(outcome, Found) else None
        if message is not None and message.seq == self._next_seq - 1:
            self._epoch = message.epoch
        logger.error(
            "the cluster's stream ends before message %d, which it had stored: this broker appends "
            "its own copy of that message and all later ones",
            self._next_seq,
        )
        self._send_next()

    def close(self) -> None:
        self._is_closed = True
        self._sender.stop()

    def _send_next(self) -> None:
        for frame in self._frames:
            if frame.seq < self._next_seq:
                continue
            # The files know better: a frame of an earlier owner may be the last in the stream.
            epoch = frame.epoch or self._epoch
            data = message_of(frame, epoch)
            if frame.seq > self._next_seq or data is None:
                # The first of them are sealed, and no longer there as they were.
                self._done(StreamCutShort(self._next_seq + 1))
                return
            self._epoch = frame.epoch_after(epoch)
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
