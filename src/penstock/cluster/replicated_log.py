"""A log whose frames are messages of a shared stream, with a copy in local segment files.

Invariant: `durable(seq)` is called only when the stream has stored every frame up to `seq`. The
local files are always a beginning of the stream, frame for message, so positions are the same on
every broker. They are a cache: written after the stream has the frame, and not synced. Must not
know what a record means, nor who owns the log.

A standby calls `ingest` for each message. The owner appends: `commit` closes the open frame and
sends it (frame_sender.py); the next is sent when the stream has stored it, so that one message
carries all that came meanwhile. More frames under way at once were slower, and a new owner could
not be sure that none of them counts.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter

import msgspec

from penstock.cluster.frame_messages import MESSAGE_HEADER_BYTES, encode_message
from penstock.cluster.frame_sender import Fate, FrameSender
from penstock.cluster.shared import SharedStream
from penstock.cluster.stream_errors import StreamCutShort
from penstock.engine.scheduler import Scheduler
from penstock.model.errors import Unavailable
from penstock.model.limits import MIB
from penstock.storage.appending import AppendingLog
from penstock.storage.frames import POSITION_BITS
from penstock.storage.kept_segments import keep_segments
from penstock.storage.log import WalOptions
from penstock.storage.segment_files import SegmentFiles
from penstock.storage.vfs import Vfs
from penstock.storage.wal_open import Opened
from penstock.storage.wal_writer import Batch, WalWriter

FRAME_BYTES = MIB
"""A frame of this size is closed between two appends. Larger messages make the stream's replicas
slow."""
MAX_UNSTORED_BYTES = 64 * MIB
"""The bytes of frames that the stream has not confirmed, or that are not in the local files yet.
Beyond it, nothing may be produced; beyond twice as many, nothing may be recorded."""
STALLED_S = 2.0
"""While a frame has waited so long for the stream, nothing may be produced."""

logger = logging.getLogger("penstock.cluster")


class Deposed(Unavailable):
    """Another broker owns the log now. What was under way may have been stored, or not."""

    def __init__(self) -> None:
        super().__init__(
            "another broker has taken over and the outcome is not known; send the request again, "
            "with an idempotency key if it must not be done twice"
        )


class _Closed(msgspec.Struct, gc=False):
    """A closed frame that waits for the stream, and the local writes that wait for it."""

    seq: int
    data: bytes
    writes: list[Batch]
    closed_at: float


class ReplicatedLog(AppendingLog):
    """See `Log` for the interface and its contract. `is_current` says whether no other broker can
    have taken over; `on_ended` is called once, when the log can no longer be used."""

    is_shared = True

    def __init__(
        self,
        vfs: Vfs,
        directory: str,
        options: WalOptions,
        opened: Opened,
        stream: SharedStream,
        scheduler: Scheduler,
        *,
        is_current: Callable[[], bool],
        on_ended: Callable[[BaseException], None],
    ) -> None:
        max_frame = stream.max_message_bytes - MESSAGE_HEADER_BYTES
        super().__init__(opened.next_seq, min(options.frame_bytes, FRAME_BYTES), max_frame)
        self.is_current = is_current
        self.epoch = 0
        self.newest: tuple[int, bytes] | None = None
        """The last message that is known to be in the stream; None before the first."""
        self._vfs = vfs
        self._directory = directory
        self._on_ended = on_ended
        self._scheduler = scheduler
        self._sender = FrameSender(stream, scheduler)
        self._is_owned = False
        self._unsent: deque[_Closed] = deque()
        self._unstored_bytes = 0
        self._local_seq = self.durable_seq
        local = msgspec.structs.replace(options, fsync="none")
        self._writer = WalWriter(
            vfs,
            local,
            opened.segments[-1],
            seq=self.durable_seq,
            post=scheduler.post,
            check_directory=opened.lock.check,
            on_written=self._written,
            on_failed=self._fail,
        )
        self.files = SegmentFiles(
            vfs,
            directory,
            local,
            opened,
            post=scheduler.post,
            on_room=self._room_changed,
            on_lost=self._writer.fail,
        )
        self._is_roll_wanted = False
        self._refuse_all()
        self._writer.start()
        self.files.start()

    # -- as a standby ----------------------------------------------------------------------------

    def ingest(self, records: Sequence[bytes]) -> None:
        """Adds the next message of the stream to the local files. A void one has no records."""
        seq = self.seq
        size = sum(map(len, records))
        if self.files.active.room < size + MESSAGE_HEADER_BYTES + 8 * len(records):
            self.files.roll(seq)
        self.files.place(seq, self.durable_seq, records)
        self._write_local(seq)
        self.seq = seq + 1
        self.durable_seq = seq

    def own(self, epoch: int) -> None:
        """Begins to append, as the owner of `epoch`."""
        self.epoch = epoch
        self._is_owned = True
        self._begin_frame()

    # -- as the owner ----------------------------------------------------------------------------

    def has_room(self, nbytes: int, *, reserve: bool = False) -> bool:
        """Closes the open frame if only that keeps these bytes out: messages of the stream may be
        little larger than one of a topic."""
        has_room = super().has_room(nbytes, reserve=reserve)
        can_close = self.failed is None and not self._is_closed
        if not has_room and can_close and self._is_frame_full(nbytes):
            self._close_frame()
            has_room = super().has_room(nbytes, reserve=reserve)
        return has_room

    def commit(self) -> None:
        if self._is_busy:
            self._is_wanted = True
        elif self._records or self._unsent:
            self._send_next()

    def _close_frame(self) -> None:
        seq, count = self.seq, len(self._records)
        if self.files.active.room < self._open_bytes:
            self.files.roll(seq)
        payload = self.files.place(seq, self.durable_seq, self._records)
        batch = self.files.take_batch()
        batch.seq = seq
        data = encode_message(self.epoch, seq, payload, count)
        self._unsent.append(_Closed(seq, data, [batch], perf_counter()))
        self._unstored_bytes += batch.nbytes
        self._records.clear()
        self.seq = seq + 1
        self._begin_frame()

    def _send_next(self) -> None:
        if not self._unsent:
            self._close_frame()
        frame = self._unsent[0]
        self._is_busy = True
        # A commit is about all that was appended, and this may not be the last frame of it.
        self._is_wanted = bool(self._records)
        self._sender.send(frame.seq, frame.data, self._sent)

    def _sent(self, fate: Fate) -> None:
        """Called when the fate of the oldest frame is known. As in the Wal, the next is sent a turn
        later, and takes along the requests of those that are answered now."""
        if self._is_closed or self.failed is not None:
            return
        if fate is Fate.TAKEN:
            self._fail(Deposed())
            return
        if fate is Fate.LOST:
            self._fail(StreamCutShort(self._unsent[0].seq))
            return
        frame = self._unsent.popleft()
        self.durable_seq = frame.seq
        self.newest = frame.seq, frame.data
        for batch in frame.writes:
            self._writer.hand_over(batch)
        self._count_commit(perf_counter() - frame.closed_at, 1, len(frame.data))
        self._is_busy = False
        self._notify(self._listener.durable, frame.seq)
        if self._is_wanted or self._unsent:
            self._scheduler.soon(self._commit_wanted)

    def _commit_wanted(self) -> None:
        if not self._is_closed:
            self.commit()

    # -- the local files -------------------------------------------------------------------------

    def _write_local(self, seq: int) -> None:
        batch = self.files.take_batch()
        batch.seq = seq
        self._unstored_bytes += batch.nbytes
        self._writer.hand_over(batch)

    def _write_roll(self) -> None:
        """Begins the new segment on disk, after the frames before it."""
        if self._unsent:
            batch = self.files.take_batch()
            batch.seq = self.seq - 1
            self._unsent[-1].writes.append(batch)
        else:
            self._write_local(self.seq - 1)

    def _written(self, batch: Batch) -> None:
        if self._is_closed or self.failed is not None:
            return
        self.files.written(self._local_seq + 1, batch.seq, batch)
        self._local_seq = batch.seq
        self._unstored_bytes -= batch.nbytes
        if batch.rolled:
            self._notify(self._listener.rolled)
        if self._is_owned and self._unstored_bytes < MAX_UNSTORED_BYTES:
            self._set_limits()

    def _fail(self, error: BaseException) -> None:
        """Ends the log for this process: the stream is somebody else's, or a local write failed."""
        if self.failed is not None or self._is_closed:
            return
        if not isinstance(error, Deposed):
            logger.error("the replicated log cannot go on: %s", error, exc_info=error)
        self.stop_writing(error)
        self._notify(self._listener.failed, error)

    def fail(self, error: BaseException) -> None:
        """Ends the log, because it is not what the stream holds."""
        self._fail(error)

    def depose(self) -> None:
        """Ends the log, because another broker owns it now."""
        self._fail(Deposed())

    def stop_writing(self, error: BaseException) -> None:
        if self.failed is None:
            self._scheduler.soon(partial(self._notify, self._on_ended, error))
        super().stop_writing(error)
        self._sender.stop()

    # -- room ------------------------------------------------------------------------------------

    def check_space(self) -> None:
        if not self._is_closed and self.failed is None:
            self.files.look()
            if self._is_owned:
                self._set_limits()

    @property
    def shortage(self) -> str:
        if self._is_stalled():
            return "the cluster's stream does not answer"
        return "the disk is nearly full"

    def _is_stalled(self) -> bool:
        if self._unstored_bytes >= MAX_UNSTORED_BYTES:
            return True
        return bool(self._unsent) and perf_counter() - self._unsent[0].closed_at > STALLED_S

    def _set_limits(self) -> None:
        room, produce_room = self.files.room()
        if self._unstored_bytes >= 2 * MAX_UNSTORED_BYTES:
            room = 0
        may_produce = self.files.supply.may_produce() and not self._is_stalled()
        self._limit_frame(room, produce_room, may_produce=may_produce)

    def _room_changed(self) -> None:
        if not self._is_closed and self.failed is None:
            if self._is_owned:
                self._set_limits()
            self._roll_if_wanted()

    # -- segments --------------------------------------------------------------------------------

    def roll(self) -> None:
        if (self._records or self.files.active.offsets) and not self._is_closed:
            self._is_roll_wanted = True
            self._roll_if_wanted()

    def _roll_if_wanted(self) -> None:
        """Rolls behind what is appended. A frame closes first, so that the segment holds it."""
        if self._is_roll_wanted and self.failed is None and self.files.supply.spare is not None:
            self._is_roll_wanted = False
            if self._records:
                self._close_frame()
            if self.files.roll(self.seq):
                self._write_roll()
            self.commit()

    def closed_segments(self) -> list[tuple[int, str]]:
        return self.files.closed()

    def drop_segments(self, up_to_number: int) -> None:
        keep_segments(self._vfs, self._directory, up_to_number)
        self.files.drop(up_to_number)

    @property
    def first_position(self) -> int:
        return self.files.first_position

    @property
    def next_position(self) -> int:
        """The position of the next frame."""
        return self.seq << POSITION_BITS

    @property
    def size_bytes(self) -> int:
        return self.files.size_bytes

    def read(self, positions: Sequence[int]) -> list[bytes]:
        return self.files.read(positions)

    # -- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Writes what the stream has stored to the local files, and lets go of them. Frames that
        are not confirmed are given up: whoever waits for them was told before."""
        if self._is_closed:
            return
        self._is_closed = True
        self._sender.stop()
        self._refuse_all()
        self._writer.stop()
        self.files.supply.stop()
        self.files.close()
