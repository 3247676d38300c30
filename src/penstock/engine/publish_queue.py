"""The publish queue of a stream: publishes that were accepted and have not fanned out, and
publishes that wait to be accepted.

Invariant: publishes are accepted in the order of arrival, and `seq` counts them. A publish is
accepted once, whole, and answered once; one that was refused is never fanned out and invalidates
nothing. The keys that it invalidates are removed before it is accepted, and the events of a durable
stream are stored then. It leaves the queue, and is answered, only when all that is durable. Must
not know subscribers.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from penstock.api.metrics import StreamCounts
from penstock.api.outcomes import Done
from penstock.api.streams import EventRun, StreamSettings
from penstock.core.event_buffer import cut
from penstock.core.publish_rules import NewEvents, Repeat
from penstock.core.stream_rules import burst_bytes, burst_events
from penstock.engine.ledger import Ledger
from penstock.engine.quotas import PublishMeter
from penstock.engine.scheduler import Cancellable, Scheduler
from penstock.engine.stream_log import StreamLog
from penstock.model import limits
from penstock.model.errors import PenstockError, ResourceExhausted
from penstock.model.limits import MIB
from penstock.model.tenancy import Path

QUEUE_BYTES = 64 * MIB
"""The bytes that a queue accepts: its depth counts events, which may be large."""

PAYLOAD_BYTES = 64
"""The memory of a payload beside its bytes: the object, and its place in the batch."""

Target = tuple[Path, str]
"""A cache, and a key of it."""

_log = logging.getLogger("penstock.engine")


class Invalidates(Protocol):
    """The caches, as far as publishing needs them."""

    def check_targets(self, targets: list[Target]) -> None:
        """Raises NotFound if there is no such cache."""
        ...

    def invalidate(self, targets: list[Target]) -> bool:
        """Removes the keys. True if that was recorded, and is still to become durable."""
        ...


class WaitingPublishes:
    """Counts the publishes that wait for any queue, and the memory that they hold.

    All streams share one, since all share the broker's memory. A publisher that sends ahead of its
    answers is held up by its own connection long before this is full.
    """

    __slots__ = ("nbytes", "publishes")

    def __init__(self) -> None:
        self.publishes = 0
        self.nbytes = 0

    def has_room(self, publish: PendingPublish) -> bool:
        """Says whether the publish may wait. The first one may, however large."""
        return not self.publishes or (
            self.publishes < limits.MAX_WAITING_PUBLISHES
            and self.nbytes + publish.held_bytes <= limits.MAX_WAITING_PUBLISH_BYTES
        )

    def enter(self, publish: PendingPublish) -> None:
        self.publishes += 1
        self.nbytes += publish.held_bytes

    def leave(self, publish: PendingPublish) -> None:
        self.publishes -= 1
        self.nbytes -= publish.held_bytes


class PendingPublish:
    """A publish that is not accepted yet; `timer` is set while it waits. `offset` is set when its
    events are stored in the log of a durable stream."""

    __slots__ = (
        "done",
        "nbytes",
        "offset",
        "payloads",
        "producer_id",
        "sequence",
        "targets",
        "timer",
    )

    def __init__(
        self,
        payloads: list[bytes],
        nbytes: int,
        targets: list[Target],
        done: Done[int | None],
        producer_id: str = "",
        sequence: int | None = None,
    ) -> None:
        self.payloads = payloads
        self.nbytes = nbytes
        self.targets = targets
        self.done = done
        self.producer_id = producer_id
        self.sequence = sequence
        self.offset: int | None = None
        self.timer: Cancellable | None = None

    @property
    def held_bytes(self) -> int:
        """The memory that it takes while it waits."""
        return self.nbytes + PAYLOAD_BYTES * len(self.payloads)


class PublishQueue:
    def __init__(
        self,
        name: str,
        settings: StreamSettings,
        counts: StreamCounts,
        waiting_room: WaitingPublishes,
        caches: Invalidates,
        ledger: Ledger,
        scheduler: Scheduler,
        on_ready: Callable[[], None],
        meter: PublishMeter,
        log: StreamLog | None = None,
    ) -> None:
        self.seq = 0
        self.events = 0
        self._nbytes = 0
        self._name = name
        self._settings = settings
        self._burst = (burst_events(settings), burst_bytes(settings))
        self._counts = counts
        self._waiting_room = waiting_room
        self._caches = caches
        self._ledger = ledger
        self._scheduler = scheduler
        self._on_ready = on_ready
        self._meter = meter
        self._log = log
        self._runs: deque[EventRun] = deque()
        # Batches that are not durable yet, or whose invalidation is not, by their numbers.
        self._held: set[int] = set()
        self._waiting: OrderedDict[PendingPublish, None] = OrderedDict()

    @property
    def waiting(self) -> int:
        """The number of publishes that wait to be accepted."""
        return len(self._waiting)

    def configure(self, settings: StreamSettings) -> None:
        """Takes new settings. Publishes that wait already keep the time they were given."""
        self._settings = settings
        self._burst = (burst_events(settings), burst_bytes(settings))
        self._let_in()

    # -- coming in -----------------------------------------------------------------------------

    def put(self, publish: PendingPublish) -> None:
        if not self._waiting and self._has_room(publish):
            self._accept(publish)
        elif not self._settings.publish_queue_wait_timeout_ms:
            self._refuse(publish, "and publishes do not wait for it")
        elif refusal := self._quota_refusal(publish):
            answer(publish.done, refusal)
        elif self._waiting_room.has_room(publish):
            self._wait(publish)
        else:
            self._refuse(publish, "and too many publishes wait already", "waiting_publishes")

    def _quota_refusal(self, publish: PendingPublish) -> PenstockError | None:
        """Returns why the publish need not wait: a quota would refuse it now. It is checked again,
        and counted, when it is accepted. A repeat is answered whatever is used up."""
        if self._log is not None and self._log.is_repeat(publish):
            return None
        try:
            self._meter.check(len(publish.payloads), publish.nbytes)
        except PenstockError as error:
            return error
        return None

    def _has_room(self, publish: PendingPublish) -> bool:
        """Says whether the queue has room. An empty one takes any publish, or one larger than the
        queue could never be made."""
        if not self._runs:
            return True
        events = self.events + len(publish.payloads)
        nbytes = self._nbytes + publish.nbytes
        return events <= self._settings.pub_queue_depth and nbytes <= QUEUE_BYTES

    def _accept(self, publish: PendingPublish) -> None:
        try:
            must_hold = self._store(publish)
        except PenstockError as error:
            answer(publish.done, error)
            return
        if must_hold is None:
            self._ledger.answer(publish.done, publish.offset)
        else:
            self._enqueue(publish, must_hold or not self._ledger.log.is_current())

    def is_full(self) -> bool:
        return self.events >= self._settings.pub_queue_depth

    def follow(self, publish: PendingPublish) -> None:
        """Adds events that are stored already. They fan out when they are durable."""
        self._enqueue(publish, must_hold=True)

    def _enqueue(self, publish: PendingPublish, must_hold: bool) -> None:
        first = self.seq + 1
        offset = -1 if publish.offset is None else publish.offset
        for run in cut(publish.payloads, publish.nbytes, *self._burst, offset):
            self.seq += 1
            run.batch.seq = self.seq
            run.batch.publish = first
            self._runs.append(run)
        self.events += len(publish.payloads)
        self._nbytes += publish.nbytes
        if must_hold:
            batches = range(first, self.seq + 1)
            self._held.update(batches)
            self._ledger.when_durable(partial(self._settled, batches, publish))
        else:
            self._counts.published += len(publish.payloads)
            self._on_ready()
            answer(publish.done, None)

    def _store(self, publish: PendingPublish) -> bool | None:
        """Removes the keys, and stores the events of a durable stream. Returns whether something
        was recorded, and is still to become durable; None for a repeat, which needs nothing."""
        log, decided = self._log, None
        if log is not None:
            decided = log.decide(publish)
            if isinstance(decided, Repeat):
                publish.offset = decided.offset
                return None
        else:
            self._meter.check(len(publish.payloads), publish.nbytes)
        must_hold = bool(publish.targets) and self._caches.invalidate(publish.targets)
        if log is not None and isinstance(decided, NewEvents):
            publish.offset = log.store(decided)
            must_hold = True
        if log is None:
            self._meter.take(len(publish.payloads), publish.nbytes)
        return must_hold

    def _settled(
        self, batches: range, publish: PendingPublish, failure: PenstockError | None
    ) -> None:
        """Continues a publish that is durable, or whose record failed."""
        self._held.difference_update(batches)
        if failure is None:
            self._counts.published += len(publish.payloads)
            if self._log is not None and publish.offset is not None:
                self._log.grown_to(publish.offset + len(publish.payloads))
        else:
            self._drop(batches)
        self._on_ready()
        answer(publish.done, failure or publish.offset)

    def _drop(self, batches: range) -> None:
        for run in [run for run in self._runs if run.batch.seq in batches]:
            self._runs.remove(run)
            self._free(run)
        self._let_in()

    # -- waiting -------------------------------------------------------------------------------

    def _wait(self, publish: PendingPublish) -> None:
        timeout_ms = self._settings.publish_queue_wait_timeout_ms
        publish.timer = self._scheduler.later(timeout_ms, partial(self._time_out, publish))
        self._waiting[publish] = None
        self._waiting_room.enter(publish)

    def _time_out(self, publish: PendingPublish) -> None:
        self._end_wait(publish)
        self._refuse(publish, "and had no room in time")
        # A smaller one behind it may fit.
        self._let_in()

    def _end_wait(self, publish: PendingPublish) -> None:
        if publish.timer is not None:
            publish.timer.cancel()
        del self._waiting[publish]
        self._waiting_room.leave(publish)

    def _let_in(self) -> None:
        while self._waiting:
            first = next(iter(self._waiting))
            if not self._has_room(first):
                return
            self._end_wait(first)
            self._accept(first)

    def _refuse(self, publish: PendingPublish, why: str, limit: str = "pub_queue_depth") -> None:
        self._counts.refused_publishes += 1
        settings = self._settings
        answer(
            publish.done,
            ResourceExhausted(
                f"the broker is overloaded: the publish queue of stream {self._name!r} is full, "
                f"{why} (pub_queue_depth is {settings.pub_queue_depth}, "
                f"publish_queue_wait_timeout_ms is {settings.publish_queue_wait_timeout_ms})",
                limit=limit,
                reason="publish_queue_timeout",
            ),
        )

    # -- going out -----------------------------------------------------------------------------

    def head(self) -> EventRun | None:
        """Returns the next run to fan out, if it is durable."""
        runs = self._runs
        if not runs or (self._held and runs[0].batch.seq in self._held):
            return None
        return runs[0]

    def pop(self) -> None:
        """Removes the head, which fans out now."""
        self._free(self._runs.popleft())
        if self._waiting:
            self._let_in()

    def _free(self, run: EventRun) -> None:
        self.events -= run.end
        self._nbytes -= run.nbytes

    def refuse_waiting(self, error: PenstockError) -> None:
        """Lets no publish in any more that waits, and refuses it when all that was decided so far
        is durable."""
        waiting = list(self._waiting)
        for publish in waiting:
            self._end_wait(publish)
        for publish in waiting:
            self._ledger.answer(partial(answer, publish.done), error)

    def end(self, error: PenstockError) -> None:
        """Drops accepted publishes, and refuses those that wait."""
        self._runs.clear()
        self.events = self._nbytes = 0
        self.refuse_waiting(error)


def answer(done: Done[int | None], outcome: int | PenstockError | None) -> None:
    try:
        done(outcome)
    except Exception:  # noqa: BLE001 - one departed publisher must not stop the others
        _log.exception("a publish could not be answered; the others go on")
