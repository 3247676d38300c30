"""A worker: one message after another from a group, handed to a function of yours.

    worker = Worker(client, "orders", "billing", handle)
    signal.signal(signal.SIGINT, lambda *_: worker.stop())
    worker.run()

The message is acked when the handler returns and nacked with the error's text when it raises;
while the handler runs, its lease is extended. Invariants: a message is acked only after its
handler has returned, so a worker that dies loses nothing, and a message may be handled twice; a
worker whose `run` has ended holds no lease, and what it had not begun has lost no attempt.

With `effect=True` the effect of a message is run once for its `idempotency_key` (without one,
for its offset): it is begun, run, committed with the text the handler returns, and acked. A
message whose effect is committed is acked unhandled, and while another worker runs the same
effect this one waits. What remains: a crash between the effect and its commit repeats it.

A broker that goes away is waited for, and so are, once the worker has worked, a topic that was
deleted and a token that is refused. Any other error of the broker ends `run`.
"""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Literal, Self, TypeVar

from penstock.client.deliveries import DEFAULT_LEASE_MS, Delivery, new_owner
from penstock.client.requests import EffectRef
from penstock.client.sync import Client, Deliveries
from penstock.client.work import (
    BUSY_WAIT_S,
    FIRST_PAUSE_S,
    LAST_DELIVERIES_S,
    LONGEST_PAUSE_S,
    NOT_BEGUN,
    NOT_BEGUN_REASON,
    Failure,
    Outage,
    Outcome,
    StopFlag,
    effect_of,
    failure_of,
    is_waited_for,
    log,
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

Handler = Callable[[Delivery], object]

HEARTBEAT_MS = 500
"""How soon an idle worker notices that it is to stop, where the broker cannot be told."""

T = TypeVar("T")


class Worker:
    """`run` blocks until `stop` is called, from another thread or a signal handler."""

    def __init__(
        self,
        client: Client,
        topic: str,
        group: str,
        handler: Handler,
        *,
        owner: str = "",
        lease_ms: int = DEFAULT_LEASE_MS,
        effect: bool = False,
    ) -> None:
        if inspect.iscoroutinefunction(handler):
            raise InvalidArgument("a worker's handler is a plain function, not a coroutine's")
        self.owner = owner or new_owner()
        self._client = client
        self._topic = topic
        self._group = group
        self._handler = handler
        self._lease_ms = lease_ms
        self._effect = effect
        self._stopping = StopFlag()
        self._stream: Deliveries | None = None
        # Received, and its handler not yet called.
        self._not_begun: list[Delivery] = []

    def stop(self) -> None:
        """Lets the message under way be finished, takes no other, and ends `run`."""
        self._stopping.set()
        stream = self._stream
        if stream is not None:
            # The broker sends no more from now on, and the end of the stream wakes `run`.
            stream.finish()

    def run(self) -> None:
        """Works until `stop`. However it ends, an interrupt included, everything that was received
        and not begun is given back to the group."""
        outage = Outage()
        has_worked = False
        with _Keeper(self._client, self._lease_ms) as keeper:
            while not self._stopping.is_set():
                pause_s = FIRST_PAUSE_S
                try:
                    with self._open() as stream:
                        has_worked = True
                        outage.is_over()
                        self._work(stream, keeper)
                except PenstockError as error:
                    if not is_waited_for(error, has_worked):
                        raise
                    pause_s = outage.failed(error)
                self._stopping.wait(pause_s)

    def _open(self) -> Deliveries:
        return Deliveries(
            self._client,
            self._topic,
            self._group,
            self.owner,
            self._lease_ms,
            prefetch=1,
            wait_s=None,
            heartbeat_ms=HEARTBEAT_MS,
        )

    def _work(self, stream: Deliveries, keeper: _Keeper) -> None:
        self._stream = stream
        try:
            self._follow(stream, keeper)
        finally:
            self._stream = None
            left, self._not_begun = self._not_begun + stream.rest(LAST_DELIVERIES_S), []
            self._release(left)

    def _follow(self, stream: Deliveries, keeper: _Keeper) -> None:
        """Handles what a stream brings, until it ends or the worker is to stop."""
        while not stream.ended and not self._stopping.is_set():
            delivery = stream.poll()
            if delivery is None:
                continue
            self._not_begun.append(delivery)
            if not self._stopping.is_set():
                self._handle(delivery, keeper, stream)

    # -- one message ---------------------------------------------------------------------------

    def _handle(self, delivery: Delivery, keeper: _Keeper, stream: Deliveries) -> None:
        attempt = self._attempt_effect if self._effect else self._attempt
        try:
            outcome = attempt(delivery, keeper)
        except BaseException as error:
            # An interrupt. What had begun is nacked, so that nobody waits for its lease.
            self.stop()
            if not self._not_begun:
                self._settle(delivery, Failure(f"{type(error).__name__}: the worker ended"))
            raise
        if self._stopping.is_set() and not stream.is_finishing:
            # Otherwise settling this one would bring the next.
            stream.close()
        self._not_begun.clear()
        self._settle(delivery, outcome)

    def _attempt(self, delivery: Delivery, keeper: _Keeper) -> Outcome:
        keeper.hold(delivery)
        try:
            return self._call(delivery)[0]
        finally:
            keeper.let_go()

    def _attempt_effect(self, delivery: Delivery, keeper: _Keeper) -> Outcome:
        """The same, unless the effect is committed; then there is nothing to do."""
        effect = effect_of(delivery, self.owner)
        keeper.hold(delivery)
        try:
            begun = self._begin(effect)
            if begun != "RUN":
                return None if begun == "COMMITTED" else NOT_BEGUN
            keeper.hold(delivery, effect)
            return self._run_effect(delivery, effect)
        except PenstockError as error:
            if self._not_begun and self._stopping.is_set():
                return NOT_BEGUN
            return Failure(error.message)
        finally:
            keeper.let_go()

    def _run_effect(self, delivery: Delivery, effect: EffectRef) -> Outcome:
        try:
            failure, result = self._call(delivery)
        except BaseException as error:
            self.stop()
            self._fail(effect, type(error).__name__)
            raise
        if failure is not None:
            self._fail(effect, failure.reason)
            return failure
        text = result if isinstance(result, str) else ""
        self._insist(lambda: self._client.commit_effect(effect, text))
        return None

    def _call(self, delivery: Delivery) -> tuple[Failure | None, object]:
        """Runs the handler: why it failed, if it did, and what it returned."""
        self._not_begun.clear()
        try:
            return None, self._handler(delivery)
        except Exception as error:  # noqa: BLE001 - the handler is somebody else's code
            return failure_of(delivery, error), None

    def _begin(self, effect: EffectRef) -> Literal["RUN", "COMMITTED", "STOPPED"]:
        """Whether to run the effect; waits while somebody else does."""
        while True:
            try:
                return self._insist(
                    lambda: self._client.begin_effect(effect, self._lease_ms)
                ).status
            except FailedPrecondition:
                if self._stopping.wait(BUSY_WAIT_S):
                    return "STOPPED"

    def _fail(self, effect: EffectRef, reason: str) -> None:
        try:
            self._insist(lambda: self._client.fail_effect(effect, reason))
        except PenstockError as error:
            log.warning("the effect %r is no longer held: %s", effect.key, error.message)

    # -- settling ------------------------------------------------------------------------------

    def _settle(self, delivery: Delivery, outcome: Outcome) -> None:
        """Acks, nacks or releases. What is another's by now, or gone with its topic, is not ours
        to settle; what could not be settled comes again."""
        try:
            if outcome is None:
                self._insist(lambda: self._client.ack(delivery))
            elif outcome is not NOT_BEGUN:
                self._nack(delivery, outcome)
        except PenstockError as error:
            log.warning("%s was not settled: %s", place_of(delivery), error.message)
        if outcome is NOT_BEGUN:
            self._release([delivery])

    def _nack(self, delivery: Delivery, failure: Failure) -> None:
        reason, delay_ms, dead = failure
        try:
            self._insist(lambda: self._client.nack(delivery, reason, delay_ms=delay_ms, dead=dead))
        except InvalidArgument:
            # An older broker knows neither; then the retry policy decides.
            self._insist(lambda: self._client.nack(delivery, reason))

    def _release(self, deliveries: list[Delivery]) -> None:
        """Gives back what nobody began to handle, without counting an attempt."""
        if not deliveries:
            return
        try:
            note_releases(deliveries, self._insist(lambda: self._client.release_batch(deliveries)))
        except (NotFound, MethodNotAllowed):
            # An older broker cannot take anything back uncounted.
            for delivery in deliveries:
                self._settle(delivery, Failure(NOT_BEGUN_REASON))
        except PenstockError as error:
            count = len(deliveries)
            log.warning("%d deliveries were not released: %s", count, error.message)

    def _insist(self, ask: Callable[[], T]) -> T:
        """Asks again while the broker is away or refuses the token, for as long as the lease may
        last."""
        until = time.monotonic() + self._lease_ms / 1000
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                return ask()
            except PenstockError as error:
                is_over = time.monotonic() + pause_s > until
                if is_over or not (error.retryable or isinstance(error, Unauthenticated)):
                    raise
                if pause_s == FIRST_PAUSE_S:
                    log.warning("asking again until the lease ends: %s", error.message)
            if self._stopping.wait(pause_s):
                return ask()
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


class _Keeper:
    """Extends the lease of what is held, from a thread of its own."""

    def __init__(self, client: Client, lease_ms: int) -> None:
        self._client = client
        self._lease_ms = lease_ms
        self._held: tuple[Delivery, EffectRef | None] | None = None
        # Whose failure was logged: once is enough.
        self._told: tuple[Delivery, EffectRef | None] | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-leases", daemon=True)

    def hold(self, delivery: Delivery, effect: EffectRef | None = None) -> None:
        self._held = (delivery, effect)

    def let_go(self) -> None:
        self._held = None

    def _run(self) -> None:
        # A third of the lease leaves room for an extension that fails.
        while not self._ended.wait(self._lease_ms / 3000):
            held = self._held
            if held is not None:
                self._extend(held)

    def _extend(self, held: tuple[Delivery, EffectRef | None]) -> None:
        delivery, effect = held
        try:
            self._client.extend(delivery, self._lease_ms)
            if effect is not None:
                self._client.renew_effect(effect, self._lease_ms)
        except PenstockError as error:
            if self._held is held and self._told is not held:
                self._told = held
                place = place_of(delivery)
                log.warning("the lease of %s was not extended: %s", place, error.message)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()
