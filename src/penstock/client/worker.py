"""A worker: hands the messages of a group to your function, one after another.

    worker = Worker(client, "orders", "billing", handle)
    signal.signal(signal.SIGINT, lambda *_: worker.stop())
    worker.run()

It acks a message when the handler returns, nacks it with the error's text when the handler raises,
and extends the lease while the handler runs. Invariants: a message is acked only after its handler
has returned, so a worker that dies loses nothing, and a message may be handled twice; when `run`
has ended, the worker holds no lease, and messages whose handler never began have lost no attempt.

With `effect=True` the effect of a message runs once for its `idempotency_key` (without one, for its
offset): the worker begins the effect, calls the handler, commits the effect with the text that the
handler returns, and acks. If the effect is already committed, the worker acks without calling the
handler. While another worker runs the same effect, this one waits. One case remains: a crash after
the handler and before the commit repeats the effect.

The worker waits for a broker that is away. Once it has been connected, it also waits for a topic
that was deleted and for a token that is refused. Any other error of the broker ends `run`.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from penstock.client.deliveries import DEFAULT_LEASE_MS, Delivery
from penstock.client.requests import EffectRef
from penstock.client.sync import Client, Deliveries
from penstock.client.sync_worker_base import Handler, WorkerBase
from penstock.client.work import (
    LAST_DELIVERIES_S,
    HandlerFailure,
    Outcome,
    check_handler,
    log,
    name_of,
    place_of,
)
from penstock.model.errors import InvalidArgument, PenstockError

HEARTBEAT_MS = 500
"""How soon an idle worker notices `stop` where it cannot tell the broker to send no more."""


class Worker(WorkerBase):
    """`run` blocks until `stop` is called, from another thread or a signal handler."""

    _keeper: _LeaseKeeper

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
        check_handler(handler)
        if inspect.iscoroutinefunction(handler):
            raise InvalidArgument("a Worker takes a plain function; use AsyncWorker for coroutines")
        super().__init__(
            client,
            topic,
            group,
            handler,
            owner=owner,
            lease_ms=lease_ms,
            effect=effect,
            prefetch=1,
            heartbeat_ms=HEARTBEAT_MS,
        )
        self._stream: Deliveries | None = None

    def stop(self) -> None:
        """Ends `run` once the message in work is finished; takes no other."""
        self._stopping.set()
        stream = self._stream
        if stream is not None:
            # The broker sends no more from now on, and the end of the stream wakes `run`.
            stream.finish()

    def run(self) -> None:
        """Works until `stop`. However it ends, by an interrupt too, it gives messages back to the
        group that were received and whose handler never began."""
        with _LeaseKeeper(self._client, self._lease_ms) as self._keeper:
            self._work_until_stopped()

    def _work(self, stream: Deliveries) -> None:
        self._stream = stream
        try:
            self._follow(stream)
        finally:
            self._stream = None
            left, self._not_begun = [*self._not_begun.values()], {}
            self._release(left + stream.rest(LAST_DELIVERIES_S))

    def _follow(self, stream: Deliveries) -> None:
        """Handles the deliveries of a stream until it ends or the worker is told to stop."""
        while not stream.ended and not self._stopping.is_set():
            delivery = stream.poll()
            if delivery is None:
                continue
            self._not_begun[name_of(delivery)] = delivery
            if not self._stopping.is_set():
                self._handle(delivery, stream)

    def _handle(self, delivery: Delivery, stream: Deliveries) -> None:
        try:
            outcome = self._attempt(delivery)
        except BaseException as error:
            # An interrupt. A message whose handler had begun is nacked, so that no other worker
            # has to wait for its lease to end.
            self.stop()
            if self._is_begun(delivery):
                self._settle(delivery, HandlerFailure(f"{type(error).__name__}: the worker ended"))
            raise
        if self._stopping.is_set() and not stream.is_finishing:
            # Otherwise the broker would answer the settling with the next delivery.
            stream.close()
        self._not_begun.pop(name_of(delivery), None)
        self._settle(delivery, outcome)

    def _run_effect(self, delivery: Delivery, effect: EffectRef) -> Outcome:
        try:
            failure, result = self._call(delivery)
        except BaseException as error:
            self.stop()
            self._end_effect(delivery, effect, HandlerFailure(type(error).__name__))
            raise
        return self._end_effect(delivery, effect, failure, result)

    @contextmanager
    def _renewing(self, delivery: Delivery, effect: EffectRef | None = None) -> Iterator[None]:
        before = self._keeper.held
        self._keeper.held = (delivery, effect)
        try:
            yield
        finally:
            self._keeper.held = before


class _LeaseKeeper:
    """Extends the leases of the delivery that is `held`, and of its effect, in its own thread."""

    def __init__(self, client: Client, lease_ms: int) -> None:
        self.held: tuple[Delivery, EffectRef | None] | None = None
        self._client = client
        self._lease_ms = lease_ms
        # The failure of each delivery is logged once.
        self._logged: tuple[Delivery, EffectRef | None] | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-leases", daemon=True)

    def _run(self) -> None:
        # A third of the lease leaves time for an extension that fails.
        while not self._ended.wait(self._lease_ms / 3000):
            held = self.held
            if held is not None:
                self._extend(held)

    def _extend(self, held: tuple[Delivery, EffectRef | None]) -> None:
        delivery, effect = held
        try:
            self._client.extend(delivery, self._lease_ms)
            if effect is not None:
                self._client.renew_effect(effect, self._lease_ms)
        except PenstockError as error:
            if self.held is held and self._logged is not held:
                self._logged = held
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
