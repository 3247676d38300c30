"""A worker for asyncio: messages of a group, several at once, handed to a coroutine of yours.

    await AsyncWorker(client, "orders", "billing", handle, concurrency=10).run()

Each message is handled as `worker.Worker` handles it, in a task of its own: acked when the
handler returns, nacked with the error's text when it raises, its lease extended meanwhile, and
with `effect=True` its effect run once. Invariant: a message is acked only after its handler has
returned, and no more than `concurrency` handlers run.

With more than one at once the order of a partition is not kept. A broker that goes away is waited
for. Any other error of the broker ends `run`, once the messages under way are finished.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, TypeVar

from penstock.client.aio import AsyncClient, AsyncDeliveries
from penstock.client.deliveries import DEFAULT_LEASE_MS, Delivery, new_owner
from penstock.client.requests import EffectRef
from penstock.client.work import (
    BUSY_WAIT_S,
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    NOT_BEGUN,
    effect_of,
    failure_of,
    log,
    place_of,
)
from penstock.model.errors import FailedPrecondition, InvalidArgument, PenstockError

Handler = Callable[[Delivery], Awaitable[object]]

HEARTBEAT_MS = 5000
"""How soon a broker that is silently gone is noticed: after a few of these."""

T = TypeVar("T")


class AsyncWorker:
    """`run` lasts until `stop` is called. If it is cancelled, so are the handlers; their messages
    come again when their leases end."""

    def __init__(
        self,
        client: AsyncClient,
        topic: str,
        group: str,
        handler: Handler,
        *,
        owner: str = "",
        lease_ms: int = DEFAULT_LEASE_MS,
        effect: bool = False,
        concurrency: int = 1,
    ) -> None:
        if inspect.isfunction(handler) and not inspect.iscoroutinefunction(handler):
            raise InvalidArgument("an async worker's handler is a coroutine function: async def")
        if concurrency < 1:
            raise InvalidArgument("concurrency must be 1 or more")
        self.owner = owner or new_owner()
        self._client = client
        self._topic = topic
        self._group = group
        self._handler = handler
        self._lease_ms = lease_ms
        self._effect = effect
        self._concurrency = concurrency
        self._room = asyncio.Semaphore(concurrency)
        self._stopping = asyncio.Event()
        self._under_way: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None

    def stop(self) -> None:
        """Lets the messages under way be finished, takes no other, and ends `run`. To be called
        in the loop's thread, as `loop.add_signal_handler` does."""
        self._stopping.set()

    async def run(self) -> None:
        try:
            await self._take()
        except PenstockError as error:
            self._failure = self._failure or error
        except asyncio.CancelledError:
            for task in self._under_way:
                task.cancel()
            raise
        finally:
            await asyncio.gather(*self._under_way, return_exceptions=True)
        if self._failure is not None:
            raise self._failure

    # -- taking messages -----------------------------------------------------------------------

    async def _take(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._stopping.is_set():
            try:
                async with self._open() as stream, self._closing_when_stopped(stream):
                    pause_s = FIRST_PAUSE_S
                    await self._follow(stream)
            except PenstockError as error:
                if not error.retryable:
                    raise
                log.warning("connecting again in %.1f s: %s", pause_s, error.message)
            await self._is_stopped_within(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _open(self) -> AsyncDeliveries:
        return AsyncDeliveries(
            self._client,
            self._topic,
            self._group,
            self.owner,
            self._lease_ms,
            prefetch=self._concurrency,
            wait_s=None,
            heartbeat_ms=HEARTBEAT_MS,
        )

    @asynccontextmanager
    async def _closing_when_stopped(self, stream: AsyncDeliveries) -> AsyncIterator[None]:
        """Whoever waits for the stream then sees its end."""

        async def close() -> None:
            await self._stopping.wait()
            await stream.close()

        async with _beside(close()):
            yield

    async def _follow(self, stream: AsyncDeliveries) -> None:
        async for delivery in stream:
            await self._room.acquire()
            if self._stopping.is_set():
                self._room.release()
                await self._settle(delivery, NOT_BEGUN)
                return
            task = asyncio.create_task(self._handle(delivery, stream))
            self._under_way.add(task)
            task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        self._room.release()
        if not task.cancelled() and task.exception() is not None:
            self._failure = self._failure or task.exception()
            self.stop()

    # -- one message ---------------------------------------------------------------------------

    async def _handle(self, delivery: Delivery, stream: AsyncDeliveries) -> None:
        attempt = self._attempt_effect if self._effect else self._attempt
        extend = partial(self._client.extend, delivery, self._lease_ms)
        async with self._renewing(delivery, extend):
            failure = await attempt(delivery)
        if self._stopping.is_set():
            # Otherwise settling this one would bring the next.
            await stream.close()
        await self._settle(delivery, failure)

    async def _attempt(self, delivery: Delivery) -> str | None:
        """Runs the handler; None, or why it failed."""
        try:
            await self._handler(delivery)
        except Exception as error:  # noqa: BLE001 - the handler is somebody else's code
            return failure_of(delivery, error)
        return None

    async def _attempt_effect(self, delivery: Delivery) -> str | None:
        """The same, unless the effect is committed; then there is nothing to do."""
        effect = effect_of(delivery, self.owner)
        try:
            if not await self._begin(effect):
                return None
            renew = partial(self._client.renew_effect, effect, self._lease_ms)
            async with self._renewing(delivery, renew):
                try:
                    result = await self._handler(delivery)
                except Exception as error:  # noqa: BLE001 - the handler is somebody else's code
                    return await self._fail(effect, failure_of(delivery, error))
            text = result if isinstance(result, str) else ""
            await self._insist(lambda: self._client.commit_effect(effect, text))
        except FailedPrecondition as error:
            return error.message
        return None

    async def _begin(self, effect: EffectRef) -> bool:
        """Whether to run the effect; waits while somebody else does."""
        while True:
            try:
                ask = self._insist(lambda: self._client.begin_effect(effect, self._lease_ms))
                return (await ask).status == "RUN"
            except FailedPrecondition:
                if await self._is_stopped_within(BUSY_WAIT_S):
                    raise

    async def _fail(self, effect: EffectRef, reason: str) -> str:
        try:
            await self._insist(lambda: self._client.fail_effect(effect, reason))
        except FailedPrecondition as error:
            log.warning("the effect %r is no longer held: %s", effect.key, error.message)
        return reason

    async def _settle(self, delivery: Delivery, failure: str | None) -> None:
        """Acks, or nacks with the failure. What is another's by now is not ours to settle."""
        try:
            if failure is None:
                await self._insist(lambda: self._client.ack(delivery))
            else:
                await self._insist(lambda: self._client.nack(delivery, failure))
        except FailedPrecondition as error:
            log.warning("%s was not settled: %s", place_of(delivery), error.message)

    @asynccontextmanager
    async def _renewing(
        self, delivery: Delivery, renew: Callable[[], Awaitable[object]]
    ) -> AsyncIterator[None]:
        async def go_on() -> None:
            while True:
                # A third of the lease leaves room for a renewal that fails.
                await asyncio.sleep(self._lease_ms / 3000)
                try:
                    await renew()
                except PenstockError as error:
                    place = place_of(delivery)
                    log.warning("the lease of %s was not extended: %s", place, error.message)

        async with _beside(go_on()):
            yield

    async def _insist(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Asks again while the broker is away, for as long as the lease may last."""
        until = time.monotonic() + self._lease_ms / 1000
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                return await ask()
            except PenstockError as error:
                if not error.retryable or time.monotonic() + pause_s > until:
                    raise
                log.warning("asking again in %.1f s: %s", pause_s, error.message)
            if await self._is_stopped_within(pause_s):
                return await ask()
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _is_stopped_within(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)
        return self._stopping.is_set()


@asynccontextmanager
async def _beside(what: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Runs a coroutine meanwhile, and no longer."""
    task = asyncio.create_task(what)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
