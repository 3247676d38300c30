"""What workers have in common, whether of threads or of asyncio. No IO.

A handler's end has an outcome: the message is done (None), its handling failed (`Failure`), or it
never began (`NOT_BEGUN`). A handler says how it failed by what it raises: `Reject` sends the
message to the dead letters, `RetryLater` says when it comes again, any other error leaves that to
the message's retry policy.
"""

from __future__ import annotations

import logging
import time
from enum import Enum
from typing import Literal, NamedTuple

from penstock.client.deliveries import Delivery
from penstock.client.requests import EffectRef
from penstock.model.errors import NotFound, PenstockError, Unauthenticated
from penstock.model.limits import MAX_BACKOFF_MS
from penstock.model.names import is_dead_letter_topic

BUSY_WAIT_S = 0.5
"""Between two looks at an effect that another worker runs."""

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
"""Between two tries while the broker is away."""

LAST_DELIVERIES_S = 5.0
"""How long a worker that stops waits for what the broker had already sent. It is there at once,
unless a proxy in between does not pass on that this side was closed."""

CANCELLED_S = 5.0
"""How long a cancelled worker takes to give back what it holds."""

NOT_BEGUN_REASON = "the worker stopped before it began"

log = logging.getLogger("penstock.worker")


class Reject(Exception):
    """Raise it in a handler: the message can never be handled. It goes to the dead letters now,
    whatever its retry policy, with this reason. A message of a dead-letter topic stays there and
    comes again: ack it if it is not wanted any more."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason or "rejected"


class RetryLater(Exception):
    """Raise it in a handler: the message cannot be handled now. It comes again after `delay_ms`,
    in place of the wait of its retry policy; the attempt counts. ValueError beyond 24 hours, which
    is the longest wait that the broker takes."""

    def __init__(self, delay_ms: int, reason: str = "") -> None:
        if type(delay_ms) is not int or not 0 <= delay_ms <= MAX_BACKOFF_MS:
            raise ValueError(
                f"delay_ms must be a whole number from 0 to {MAX_BACKOFF_MS} (24 hours), "
                f"not {delay_ms!r}"
            )
        super().__init__(reason or f"again in {delay_ms} ms")
        self.delay_ms = delay_ms
        self.reason = reason or "retry later"


class Failure(NamedTuple):
    """Why an attempt failed, and what is to become of its message."""

    reason: str
    delay_ms: int | None = None
    dead: bool = False


class _Unhandled(Enum):
    NOT_BEGUN = "not begun"


NOT_BEGUN = _Unhandled.NOT_BEGUN

Outcome = Failure | Literal[_Unhandled.NOT_BEGUN] | None


def failure_of(delivery: Delivery, error: BaseException) -> Failure:
    """Logs an error of a handler, and returns what the broker is told of it. `Reject` and
    `RetryLater` are raised on purpose: they are logged without a traceback."""
    if isinstance(error, Reject):
        if is_dead_letter_topic(delivery.topic):
            text = "%s is rejected, but a dead letter cannot be dead-lettered; it comes again: %s"
            log.warning(text, place_of(delivery), error.reason)
            return Failure(error.reason)
        log.info("%s is rejected: %s", place_of(delivery), error.reason)
        return Failure(error.reason, dead=True)
    if isinstance(error, RetryLater):
        later = f"{place_of(delivery)} comes again in {error.delay_ms} ms"
        log.info("%s: %s", later, error.reason)
        return Failure(error.reason, delay_ms=error.delay_ms)
    log.warning("handling %s failed", place_of(delivery), exc_info=error)
    return Failure(f"{type(error).__name__}: {error}")


def is_waited_for(error: PenstockError, has_worked: bool) -> bool:
    """Whether a worker waits until the error is over. A topic that is gone may be created again,
    and a token that is refused may have been rotated; where that was never otherwise, it is a
    mistake that somebody should be told of."""
    if error.retryable:
        return True
    return has_worked and isinstance(error, NotFound | Unauthenticated)


class Outage:
    """What keeps a worker from its messages: logged when it begins, changes and ends, and not with
    every try. The pauses between tries double up to `LONGEST_PAUSE_S`."""

    def __init__(self) -> None:
        self._code = ""
        self._pause_s = FIRST_PAUSE_S

    def failed(self, error: PenstockError) -> float:
        """How long to pause before the next try."""
        if error.code != self._code:
            log.warning("waiting, and trying again from time to time: %s", error.message)
            self._code = error.code
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, LONGEST_PAUSE_S)
        return pause_s

    def is_over(self) -> None:
        if self._code:
            log.info("connected again")
        self._code, self._pause_s = "", FIRST_PAUSE_S


class StopFlag:
    """A flag that a signal handler may set. An Event may not be set there: its lock may be held
    by the very thread that the handler interrupts."""

    LOOK_S = 0.05

    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        self._is_set = True

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, seconds: float) -> bool:
        """Waits for so long, or until it is set; whether it is."""
        until = time.monotonic() + seconds
        while not self._is_set and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, self.LOOK_S))
        return self._is_set


def effect_of(delivery: Delivery, owner: str) -> EffectRef:
    envelope = delivery.envelope
    return EffectRef(
        topic=delivery.topic,
        group=delivery.group,
        key=envelope.idempotency_key or f"offset-{delivery.offset}",
        owner=owner,
        tenant_id=envelope.tenant_id,
    )


def name_of(delivery: Delivery) -> tuple[int, int, str]:
    """Which delivery of the group it is."""
    return delivery.partition, delivery.offset, delivery.delivery_id


def place_of(delivery: Delivery) -> str:
    return f"{delivery.topic}, partition {delivery.partition}, offset {delivery.offset}"


def note_releases(deliveries: list[Delivery], outcomes: list[PenstockError | None]) -> None:
    """Logs what could not be released: it comes again when its lease ends."""
    for delivery, error in zip(deliveries, outcomes, strict=False):
        if error is not None:
            log.warning("%s was not released: %s", place_of(delivery), error.message)
