"""Sends one frame to the shared stream, until its fate is known.

Invariant: `done` is called once, and never says STORED unless the stream has these very bytes
under this number. Whatever leaves doubt (no answer, a refusal that may count our own message) is
looked up where appends are decided, and sent again if it is not there: the number in the append
makes that harmless. Must not know what is in a frame.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

from penstock.cluster.shared import (
    AppendOutcome,
    Found,
    LookUpOutcome,
    Missing,
    SharedStream,
    Stored,
    Unanswered,
)
from penstock.engine.scheduler import Cancellable, Scheduler

FIRST_PAUSE_MS = 20
LONGEST_PAUSE_MS = 500
"""A leader without a quorum refuses at once, as often as it is asked."""
MOST_SHORT_VIEWS = 40
"""So often in turn, over about 20 seconds, the stream must end too early before it counts as cut
short. A leader that was cut off from the others answers for some seconds from what it knew."""


class Fate(enum.Enum):
    """The fate of a frame. TAKEN: another message has its number. LOST: the stream ends before
    the message that it must follow."""

    STORED = "stored"
    TAKEN = "taken"
    LOST = "lost"


class FrameSender:
    """Sends one frame at a time. After `stop` nothing is told any more; what was sent may still be
    stored."""

    def __init__(self, stream: SharedStream, scheduler: Scheduler) -> None:
        self._stream = stream
        self._scheduler = scheduler
        self._seq = 0
        self._data = b""
        self._done: Callable[[Fate], None] | None = None
        self._pause_ms = FIRST_PAUSE_MS
        self._short_views = 0
        self._timer: Cancellable | None = None
        self._is_stopped = False

    @property
    def is_doubtful(self) -> bool:
        """True while a frame is under way whose first append was not confirmed."""
        return self._done is not None and self._pause_ms > FIRST_PAUSE_MS

    def send(self, seq: int, data: bytes, done: Callable[[Fate], None]) -> None:
        self._seq, self._data, self._done = seq, data, done
        self._pause_ms = FIRST_PAUSE_MS
        self._short_views = 0
        self._append()

    def stop(self) -> None:
        self._is_stopped = True
        self._done = None
        if self._timer is not None:
            self._timer.cancel()

    def _append(self) -> None:
        self._stream.append(self._seq, self._data, self._answered)

    def _answered(self, outcome: AppendOutcome) -> None:
        if isinstance(outcome, Stored):
            self._tell(Fate.STORED)
        elif not self._is_stopped:
            self._look_up()

    def _look_up(self) -> None:
        self._stream.look_up(self._seq, self._found)

    def _found(self, outcome: LookUpOutcome) -> None:
        if self._is_stopped:
            return
        if isinstance(outcome, Found):
            self._tell(Fate.STORED if outcome.data == self._data else Fate.TAKEN)
        elif isinstance(outcome, Unanswered):
            self._later(self._look_up)
        else:
            self._missing(outcome)

    def _missing(self, outcome: Missing) -> None:
        if outcome.last_seq >= self._seq:
            self._tell(Fate.TAKEN)
        elif outcome.last_seq == self._seq - 1:
            self._short_views = 0
            self._later(self._append)
        elif self._short_views == MOST_SHORT_VIEWS:
            self._tell(Fate.LOST)
        else:
            self._short_views += 1
            self._later(self._look_up)

    def _later(self, step: Callable[[], None]) -> None:
        self._timer = self._scheduler.later(self._pause_ms, step)
        self._pause_ms = min(2 * self._pause_ms, LONGEST_PAUSE_MS)

    def _tell(self, fate: Fate) -> None:
        done, self._done = self._done, None
        self._data = b""
        if done is not None:
            done(fate)
