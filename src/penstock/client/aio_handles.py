"""A stream or a cache in the hand: its operations for asyncio, without its path each time.

Operations are those of `streams` and `caches`, bound here. A handle asks nothing of the broker
when it is made, and lasts as long as its client.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from penstock.client import caches, streams
from penstock.client.aio_feeds import AsyncSubscription, AsyncWatch
from penstock.client.calls import Call, named_like
from penstock.model.tenancy import Path

if TYPE_CHECKING:
    from penstock.client.aio import AsyncClient

P = ParamSpec("P")
T = TypeVar("T")


class AsyncHandle:
    """`path` is tenant, namespace and name."""

    def __init__(self, client: AsyncClient, path: Path) -> None:
        self.client = client
        self.path = path


def _operation(
    build: Callable[Concatenate[Path, P], Call[T]],
) -> Callable[Concatenate[AsyncHandle, P], Coroutine[Any, Any, T]]:
    """A method that sends the call which `build` makes of the path and its arguments."""

    async def method(self: AsyncHandle, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.client.send(build(self.path, *args, **kwargs))

    return named_like(method, build, given=1)


class AsyncStreamHandle(AsyncHandle):
    """A stream: `client.stream("orders")`."""

    publish = _operation(streams.publish)
    publish_batch = _operation(streams.publish_batch)
    subscriptions = _operation(streams.subscriptions)

    def subscribe(
        self, *, event_queue_depth: int | None = None, wait_s: float | None = None
    ) -> AsyncSubscription:
        """A subscription, which begins when it is opened or first read: use it in an `async with`.

        The broker keeps up to `event_queue_depth` events for it (None: as the stream is set), and
        drops the newest for a subscriber that is further behind. With `wait_s` it ends when
        nothing has come for so long.
        """
        return AsyncSubscription(self.client, self.path, event_queue_depth, wait_s)


class AsyncCacheHandle(AsyncHandle):
    """A cache: `client.cache("sessions")`."""

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
    ) -> AsyncWatch:
        """A watch, which begins when it is opened or first read: use it in an `async with`.

        Of one `key`, or of all that begin with `prefix` (every key: ""). `include` asks for
        `expire` and `evict` too. If the cache has changed after `since_version`, a gap comes
        first. With `wait_s` it ends when nothing has come for so long.
        """
        return AsyncWatch(self.client, self.path, key, prefix, include, since_version, wait_s)
