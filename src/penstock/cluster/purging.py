"""Purges the beginning of the stream, which the brokers have in sealed and synced files.

Invariant: a message is purged only if at least `copies` live brokers have it in such files. Until
the stream is half full, it is kept as well for every broker that needs it, live or not; beyond
that, slower ones are left behind, and copy anew. Must not know how files are sealed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import msgspec

from penstock.cluster.shared import Bounds, BoundsOutcome, SharedStream, Unanswered
from penstock.engine.scheduler import Cancellable, Scheduler

PURGE_MS = 5000
SEAL_FULL = 0.25
"""From this part of its room on, brokers seal what they have although a segment is not full."""
KEEP_FULL = 0.5
"""Up to this part of its room, the stream is kept for brokers that are away or behind."""

logger = logging.getLogger("penstock.cluster")


class ReplicaStanding(msgspec.Struct, frozen=True):
    """A broker's announcement of its copy. `sealed` is the last message in its synced files."""

    name: str
    sealed: int
    is_live: bool
    is_copying: bool = False


def purge_position(standings: Sequence[ReplicaStanding], copies: int, *, is_half_full: bool) -> int:
    """Returns the last message that may be purged; 0 for none."""
    whole = sorted(
        (each.sealed for each in standings if each.is_live and not each.is_copying), reverse=True
    )
    if len(whole) < copies:
        return 0
    enough = whole[copies - 1]
    if is_half_full:
        return enough
    return min([enough, *(each.sealed for each in standings)])


class StreamPurge:
    """Looks every few seconds. `roll` asks for what is not sealed to be sealed soon."""

    def __init__(
        self,
        stream: SharedStream,
        scheduler: Scheduler,
        copies: int,
        is_owner: Callable[[], bool],
        standings: Callable[[], list[ReplicaStanding]],
        roll: Callable[[Bounds], None],
    ) -> None:
        self.first_seq = 0
        """The first message of the stream, when it was read last."""
        self._stream = stream
        self._scheduler = scheduler
        self._copies = copies
        self._is_owner = is_owner
        self._standings = standings
        self._roll = roll
        self._timer: Cancellable | None = None
        self._is_closed = False
        self._left_behind: set[str] = set()

    def start(self) -> None:
        self._timer = self._scheduler.later(PURGE_MS, lambda: self._stream.bounds(self._look))

    def close(self) -> None:
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _look(self, outcome: BoundsOutcome) -> None:
        if self._is_closed:
            return
        self.start()
        if isinstance(outcome, Unanswered):
            return
        self.first_seq = outcome.first_seq
        full = outcome.used_bytes / max(1, outcome.used_bytes + outcome.room_bytes)
        if full >= SEAL_FULL:
            self._roll(outcome)
        if self._is_owner():
            self._purge(outcome, is_half_full=full >= KEEP_FULL)

    def _purge(self, bounds: Bounds, *, is_half_full: bool) -> None:
        standings = self._standings()
        sealed = purge_position(standings, self._copies, is_half_full=is_half_full)
        # The last message stays: a broker that starts compares it with its own files.
        up_to = min(sealed, bounds.last_seq - 1)
        if up_to < bounds.first_seq:
            return
        behind = {each.name for each in standings if each.sealed < up_to}
        for name in sorted(behind - self._left_behind):
            logger.warning(
                "the stream is half full and is no longer kept for broker %s, which will copy the "
                "files of another one",
                name,
            )
        self._left_behind = behind
        self._stream.purge(up_to, lambda failure: self._purged(up_to, failure))

    def _purged(self, up_to: int, failure: Unanswered | None) -> None:
        if failure is None:
            logger.debug("the stream was purged up to message %d", up_to)
        else:
            logger.info("the stream could not be purged, and is tried again: %s", failure.reason)
