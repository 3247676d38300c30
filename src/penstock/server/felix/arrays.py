"""An array of operations: performed in order, answered as one array, each in its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from penstock.model.errors import PenstockError
from penstock.server.felix.answers import Value, Values
from penstock.server.felix.messages import Message, Refused
from penstock.server.felix.operations import Done, too_much
from penstock.server.replies import encode_json

PerformOne = Callable[[Message | Refused, Done], None]
RenderError = Callable[[Message | Refused, PenstockError], Any]


class _Gathering:
    """Outcomes that may come in any order."""

    __slots__ = ("_done", "_missing", "_outcomes")

    def __init__(self, count: int, done: Done) -> None:
        self._outcomes: list[Any] = [None] * count
        self._missing = count
        self._done = done

    def take(self, place: int, outcome: Any) -> None:
        self._outcomes[place] = outcome
        self._missing -= 1
        if not self._missing:
            self._done(self._outcomes)


def perform_all(messages: Sequence[Message | Refused], perform: PerformOne, done: Done) -> None:
    """Gives `done` the list of outcomes, in the order of `messages`."""
    gathering = _Gathering(len(messages), done)
    for place, message in enumerate(messages):
        perform(message, partial(gathering.take, place))


def encode_outcomes(
    messages: Sequence[Message | Refused],
    outcomes: Sequence[Any],
    render_error: RenderError,
    max_bytes: int,
) -> bytes:
    """One array: of each its answer, its answers, null when none is due, or its error. Values
    past `max_bytes` are refused."""
    left = max_bytes
    rendered: list[Any] = []
    for message, outcome in zip(messages, outcomes, strict=True):
        size = _size(outcome)
        if size > left:
            outcome = too_much(max_bytes)
        else:
            left -= size
        is_error = isinstance(outcome, PenstockError)
        rendered.append(render_error(message, outcome) if is_error else outcome)
    return encode_json(rendered)


def _size(outcome: Any) -> int:
    if isinstance(outcome, Value):
        return len(outcome.value or b"")
    if isinstance(outcome, Values):
        return sum(len(each.value or b"") for each in outcome.values)
    return 0
