"""A worker for asyncio: messages of a group, several at once, handed to a coroutine of yours.

    await AsyncWorker(client, "orders", "billing", handle, concurrency=10).run()

Each message is handled as `worker.Worker` handles it, in a task of its own: acked when the
handler returns, nacked with the error's text when it raises, its lease extended meanwhile, and
with `effect=True` its effect run once. Invariants: a message is acked only after its handler has
returned; no more than `concurrency` handlers run; a worker whose `run` has ended holds no lease,
and what it had not begun has lost no attempt.

With more than one at once the order of a partition is not kept. A broker that goes away is waited
for, and so are, once the worker has worked, a topic that was deleted and a token that is refused.
Any other error of the broker ends `run`, once the messages under way are finished.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Literal, TypeVar

from penstock.client.aio import AsyncClient, AsyncDeliveries
from penstock.client.deliveries import DEFAULT_LEASE_MS, Delivery, new_owner
from penstock.client.requests import EffectRef
from penstock.client.work import (
    BUSY_WAIT_S,
    CANCELLED_S,
    FIRST_PAUSE_S,
    LAST_DELIVERIES_S,
    LONGEST_PAUSE_S,
    NOT_BEGUN,
    NOT_BEGUN_REASON,
    Failure,
    Outage,
    Outcome,
    effect_of,
    failure_of,
    is_waited_for,
    log,
    name_of,
    note_releases,
    place_of,
)
from penstock.model.errors import (
    FailedPrecondition,
    InvalidArgument,
    MethodNotAllowed,
    NotFound,
    PenstockError,
    Unauthenticated,
)

Handler = Callable[[Delivery], Awaitable[object]]

HEARTBEAT_MS = 5000
"""How soon a broker that is silently gone is noticed: after a few of these."""

CANCELLED = "CancelledError: the handler was cancelled"

T = TypeVar("T")


class AsyncWorker:
    """`run` lasts until `stop` is called. If it is cancelled, so are the handlers: their messages
    are nacked, and those that were not begun are released."""

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
        # Given to a task, and the handler not yet called.
        self._not_begun: dict[tuple[int, int, str], Delivery] = {}
        self._failure: BaseException | None = None

    def stop(self) -> None:
        """Lets the messages under way be finished, takes no other, and ends `run`. To be called
        in the loop's thread, as `loop.add_signal_handler` does."""
        if not self._stopping.is_set():
            self._stopping.set()
            # Wakes the one who waits for room; no handler is begun any more.
            self._room.release()

    async def run(self) -> None:
        """Works until `stop`. However it ends, everything that was received and not begun is given
        back to the group."""
        taking = asyncio.create_task(self._take())
        try:
            # A task of its own, and shielded: reading goes on to the stream's end when this is
            # cancelled, so that what the broker has sent is not forgotten.
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
        """Cancels the handlers and gives everything back, in a bounded time."""
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

    async def _take(self) -> None:
        outage = Outage()
        has_worked = False
        while not self._stopping.is_set():
            pause_s = FIRST_PAUSE_S
            try:
                async with self._open() as stream:
                    has_worked = True
                    outage.is_over()
                    await self._work(stream)
            except PenstockError as error:
                if not is_waited_for(error, has_worked):
                    raise
                pause_s = outage.failed(error)
            await self._is_stopped_within(pause_s)

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

    async def _work(self, stream: AsyncDeliveries) -> None:
        left: list[Delivery] = []
        try:
            async with _beside(self._end_when_stopped(stream)):
                await self._follow(stream, left)
        finally:
            left += await stream.rest(LAST_DELIVERIES_S)
            await self._release(left)

    async def _end_when_stopped(self, stream: AsyncDeliveries) -> None:
        """Tells the broker to send no more; whoever reads the stream then comes to its end."""
        await self._stopping.wait()
        if stream.finish():
            await asyncio.sleep(LAST_DELIVERIES_S)
        await stream.close()

    async def _follow(self, stream: AsyncDeliveries, left: list[Delivery]) -> None:
        """Hands out what comes; what comes when the worker is to stop is `left`."""
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
        attempt = self._attempt_effect if self._effect else self._attempt
        extend = partial(self._client.extend, delivery, self._lease_ms)
        outcome: Outcome = NOT_BEGUN
        if not self._stopping.is_set():
            try:
                async with self._renewing(delivery, extend):
                    outcome = await attempt(delivery)
            except asyncio.CancelledError:
                outcome = Failure(CANCELLED) if self._is_begun(delivery) else NOT_BEGUN
        self._not_begun.pop(name_of(delivery), None)
        await self._settle(delivery, outcome)

    async def _attempt(self, delivery: Delivery) -> Outcome:
        return (await self._call(delivery))[0]

    async def _attempt_effect(self, delivery: Delivery) -> Outcome:
        """The same, unless the effect is committed; then there is nothing to do."""
        effect = effect_of(delivery, self.owner)
        try:
            begun = await self._begin(effect)
            if begun != "RUN":
                return None if begun == "COMMITTED" else NOT_BEGUN
            renew = partial(self._client.renew_effect, effect, self._lease_ms)
            async with self._renewing(delivery, renew):
                return await self._run_effect(delivery, effect)
        except PenstockError as error:
            if self._stopping.is_set() and not self._is_begun(delivery):
                return NOT_BEGUN
            return Failure(error.message)

    async def _run_effect(self, delivery: Delivery, effect: EffectRef) -> Outcome:
        try:
            failure, result = await self._call(delivery)
        except asyncio.CancelledError:
            failure, result = Failure(CANCELLED), None
        if failure is not None:
            await self._fail(effect, failure.reason)
            return failure
        text = result if isinstance(result, str) else ""
        await self._insist(lambda: self._client.commit_effect(effect, text))
        return None

    async def _call(self, delivery: Delivery) -> tuple[Failure | None, object]:
        """Runs the handler: why it failed, if it did, and what it returned."""
        self._not_begun.pop(name_of(delivery), None)
        try:
            return None, await self._handler(delivery)
        except Exception as error:  # noqa: BLE001 - the handler is somebody else's code
            return failure_of(delivery, error), None

    def _is_begun(self, delivery: Delivery) -> bool:
        return name_of(delivery) not in self._not_begun

    async def _begin(self, effect: EffectRef) -> Literal["RUN", "COMMITTED", "STOPPED"]:
        """Whether to run the effect; waits while somebody else does."""
        while True:
            try:
                ask = self._insist(lambda: self._client.begin_effect(effect, self._lease_ms))
                return (await ask).status
            except FailedPrecondition:
                if await self._is_stopped_within(BUSY_WAIT_S):
                    return "STOPPED"

    async def _fail(self, effect: EffectRef, reason: str) -> None:
        try:
            await self._insist(lambda: self._client.fail_effect(effect, reason))
        except PenstockError as error:
            log.warning("the effect %r is no longer held: %s", effect.key, error.message)

    # -- settling ------------------------------------------------------------------------------

    async def _settle(self, delivery: Delivery, outcome: Outcome) -> None:
        """Acks, nacks or releases. What is another's by now, or gone with its topic, is not ours
        to settle; what could not be settled comes again."""
        try:
            if outcome is None:
                await self._insist(lambda: self._client.ack(delivery))
            elif outcome is not NOT_BEGUN:
                await self._nack(delivery, outcome)
        except PenstockError as error:
            log.warning("%s was not settled: %s", place_of(delivery), error.message)
        if outcome is NOT_BEGUN:
            await self._release([delivery])

    async def _nack(self, delivery: Delivery, failure: Failure) -> None:
        reason, delay_ms, dead = failure
        try:
            await self._insist(
                lambda: self._client.nack(delivery, reason, delay_ms=delay_ms, dead=dead)
            )
        except InvalidArgument:
            # An older broker knows neither; then the retry policy decides.
            await self._insist(lambda: self._client.nack(delivery, reason))

    async def _release(self, deliveries: list[Delivery]) -> None:
        """Gives back what nobody began to handle, without counting an attempt."""
        if not deliveries:
            return
        try:
            outcomes = await self._insist(lambda: self._client.release_batch(deliveries))
            note_releases(deliveries, outcomes)
        except (NotFound, MethodNotAllowed):
            # An older broker cannot take anything back uncounted.
            for delivery in deliveries:
                await self._settle(delivery, Failure(NOT_BEGUN_REASON))
        except PenstockError as error:
            count = len(deliveries)
            log.warning("%d deliveries were not released: %s", count, error.message)

    @asynccontextmanager
    async def _renewing(
        self, delivery: Delivery, renew: Callable[[], Awaitable[object]]
    ) -> AsyncIterator[None]:
        async def go_on() -> None:
            is_told = False
            while True:
                # A third of the lease leaves room for a renewal that fails.
                await asyncio.sleep(self._lease_ms / 3000)
                try:
                    await renew()
                except PenstockError as error:
                    if not is_told:
                        place = place_of(delivery)
                        log.warning("the lease of %s was not extended: %s", place, error.message)
                    is_told = True

        async with _beside(go_on()):
            yield

    async def _insist(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Asks again while the broker is away or refuses the token, for as long as the lease may
        last."""
        until = time.monotonic() + self._lease_ms / 1000
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                return await ask()
            except PenstockError as error:
                is_over = time.monotonic() + pause_s > until
                if is_over or not (error.retryable or isinstance(error, Unauthenticated)):
                    raise
                if pause_s == FIRST_PAUSE_S:
                    log.warning("asking again until the lease ends: %s", error.message)
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
