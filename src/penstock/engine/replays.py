"""Opens subscriptions that read a durable stream from a start on.

Invariant: one begins at an offset below which everything is durable, so that its reader may ask for
the same offset again after a crash. Must not know how a replay reads (engine/replay.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from penstock.api.outcomes import Done
from penstock.api.streams import EventSink, Subscription
from penstock.core.state import BrokerState
from penstock.core.stream_logs import find_log
from penstock.engine.event_reading import EventReading
from penstock.engine.ledger import Ledger
from penstock.engine.named_subscriptions import resolve_start
from penstock.engine.quotas import Quotas, Reservation
from penstock.engine.ranges import Ranges
from penstock.engine.replay import ReplaySubscription
from penstock.engine.scheduler import Scheduler
from penstock.engine.stream_log import StreamLog
from penstock.model.errors import NotFound, PenstockError
from penstock.model.streams import Start, Subscribe
from penstock.model.tenancy import Path

if TYPE_CHECKING:
    from penstock.engine.streams import StreamInUse

Find = Callable[[Path], "StreamInUse | None"]


class Replays:
    """`find` returns the stream that has a path now."""

    def __init__(
        self,
        state: BrokerState,
        ledger: Ledger,
        scheduler: Scheduler,
        reading: EventReading,
        ranges: Ranges,
        quotas: Quotas,
        find: Find,
    ) -> None:
        self._state = state
        self._ledger = ledger
        self._scheduler = scheduler
        self._reading = reading
        self._ranges = ranges
        self._quotas = quotas
        self._find = find

    def open(
        self,
        command: Subscribe,
        start: Start,
        number: int,
        sink: EventSink,
        done: Done[Subscription],
    ) -> None:
        """Raises if the stream is not durable or not the one that is meant, or if no other
        subscription may be opened."""
        path = command.path
        stream, topic = self._find(path), find_log(self._state, path, command.stream_id)
        reserved = self._quotas.reserve(path[:2]) if self._quotas.is_active else None
        begin = partial(self._begin, path, stream, reserved, number, sink, done)
        resolve_start(self._ranges, topic, start, begin)

    def _begin(
        self,
        path: Path,
        stream: StreamInUse | None,
        reserved: Reservation | None,
        number: int,
        sink: EventSink,
        done: Done[Subscription],
        at: int | PenstockError,
    ) -> None:
        def begin(failure: PenstockError | None) -> None:
            if reserved is not None:
                reserved.end()
            log = None if stream is None else stream.log
            if failure is not None:
                done(failure)
            elif isinstance(at, PenstockError):
                done(at)
            elif stream is None or log is None or self._find(path) is not stream:
                done(NotFound("the stream was deleted meanwhile"))
            else:
                self._add(stream, log, number, at, sink, done)

        self._ledger.when_durable(begin)

    def _add(
        self,
        stream: StreamInUse,
        log: StreamLog,
        number: int,
        at: int,
        sink: EventSink,
        done: Done[Subscription],
    ) -> None:
        replay = ReplaySubscription(
            number,
            at,
            log,
            self._reading,
            sink,
            stream.around.counts,
            self._scheduler,
            self._ledger.now_ms(),
            stream.remove_replay,
        )
        stream.add_replay(replay)
        try:
            done(replay)
        except BaseException:
            replay.close()
            raise
        replay.advance()
