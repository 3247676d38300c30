# Generated from aio_handles.py by scripts/generate_sync_client.py: edit that, run this.
"""Handles of one stream or one cache for blocking code: their methods need no path.

A handle sends the calls that `streams` and `caches` build. Making one sends nothing to the broker.
It can be used as long as its client is open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

from penstock.client import caches, ranges, streams
from penstock.client.calls import Call, named_like
from penstock.client.deliveries import DEFAULT_LEASE_MS
from penstock.client.positions import HandledEvents
from penstock.client.streams import Start
from penstock.client.sync_events import Events, Producer
from penstock.client.sync_feeds import Entries, KeptEvents, Subscription, Watch
from penstock.model.tenancy import Path

if TYPE_CHECKING:
    from penstock.client.sync import Client

P = ParamSpec("P")
T = TypeVar("T")


class Sender(Protocol):
    """Sends calls: a client, or a socket."""

    def send(self, call: Call[T]) -> T: ...


class Handle:
    """Remembers a path: tenant, namespace and name."""

    def __init__(self, sender: Sender, path: Path) -> None:
        self._sender = sender
        self.path = path


def operation(
    build: Callable[Concatenate[Path, P], Call[T]],
) -> Callable[Concatenate[Handle, P], T]:
    """Returns a method that sends the call which `build` makes from the path and its arguments."""

    def method(self: Handle, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._sender.send(build(self.path, *args, **kwargs))

    return named_like(method, build, given=1)


class StreamOperations(Handle):
    """Lists and deletes the subscriptions of a stream, and asks for the next number of a producer.
    This goes over HTTP, also if the sender is a socket."""

    subscriptions = operation(streams.subscriptions)
    delete_subscription = operation(streams.delete_subscription)
    offsets = operation(ranges.stream_offsets)
    splits = operation(ranges.stream_splits)
    set_progress = operation(ranges.set_stream_progress)
    next_sequence = operation(streams.next_sequence)


class StreamHandle(StreamOperations):
    """A handle of a stream: `client.stream("orders")`."""

    def __init__(self, client: Client, path: Path) -> None:
        super().__init__(client, path)
        self.client = client

    publish = operation(streams.publish)
    publish_batch = operation(streams.publish_batch)

    def events(
        self,
        *,
        start: Start | None = None,
        name: str | None = None,
        owner: str | None = None,
        lease_ms: int = DEFAULT_LEASE_MS,
        prefetch: int = 0,
        once: HandledEvents | None = None,
        wait_s: float | None = None,
        stream_id: int | None = None,
    ) -> Events:
        """Returns the events of a durable stream. Use it in a `with`.

        With a `name` it joins this subscription: events come until they are acked, and a new name
        begins at `start`. Without one it reads from `start` on, to the newest event and further.
        `start` is `latest`, `earliest`, an offset or a time; the default is `latest` for a new
        name, else `earliest`. `once` drops events that were handled before. With `wait_s` it ends
        when nothing has arrived for that many seconds. With `stream_id`, the id that an earlier
        subscription had, it raises OutOfRange if the stream was deleted and created again since.
        """
        streams.check_named(name, owner, lease_ms, prefetch, once)
        if name is None and start is None:
            start = "earliest"
        return Events(
            self.client,
            self.path,
            name,
            start,
            owner,
            lease_ms,
            prefetch,
            once,
            wait_s,
            stream_id,
        )

    def read_range(
        self,
        start: int | None = None,
        end: int | None = None,
        *,
        from_ms: int | None = None,
        to_ms: int | None = None,
    ) -> KeptEvents:
        """Returns the events that a durable stream keeps, from offset `start` up to, but not
        including, `end`. It connects when it is first read. Without `start` the oldest event is the
        first; without `end` the newest at that time is the last."""
        return KeptEvents(self.client, self.path, start, end, from_ms, to_ms)

    def producer(
        self, producer_id: str | None = None, *, next_sequence: int = 0, retry_s: float = 60.0
    ) -> Producer:
        """Returns a producer that publishes each event once, and retries for `retry_s`. Without a
        `producer_id` it makes one up."""
        return Producer(self.client, self.path, producer_id, next_sequence, retry_s)

    @overload
    def subscribe(
        self, *, event_queue_depth: int | None = None, wait_s: float | None = None
    ) -> Subscription: ...

    @overload
    def subscribe(
        self,
        *,
        name: str,
        start: Start | None = None,
        owner: str | None = None,
        lease_ms: int = DEFAULT_LEASE_MS,
        prefetch: int = 0,
        once: HandledEvents | None = None,
        wait_s: float | None = None,
        stream_id: int | None = None,
    ) -> Events: ...

    @overload
    def subscribe(
        self, *, start: Start, wait_s: float | None = None, stream_id: int | None = None
    ) -> Events: ...

    def subscribe(
        self,
        *,
        event_queue_depth: int | None = None,
        wait_s: float | None = None,
        **durable: Any,
    ) -> Subscription | Events:
        """Returns a subscription. Use it in a `with`. It begins when opened or first read.
        With a `name` or a `start` it is one of a durable stream: see `events`.

        The broker keeps up to `event_queue_depth` unread events for it (None: the stream's
        setting) and drops newer ones while that many are unread. With `wait_s` the subscription
        ends when nothing has arrived for that many seconds.
        """
        if durable:
            return self.events(wait_s=wait_s, **durable)
        return Subscription(self.client, self.path, event_queue_depth, wait_s)


class CacheOperations(Handle):
    """Reads and writes the entries of a cache."""

    get = operation(caches.get)
    get_many = operation(caches.get_many)
    put = operation(caches.put)
    delete = operation(caches.delete)
    incr = operation(caches.incr)
    txn = operation(caches.txn)


class CacheHandle(CacheOperations):
    """A handle of a cache: `client.cache("sessions")`."""

    def __init__(self, client: Client, path: Path) -> None:
        super().__init__(client, path)
        self.client = client

    def entries(self) -> Entries:
        """Returns all entries as of the moment when it connects, which is when it is first read.
        Use it in a `with`. A later change is not in it."""
        return Entries(self.client, self.path)

    def watch(
        self,
        *,
        key: str | None = None,
        prefix: str | None = None,
        include: Iterable[str] = (),
        since_version: int | None = None,
        wait_s: float | None = None,
    ) -> Watch:
        """Returns a watch. Use it in a `with`; it begins when it is opened or first read.

        It follows one `key`, or all keys that begin with `prefix` ("" means every key). `include`
        may name the events `expire` and `evict`, which are left out otherwise. If the cache has
        changed after `since_version`, the first event is a gap. With `wait_s` the watch ends when
        nothing has arrived for that many seconds.
        """
        return Watch(self.client, self.path, key, prefix, include, since_version, wait_s)
