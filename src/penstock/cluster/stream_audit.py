"""Compares the newest message that a broker has with the stream, while it runs.

The stream must hold that message, byte for byte. A stream that ends before it has lost what it had
confirmed; one with another message there was replaced, or goes on from a shorter end. Either ends
this life of the copy, and the next one repairs the stream or refuses it (standby.py). Must not know
who owns the log.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from penstock.cluster.frame_sender import MOST_SHORT_VIEWS
from penstock.cluster.replicated_log import ReplicatedLog
from penstock.cluster.shared import (
    BoundsOutcome,
    Found,
    LookUpOutcome,
    Missing,
    SharedStream,
    Unanswered,
)
from penstock.cluster.stream_errors import StreamCutShort, StreamHoldsOthers, StreamReplaced
from penstock.engine.scheduler import Cancellable, Scheduler

AUDIT_MS = 60_000
RETRY_MS = 500


class StreamFindings(msgspec.Struct):
    """Results of comparing this broker with the stream since the process began. `faults` are
    those after which its copy could not go on; `repaired` are messages that it appended again."""

    audits: int = 0
    faults: int = 0
    repaired: int = 0


class StreamAudit:
    """`identity` returns that of the stream as it was at the start, empty before it is known.
    `on_failed` is told once why the copy cannot go on."""

    def __init__(
        self,
        log: ReplicatedLog,
        stream: SharedStream,
        scheduler: Scheduler,
        identity: Callable[[], str],
        findings: StreamFindings,
        on_failed: Callable[[BaseException], None],
    ) -> None:
        self._findings = findings
        self._log = log
        self._stream = stream
        self._scheduler = scheduler
        self._identity = identity
        self._on_failed = on_failed
        self._seq = 0
        self._data = b""
        self._short_views = 0
        self._timer: Cancellable | None = None
        self._is_closed = False
        self._later(AUDIT_MS, self._begin)

    def close(self) -> None:
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _begin(self) -> None:
        self._short_views = 0
        if self._log.newest is None:
            self._later(AUDIT_MS, self._begin)
        else:
            self._seq, self._data = self._log.newest
            self._stream.bounds(self._check_identity)

    def _check_identity(self, outcome: BoundsOutcome) -> None:
        if self._is_closed:
            return
        if isinstance(outcome, Unanswered):
            self._later(AUDIT_MS, self._begin)
        elif outcome.identity != self._identity():
            self._fail(StreamReplaced())
        else:
            self._look()

    def _look(self) -> None:
        if not self._is_closed:
            self._stream.look_up(self._seq, self._found)

    def _found(self, outcome: LookUpOutcome) -> None:
        if self._is_closed:
            return
        if isinstance(outcome, Found) and outcome.data != self._data:
            self._fail(StreamHoldsOthers(self._seq))
        elif isinstance(outcome, Missing) and outcome.last_seq < self._seq:
            # It may be a leader that was cut off and answers from what it knew.
            self._short_views += 1
            if self._short_views > MOST_SHORT_VIEWS:
                self._fail(StreamCutShort(self._seq + 1))
            else:
                self._later(RETRY_MS, self._look)
        else:
            self._findings.audits += isinstance(outcome, Found)
            self._data = b""
            self._later(AUDIT_MS, self._begin)

    def _fail(self, error: BaseException) -> None:
        self.close()
        self._findings.faults += 1
        self._on_failed(error)

    def _later(self, delay_ms: int, turn: Callable[[], None]) -> None:
        self._timer = self._scheduler.later(delay_ms, turn)
