"""Streams: events fan out to all who are subscribed when they are published.

Invariant: a subscription is offered exactly the events accepted after it was confirmed, each once,
in the order of acceptance. A slow one delays neither publishers nor other subscriptions. Fan-out
has turns of its own, in bursts, and the streams take turns at it. Events of a durable stream are
stored first (engine/stream_log.py) and fan out when they are durable. Otherwise nothing here is
durable or waits for the log, except refusals: that a stream does not exist may not be durable yet.
Must not know the wire.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from copy import copy
from functools import partial
from itertools import islice

from penstock.api.consumers import Sink
from penstock.api.metrics import StreamCounts, StreamMetrics
from penstock.api.outcomes import Done
from penstock.api.streams import (
    EventRun,
    EventSink,
    StreamSettings,
    Subscription,
    stream_settings,
)
from penstock.core.publish_rules import check_numbers
from penstock.core.scope_counts import ScopeCounts
from penstock.core.state import BrokerState
from penstock.core.stream_logs import find_log
from penstock.core.stream_rules import burst_bytes, burst_events, check_depth, check_publish
from penstock.core.tenancy import find
from penstock.engine.consumers import OpenConsumer
from penstock.engine.counted_sink import CountedSink
from penstock.engine.event_reading import EventReading
from penstock.engine.ledger import Ledger
from penstock.engine.named_subscriptions import NamedSubscriptions
from penstock.engine.publish_queue import (
    Invalidates,
    PendingPublish,
    PublishQueue,
    Target,
    WaitingPublishes,
)
from penstock.engine.quotas import PublishMeter, Quotas
from penstock.engine.ranges import Ranges
from penstock.engine.replay import ReplaySubscription
from penstock.engine.replays import Replays
from penstock.engine.scheduler import Scheduler
from penstock.engine.stream_log import Mark, StreamLog
from penstock.engine.subscriptions import OpenSubscription, StreamContext
from penstock.model.errors import NotFound, PenstockError, Unavailable
from penstock.model.streams import Lag, Publish, Subscribe, SubscribeNamed
from penstock.model.tenancy import Entry, Path, StreamConfig

TURN_OFFERS = 512
"""The offers of a batch to a subscription in one turn of fan-out, over all streams. Each may end in
a write to a socket, and others wait for the loop meanwhile."""


class StreamInUse:
    """A stream that has been used: its queue, its subscriptions, and the batch that fans out."""

    def __init__(
        self,
        config: StreamConfig,
        settings: StreamSettings,
        queue: PublishQueue,
        around: StreamContext,
        log: StreamLog | None,
        count: Callable[[int], None],
    ) -> None:
        self.config = config
        self.is_numbered = config.delivery == "exactly_once"
        self.settings = settings
        self._count = count
        self.queue = queue
        self.around = around
        self.log = log
        self.is_busy = False
        self.subscriptions: dict[str, OpenSubscription] = {}
        self.replays: dict[str, ReplaySubscription] = {}
        self._audience: list[OpenSubscription] | None = None
        self._run: EventRun | None = None
        self._left: Iterator[OpenSubscription] = iter(())

    def configure(self, settings: StreamSettings) -> None:
        self.settings = settings
        self.queue.configure(settings)
        for subscription in list(self.subscriptions.values()):
            subscription.configure(settings)

    def add(self, subscription: OpenSubscription) -> None:
        self.subscriptions[subscription.id] = subscription
        self.around.counts.subscribers += 1
        self._count(1)
        self._audience = None

    def remove(self, subscription: OpenSubscription) -> None:
        del self.subscriptions[subscription.id]
        self.around.counts.subscribers -= 1
        self._count(-1)
        self._audience = None

    def add_replay(self, replay: ReplaySubscription) -> None:
        self.replays[replay.id] = replay
        self.around.counts.subscribers += 1
        self._count(1)

    def remove_replay(self, replay: ReplaySubscription) -> None:
        del self.replays[replay.id]
        self.around.counts.subscribers -= 1
        self._count(-1)

    def stored(self, payloads: list[bytes], offset: int) -> None:
        """Takes note of events that a transaction has stored in the log of this stream. They fan
        out when they are durable."""
        publish = PendingPublish(payloads, sum(map(len, payloads)), [], _nobody)
        publish.offset = offset
        if self.subscriptions or self.log is None:
            self.queue.follow(publish)
        else:
            self.log.follow_publish(publish)

    def end(self, error: PenstockError) -> None:
        """Ends all subscriptions and drops what was not fanned out."""
        self._run = None
        self._left = iter(())
        for subscription in list(self.subscriptions.values()):
            subscription.end(error)
        for replay in list(self.replays.values()):
            replay.end(error)
        self.queue.end(error)

    def has_work(self) -> bool:
        return self._run is not None or self.queue.head() is not None

    def fan_out(self, max_offers: int) -> int:
        """Fans a burst out, or the rest of one. Returns how many offers it took, at least 1."""
        offers = events = nbytes = 0
        while offers < max_offers:
            run = self._run or self._next(events, nbytes)
            if run is None:
                break
            some = list(islice(self._left, max_offers - offers))
            seq = run.batch.seq
            for subscription in some:
                if seq > subscription.since:
                    subscription.offer(run)
            if len(some) < max_offers - offers:
                self._run = None
            offers += len(some) or 1
            events += run.end
            nbytes += run.nbytes
        return offers or 1

    def _next(self, events: int, nbytes: int) -> EventRun | None:
        """Returns the next batch, if the burst stays within its bounds with it."""
        run = self.queue.head()
        if run is None:
            return None
        if events and (
            events + run.end > burst_events(self.settings)
            or nbytes + run.nbytes > burst_bytes(self.settings)
        ):
            return None
        if self._audience is None:
            self._audience = list(self.subscriptions.values())
        self._run = run
        self._left = iter(self._audience)
        self.queue.pop()
        return run


def _nobody(outcome: int | PenstockError | None) -> None:
    """Ignores the outcome: the transaction is answered, not the publish."""


class Streams:
    def __init__(
        self,
        state: BrokerState,
        ledger: Ledger,
        caches: Invalidates,
        scheduler: Scheduler,
        quotas: Quotas,
        opened: ScopeCounts,
        mark: Mark,
        reading: EventReading,
        ranges: Ranges,
        named: NamedSubscriptions,
    ) -> None:
        self._named = named
        self.advance = named.advance
        self._quotas = quotas
        self._opened = opened
        self._state = state
        self._mark = mark
        self._registry = state.registry
        self._limits = state.limits
        self._caches = caches
        self._ledger = ledger
        self._scheduler = scheduler
        self._streams: dict[Path, StreamInUse] = {}
        self._replays = Replays(
            state, ledger, scheduler, reading, ranges, quotas, self._streams.get
        )
        self._waiting_room = WaitingPublishes()
        self._subscribed = 0
        self._busy: deque[StreamInUse] = deque()
        self._woken: list[OpenSubscription] = []
        self._is_asked = False
        self._is_held = False

    # -- commands ------------------------------------------------------------------------------

    def publish(self, command: Publish, done: Done[int | None]) -> None:
        targets: list[Target] = []
        try:
            stream = self._streams.get(command.path) or self._open(command.path)
            nbytes = check_publish(command, self._limits)
            if stream.is_numbered or command.producer_id or command.sequence is not None:
                check_numbers(stream.config, command.producer_id, command.sequence)
            if command.invalidate:
                tenant_id, namespace, _ = command.path
                targets = [((tenant_id, namespace, c), key) for c, key in command.invalidate]
                self._caches.check_targets(targets)
        except PenstockError as error:
            self._ledger.answer(done, error)
            return
        publish = PendingPublish(
            command.payloads, nbytes, targets, done, command.producer_id, command.sequence
        )
        log = stream.log
        if log is None or stream.subscriptions or targets or stream.queue.waiting:
            stream.queue.put(publish)
        else:
            log.publish(publish)

    def subscribe(self, command: Subscribe, sink: EventSink, done: Done[Subscription]) -> None:
        try:
            stream = self._streams.get(command.path) or self._open(command.path)
            check_depth(command.event_queue_depth)
            if command.start is not None:
                self._subscribed += 1
                self._replays.open(command, command.start, self._subscribed, sink, done)
                return
            if command.stream_id is not None:
                find_log(self._state, command.path, command.stream_id)
            if self._quotas.is_active:
                self._quotas.check_subscription(command.path[:2])
        except PenstockError as error:
            self._ledger.answer(done, error)
            return
        self._subscribed += 1
        subscription = OpenSubscription(
            self._subscribed,
            stream.queue.seq,
            sink,
            stream.settings,
            stream.around,
            own_depth=command.event_queue_depth,
            wants_lag=command.wants_lag,
            begins_at=-1 if stream.log is None else stream.log.topic.next_offset,
            stream_id=None if stream.log is None else stream.log.topic.id,
        )
        stream.add(subscription)
        confirm = partial(self._confirm, subscription, done)
        if stream.log is None:
            confirm(None)
        else:
            # After a crash the log must not end before the offset that is given here.
            self._ledger.when_durable(confirm)

    def consume(self, command: SubscribeNamed, sink: Sink, done: Done[OpenConsumer]) -> None:
        try:
            counts = self.in_use(command.path).around.counts
        except PenstockError as error:
            self._ledger.answer(done, error)
            return
        self._named.open(command, CountedSink(sink, counts), done)

    def _confirm(
        self,
        subscription: OpenSubscription,
        done: Done[Subscription],
        failure: PenstockError | None,
    ) -> None:
        if failure is None and subscription.is_closed:
            failure = NotFound("the stream was deleted meanwhile")
        if failure is not None:
            subscription.close()
            done(failure)
            return
        try:
            done(subscription)
        except BaseException:
            # Nobody knows of it, so nobody would close it.
            subscription.close()
            raise

    def in_use(self, path: Path) -> StreamInUse:
        return self._streams.get(path) or self._open(path)

    def log_name(self, path: Path) -> str:
        return find_log(self._state, path).name

    def next_sequence(self, path: Path, producer_id: str, done: Done[int]) -> None:
        outcome: int | PenstockError
        try:
            publishers = find_log(self._state, path).publishers
            publisher = publishers.find(producer_id, self._ledger.now_ms())
            outcome = 0 if publisher is None else publisher.next
        except PenstockError as error:
            outcome = error
        self._ledger.answer(done, outcome)

    def subscriptions(self, path: Path, done: Done[list[Lag]]) -> None:
        try:
            stream = self._streams.get(path) or self._open(path)
        except PenstockError as error:
            self._ledger.answer(done, error)
            return
        live = [subscription.lag() for subscription in stream.subscriptions.values()]
        done(live + [replay.lag() for replay in stream.replays.values()])

    # -- what there is -------------------------------------------------------------------------

    def metrics(self) -> list[StreamMetrics]:
        """Returns the metrics of every stream that has been used."""
        return [
            StreamMetrics(
                path, copy(stream.around.counts), stream.queue.events, stream.queue.waiting
            )
            for path, stream in self._streams.items()
        ]

    def registry_changed(self, entry: Entry, deleted: bool) -> None:
        stream = self._streams.get(entry.path) if entry.kind == "stream" else None
        if stream is None:
            return
        if deleted:
            del self._streams[entry.path]
            error = NotFound(f"stream {stream.around.name!r} was deleted")
            # Its log is gone already: nothing may be let in until the deletion is durable.
            stream.queue.refuse_waiting(error)
            self._ledger.answer(stream.end, error)
        else:
            stream.config = entry.stream or StreamConfig()
            stream.is_numbered = stream.config.delivery == "exactly_once"
            stream.configure(stream_settings(stream.config, self._limits))

    def end_all(self, reason: str) -> None:
        """Ends every subscription and refuses every publish that waits."""
        for stream in list(self._streams.values()):
            stream.end(Unavailable(reason))

    def _open(self, path: Path) -> StreamInUse:
        config = find(self._registry, "stream", path).stream or StreamConfig()
        settings = stream_settings(config, self._limits)
        counts = StreamCounts()
        meter = PublishMeter(self._quotas, path[:2], is_kept=config.durable)
        log = None
        if config.durable:
            topic = find_log(self._state, path)
            log = StreamLog(self._state, self._ledger, topic, self._mark, counts, meter)
        name = "/".join(path)
        scheduler = self._scheduler
        stream: StreamInUse
        queue = PublishQueue(
            name,
            settings,
            counts,
            self._waiting_room,
            self._caches,
            self._ledger,
            scheduler,
            lambda: self._ready(stream),
            meter,
            log,
        )
        around = StreamContext(
            name,
            counts,
            self._woken,
            scheduler,
            self._ledger.now_ms,
            lambda subscription: stream.remove(subscription),
        )
        count = partial(self._opened.add, path[:2])
        stream = self._streams[path] = StreamInUse(config, settings, queue, around, log, count)
        return stream

    # -- fan-out -------------------------------------------------------------------------------

    def hold_fanout(self) -> None:
        """Keeps accepted events in the queues until `release_fanout`. For tests."""
        self._is_held = True

    def release_fanout(self) -> None:
        self._is_held = False
        self._ask()

    def _ready(self, stream: StreamInUse) -> None:
        if not stream.is_busy:
            stream.is_busy = True
            self._busy.append(stream)
        if not self._is_asked:
            self._ask()

    def _ask(self) -> None:
        if not self._is_asked and not self._is_held:
            self._is_asked = True
            self._scheduler.soon(self._turn)

    def _turn(self) -> None:
        """Fans out bursts of the streams in turn, then wakes the sinks, which have turns of their
        own before the next burst."""
        try:
            if not self._is_held:
                self._fan_out()
                self._wake()
        finally:
            self._is_asked = False
            if self._busy:
                self._ask()

    def _fan_out(self) -> None:
        left = TURN_OFFERS
        for _ in range(len(self._busy)):
            if left <= 0:
                break
            stream = self._busy.popleft()
            left -= stream.fan_out(left)
            if stream.has_work():
                self._busy.append(stream)
            else:
                stream.is_busy = False

    def _wake(self) -> None:
        woken = self._woken[:]
        self._woken.clear()
        for subscription in woken:
            subscription.wake()
