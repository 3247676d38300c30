"""Streams driven by hand: publishers, and listeners that read or stall."""

from __future__ import annotations

from typing import Any

from penstock.api.metrics import StreamCounts
from penstock.engine.subscriptions import OpenSubscription
from penstock.model.errors import PenstockError
from penstock.model.limits import Limits
from penstock.model.streams import Lag, Publish, Subscribe
from penstock.model.tenancy import CacheConfig, Entry, Kind, Path, StreamConfig
from penstock.storage.vfs import Vfs
from tests.engine.harness import Broker

S = ("acme", "prod", "s")
SECOND = ("acme", "prod", "second")


class Listener:
    """The far end of a subscription. Takes all when it is woken, or nothing while it is stalled."""

    def __init__(self, *, stalled: bool = False) -> None:
        self.is_stalled = stalled
        self.events: list[bytes] = []
        self.wakes = 0
        self.lags: list[Lag] = []
        self.errors: list[PenstockError] = []
        self.subscription: OpenSubscription | None = None

    def wake(self) -> None:
        self.wakes += 1
        if not self.is_stalled:
            self.read()

    def lagging(self, lag: Lag) -> None:
        self.lags.append(lag)

    def ended(self, error: PenstockError) -> None:
        self.errors.append(error)

    def read(self, max_events: int = 10**6) -> list[bytes]:
        """What it got just now."""
        got = [event for run in self.live.take(max_events) for event in run.payloads]
        self.events += got
        return got

    @property
    def live(self) -> OpenSubscription:
        assert self.subscription is not None
        return self.subscription

    @property
    def behind(self) -> int:
        return self.live.lag().messages_behind


class Bank:
    """A broker with two streams, `S` and `SECOND`, and whatever else a test adds."""

    def __init__(self, vfs: Vfs | None = None, limits: Limits | None = None, **config: Any) -> None:
        self.broker = Broker(vfs, limits=limits or Limits())
        self.registry = self.broker.engine.registry
        self.streams = self.broker.engine.streams
        self.caches = self.broker.engine.caches
        self.add(S, **config)
        self.add(SECOND)

    # -- the registry -------------------------------------------------------------------------

    def add(self, path: Path, **config: Any) -> Path:
        """The stream, and the tenant and namespace it is in."""
        tenant_id, namespace, name = path
        self._create(Entry(kind="tenant", tenant_id=tenant_id))
        self._create(Entry(kind="namespace", tenant_id=tenant_id, namespace=namespace))
        stream = StreamConfig(**config)
        self._create(
            Entry(kind="stream", tenant_id=tenant_id, namespace=namespace, name=name, stream=stream)
        )
        return path

    def add_cache(self, name: str, *, durable: bool = False) -> None:
        """Beside `S`."""
        tenant_id, namespace, _ = S
        cache = CacheConfig(durable=durable)
        self._create(
            Entry(kind="cache", tenant_id=tenant_id, namespace=namespace, name=name, cache=cache)
        )

    def change(self, path: Path = S, **config: Any) -> None:
        def command(done: Any) -> None:
            self.registry.change(path, done, stream=StreamConfig(**config))

        self.broker.must(command)

    def delete(self, kind: Kind = "stream", path: Path = S, cascade: bool = False) -> None:
        self.broker.must(self.registry.delete, kind, path, cascade)

    def _create(self, entry: Entry) -> None:
        self.broker.must(self.registry.create, entry)

    # -- streams ------------------------------------------------------------------------------

    def send(self, *events: bytes, path: Path = S, invalidate: Any = ()) -> list[Any]:
        """One publish, and no turn; its outcome will be in the list once there is one."""
        command = Publish(path=path, payloads=list(events), invalidate=list(invalidate))
        return self.broker.submit(self.streams.publish, command)

    def publish(self, *events: bytes, path: Path = S) -> None:
        """One publish that is accepted, and all that follows from it."""
        assert self.send(*events, path=path) == [None]
        self.settle()

    def publish_each(self, *events: bytes, path: Path = S) -> None:
        for event in events:
            self.publish(event, path=path)

    def subscribe(
        self, path: Path = S, *, listener: Listener | None = None, **options: Any
    ) -> Listener:
        listener = listener or Listener()
        outcomes = self.broker.submit(
            self.streams.subscribe, Subscribe(path=path, **options), listener
        )
        assert len(outcomes) == 1
        if isinstance(outcomes[0], PenstockError):
            raise outcomes[0]
        listener.subscription = outcomes[0]
        return listener

    def stalled(self, path: Path = S, **options: Any) -> Listener:
        return self.subscribe(path, listener=Listener(stalled=True), **options)

    def settle(self) -> None:
        self.broker.settle()

    def pass_ms(self, ms: int) -> None:
        self.broker.pass_ms(ms)

    def counts(self, path: Path = S) -> StreamCounts:
        return next(r.counts for r in self.streams.metrics() if r.path == path)

    def queued(self, path: Path = S) -> tuple[int, int]:
        """Events in the queue, and publishes that wait for it."""
        report = next(r for r in self.streams.metrics() if r.path == path)
        return report.queued, report.waiting


def numbers(start: int, end: int) -> list[bytes]:
    """Events that tell themselves apart, from `start` to before `end`."""
    return [b"%d" % n for n in range(start, end)]
