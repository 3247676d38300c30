"""A broker's copy of a shard that follows the shared stream: state, window and local files.

Invariant: the state is what `apply` makes of the messages that count, up to `log.durable_seq`, and
nothing else changes it. So it is the owner's state at that message. A copy that does not belong to
the stream, or that the stream no longer continues, ends; it never guesses. Must not know leases of
shards, nor who should own one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from penstock.cluster.frame_messages import Chain, decode_message
from penstock.cluster.frame_sender import MOST_SHORT_VIEWS
from penstock.cluster.replica_directory import ReplicaDirectory
from penstock.cluster.shared import (
    Bounds,
    BoundsOutcome,
    Found,
    LookUpOutcome,
    Missing,
    SharedStream,
    Tail,
    Unanswered,
)
from penstock.cluster.stream_audit import StreamFindings
from penstock.cluster.stream_errors import StreamHoldsOthers, StreamReplaced
from penstock.cluster.stream_repair import StreamRepair
from penstock.engine.clock import Clock
from penstock.engine.eviction import Eviction
from penstock.engine.opening import Recovery
from penstock.engine.scheduler import Cancellable, Scheduler
from penstock.engine.sealing import Sealing
from penstock.model.errors import Unavailable
from penstock.model.limits import Limits
from penstock.storage.frames import POSITION_BITS
from penstock.storage.log import RECORD_OVERHEAD_BYTES

HOUSEKEEPING_MS = 1000
RETRY_MS = 500

logger = logging.getLogger("penstock.cluster")


class CopyTooOld(Unavailable):
    """The stream begins behind the end of the local files: another broker's are copied."""

    def __init__(self, seq: int, first_seq: int) -> None:
        super().__init__(
            f"the cluster's stream begins with message {first_seq}, and the data directory ends "
            f"before message {seq}"
        )
        self.first_seq = first_seq


