"""A worker for asyncio: hands the messages of a group to your coroutine, several at a time.

    await AsyncWorker(client, "orders", "billing", handle, concurrency=10).run()

It treats each message as `worker.Worker` does, in a task of its own. It acks when the handler
returns, nacks with the error's text when it raises, extends the lease meanwhile, and with
`effect=True` runs the effect once. Invariants: a message is acked only after its handler has
returned; at most `concurrency` handlers run at a time; when `run` has ended, the worker holds no
lease, and messages whose handler never began have lost no attempt.

With a `concurrency` above 1, messages of a partition are not handled in order. The worker waits
for a broker that is away. Once it has been connected, it also waits for a topic that was deleted
and for a token that is refused. Any other error of the broker ends `run`, after the running
handlers have finished.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

from penstock.client.aio import AsyncClient, AsyncDeliveries
from penstock.client.aio_worker_base import AsyncHandler, AsyncWorkerBase
from penstock.client.deliveries import DEFAULT_LEASE_MS, Delivery
from penstock.client.requests import EffectRef
from penstock.client.work import (
    CANCELLED_S,
    LAST_DELIVERIES_S,
    NOT_BEGUN,
    HandlerFailure,
    Outcome,
    check_handler,
    log,
    name_of,
    place_of,
)
from penstock.model.errors import InvalidArgument, PenstockError

HEARTBEAT_MS = 5000
"""The worker notices a broker that vanished without closing after a few heartbeats."""

CANCELLED = HandlerFailure("CancelledError: the handler was cancelled")


class AsyncWorker(AsyncWorkerBase):
    """`run` lasts until `stop` is called. If `run` is cancelled, it cancels the handlers, nacks
    their messages and releases those whose handler never began."""

    def __init__(
        self,
        client: AsyncClient,
        topic: str,
        group: str,
        handler: AsyncHandler,
        *,
        owner: str = "",
        lease_ms: int = DEFAULT_LEASE_MS,
        effect: bool = False,
        concurrency: int = 1,
    ) -> None:
        check_handler(handler)
        if inspect.isfunction(handler) and not inspect.iscoroutinefunction(handler):
            raise InvalidArgument("an async worker's handler is a coroutine function: async def")
        if concurrency < 1:
            raise InvalidArgument("concurrency must be 1 or more")
        super().__init__(
            client,
            topic,
            group,
            handler,
            owner=owner,
            lease_ms=lease_ms,
            effect=effect,
            prefetch=concurrency,
            heartbeat_ms=HEARTBEAT_MS,
        )
        self._room = asyncio.Semaphore(concurrency)
        self._under_way: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None

    def stop(self) -> None:
        """Ends `run` once the running handlers have finished; begins no other. Call it in the
        loop's thread, as `loop.add_signal_handler` does."""
        if not self._stopping.is_set():
            self._stopping.set()
            # Wakes `_follow` if it waits for room. It begins no handler any more.
            self._room.release()

    async def run(self) -> None:
        """Works until `stop`. However it ends, it gives messages back to the group that were
        received and whose handler never began."""
        taking = asyncio.create_task(self._work_until_stopped())
        try:
            # Shielded: if this is cancelled, the task still reads the stream to its end, so that
            # deliveries which the broker has already sent are released and not lost.
            await asyncio.shield(taking)
            await self._finish_handlers()
        except asyncio.CancelledError:
            await self._abandon(taking)
            raise
        except Exception as error:  # noqa: BLE001 - raised again when the rest is finished
            self._failure = self._failure or error
            self.stop()
            await self._finish_handlers()
        if self._failure is not None:
            raise self._failure

    async def _finish_handlers(self) -> None:
        while self._under_way:
            await asyncio.wait(self._under_way)

    async def _abandon(self, taking: asyncio.Task[None]) -> None:
        """Cancels the handlers and gives everything back, within a time limit."""
        self.stop()
        for task in self._under_way:
            task.cancel()
        _, late = await asyncio.wait({taking, *self._under_way}, timeout=CANCELLED_S)
        for task in late:
            task.cancel()
        await asyncio.gather(taking, *self._under_way, return_exceptions=True)
        # Tasks that were cancelled before their first step.
        left, self._not_begun = list(self._not_begun.values()), {}
        with suppress(TimeoutError):
            await asyncio.wait_for(self._release(left), CANCELLED_S)

    # -- taking messages -----------------------------------------------------------------------

    async def _work(self, stream: AsyncDeliveries) -> None:
        left: list[Delivery] = []
        try:
            async with _in_background(self._end_when_stopped(stream)):
                await self._follow(stream, left)
        finally:
            left += await stream.rest(LAST_DELIVERIES_S)
            await self._release(left)

    async def _end_when_stopped(self, stream: AsyncDeliveries) -> None:
        """Tells the broker to send no more; the reader of the stream then comes to its end."""
        await self._stopping.wait()
        if stream.finish():
            await asyncio.sleep(LAST_DELIVERIES_S)
        await stream.close()

    async def _follow(self, stream: AsyncDeliveries, left: list[Delivery]) -> None:
        """Starts a task for each delivery. Adds those that arrive after `stop` to `left`."""
        async for delivery in stream:
            left.append(delivery)
            await self._room.acquire()
            if self._stopping.is_set():
                self._room.release()
                continue
            left.pop()
            self._not_begun[name_of(delivery)] = delivery
            task = asyncio.create_task(self._handle(delivery))
            self._under_way.add(task)
            task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        self._room.release()
        if not task.cancelled() and task.exception() is not None:
            self._failure = self._failure or task.exception()
            self.stop()

    # -- one message ---------------------------------------------------------------------------

    async def _handle(self, delivery: Delivery) -> None:
        outcome: Outcome = NOT_BEGUN
        if not self._stopping.is_set():
            try:
                outcome = await self._attempt(delivery)
            except asyncio.CancelledError:
                outcome = CANCELLED if self._is_begun(delivery) else NOT_BEGUN
        self._not_begun.pop(name_of(delivery), None)
        await self._settle(delivery, outcome)

    async def _run_effect(self, delivery: Delivery, effect: EffectRef) -> Outcome:
        try:
            failure, result = await self._call(delivery)
        except asyncio.CancelledError:
            failure, result = CANCELLED, None
        return await self._end_effect(delivery, effect, failure, result)

    @asynccontextmanager
    async def _renewing(
        self, delivery: Delivery, effect: EffectRef | None = None
    ) -> AsyncIterator[None]:
        if effect is None:
            renew = partial(self._client.extend, delivery, self._lease_ms)
        else:
            renew = partial(self._client.renew_effect, effect, self._lease_ms)

        async def renew_forever() -> None:
            is_logged = False
            while True:
                # A third of the lease leaves time for a renewal that fails.
                await asyncio.sleep(self._lease_ms / 3000)
                try:
                    await renew()
                except PenstockError as error:
                    if not is_logged:
                        place = place_of(delivery)
                        log.warning("the lease of %s was not extended: %s", place, error.message)
                    is_logged = True

        async with _in_background(renew_forever()):
            yield


@asynccontextmanager
async def _in_background(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Runs a coroutine until the block ends."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
