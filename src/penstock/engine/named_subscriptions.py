"""Named subscriptions of durable streams: consumer groups of their logs.

Invariant: a new one begins where it was asked to, an existing one goes on where it was, and it
exists durably before its first event is delivered. Leases, attempts and retries are those of groups
(engine/dispatcher.py). Must not know the wire.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from penstock.api.consumers import Sink
from penstock.api.outcomes import Done
from penstock.core.progress_rules import ProgressTarget, decide_progress
from penstock.core.state import BrokerState
from penstock.core.stream_logs import find_log
from penstock.core.tenancy import find
from penstock.core.topics import Topic
from penstock.engine.consumers import OpenConsumer
from penstock.engine.dispatcher import Dispatcher
from penstock.engine.ledger import Ledger
from penstock.engine.progress import ProgressCommands
from penstock.engine.quotas import Quotas, Reservation
from penstock.engine.ranges import Ranges
from penstock.model.errors import (
    FailedPrecondition,
    NotFound,
    NotYet,
    OutOfRange,
    PenstockError,
)
from penstock.model.progress import Reached
from penstock.model.ranges import TopicOffsets
from penstock.model.streams import Start, SubscribeNamed
from penstock.model.tenancy import Path

Resolved = Callable[[int | PenstockError], None]


def resolve_start(ranges: Ranges, topic: Topic, start: Start, resolved: Resolved) -> None:
    """Tells the offset at which a subscription begins. Times are looked up, perhaps on disk."""
    partition = topic.partitions[0]
    first, end = partition.first_offset, partition.end_offset

    def found(outcome: TopicOffsets | PenstockError) -> None:
        if isinstance(outcome, TopicOffsets):
            at_time = outcome.partitions[0].at_time
            resolved(end if at_time is None else at_time)
        else:
            resolved(outcome)

    if start.kind == "latest":
        resolved(end)
    elif start.kind == "earliest":
        resolved(first)
    elif start.kind == "time":
        ranges.offsets(topic.name, start.number, found)
    elif start.number < first:
        resolved(OutOfRange(f"events below {first} are no longer kept; start is {start.number}"))
    elif start.number > end:
        resolved(NotYet(f"the stream ends at offset {end}; start is {start.number}"))
    else:
        resolved(start.number)


class NamedSubscriptions:
    def __init__(
        self,
        state: BrokerState,
        ledger: Ledger,
        dispatcher: Dispatcher,
        progress: ProgressCommands,
        ranges: Ranges,
        quotas: Quotas,
    ) -> None:
        self._quotas = quotas
        self._state = state
        self._ledger = ledger
        self._dispatcher = dispatcher
        self._progress = progress
        self._ranges = ranges

    def open(self, command: SubscribeNamed, sink: Sink, done: Done[OpenConsumer]) -> None:
        """Joins the subscription, after creating it if it is new."""
        reserved: Reservation | None = None
        try:
            topic = self.find(command.path, command.stream_id)
            if self._quotas.is_active:
                reserved = self._quotas.reserve(command.path[:2])
        except PenstockError as error:
            self._ledger.answer(done, error)
            return

        def join(failure: PenstockError | None) -> None:
            if reserved is not None:
                reserved.end()
            self._join(topic, command, sink, done, failure)

        if command.name in topic.groups:
            self._ledger.when_durable(join)
        else:
            begin = partial(self._begin, topic, command.name, join)
            resolve_start(self._ranges, topic, command.start, begin)

    def find(self, path: Path, stream_id: int | None = None) -> Topic:
        """Returns the log of a stream that may have named subscriptions."""
        topic = find_log(self._state, path, stream_id)
        config = find(self._state.registry, "stream", path).stream
        if config is not None and config.delivery == "at_most_once":
            raise FailedPrecondition(
                "a named subscription needs a stream with delivery at_least_once or exactly_once; "
                "subscribe without a name, or create such a stream"
            )
        return topic

    def advance(
        self, path: Path, name: str, at: int, done: Done[int], stream_id: int | None = None
    ) -> None:
        """Sets a subscription's progress, for readers of ranges, which count it themselves."""

        def advanced(outcome: list[Reached] | PenstockError) -> None:
            done(outcome if isinstance(outcome, PenstockError) else outcome[0].next)

        try:
            topic = self.find(path)
        except PenstockError as error:
            self._ledger.answer(done, error)
            return
        self._progress.advance(topic.name, name, [Reached(0, at)], advanced, stream_id)

    def _begin(
        self,
        topic: Topic,
        name: str,
        join: Callable[[PenstockError | None], None],
        at: int | PenstockError,
    ) -> None:
        if isinstance(at, PenstockError):
            self._ledger.answer(join, at)
            return
        partition = topic.partitions[0]
        if partition.first_offset < at < partition.end_offset:
            # How many bytes lie before it is counted first, perhaps on disk.
            self._progress.advance(
                topic.name,
                name,
                [Reached(0, at)],
                lambda outcome: join(outcome if isinstance(outcome, PenstockError) else None),
                topic.id,
                only_new=True,
            )
        else:
            decided = self._ledger.attempt(partial(self._create, topic, name, at))
            self._ledger.answer(join, decided)

    def _create(self, topic: Topic, name: str, at: int) -> None:
        """Creates it at an end of the log, which needs no counting."""
        if self._state.topics.get(topic.name) is not topic:
            raise NotFound("the stream was deleted meanwhile")
        if name in topic.groups:
            return
        partition = topic.partitions[0]
        backlog = partition.backlog
        targets = []
        if at >= partition.end_offset:
            stored = (backlog.stored_msgs, backlog.stored_bytes)
            targets = [ProgressTarget(0, partition.end_offset, *stored)]
        records = decide_progress(self._state, topic, name, targets, self._ledger.now_ms())
        if self._quotas.is_active:
            self._quotas.check_group(topic.scope)
        self._ledger.must_record(*records)

    def _join(
        self,
        topic: Topic,
        command: SubscribeNamed,
        sink: Sink,
        done: Done[OpenConsumer],
        failure: PenstockError | None,
    ) -> None:
        group = topic.groups.get(command.name)
        if failure is not None:
            done(failure)
        elif group is None or self._state.topics.get(topic.name) is not topic:
            done(NotFound("the stream or the subscription was deleted meanwhile"))
        else:
            lease_ms = command.lease_ms or self._state.limits.lease_ms
            done(self._dispatcher.open(group.id, command.owner, lease_ms, command.prefetch, sink))
