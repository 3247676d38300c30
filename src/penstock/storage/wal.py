"""The write-ahead log: makes records durable in frames, in order; many appends share one sync.

Invariant: the listener's `durable(seq)` is called only when every frame up to `seq` is as durable
as the mode promises; after a failed write or sync it is never called again. Used from one thread
(the event loop's), except for `read`. Must not know what a record means, nor the engine above it.

The way of a record: `append` adds it to the open frame. `commit` closes that frame and hands it to
the writer thread (wal_writer.py); while a write is under way, the frame waits for the next one,
which takes all that has come by then. Frames get their place in a segment when they are closed. The
next segment is prepared ahead (wal_supply.py), so that a full disk is noticed before anything is
decided, never by a write. Room is what has been prepared; free disk counts only while there is far
more of it than is asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from penstock.api.durability import FsyncMode
from penstock.model.errors import TooLarge, Unavailable
from penstock.storage.errors import DirectoryReplaced
from penstock.storage.frames import (
    FRAME_HEADER_BYTES,
    MAX_FRAME_BYTES,
    POSITION_BITS,
    encode_frame,
)
from penstock.storage.lock import DirectoryLock
from penstock.storage.log import (
    RECORD_OVERHEAD_BYTES,
    LogListener,
    NoListener,
    Post,
    Replay,
    WalOptions,
)
from penstock.storage.segments import SEGMENT_HEADER_BYTES, Segment, TornTail
from penstock.storage.stopped_file import Stopped, write_stopped
from penstock.storage.vfs import Vfs
from penstock.storage.wal_open import Opened, open_log
from penstock.storage.wal_reader import read_records
from penstock.storage.wal_supply import SegmentSupply
from penstock.storage.wal_writer import Batch, WalWriter, Write

__all__ = ["FsyncMode", "Wal", "WalOptions"]

_SLACK_BYTES = 1024
"""Room for more frame headers, when what `has_room` was asked for is appended in parts."""
_NO_ROOM = -1

logger = logging.getLogger("penstock.storage")


class Wal:
    """See `Log` for the interface and its contract. Made with `Wal.open`."""

    def __init__(
        self, vfs: Vfs, directory: str, options: WalOptions, opened: Opened, post: Post
    ) -> None:
        self.seq = opened.next_seq
        self.durable_seq = opened.next_seq - 1
        self.failed: BaseException | None = None
        self.torn_tails: list[TornTail] = opened.tails
        self.commits = 0
        self.commit_seconds = 0.0
        self.last_commit_seconds = 0.0
        self.last_commit_frames = 0
        self.last_commit_bytes = 0

        self._vfs = vfs
        self._directory = directory
        self._post = post
        self._options = options
        self._lock = opened.lock
        self._had_closing_mark = opened.has_closing_mark
        self._segments = opened.segments  # replaced, never changed: `read` is on other threads
        self._active = opened.segments[-1]
        self._roll_wanted = False
        self._listener: LogListener = NoListener()
        self._records: list[bytes] = []
        self._add = self._records.append
        self._extend = self._records.extend
        self._unwritten: dict[int, bytes] = {}
        self._next_batch = Batch()
        self._busy = False
        self._wanted = False
        self._closed = False
        self._opened_seq = self.seq
        self._synced = self.durable_seq
        self._end = self._soft_end = self._room_end = self._produce_end = 0  # as positions

        self._writer = WalWriter(
            vfs,
            options,
            self._active,
            seq=self.durable_seq,
            post=post,
            check_directory=self._lock.check,
            on_written=self._written,
            on_failed=self._fail,
        )
        self._supply = SegmentSupply(
            vfs,
            directory,
            options,
            spare=opened.spare,
            free_bytes=opened.free_bytes,
            post=post,
            check_directory=self._lock.check,
            on_change=self._supply_changed,
            on_lost=self._writer.fail,
        )
        self._begin_frame()

    @classmethod
    def open(
        cls,
        vfs: Vfs,
        directory: str,
        options: WalOptions,
        *,
        replay: Replay,
        post: Post,
        first_segment: int = 1,
        lock: DirectoryLock | None = None,
    ) -> Wal:
        """Opens the log. Blocks while it calls `replay(record, position)` for each record, in
        order.

        Segments below `first_segment` were left by an interrupted clean-up and are removed. A
        `lock` taken earlier is handed over; without one, it is taken here. `close` releases it.
        """
        opened = open_log(vfs, directory, options, first_segment, replay, lock)
        wal = cls(vfs, directory, options, opened, post)
        wal._writer.start()
        wal._supply.start()
        wal._prepare_spare()
        return wal

    def start(self, listener: LogListener) -> None:
        self._listener = listener

    # Appending

    def append_one(self, record: bytes) -> int:
        position = self._end
        end = position + len(record) + RECORD_OVERHEAD_BYTES
        if end > self._soft_end:
            return self._append_to_new_frame([record])
        self._add(record)
        self._end = end
        return position

    def append(self, records: Sequence[bytes]) -> int:
        position = self._end
        end = position + sum(map(len, records)) + len(records) * RECORD_OVERHEAD_BYTES
        if end > self._soft_end:
            return self._append_to_new_frame(records)
        self._extend(records)
        self._end = end
        return position

    def commit(self) -> None:
        if self._busy:
            self._wanted = True
        elif self._records or self._next_batch.writes:
            self._hand_over()

    @property
    def has_pending(self) -> bool:
        return bool(self._records) or self.seq - 1 > self.durable_seq

    def _append_to_new_frame(self, records: Sequence[bytes]) -> int:
        if self._soft_end == _NO_ROOM:
            if self.failed is not None:
                raise Unavailable(f"the log cannot be written: {self.failed}; restart the broker")
            raise Unavailable("the broker is stopping")
        nbytes = sum(map(len, records)) + len(records) * RECORD_OVERHEAD_BYTES
        if nbytes >= MAX_FRAME_BYTES:
            raise TooLarge(f"{nbytes} bytes do not fit in one frame of the log")
        if self._records:
            self._close_frame()
        position = self._end
        self._extend(records)
        self._end = position + nbytes
        return position

    def _begin_frame(self) -> None:
        self._end = self.seq << POSITION_BITS
        self._soft_end = self._end + self._options.frame_bytes
        self._set_limits()

    def _close_frame(self) -> None:
        """Gives the open frame its place and its bytes, and opens the next."""
        size = self._end - (self.seq << POSITION_BITS) + FRAME_HEADER_BYTES
        if self._active.room < size:
            self._roll_to_spare()
        segment = self._active
        header, payload = encode_frame(self.seq, self._synced, segment.salt, self._records)
        self._records.clear()
        self._unwritten[self.seq] = payload
        batch = self._next_batch
        write = batch.writes[-1] if batch.writes else None
        if write is not None and write.segment is segment:
            write.buffers += (header, payload)
        else:
            batch.writes.append(Write(segment, segment.used, [header, payload]))
        batch.frames += 1
        batch.nbytes += size
        segment.offsets.append(segment.used)
        segment.used += size
        if segment.used > segment.capacity:
            self._supply.free_bytes -= segment.used - segment.capacity
            segment.capacity = segment.used
        self.seq += 1
        self._begin_frame()

    def _hand_over(self) -> None:
        if self._records:
            self._close_frame()
        batch, self._next_batch = self._next_batch, Batch()
        batch.seq = self.seq - 1
        self._busy = True
        self._wanted = False
        self._writer.hand_over(batch)

    def _written(self, batch: Batch) -> None:
        """Called on the loop after each write.

        Most clients that are answered send the next request at once. So the next write starts a
        turn later and takes those along with what waits already: one commit of all is better than
        two of a half each, the first a little earlier.
        """
        if self._closed or self.failed is not None:
            return
        self._settle(batch.seq, batch.synced)
        self.commits += 1
        self.commit_seconds += batch.seconds
        self.last_commit_seconds = batch.seconds
        self.last_commit_frames = batch.frames
        self.last_commit_bytes = batch.nbytes
        if batch.rolled:
            self._mark_closed(batch.writes[-1].segment)
        self._busy = False
        if batch.frames:
            self._notify(self._listener.durable, batch.seq)
        if batch.rolled:
            self._notify(self._listener.rolled)
        if self._wanted:
            self._post(self._commit_wanted)

    def _commit_wanted(self) -> None:
        if self._wanted and not self._closed:
            self.commit()

    def _settle(self, seq: int, synced: int) -> None:
        for written in range(self.durable_seq + 1, seq + 1):
            del self._unwritten[written]
        self.durable_seq = seq
        self._synced = synced

    def _fail(self, error: BaseException) -> None:
        """Ends writing until restart, after a write or sync failed and what it left was erased."""
        if self.failed is not None:
            return
        logger.error("the log cannot be written any more: %s", error, exc_info=error)
        self.stop_writing(error)
        self._notify(self._listener.failed, error)

    def stop_writing(self, error: BaseException) -> None:
        self.failed = error
        self._busy = True  # for good: nothing more is handed over
        self._refuse_all()

    def _refuse_all(self) -> None:
        self._soft_end = self._room_end = self._produce_end = _NO_ROOM

    def _notify(self, callback: Callable[..., object], *args: object) -> None:
        try:
            callback(*args)
        except Exception:
            logger.exception("a callback of the log failed; the log goes on")

    # Room

    def has_room(self, nbytes: int, *, reserve: bool = False) -> bool:
        return self._end + nbytes <= (self._room_end if reserve else self._produce_end)

    def check_space(self) -> None:
        if not self._closed and self.failed is None:
            self._supply.measure()
            self._prepare_spare()

    def _set_limits(self) -> None:
        """Computes how far the open frame may grow, as positions, so that `has_room` is one
        comparison."""
        prepared = self._active.room
        kept_back = self._options.segment_bytes // 8
        spare = self._supply.spare
        if spare is not None:
            prepared = max(prepared, spare.room)
            kept_back = 0
        growth = self._supply.growth_bytes
        frame = (self.seq << POSITION_BITS) - FRAME_HEADER_BYTES - _SLACK_BYTES
        self._room_end = frame + min(max(prepared, growth), MAX_FRAME_BYTES)
        self._produce_end = frame + min(max(prepared - kept_back, growth), MAX_FRAME_BYTES)
        if not self._supply.may_produce():
            self._produce_end = _NO_ROOM

    def _prepare_spare(self) -> None:
        self._supply.prepare(self._active.number + 1)
        self._set_limits()

    def _supply_changed(self) -> None:
        if not self._closed and self.failed is None:
            self._set_limits()
            self._roll_if_wanted()

    # Segments

    def roll(self) -> None:
        something = self._records or self._active.offsets
        if something and not self._closed and self.failed is None:
            self._roll_wanted = True
            self._roll_if_wanted()

    def closed_segments(self) -> list[tuple[int, str]]:
        return [(segment.number, segment.path) for segment in self._segments if segment.closed]

    def drop_segments(self, up_to_number: int) -> None:
        """Files are removed in the background."""
        gone = [s.path for s in self._segments if s.closed and s.number <= up_to_number]
        if gone:
            self._segments = self._segments[len(gone) :]
            self._supply.remove(gone)

    @property
    def first_position(self) -> int:
        return self._segments[0].first_seq << POSITION_BITS

    @property
    def segment_of_open_frame(self) -> int:
        return self._active.number

    @property
    def size_bytes(self) -> int:
        """Does not count the spare."""
        return sum(segment.capacity for segment in self._segments)

    def read(self, positions: Sequence[int]) -> list[bytes]:
        return read_records(self._vfs, self._segments, self._unwritten, positions)

    def _roll_if_wanted(self) -> None:
        """Rolls behind what is appended, without waiting for the next record."""
        if self._roll_wanted and self._supply.spare is not None:
            self._roll_wanted = False
            if self._records:
                self._close_frame()
            self._roll_to_spare()
            self.commit()

    def _roll_to_spare(self) -> None:
        """Makes the spare the active segment. Without a spare, or when the active segment is
        empty, that one grows instead."""
        segment = self._supply.take_spare() if self._active.offsets else None
        if segment is None:
            return
        self._supply.last_took(self._active.used)
        segment.first_seq = self.seq
        self._segments = [*self._segments, segment]
        self._active = segment
        self._next_batch.writes.append(Write(segment, SEGMENT_HEADER_BYTES, []))
        self._next_batch.rolled = True
        self._prepare_spare()

    def _mark_closed(self, begun: Segment) -> None:
        for segment in self._segments:
            if segment.number < begun.number and not segment.closed:
                segment.capacity = segment.used
                segment.closed = True

    # The end

    def close(self) -> None:
        """Syncs in every mode."""
        if self._closed:
            return
        if self.failed is None and (self._records or self._next_batch.writes):
            self._hand_over()
        self._closed = True
        self._refuse_all()
        self._writer.stop()
        self._supply.stop()
        if self._writer.written > self.durable_seq:
            self._settle(self._writer.written, self._writer.synced)
            self._notify(self._listener.durable, self.durable_seq)
        if self._writer.failure is not None:
            self._fail(self._writer.failure)
        if self.failed is None:
            self._end_in_order()
        for segment in self._segments:
            if segment.fd >= 0:
                self._vfs.close(segment.fd)
                segment.fd = -1
        self._lock.release()

    def _end_in_order(self) -> None:
        """Writes the closing mark, and its place into STOPPED. With it the next start can tell
        damage, or a log that was cut short, from an interrupted write."""
        try:
            self._lock.check()
            write_stopped(self._vfs, self._directory, self._closing_mark())
        except (OSError, DirectoryReplaced) as error:
            logger.warning(
                "the log is complete, but the orderly stop could not be noted: %s", error
            )

    def _closing_mark(self) -> Stopped:
        """Writes the closing mark, an empty frame which says that all before it was synced,
        unless it is there already. Returns its place."""
        active = self._active
        is_unchanged = self.seq == self._opened_seq and len(active.offsets) > 0
        if self._had_closing_mark and is_unchanged:
            return Stopped(active.number, active.salt, self.seq - 1, active.offsets[-1])
        header, _ = encode_frame(self.seq, self.seq - 1, active.salt, ())
        self._vfs.write_at_durable(active.fd, [header], active.used)
        return Stopped(active.number, active.salt, self.seq, active.used)
