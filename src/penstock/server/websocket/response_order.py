"""The order of answers on a socket: each request has its place, and leaves in its turn.

Invariant: answers leave in the order of their requests; one that is held back holds back those
behind it. A place is answered once. Must not know how an answer travels.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from penstock.model.errors import PenstockError
from penstock.server.http.responses import TypedErrorBody, encode_json, typed_error
from penstock.server.message_actions import Outcome
from penstock.server.websocket.answers import Ok, Subscribed
from penstock.server.websocket.arrays import answer_bytes, encode_outcomes
from penstock.server.websocket.messages import Message, Refused

Leave = Callable[[list[bytes], list[str]], None]
"""Takes the answers of a request, a frame each, and the channels that they name."""

HasRoom = Callable[[], bool]
Ask = Callable[[int, Callable[[], None]], None]
"""Takes about how many bytes an answer has, and what makes it when there is memory for it."""


class Places:
    """Requests that have no answer yet, or have one that must wait. `held_bytes` is their size.
    `ask` is set before the first request comes."""

    ask: Ask

    def __init__(self, leave: Leave, has_room: HasRoom, max_answer_bytes: int) -> None:
        self._leave = leave
        self._has_room = has_room
        self._is_asking = False
        self._queue: deque[Place] = deque()
        self.max_answer_bytes = max_answer_bytes
        self.held_bytes = 0

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, place: Place) -> None:
        self._queue.append(place)
        self.held_bytes += place.nbytes

    def may_leave(self) -> bool:
        return bool(self._queue) and self._queue[0].is_done and not self._is_asking

    def go_on(self) -> None:
        """Lets those leave that are first and answered. An answer becomes bytes only when there
        is room for it, on the connection and in memory: what is small to ask for can be large."""
        while self.may_leave() and self._has_room():
            self._is_asking = True
            self.ask(self._queue[0].answer_bytes(), self._leave_first)

    def _leave_first(self) -> None:
        self._is_asking = False
        if self._queue:
            place = self._queue.popleft()
            self.held_bytes -= place.nbytes
            self._leave(place.frames(), place.names())

    def clear(self) -> None:
        self._queue.clear()
        self.held_bytes = 0


class Place:
    """Of one request: a message, or an array of them."""

    __slots__ = ("_is_array", "_messages", "_outcomes", "_places", "is_done", "nbytes")

    def __init__(
        self,
        places: Places,
        messages: list[Message | Refused],
        nbytes: int,
        *,
        is_array: bool = False,
    ) -> None:
        self._places = places
        self._messages = messages
        self._is_array = is_array
        self._outcomes: list[Outcome] = []
        self.nbytes = nbytes
        self.is_done = False
        places.add(self)

    def done(self, outcome: Outcome) -> None:
        """Of a single message."""
        self.done_all([outcome])

    def done_all(self, outcomes: list[Outcome]) -> None:
        """Of an array of messages."""
        if not self.is_done:
            self.is_done = True
            self._outcomes = outcomes
            self._places.go_on()

    def answer_bytes(self) -> int:
        return answer_bytes(self._outcomes)

    def frames(self) -> list[bytes]:
        if self._is_array:
            limit = self._places.max_answer_bytes
            return [encode_outcomes(self._messages, self._outcomes, error_answer, limit)]
        outcome = self._outcomes[0]
        if isinstance(outcome, PenstockError):
            return [encode_json(error_answer(self._messages[0], outcome))]
        if isinstance(outcome, list):
            return [encode_json(answer) for answer in outcome]
        return [] if outcome is None else [encode_json(outcome)]

    def names(self) -> list[str]:
        """Of the channels that the answer names."""
        names: list[str] = []
        for outcome in self._outcomes:
            if isinstance(outcome, Subscribed):
                names.append(outcome.subscription_id)
            elif isinstance(outcome, Ok) and outcome.watch_id is not None:
                names.append(outcome.watch_id)
        return names


def error_answer(message: Message | Refused, error: PenstockError) -> TypedErrorBody:
    return typed_error(error, request_id=message.request_id)
