"""An array of messages: performed in order, and answered with one array in the same order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from penstock.model.errors import PenstockError
from penstock.server.http.responses import encode_json
from penstock.server.message_actions import Done, Outcome, too_much
from penstock.server.websocket.answers import Value, Values
from penstock.server.websocket.messages import Message, RefusedMessage

PerformOne = Callable[[Message | RefusedMessage, Done], None]
RenderError = Callable[[Message | RefusedMessage, PenstockError], Any]


class _Gathering:
    """Collects outcomes, which may come in any order."""

    __slots__ = ("_done", "_missing", "_outcomes")

    def __init__(self, count: int, done: Callable[[list[Outcome]], None]) -> None:
        self._outcomes: list[Outcome] = [None] * count
        self._missing = count
        self._done = done

    def take(self, place: int, outcome: Outcome) -> None:
        self._outcomes[place] = outcome
        self._missing -= 1
        if not self._missing:
            self._done(self._outcomes)


def perform_all(
    messages: Sequence[Message | RefusedMessage],
    perform: PerformOne,
    done: Callable[[list[Outcome]], None],
) -> None:
    """Gives `done` the list of outcomes, in the order of `messages`."""
    gathering = _Gathering(len(messages), done)
    for place, message in enumerate(messages):
        perform(message, partial(gathering.take, place))


def encode_outcomes(
    messages: Sequence[Message | RefusedMessage],
    outcomes: Sequence[Outcome],
    render_error: RenderError,
    max_bytes: int,
) -> bytes:
    """Encodes one array: for each message its answer, its answers, null when none is due, or its
    error. Values past `max_bytes` are refused."""
    left = max_bytes
    rendered: list[Any] = []
    for message, outcome in zip(messages, outcomes, strict=True):
        size = _size(outcome)
        if size > left:
            outcome = too_much(max_bytes)
        else:
            left -= size
        rendered.append(
            render_error(message, outcome) if isinstance(outcome, PenstockError) else outcome
        )
    return encode_json(rendered)


def answer_bytes(outcomes: Sequence[Outcome]) -> int:
    """About how many bytes the answers have: values are base64 in JSON."""
    return sum(map(_size, outcomes)) * 4 // 3


def _size(outcome: Outcome) -> int:
    if isinstance(outcome, Value):
        return len(outcome.value or b"")
    if isinstance(outcome, Values):
        return sum(len(each.value or b"") for each in outcome.values)
    return 0
