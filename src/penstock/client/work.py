"""The decisions that both workers share. No IO.

An attempt to handle a message has an outcome: the message is done (None) and has to be acked, its
handler failed (`HandlerFailure`), its handler never began (`NOT_BEGUN`), or it was settled together
with the messages that its handler returned (`SETTLED`). The error that a handler raises
decides what follows. `Reject` sends the message to the dead letters, `RetryLater` says when it is
delivered again, and any other error leaves that to the message's retry policy.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from enum import Enum
from itertools import chain, islice
from typing import Any, NamedTuple

from penstock.client.calls import Call
from penstock.client.deliveries import Delivery
from penstock.client.requests import EffectRef, NewMessage
from penstock.client.transactions import TransactionOperations, TransactionResult
from penstock.model.errors import InvalidArgument, NotFound, PenstockError, Unauthenticated
from penstock.model.limits import MAX_BACKOFF_MS, MAX_BATCH_ITEMS
from penstock.model.names import is_dead_letter_topic

BUSY_WAIT_S = 0.5
"""The pause before a worker tries again to begin an effect that another worker runs."""

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
"""The pauses between attempts to reach a broker that is away, from the first to the longest."""

LAST_DELIVERIES_S = 5.0
"""How long a worker that stops waits for deliveries that the broker had already sent. They arrive
at once, unless a proxy in between does not pass on that this side was closed."""

CANCELLED_S = 5.0
"""How long a cancelled worker may take to give its messages back."""

NOT_BEGUN_REASON = "the worker stopped before it began"

log = logging.getLogger("penstock.worker")


class Reject(Exception):
    """Raise this in a handler if the message can never be handled. It goes to the dead letters at
    once, whatever its retry policy, with this reason. A message of a dead-letter topic stays there
    and is delivered again: ack it if you no longer want it."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason or "rejected"


class RetryLater(Exception):
    """Raise this in a handler if the message cannot be handled now. It is delivered again after
    `delay_ms`, whatever its retry policy; the attempt counts. A delay of more than 24 hours, the
    longest that the broker takes, is a ValueError."""

    def __init__(self, delay_ms: int, reason: str = "") -> None:
        if type(delay_ms) is not int or not 0 <= delay_ms <= MAX_BACKOFF_MS:
            raise ValueError(
                f"delay_ms must be a whole number from 0 to {MAX_BACKOFF_MS} (24 hours), "
                f"not {delay_ms!r}"
            )
        super().__init__(reason or f"again in {delay_ms} ms")
        self.delay_ms = delay_ms
        self.reason = reason or "retry later"


class HandlerFailure(NamedTuple):
    """Why an attempt failed, and what happens to its message."""

    reason: str
    delay_ms: int | None = None
    dead: bool = False


class _Ended(Enum):
    NOT_BEGUN = "not begun"
    SETTLED = "settled"


NOT_BEGUN = _Ended.NOT_BEGUN
SETTLED = _Ended.SETTLED

Outcome = HandlerFailure | _Ended | None


def check_handler(handler: Callable[..., Any]) -> None:
    """Refuses a handler that yields: calling it would run none of its body."""
    if not callable(handler):
        raise InvalidArgument("the handler must be a function, which gets one delivery")
    for each in (handler, type(handler).__call__):
        if inspect.isgeneratorfunction(each) or inspect.isasyncgenfunction(each):
            raise InvalidArgument(
                "a handler cannot yield: its body would never run. Return a list of the messages"
            )


def messages_of(result: object) -> list[NewMessage]:
    """Returns the messages that a handler returned: one, or a list or tuple of them. Any other
    result means none. Raises TypeError if that would lose messages or skip the handler's work: for
    generators and other iterators, coroutines, sets and dicts of messages, and for a list with
    messages and other things in it."""
    if isinstance(result, NewMessage):
        return [result]
    if isinstance(result, list | tuple):
        messages = [each for each in result if isinstance(each, NewMessage)]
        if messages and len(messages) < len(result):
            raise TypeError("a handler returned a list with messages and other things in it")
        return messages
    kind = type(result).__name__
    if isinstance(result, Iterator | AsyncIterator):
        raise TypeError(f"a handler returned a {kind}, which is not run; return a list of messages")
    if inspect.iscoroutine(result):
        result.close()
        raise TypeError("a handler returned a coroutine that nobody awaits; use AsyncWorker")
    if isinstance(result, Iterable) and any(map(_is_message, _some_of(result))):
        raise TypeError(f"a handler returned a {kind} of messages; return a list of them")
    return []