class Standby:
    """`on_ended` is called once if the copy cannot go on."""

    def __init__(
        self,
        directory: ReplicaDirectory,
        stream: SharedStream,
        limits: Limits,
        clock: Clock,
        scheduler: Scheduler,
        on_ended: Callable[[BaseException], None],
    ) -> None:
        """Blocks while the local files are read. Raises StorageError if they are damaged."""
        self.recovery = Recovery(limits, scheduler)
        self.log = directory.open(limits, scheduler.post, self.recovery.begin)
        self.state = self.recovery.checkpoint.state
        self.is_following = False
        self.is_caught_up = False
        """Everything was read that the stream had about a second ago."""
        self.identity = ""
        """The identity of the stream, once it is known."""
        self.findings = StreamFindings()
        self._is_replaced = False
        self._repair: StreamRepair | None = None
        self._last_end: int | None = None
        self._directory = directory
        self._stream = stream
        self._scheduler = scheduler
        self._on_ended = on_ended
        self._is_closed = False
        self._short_views = 0
        self._tail: Tail | None = None
        self._waiting: list[tuple[int, Callable[[], None]]] = []
        self.chain = Chain(self.state.epoch, is_whole=not directory.last_frame.is_void)
        window = self.recovery.window
        self.sealing = Sealing(
            self.recovery.checkpoint, window, self.log, directory.sealed, clock, scheduler
        )
        self._eviction = Eviction(self.state, window, scheduler)
        self.log.start(self)
        self._timer: Cancellable | None = None
        self._housekeep()
        self._check_end()

    # -- beginning -------------------------------------------------------------------------------

    def _check_end(self) -> None:
        """Compares identity and newest message with the stream, then follows. Repairs a stream that
        has lost its end."""
        self._stream.bounds(self._found_bounds)

    def _found_bounds(self, outcome: BoundsOutcome) -> None:
        if self._is_closed:
            return
        if isinstance(outcome, Unanswered):
            self._timer_for(RETRY_MS, self._check_end)
            return
        self.identity = outcome.identity
        self._is_replaced = self._directory.identity not in ("", outcome.identity)
        seq = self.log.durable_seq
        if seq:
            self._stream.look_up(seq, self._compare)
        elif self._is_replaced:
            self._end(StreamReplaced())
        else:
            self._follow()

    def _compare(self, outcome: LookUpOutcome) -> None:
        if self._is_closed:
            return
        seq = self.log.durable_seq
        if isinstance(outcome, Unanswered):
            self._timer_for(RETRY_MS, self._check_end)
        elif isinstance(outcome, Found):
            message = decode_message(outcome.data)
            mine = self._directory.last_frame.records
            if mine and (message is None or message.seq != seq or message.records != mine):
                self._end(StreamHoldsOthers(seq))
            elif self._is_replaced and not mine:
                self._end(StreamReplaced())
            else:
                self.log.newest = seq, outcome.data
                self._follow()
        elif self._is_replaced:
            self._end(StreamReplaced())
        else:
            self._compare_missing(seq, outcome)

    def _compare_missing(self, seq: int, outcome: Missing) -> None:
        if outcome.first_seq > seq + 1:
            self._end(CopyTooOld(seq + 1, outcome.first_seq))
        elif outcome.last_seq < seq:
            # It may be a leader that was cut off and answers from what it knew.
            self._short_views += 1
            if self._short_views > MOST_SHORT_VIEWS:
                self.findings.faults += 1
                self._repair_from(outcome.last_seq + 1)
            else:
                self._timer_for(RETRY_MS, self._check_end)
        else:
            self._follow()

    def _repair_from(self, seq: int) -> None:
        frames = self._directory.frames()
        self._repair = StreamRepair(self._stream, self._scheduler, frames, seq, self._repaired)
        self._repair.start()

    def _repaired(self, failure: BaseException | None) -> None:
        if self._is_closed:
            return
        if failure is not None:
            self._end(failure)
            return
        if self._repair is not None:
            self.findings.repaired += self._repair.appended
        self._short_views = 0
        self._check_end()

    def _follow(self) -> None:
        if not self._is_closed and self._tail is None:
            self.is_following = True
            if self._directory.identity != self.identity:
                self._directory.remember_identity(self.identity)
            self._stream.bounds(self._compare_ends)
            self._tail = self._stream.follow(self.log.seq, self)

    # -- the stream ------------------------------------------------------------------------------

    def received(self, seq: int, data: bytes) -> None:
        if self._is_closed or seq < self.log.seq:
            return
        if seq > self.log.seq:
            self._end(Unavailable(f"message {self.log.seq} of the cluster's stream was skipped"))
            return
        message = decode_message(data)
        is_counted = self.chain.counts(seq, message)
        records = message.records if is_counted and message is not None else []
        try:
            self._apply(records)
        except Exception as error:
            logger.exception("message %d of the cluster's stream cannot be applied", seq)
            self._end(error)
            return
        self.log.newest = seq, data
        if not is_counted:
            logger.warning("message %d of the cluster's stream is void", seq)
        self._tell_waiting()

    def purged(self, first_seq: int) -> None:
        self._end(CopyTooOld(self.log.seq, first_seq))

    def _apply(self, records: list[bytes]) -> None:
        position = self.log.seq << POSITION_BITS
        self.log.ingest(records)
        take = self.recovery.take
        for record in records:
            take(record, position)
            position += len(record) + RECORD_OVERHEAD_BYTES

    def when_at(self, seq: int, then: Callable[[], None]) -> None:
        """Calls `then` once message `seq` was received; in a later turn if it was already."""
        self._waiting.append((seq, then))
        if self.log.durable_seq >= seq:
            self._scheduler.soon(self._tell_waiting)

    def _tell_waiting(self) -> None:
        if not self._waiting or self._is_closed:
            return
        at = self.log.durable_seq
        ready = [then for seq, then in self._waiting if seq <= at]
        self._waiting = [each for each in self._waiting if each[0] > at]
        for then in ready:
            then()

    # -- maintenance -----------------------------------------------------------------------------

    def _housekeep(self) -> None:
        """Does what a serving broker does for memory and disk, and nothing that needs a record."""
        self._timer = self._scheduler.later(HOUSEKEEPING_MS, self._housekeep)
        self.log.check_space()
        self.sealing.housekeep()
        self._eviction.look()
        self.state.produced.forget_expired(self.state.last_ts)
        self.state.transactions.forget_expired(self.state.last_ts)
        if self.is_following:
            self._stream.bounds(self._compare_ends)

    def _compare_ends(self, outcome: BoundsOutcome) -> None:
        if isinstance(outcome, Bounds) and not self._is_closed:
            if outcome.identity != self.identity:
                self._end(StreamReplaced())
                return
            # Under load the stream's end is always a little ahead. Its end of a second ago is not.
            before = outcome.last_seq if self._last_end is None else self._last_end
            self.is_caught_up = self.log.durable_seq >= min(before, outcome.last_seq)
            self._last_end = outcome.last_seq

    # -- the log's listener ----------------------------------------------------------------------

    def durable(self, seq: int) -> None:
        """The stream tells what is durable; see `received`."""

    def failed(self, error: BaseException) -> None:
        """`on_ended` of the log tells it too."""

    def rolled(self) -> None:
        self.sealing.run()

    # -- the end ---------------------------------------------------------------------------------

    def hand_over(self) -> None:
        """Stops following: an engine goes on with the log, the state and the sealing."""
        self._stop()

    def close(self) -> None:
        """Stops following and closes the local files."""
        self._stop()
        self.sealing.stop()
        self.log.close()
        self._scheduler.close()

    def _stop(self) -> None:
        self._is_closed = True
        self._waiting.clear()
        if self._tail is not None:
            self._tail.close()
        if self._timer is not None:
            self._timer.cancel()
        if self._repair is not None:
            self._repair.close()

    def _timer_for(self, delay_ms: int, turn: Callable[[], None]) -> None:
        self._scheduler.later(delay_ms, lambda: None if self._is_closed else turn())

    def _end(self, error: BaseException) -> None:
        if not self._is_closed:
            self._stop()
            self._on_ended(error)
