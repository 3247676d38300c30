# Generated from aio_handles.py by scripts/generate_sync_client.py: edit that, run this.
"""Handles of one stream or one cache for blocking code: their methods need no path.

A handle sends the calls that `streams` and `caches` build. Making one sends nothing to the broker.
It can be used as long as its client is open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from penstock.client import caches, streams
from penstock.client.calls import Call, named_like
from penstock.client.sync_feeds import Subscription, Watch
from penstock.model.tenancy import Path

if TYPE_CHECKING:
    from penstock.client.sync import Client

P = ParamSpec("P")
T = TypeVar("T")


class Handle:
    """Remembers a path: tenant, namespace and name."""

    def __init__(self, client: Client, path: Path) -> None:
        self.client = client
        self.path = path


def _operation(
    build: Callable[Concatenate[Path, P], Call[T]],
) -> Callable[Concatenate[Handle, P], T]:
    """Returns a method that sends the call which `build` makes from the path and its arguments."""

    def method(self: Handle, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.client.send(build(self.path, *args, **kwargs))

    return named_like(method, build, given=1)


class StreamHandle(Handle):
    """A handle of a stream: `client.stream("orders")`."""

    publish = _operation(streams.publish)
    publish_batch = _operation(streams.publish_batch)
    subscriptions = _operation(streams.subscriptions)

    def subscribe(
        self, *, event_queue_depth: int | None = None, wait_s: float | None = None
    ) -> Subscription:
        """Returns a subscription. Use it in a `with`. It begins when opened or first read.

        The broker keeps up to `event_queue_depth` unread events for it (None: the stream's
        setting) and drops newer ones while that many are unread. With `wait_s` the subscription
        ends when nothing has arrived for that many seconds.
        """
        return Subscription(self.client, self.path, event_queue_depth, wait_s)


class CacheHandle(Handle):
    """A handle of a cache: `client.cache("sessions")`."""

    get = _operation(caches.get)
    get_many = _operation(caches.get_many)
    put = _operation(caches.put)
    delete = _operation(caches.delete)
    incr = _operation(caches.incr)
    txn = _operation(caches.txn)

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
