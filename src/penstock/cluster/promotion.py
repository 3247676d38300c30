"""The step from a standby to the owner of the log.

Invariant: the replica serves only behind a fence of its own epoch, with everything before it
applied, and never on a stream that is shorter than a copy of it that any broker is known to have.
Must not know leases.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.api.outcomes import Done
from penstock.cluster.frame_messages import encode_message
from penstock.cluster.frame_sender import MOST_SHORT_VIEWS, Fate, FrameSender
from penstock.cluster.replicated_log import Deposed
from penstock.cluster.shared import BoundsOutcome, Found, LookUpOutcome, Unanswered
from penstock.cluster.stream_errors import StreamCutShort, StreamHoldsOthers
from penstock.model.errors import PenstockError
from penstock.model.records import OwnerChanged, encode_record
from penstock.storage.frames import encode_frame

if TYPE_CHECKING:
    from penstock.cluster.replica import Replica
    from penstock.cluster.standby import Standby

RETRY_MS = 100
SHORT_VIEW_MS = 500


class Promotion:
    """Reads the stream to its end, then appends the fence, again behind whatever came meanwhile."""

    def __init__(
        self,
        replica: Replica,
        standby: Standby,
        epoch: int,
        done: Done[None],
    ) -> None:
        self._replica = replica
        self._standby = standby
        self._epoch = epoch
        self._done: Done[None] | None = done
        self._sender = FrameSender(replica.stream, replica.scheduler)
        self._fence = b""
        self._short_views = 0
        self._is_compared = False

    def start(self) -> None:
        self._replica.stream.bounds(self._found_end)

    def end(self, error: PenstockError) -> None:
        """Gives up. The fence may still be stored: then nobody owns the log until the next one."""
        self._sender.stop()
        done, self._done = self._done, None
        self._replica.promotion_failed()
        if done is not None:
            done(error)

    def _found_end(self, outcome: BoundsOutcome) -> None:
        if self._done is None:
            return
        if isinstance(outcome, Unanswered):
            self._replica.scheduler.later(RETRY_MS, self._again)
            return
        position, holder = self._replica.furthest(outcome.identity)
        if outcome.last_seq >= position:
            self._standby.when_at(outcome.last_seq, self._append)
        elif self._short_views < MOST_SHORT_VIEWS:
            # It may be a leader that was cut off, or that broker repairs the stream now.
            self._short_views += 1
            self._replica.scheduler.later(SHORT_VIEW_MS, self._again)
        else:
            self.end(StreamCutShort(position + 1, holder))

    def _again(self) -> None:
        if self._done is not None:
            self.start()

    def _append(self) -> None:
        """Sends the fence as the next message."""
        if self._done is None:
            return
        standby, replica = self._standby, self._replica
        if not standby.is_following:
            replica.scheduler.later(RETRY_MS, self._append)
        elif standby.chain.epoch > self._epoch:
            self.end(Deposed())
        elif not self._is_compared and standby.log.newest is not None:
            newest = standby.log.newest
            replica.stream.look_up(newest[0], lambda outcome: self._compare(newest, outcome))
        else:
            seq = standby.log.seq
            replica.clock.start_at(standby.state.last_ts)
            ts = replica.clock.now_ms()
            record = encode_record(OwnerChanged(ts, self._epoch, replica.name))
            _, payload = encode_frame(seq, 0, 0, [record])
            self._fence = encode_message(self._epoch, seq, payload, 1, is_fence=True)
            self._sender.send(seq, self._fence, lambda fate: self._sent(seq, fate))

    def _compare(self, newest: tuple[int, bytes], outcome: LookUpOutcome) -> None:
        """Compares the newest message here with the stream. If the stream ends before it, the fence
        finds no place."""
        if self._done is None:
            return
        if isinstance(outcome, Unanswered):
            self._replica.scheduler.later(RETRY_MS, self._append)
        elif isinstance(outcome, Found) and outcome.data != newest[1]:
            self._standby.log.fail(StreamHoldsOthers(newest[0]))
        else:
            self._is_compared = True
            self._append()

    def _sent(self, seq: int, fate: Fate) -> None:
        if self._done is None:
            return
        if fate is Fate.LOST:
            self._standby.log.fail(StreamCutShort(seq))
        elif fate is Fate.TAKEN:
            self._standby.when_at(seq, self._append)
        else:
            self._standby.received(seq, self._fence)
            self._replica.find_pieces(self._epoch, self._take_over)

    def _take_over(self, _: PenstockError | None) -> None:
        if self._done is None:
            return
        chain = self._standby.chain
        if chain.epoch != self._epoch or not chain.is_whole:
            # A stray message came behind the fence, or another owner's fence.
            self._append()
            return
        done, self._done = self._done, None
        self._replica.serve(self._standby, self._epoch)
        if done is not None:
            done(None)
