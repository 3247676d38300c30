"""Durable streams on a disk that can fail: publishers, named subscriptions and replays."""

from __future__ import annotations

from typing import Any

from penstock.api.messages import Settle
from penstock.engine.replay import ReplaySubscription
from penstock.model.errors import PenstockError
from penstock.model.item import EventItem
from penstock.model.scopes import stream_log_name
from penstock.model.streams import Lag, Publish, Start, Subscribe, SubscribeNamed
from penstock.model.tenancy import Entry, Path, StreamConfig
from tests.engine.harness import Broker, Reader
from tests.storage.faulty_vfs import FaultyVfs

EARLIEST, LATEST = Start("earliest"), Start("latest")


class Listener:
    """The far end of a plain subscription: takes at once, or when it is told to."""

    def __init__(self, *, is_stalled: bool = False) -> None:
        self.is_stalled = is_stalled
        self.events: list[bytes] = []
        self.offsets: list[int] = []
        self.ends: list[PenstockError] = []
        self.subscription: Any = None

    def wake(self) -> None:
        if not self.is_stalled and self.subscription is not None:
            self.read()

    def read(self, max_events: int = 1_000_000) -> None:
        while runs := self.subscription.take(max_events):
            for run in runs:
                self.events += run.payloads
                self.offsets += range(run.offset, run.offset + run.end - run.start)
            if self.is_stalled:
                return

    def lagging(self, lag: Lag) -> None: ...

    def ended(self, error: PenstockError) -> None:
        self.ends.append(error)


class EventReader(Reader):
    """The far end of a named subscription: a reader whose items are EventItems."""

    items: list[Any]

    def take(self) -> list[Any]:
        return super().take()

    def one(self) -> Any:
        return super().one()


class Streams(Broker):
    """A broker with one durable stream, `acme/prod/orders`."""

    def __init__(self, *, delivery: str = "at_least_once", **options: Any) -> None:
        config = options.pop("config", {})
        super().__init__(options.pop("vfs", None) or FaultyVfs(), **options)
        self.path: Path = ("acme", "prod", "orders")
        registry = self.engine.registry
        self.must(registry.create, Entry(kind="tenant", tenant_id="acme"))
        namespace = Entry(kind="namespace", tenant_id="acme", namespace="prod")
        self.must(registry.create, namespace)
        self.create("orders", delivery=delivery, **config)

    def create(self, name: str, delivery: Any = "at_least_once", **config: Any) -> Path:
        wanted = Entry(
            kind="stream",
            tenant_id="acme",
            namespace="prod",
            name=name,
            stream=StreamConfig(delivery=delivery, **({"durable": True} | config)),
        )
        self.must(self.engine.registry.create, wanted)
        return wanted.path

    @property
    def log_name(self) -> str:
        return stream_log_name(self.path)

    def publish(self, *payloads: bytes, **numbers: Any) -> int | None:
        command = Publish(path=self.path, payloads=list(payloads), **numbers)
        offset: int | None = self.must(self.engine.streams.publish, command)
        return offset

    def try_publish(self, *payloads: bytes, **numbers: Any) -> Any:
        command = Publish(path=self.path, payloads=list(payloads), **numbers)
        return self.call(self.engine.streams.publish, command)

    def named(
        self,
        name: str = "billing",
        owner: str = "w1",
        start: Start = LATEST,
        *,
        lease_ms: int = 0,
        prefetch: int = 0,
    ) -> EventReader:
        reader = EventReader(self.log_name, name, owner)
        command = SubscribeNamed(
            path=self.path,
            name=name,
            owner=owner,
            start=start,
            lease_ms=lease_ms,
            prefetch=prefetch,
        )
        reader.consumer = self.must(self.engine.streams.consume, command, reader)
        self.settle()
        return reader

    def listen(self, start: Start | None = None, *, is_stalled: bool = False) -> Listener:
        listener = Listener(is_stalled=is_stalled)
        command = Subscribe(path=self.path, start=start)
        listener.subscription = self.must(self.engine.streams.subscribe, command, listener)
        self.settle()
        listener.wake()
        self.settle()
        return listener

    def ack_item(self, reader: Reader, item: EventItem) -> PenstockError | None:
        settle = Settle(reader.topic, reader.group, 0, item.offset, reader.owner, item.delivery_id)
        outcome: PenstockError | None = self.call(self.engine.ack, settle)
        return outcome

    def ack_all(self, reader: EventReader) -> list[bytes]:
        """Acks everything that came; returns the payloads."""
        found = []
        while items := reader.take():
            for item in items:
                assert self.ack_item(reader, item) is None
                found.append(item.value)
        return found


def payloads(items: list[Any]) -> list[bytes]:
    return [item.value for item in items]


def replay_of(listener: Listener) -> ReplaySubscription:
    assert isinstance(listener.subscription, ReplaySubscription)
    return listener.subscription
