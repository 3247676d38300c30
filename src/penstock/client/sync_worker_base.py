# Generated from aio_worker_base.py by scripts/generate_sync_client.py: edit that, run this.
"""The part of a worker for blocking code that does not depend on how it runs handlers.

Connects to the group, runs the effect of a message, and settles deliveries. A subclass decides how
deliveries reach the handler, and how their leases are renewed meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Literal, TypeVar

from penstock.client.deliveries import Delivery, new_owner
from penstock.client.requests import EffectRef, NewMessage
from penstock.client.sync import Client, Deliveries
from penstock.client.sync_waiting import StopFlag
from penstock.client.work import (
    ACK_OPERATION,
    BUSY_WAIT_S,
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    NOT_BEGUN,
    NOT_BEGUN_REASON,
    SETTLED,
    HandlerFailure,
    Outage,
    Outcome,
    effect_of,
    failure_of,
    is_waited_for,
    log,
    messages_of,
    name_of,
    note_releases,
    place_of,
    result_call,
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

T = TypeVar("T")


class WorkerBase:
    """`_not_begun` holds the deliveries that were received and whose handler was not called yet."""

    def __init__(
        self,
        client: Client,
        topic: str,
        group: str,
        handler: Handler,
        *,
        owner: str,
        lease_ms: int,
        effect: bool,
        prefetch: int,
        heartbeat_ms: int,
    ) -> None:
        self.owner = owner or new_owner()
        self._client = client
        self._topic = topic
        self._group = group
        self._handler = handler
        self._lease_ms = lease_ms
        self._effect = effect
        self._prefetch = prefetch
        self._heartbeat_ms = heartbeat_ms
        self._stopping = StopFlag()
        self._not_begun: dict[tuple[int, int, str], Delivery] = {}

    def _work(self, stream: Deliveries) -> None:
        """Handles the deliveries of one stream until it ends or the worker is told to stop."""
        raise NotImplementedError

    def _renewing(
        self, delivery: Delivery, effect: EffectRef | None = None
    ) -> AbstractContextManager[None]:
        """Renews the lease of a delivery, or of its effect, until the block ends."""
        raise NotImplementedError

    def _run_effect(self, delivery: Delivery, effect: EffectRef) -> Outcome:
        """Calls the handler and ends the effect, also if the handler is interrupted."""
        raise NotImplementedError

    def _work_until_stopped(self) -> None:
        """Connects, again and again if need be, and works on each stream."""
        outage = Outage()
        has_worked = False
        while not self._stopping.is_set():
            pause_s = FIRST_PAUSE_S
            try:
                with self._open() as stream:
                    has_worked = True
                    outage.is_over()
                    self._work(stream)
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
            prefetch=self._prefetch,
            wait_s=None,
            heartbeat_ms=self._heartbeat_ms,
        )

    # -- one message ---------------------------------------------------------------------------

    def _attempt(self, delivery: Delivery) -> Outcome:
        with self._renewing(delivery):
            if self._effect:
                return self._attempt_effect(delivery)
            failure, result = self._call(delivery)
            messages = messages_of(result)
            return self._send_results(delivery, messages) if messages else failure

    def _attempt_effect(self, delivery: Delivery) -> Outcome:
        """Calls the handler unless its effect is already committed: then there is nothing to do."""
        effect = effect_of(delivery, self.owner)
        try:
            begun = self._begin(effect)
            if begun != "RUN":
                return None if begun == "COMMITTED" else NOT_BEGUN
            with self._renewing(delivery, effect):
                return self._run_effect(delivery, effect)
        except PenstockError as error:
            if self._stopping.is_set() and not self._is_begun(delivery):
                return NOT_BEGUN
            return HandlerFailure(error.message)

    def _call(self, delivery: Delivery) -> tuple[HandlerFailure | None, object]:
        """Calls the handler. Returns why it failed, if it did, and its result."""
        self._not_begun.pop(name_of(delivery), None)
        try:
            result = self._handler(delivery)
            messages_of(result)
            return None, result
        except Exception as error:  # noqa: BLE001 - the handler is somebody else's code
            return failure_of(delivery, error), None

    def _send_results(
        self, delivery: Delivery, messages: list[NewMessage], effect: EffectRef | None = None
    ) -> Outcome:
        """Produces the messages that the handler returned, commits its effect and acks, all or
        nothing. Repeated after a lost answer, it happens once."""
        call = result_call(delivery, messages, effect)
        try:
            self._insist(lambda: self._client.send(call))
            return SETTLED
        except PenstockError as error:
            place = place_of(delivery)
            log.warning("%s was not settled with its results: %s", place, error.message)
            if isinstance(error, FailedPrecondition) and error.operation == ACK_OPERATION:
                # Another worker has it, or has finished it.
                return SETTLED
            return HandlerFailure(f"its results were refused: {error.message}")

    def _is_begun(self, delivery: Delivery) -> bool:
        return name_of(delivery) not in self._not_begun

    # -- effects -------------------------------------------------------------------------------

    def _begin(self, effect: EffectRef) -> Literal["RUN", "COMMITTED", "STOPPED"]:
        """Begins an effect. Waits while another worker runs it, until this one is told to stop."""
        while True:
            try:
                begun = self._insist(lambda: self._client.begin_effect(effect, self._lease_ms))
                return begun.status
            except FailedPrecondition:
                if self._stopping.wait(BUSY_WAIT_S):
                    return "STOPPED"

    def _end_effect(
        self,
        delivery: Delivery,
        effect: EffectRef,
        failure: HandlerFailure | None,
        result: object = None,
    ) -> Outcome:
        """Commits the effect with the handler's text or messages, or tells the broker why it
        failed."""
        messages = messages_of(result)
        if messages:
            outcome = self._send_results(delivery, messages, effect)
            if not isinstance(outcome, HandlerFailure):
                return outcome
            failure = outcome
        if failure is None:
            text = result if isinstance(result, str) else ""
            self._insist(lambda: self._client.commit_effect(effect, text))
            return None
        try:
            self._insist(lambda: self._client.fail_effect(effect, failure.reason))
        except PenstockError as error:
            log.warning("the effect %r is no longer held: %s", effect.key, error.message)
        return failure

    # -- settling ------------------------------------------------------------------------------

    def _settle(self, delivery: Delivery, outcome: Outcome) -> None:
        """Acks, nacks or releases a delivery. Only logs it if the broker refuses: the message then
        belongs to another worker, is gone with its topic, or is delivered again."""
        try:
            if outcome is None:
                self._insist(lambda: self._client.ack(delivery))
            elif isinstance(outcome, HandlerFailure):
                self._nack(delivery, outcome)
        except PenstockError as error:
            log.warning("%s was not settled: %s", place_of(delivery), error.message)
        if outcome is NOT_BEGUN:
            self._release([delivery])

    def _nack(self, delivery: Delivery, failure: HandlerFailure) -> None:
        reason, delay_ms, dead = failure
        try:
            self._insist(lambda: self._client.nack(delivery, reason, delay_ms=delay_ms, dead=dead))
        except InvalidArgument:
            # An older broker knows neither option; then the retry policy decides.
            self._insist(lambda: self._client.nack(delivery, reason))

    def _release(self, deliveries: list[Delivery]) -> None:
        """Gives deliveries back that no handler has begun, without counting an attempt."""
        if not deliveries:
            return
        try:
            outcomes = self._insist(lambda: self._client.release_batch(deliveries))
            note_releases(deliveries, outcomes)
        except (NotFound, MethodNotAllowed):
            # An older broker can only take a delivery back by counting the attempt.
            for delivery in deliveries:
                self._settle(delivery, HandlerFailure(NOT_BEGUN_REASON))
        except PenstockError as error:
            count = len(deliveries)
            log.warning("%d deliveries were not released: %s", count, error.message)

    def _insist(self, ask: Callable[[], T]) -> T:
        """Sends a request, and repeats it while the broker is away or refuses the token, at most
        for the length of a lease."""
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