def _is_message(value: object) -> bool:
    return isinstance(value, NewMessage)


def _some_of(values: Iterable[object]) -> Iterable[object]:
    """Returns at most as many of the values as a batch could have."""
    if isinstance(values, str | bytes | bytearray | memoryview):
        return ()
    if isinstance(values, Mapping):
        values = chain.from_iterable(values.items())
    return islice(values, MAX_BATCH_ITEMS)


def result_call(
    delivery: Delivery, messages: list[NewMessage], effect: EffectRef | None
) -> Call[list[TransactionResult]]:
    """Returns the call that produces a handler's messages and acks its delivery, in one
    transaction. The ack is operation `ACK_OPERATION`."""
    operations = TransactionOperations()
    operations.ack(delivery)
    if effect is not None:
        operations.commit_effect(effect)
    for message in messages:
        operations.produce_message(message)
    return operations.call()


ACK_OPERATION = 0


def failure_of(delivery: Delivery, error: BaseException) -> HandlerFailure:
    """Logs an error of a handler and returns what to tell the broker. `Reject` and `RetryLater` are
    raised on purpose, so they are logged without a traceback."""
    if isinstance(error, Reject):
        if is_dead_letter_topic(delivery.topic):
            text = "%s is rejected, but a dead letter cannot be dead-lettered; it comes again: %s"
            log.warning(text, place_of(delivery), error.reason)
            return HandlerFailure(error.reason)
        log.info("%s is rejected: %s", place_of(delivery), error.reason)
        return HandlerFailure(error.reason, dead=True)
    if isinstance(error, RetryLater):
        later = f"{place_of(delivery)} comes again in {error.delay_ms} ms"
        log.info("%s: %s", later, error.reason)
        return HandlerFailure(error.reason, delay_ms=error.delay_ms)
    log.warning("handling %s failed", place_of(delivery), exc_info=error)
    return HandlerFailure(f"{type(error).__name__}: {error}")


def is_waited_for(error: PenstockError, has_worked: bool) -> bool:
    """Tells whether a worker waits until the error is over. A deleted topic may be created again,
    and a refused token may be one that was just rotated. A worker that has never worked has the
    wrong name or token instead: it fails, so that somebody notices."""
    if error.retryable:
        return True
    return has_worked and isinstance(error, NotFound | Unauthenticated)


class Outage:
    """A time in which a worker cannot consume. It is logged when it begins, changes and ends, not
    at every attempt. The pauses between attempts double up to `LONGEST_PAUSE_S`."""

    def __init__(self) -> None:
        self._code = ""
        self._pause_s = FIRST_PAUSE_S

    def failed(self, error: PenstockError) -> float:
        """Returns how many seconds to pause before the next attempt."""
        if error.code != self._code:
            log.warning("waiting, and trying again from time to time: %s", error.message)
            self._code = error.code
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, LONGEST_PAUSE_S)
        return pause_s

    def is_over(self) -> None:
        if self._code:
            log.info("connected again")
        self._code, self._pause_s = "", FIRST_PAUSE_S


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
    """Returns what identifies a delivery in its group."""
    return delivery.partition, delivery.offset, delivery.delivery_id


def place_of(delivery: Delivery) -> str:
    return f"{delivery.topic}, partition {delivery.partition}, offset {delivery.offset}"


def note_releases(deliveries: list[Delivery], outcomes: list[PenstockError | None]) -> None:
    """Logs deliveries that the broker did not take back: they come again when their lease ends."""
    for delivery, error in zip(deliveries, outcomes, strict=False):
        if error is not None:
            log.warning("%s was not released: %s", place_of(delivery), error.message)
