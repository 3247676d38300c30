"""Broker time: wall-clock milliseconds that never go back, and that no bad clock carries away.

Leases, backoffs, TTLs and the time of every record are broker time. It follows the machine's
clock, except that

- a machine's clock that is set back does not set it back: it goes on at its own pace;
- a machine's clock that jumps ahead by more than MAX_STEP_MS is followed only when it has stayed
  ahead for TRUST_MS. A clock that jumps and comes back, as a bad time server makes it do, so
  leaves no trace. Steps are measured from the clock that was trusted last, so that several small
  ones in turn do not add up.

Times that users give, such as a deadline, are compared with `wall_ms` instead: broker time may
still be ahead of the machine's clock when an earlier process ran with a wrong one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

MAX_STEP_MS = 60_000
"""A larger step ahead is a jump. Time servers correct less than this in ordinary operation."""

TRUST_MS = 10 * 60_000
"""The time that a jump must last before broker time follows it."""

DRIFT_MS = 1_000
"""A smaller change between two looks is drift: the clock goes on being trusted."""

_log = logging.getLogger("penstock.engine")


class Clock(Protocol):
    def now_ms(self) -> int:
        """Returns broker time."""
        ...

    def wall_ms(self) -> int:
        """Returns the time to compare with times that users give."""
        ...

    def ahead_ms(self) -> int:
        """Returns how far broker time is ahead of the machine's clock; below 0 when it is
        behind."""
        ...

    def start_at(self, floor_ms: int) -> None:
        """Moves broker time to `floor_ms` if it is behind: the log's last record is the past."""
        ...


def _elapsed_seconds() -> float:
    """Seconds that passed, time asleep included where the system counts it."""
    return time.clock_gettime(_ELAPSED)


_ELAPSED = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class SystemClock:
    """`wall` and `elapsed` are in seconds; tests replace them."""

    __slots__ = (
        "_base_ms",
        "_elapsed",
        "_is_logged",
        "_jump_ms",
        "_jumped_at",
        "_started",
        "_trusted_ms",
        "_wall",
    )

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        elapsed: Callable[[], float] = _elapsed_seconds,
    ) -> None:
        self._wall = wall
        self._elapsed = elapsed
        self._started = elapsed()
        self._base_ms = self._trusted_ms = wall() * 1000
        """Broker time, and the machine's clock as far as it is trusted, both less `elapsed`."""
        self._jump_ms = 0.0
        self._jumped_at: float | None = None
        self._is_logged = False

    def start_at(self, floor_ms: int) -> None:
        elapsed_ms = (self._elapsed() - self._started) * 1000
        # The half keeps rounding from giving a time before the floor.
        self._base_ms = max(self._base_ms, floor_ms + 0.5 - elapsed_ms)

    def now_ms(self) -> int:
        elapsed_ms = (self._elapsed() - self._started) * 1000
        carried = self._base_ms + elapsed_ms
        wall_ms = self._wall() * 1000
        lead = wall_ms - carried
        step = wall_ms - elapsed_ms - self._trusted_ms
        if -DRIFT_MS <= step <= DRIFT_MS:
            self._trusted_ms += step
        if lead >= 0 and step <= MAX_STEP_MS and self._jumped_at is None:
            self._base_ms += lead
            return int(carried + lead)
        if -MAX_STEP_MS <= lead < 0 and self._jumped_at is None and not self._is_logged:
            return int(carried)
        return int(carried + self._follow(carried, lead, step))

    def wall_ms(self) -> int:
        # Behind a jump ahead that is not trusted yet, broker time is the better guess.
        return min(self.now_ms(), int(self._wall() * 1000))

    def ahead_ms(self) -> int:
        return self.now_ms() - int(self._wall() * 1000)

    def _follow(self, carried: float, lead: float, step: float) -> float:
        """Returns how far to step ahead, when the clocks are or were far apart."""
        if lead > 0 and step > MAX_STEP_MS:
            return self._follow_jump(carried, lead, step)
        if self._jumped_at is not None:
            self._jumped_at = None
            _log.warning("the machine's clock came back from its jump ahead")
        if lead < -MAX_STEP_MS:
            self._tell_ahead(-lead)
            return 0.0
        self._is_logged = False
        followed = max(lead, 0.0)
        self._base_ms += followed
        return followed

    def _follow_jump(self, carried: float, lead: float, step: float) -> float:
        self._is_logged = False
        if self._jumped_at is None or abs(lead - self._jump_ms) > MAX_STEP_MS:
            self._jumped_at, self._jump_ms = carried, lead
            _log.warning(
                "the machine's clock jumped ahead by %.0f s; the broker's time follows "
                "if it stays there for %d minutes",
                lead / 1000,
                TRUST_MS // 60_000,
            )
        if carried - self._jumped_at < TRUST_MS:
            return 0.0
        self._jumped_at = None
        self._base_ms += lead
        self._trusted_ms += step
        _log.warning("the broker's time follows the machine's clock, %.0f s ahead", lead / 1000)
        return lead

    def _tell_ahead(self, ahead_ms: float) -> None:
        if not self._is_logged:
            self._is_logged = True
            _log.warning(
                "the broker's time is %.0f s ahead of the machine's clock and goes on from "
                "there; deadlines are compared with the machine's clock",
                ahead_ms / 1000,
            )


class ManualClock:
    """Time that a test moves. `behind_ms` is how far the machine's clock is behind it."""

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self._now_ms = now_ms
        self.behind_ms = 0

    def now_ms(self) -> int:
        return self._now_ms

    def wall_ms(self) -> int:
        return self._now_ms - self.behind_ms

    def ahead_ms(self) -> int:
        return self.behind_ms

    def start_at(self, floor_ms: int) -> None:
        self._now_ms = max(self._now_ms, floor_ms)

    def advance(self, ms: int) -> None:
        self._now_ms += ms
