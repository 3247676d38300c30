"""The write-ahead log: makes records durable in frames, in order; many appends share one sync.

Invariant: the listener's `durable(seq)` is called only when every frame up to `seq` is as durable
as the mode promises; after a failed write or sync it is never called again. Used from one thread
(the event loop's), except for `read`. Must not know what a record means, nor the engine above it.

The way of a record: `append` adds it to the open frame (appending.py). `commit` closes that frame,
which gets its place in a segment (segment_files.py), and hands it to the writer thread
(wal_writer.py); while a write is under way, the frame waits for the next one, which takes all that
has come by then. The next segment is prepared ahead (wal_supply.py), so that a full disk is noticed
before anything is decided, never by a write. Room is what has been prepared; free disk counts only
while there is far more of it than is asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from penstock.api.durability import FsyncMode
from penstock.storage.appending import AppendingLog
from penstock.storage.errors import DirectoryReplaced
from penstock.storage.frames import MAX_FRAME_BYTES, encode_frame
from penstock.storage.lock import DirectoryLock
from penstock.storage.log import Post, Replay, WalOptions
from penstock.storage.segment_files import SegmentFiles
from penstock.storage.segments import TornTail
from penstock.storage.stopped_file import Stopped, write_stopped
from penstock.storage.vfs import Vfs
from penstock.storage.wal_open import Opened, open_log
from penstock.storage.wal_writer import Batch, WalWriter

__all__ = ["FsyncMode", "Wal", "WalOptions"]

logger = logging.getLogger("penstock.storage")


class Wal(AppendingLog):
    """See `Log` for the interface and its contract. Made with `Wal.open`."""

    is_shared = False

    def __init__(
        self, vfs: Vfs, directory: str, options: WalOptions, opened: Opened, post: Post
    ) -> None:
        super().__init__(opened.next_seq, options.frame_bytes, MAX_FRAME_BYTES)
        self.torn_tails: list[TornTail] = opened.tails
        self._vfs = vfs
        self._directory = directory
        self._post = post
        self._lock = opened.lock
        self._had_closing_mark = opened.has_closing_mark
        self._is_roll_wanted = False
        self._opened_seq = self.seq
        self._synced = self.durable_seq
        self._writer = WalWriter(
            vfs,
            options,
            opened.segments[-1],
            seq=self.durable_seq,
            post=post,
            check_directory=self._lock.check,
            on_written=self._written,
            on_failed=self._fail,
        )
        self.files = SegmentFiles(
            vfs,
            directory,
            options,
            opened,
            post=post,
            on_room=self._room_changed,
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
        wal.files.start()
        wal._set_limits()
        return wal

    def is_current(self) -> bool:
        return True

    # Commits

    def commit(self) -> None:
        if self._is_busy:
            self._is_wanted = True
        elif self._records or self.files.next_batch.writes:
            self._hand_over()

    def _close_frame(self) -> None:
        """Gives the open frame its place and its bytes, and opens the next."""
        if self.files.active.room < self._open_bytes:
            self.files.roll(self.seq)
        self.files.place(self.seq, self._synced, self._records)
        self._records.clear()
        self.seq += 1
        self._begin_frame()

    def _hand_over(self) -> None:
        if self._records:
            self._close_frame()
        batch = self.files.take_batch()
        batch.seq = self.seq - 1
        self._is_busy = True
        self._is_wanted = False
        self._writer.hand_over(batch)

    def _written(self, batch: Batch) -> None:
        """Called on the loop after each write.

        Most clients that are answered send the next request at once. So the next write starts a
        turn later and takes those along with what waits already: one commit of all is better than
        two of a half each, the first a little earlier.
        """
        if self._is_closed or self.failed is not None:
            return
        self._settle(batch.seq, batch.synced, batch)
        self._count_commit(batch.seconds, batch.frames, batch.nbytes)
        self._is_busy = False
        if batch.frames:
            self._notify(self._listener.durable, batch.seq)
        if batch.rolled:
            self._notify(self._listener.rolled)
        if self._is_wanted:
            self._post(self._commit_wanted)

    def _commit_wanted(self) -> None:
        if self._is_wanted and not self._is_closed:
            self.commit()

    def _settle(self, seq: int, synced: int, batch: Batch | None = None) -> None:
        self.files.written(self.durable_seq + 1, seq, batch)
        self.durable_seq = seq
        self._synced = synced

    def _fail(self, error: BaseException) -> None:
        """Ends writing until restart, after a write or sync failed and what it left was erased."""
        if self.failed is not None:
            return
        logger.error("the log cannot be written any more: %s", error, exc_info=error)
        self.stop_writing(error)
        self._notify(self._listener.failed, error)

    # Room

    @property
    def shortage(self) -> str:
        return "the disk is nearly full"

    def check_space(self) -> None:
        if not self._is_closed and self.failed is None:
            self.files.look()
            self._set_limits()

    def _set_limits(self) -> None:
        room, produce_room = self.files.room()
        self._limit_frame(room, produce_room, may_produce=self.files.supply.may_produce())

    def _room_changed(self) -> None:
        if not self._is_closed and self.failed is None:
            self._set_limits()
            self._roll_if_wanted()

    # Segments

    def roll(self) -> None:
        something = self._records or self.files.active.offsets
        if something and not self._is_closed and self.failed is None:
            self._is_roll_wanted = True
            self._roll_if_wanted()

    def _roll_if_wanted(self) -> None:
        """Rolls behind what is appended, without waiting for the next record."""
        if self._is_roll_wanted and self.files.supply.spare is not None:
            self._is_roll_wanted = False
            if self._records:
                self._close_frame()
            if self.files.roll(self.seq):
                self._set_limits()
            self.commit()

    def closed_segments(self) -> list[tuple[int, str]]:
        return self.files.closed()

    def drop_segments(self, up_to_number: int) -> None:
        self.files.drop(up_to_number)

    @property
    def first_position(self) -> int:
        return self.files.first_position

    @property
    def segment_of_open_frame(self) -> int:
        return self.files.active.number

    @property
    def size_bytes(self) -> int:
        return self.files.size_bytes

    def read(self, positions: Sequence[int]) -> list[bytes]:
        return self.files.read(positions)

    # The end

    def close(self) -> None:
        """Syncs in every mode."""
        if self._is_closed:
            return
        if self.failed is None and (self._records or self.files.next_batch.writes):
            self._hand_over()
        self._is_closed = True
        self._refuse_all()
        self._writer.stop()
        self.files.supply.stop()
        if self._writer.written > self.durable_seq:
            self._settle(self._writer.written, self._writer.synced)
            self._notify(self._listener.durable, self.durable_seq)
        if self._writer.failure is not None:
            self._fail(self._writer.failure)
        if self.failed is None:
            self._end_in_order()
        self.files.close()

    def _end_in_order(self) -> None:
        """Writes the closing mark, and its position into STOPPED, so that the next start can tell
        damage, or a log that was cut short, from an interrupted write."""
        try:
            self._lock.check()
            write_stopped(self._vfs, self._directory, self._closing_mark())
        except (OSError, DirectoryReplaced) as error:
            logger.warning(
                "the log is complete, but the orderly stop could not be noted: %s", error
            )

    def _closing_mark(self) -> Stopped:
        """Writes the closing mark unless it exists: an empty frame that says that everything before
        it is synced. Returns its position."""
        active = self.files.active
        is_unchanged = self.seq == self._opened_seq and len(active.offsets) > 0
        if self._had_closing_mark and is_unchanged:
            return Stopped(active.number, active.salt, self.seq - 1, active.offsets[-1])
        header, _ = encode_frame(self.seq, self.seq - 1, active.salt, ())
        self._vfs.write_at_durable(active.fd, [header], active.used)
        return Stopped(active.number, active.salt, self.seq, active.used)
