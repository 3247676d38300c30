"""The memory that answers in progress may take, over all connections.

An answer that may be large is made only when its connection accepts bytes and the budget has room;
else it waits, in the order of asking. Small answers never wait. A connection that accepts no byte
of an answer for `stalled_timeout_ms` is closed. While others wait for memory, so is one that
accepts less than SLOWEST_BYTES_S over that time.

Invariant: `used_bytes` is the sum of what the connections hold. It is above the limit only by
answers that turned out larger than asked for, or that are larger than the limit by themselves. A
consumer's stream, a feed and a WebSocket with subscriptions are no answers in progress: their own
rules bound what they hold, and they may stall for as long as they like.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from penstock.model.limits import KIB, MIB
from penstock.server.http.tcp_liveness import acknowledged_bytes, reset

SMALL_ANSWER_BYTES = 64 * KIB
"""A smaller answer is sent at once: it fits into the buffers that a connection has anyway."""
ANSWER_MEMORY_BYTES = 128 * MIB
STALLED_TIMEOUT_MS = 60_000
SLOWEST_BYTES_S = 16 * KIB
"""A slower reader holds memory that others wait for."""
GIVE_BACK_BYTES = 32 * MIB
"""When this much less is in use than before, memory goes back to the system."""

_log = logging.getLogger("penstock.server")

Then = Callable[[], None]


class AnswerBudget:
    """`give_back` returns memory that the allocator keeps to the system."""

    def __init__(
        self,
        limit_bytes: int = ANSWER_MEMORY_BYTES,
        stalled_timeout_ms: int = STALLED_TIMEOUT_MS,
        give_back: Callable[[], object] | None = None,
    ) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.stalled_connections = 0
        self._give_back = give_back
        self._peak_bytes = 0
        self._timeout_s = stalled_timeout_ms / 1000
        self._waiting: OrderedDict[Claim, tuple[int, Then]] = OrderedDict()
        self._full: dict[Claim, _Acceptance] = {}
        """Connections above their high-water mark."""
        self._is_granting = False

    @property
    def waiting(self) -> int:
        """The number of answers that wait for room."""
        return len(self._waiting)

    def tick(self, now: float) -> None:
        """Closes connections that have stalled for too long. Called once a second."""
        for claim, acceptance in list(self._full.items()):
            if not claim.is_answering():
                self._full[claim] = _Acceptance(claim.transport, now)
                continue
            stalled_s = acceptance.stalled_s(now)
            is_slow = self._waiting and acceptance.is_slow(now, self._timeout_s)
            if stalled_s >= self._timeout_s or is_slow:
                self._close(claim)
        self._peak_bytes = max(self._peak_bytes, self.used_bytes)
        if self.used_bytes < self._peak_bytes - GIVE_BACK_BYTES:
            self._peak_bytes = self.used_bytes
            if self._give_back is not None:
                self._give_back()

    def _close(self, claim: Claim) -> None:
        self.stalled_connections += 1
        _log.warning(
            "closed a connection from %s that accepted nothing, or too little, for %d s; "
            "%d bytes of an answer were left",
            claim.transport.get_extra_info("peername"),
            self._timeout_s,
            claim.transport.get_write_buffer_size(),
        )
        self._full.pop(claim, None)
        reset(claim.transport)

    # -- called by claims ----------------------------------------------------------------------

    def ask(self, claim: Claim, nbytes: int, then: Then) -> None:
        self._waiting[claim] = (nbytes, then)
        self.grant()

    def grant(self) -> None:
        """Makes the answers that have waited longest, as far as there is room."""
        if self._is_granting:
            return
        self._is_granting = True
        try:
            while self._waiting:
                claim, (nbytes, then) = next(iter(self._waiting.items()))
                if self.used_bytes and self.used_bytes + nbytes > self.limit_bytes:
                    return
                del self._waiting[claim]
                claim.hold(nbytes)
                try:
                    then()
                except Exception:  # noqa: BLE001 - the others must not wait for ever
                    _log.exception("an answer could not be made")
                    claim.hold(0)
        finally:
            self._is_granting = False

    def forget(self, claim: Claim) -> None:
        self._waiting.pop(claim, None)

    def filled(self, claim: Claim) -> None:
        self._full[claim] = _Acceptance(claim.transport, time.monotonic())

    def drained(self, claim: Claim) -> None:
        self._full.pop(claim, None)


class _Acceptance:
    """How much of its answers a full connection has accepted, and since when."""

    __slots__ = ("_accepted", "_began", "_changed", "_first_accepted", "_transport")

    def __init__(self, transport: Any, now: float) -> None:
        self._transport = transport
        self._accepted = self._first_accepted = acknowledged_bytes(transport)
        self._began = self._changed = now

    def stalled_s(self, now: float) -> float:
        """Returns for how long the connection has accepted nothing."""
        accepted = acknowledged_bytes(self._transport)
        if accepted != self._accepted:
            self._accepted, self._changed = accepted, now
        return now - self._changed

    def is_slow(self, now: float, period_s: float) -> bool:
        """Returns whether the connection was too slow over at least `period_s`."""
        taken_s = now - self._began
        accepted = self._accepted - self._first_accepted
        return taken_s >= period_s and accepted < taken_s * SLOWEST_BYTES_S


class Claim:
    """One connection's part of the budget. `is_answering` says whether the bytes that it has not
    accepted yet are those of an answer in progress."""

    __slots__ = ("_budget", "held_bytes", "is_answering", "transport")

    def __init__(
        self, budget: AnswerBudget, transport: Any, is_answering: Callable[[], bool]
    ) -> None:
        self._budget = budget
        self.transport = transport
        self.is_answering = is_answering
        self.held_bytes = 0

    def ask(self, nbytes: int, then: Then) -> None:
        """Runs `then`, which makes an answer of about `nbytes`, when there is room for it."""
        if nbytes < SMALL_ANSWER_BYTES:
            then()
        else:
            self._budget.ask(self, nbytes, then)

    def hold(self, nbytes: int) -> None:
        """Sets how many bytes the connection's answers take now."""
        budget, more = self._budget, nbytes - self.held_bytes
        self.held_bytes = nbytes
        budget.used_bytes += more
        if more < 0:
            budget.grant()

    def filled(self) -> None:
        """Called when the connection is above its high-water mark."""
        self._budget.filled(self)
        if not self.held_bytes and self.is_answering():
            self.hold(self.transport.get_write_buffer_size())

    def drained(self) -> None:
        """Called when the connection accepts bytes again."""
        self._budget.drained(self)

    def close(self) -> None:
        """Ends all claims, because the connection is gone."""
        self._budget.drained(self)
        self._budget.forget(self)
        self.hold(0)
