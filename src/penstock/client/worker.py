"""A worker: one message after another from a group, handed to a function of yours.

    Worker(client, "orders", "billing", handle).run()

The message is acked when the handler returns and nacked with the error's text when it raises;
while the handler runs, its lease is extended. Invariant: a message is acked only after its
handler has returned. So a worker that dies loses nothing, and a message may be handled twice.

With `effect=True` the effect of a message is run once for its `idempotency_key` (without one,
for its offset): it is begun, run, committed with the text the handler returns, and acked. A
message whose effect is committed is acked unhandled, and while another worker runs the same
effect this one waits. What remains: a crash between the effect and its commit repeats it.

A broker that goes away is waited for. Any other error of the broker ends `run`.
"""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TypeVar

from penstock.client.deliveries import DEFAULT_LEASE_MS, Delivery, new_owner
from penstock.client.requests import EffectRef
from penstock.client.sync import Client, Deliveries
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

Handler = Callable[[Delivery], object]

HEARTBEAT_MS = 500
"""How soon an idle worker notices that it is to stop."""

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
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Lets the message under way be finished, takes no other, and ends `run`."""
        self._stopping.set()

    def run(self) -> None:
        pause_s = FIRST_PAUSE_S
        with _Keeper(self._client, self._lease_ms) as keeper:
            while not self._stopping.is_set():
                try:
                    with self._open() as stream:
                        pause_s = FIRST_PAUSE_S
                        self._follow(stream, keeper)
                except PenstockError as error:
                    if not error.retryable:
                        raise
                    log.warning("connecting again in %.1f s: %s", pause_s, error.message)
                self._stopping.wait(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

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

    def _follow(self, stream: Deliveries, keeper: _Keeper) -> None:
        """Handles what a stream brings, until it ends or the worker is to stop."""
        while not stream.ended:
            delivery = stream.poll()
            if self._stopping.is_set():
                if delivery is not None:
                    self._settle(delivery, NOT_BEGUN)
                return
            if delivery is not None:
                self._handle(delivery, keeper, stream)

    def _handle(self, delivery: Delivery, keeper: _Keeper, stream: Deliveries) -> None:
        attempt = self._attempt_effect if self._effect else self._attempt
        failure = attempt(delivery, keeper)
        if self._stopping.is_set():
            # Otherwise settling this one would bring the next.
            stream.close()
        self._settle(delivery, failure)

    def _attempt(self, delivery: Delivery, keeper: _Keeper) -> str | None:
        """Runs the handler; None, or why it failed."""
        keeper.hold(delivery)
        try:
            self._handler(delivery)
        except Exception as error:  # noqa: BLE001 - the handler is somebody else's code
            return failure_of(delivery, error)
        finally:
            keeper.let_go()
        return None

    def _attempt_effect(self, delivery: Delivery, keeper: _Keeper) -> str | None:
        """The same, unless the effect is committed; then there is nothing to do."""
        effect = effect_of(delivery, self.owner)
        keeper.hold(delivery)
        try:
            if not self._begin(effect):
                return None
            keeper.hold(delivery, effect)
            try:
                result = self._handler(delivery)
            except Exception as error:  # noqa: BLE001 - the handler is somebody else's code
                return self._fail(effect, failure_of(delivery, error))
            text = result if isinstance(result, str) else ""
            self._insist(lambda: self._client.commit_effect(effect, text))
        except FailedPrecondition as error:
            return error.message
        finally:
            keeper.let_go()
        return None

    def _begin(self, effect: EffectRef) -> bool:
        """Whether to run the effect; waits while somebody else does."""
        while True:
            try:
                begun = self._insist(lambda: self._client.begin_effect(effect, self._lease_ms))
                return begun.status == "RUN"
            except FailedPrecondition:
                if self._stopping.wait(BUSY_WAIT_S):
                    raise

    def _fail(self, effect: EffectRef, reason: str) -> str:
        try:
            self._insist(lambda: self._client.fail_effect(effect, reason))
        except FailedPrecondition as error:
            log.warning("the effect %r is no longer held: %s", effect.key, error.message)
        return reason

    def _settle(self, delivery: Delivery, failure: str | None) -> None:
        """Acks, or nacks with the failure. What is another's by now is not ours to settle."""
        try:
            if failure is None:
                self._insist(lambda: self._client.ack(delivery))
            else:
                self._insist(lambda: self._client.nack(delivery, failure))
        except FailedPrecondition as error:
            log.warning("%s was not settled: %s", place_of(delivery), error.message)

    def _insist(self, ask: Callable[[], T]) -> T:
        """Asks again while the broker is away, for as long as the lease may last."""
        until = time.monotonic() + self._lease_ms / 1000
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                return ask()
            except PenstockError as error:
                if not error.retryable or time.monotonic() + pause_s > until:
                    raise
                log.warning("asking again in %.1f s: %s", pause_s, error.message)
            if self._stopping.wait(pause_s):
                return ask()
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


class _Keeper:
    """Extends the lease of what is held, from a thread of its own."""

    def __init__(self, client: Client, lease_ms: int) -> None:
        self._client = client
        self._lease_ms = lease_ms
        self._held: tuple[Delivery, EffectRef | None] | None = None
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
            if self._held is held:
                log.warning(
                    "the lease of %s was not extended: %s", place_of(delivery), error.message
                )

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
