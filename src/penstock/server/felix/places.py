"""The order of answers on a socket: each request has its place, and leaves in its turn.

Invariant: answers leave in the order of their requests; one that is held back holds back those
behind it. A place is answered once. Must not know how an answer travels.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from penstock.model.errors import PenstockError
from penstock.server.felix.answers import Ok, Subscribed
from penstock.server.felix.arrays import encode_outcomes
from penstock.server.felix.messages import Message, Refused, is_publish
from penstock.server.replies import TypedErrorBody, encode_json, typed_error

Leave = Callable[[list[bytes], list[str]], None]
"""Takes the answers of a request, a frame each, and the channels that they name."""


class Places:
    """Requests that have no answer yet, or have one that must wait. `held_bytes` is their size."""

    def __init__(self, leave: Leave, max_answer_bytes: int) -> None:
        self._leave = leave
        self._queue: deque[Place] = deque()
        self.max_answer_bytes = max_answer_bytes
        self.held_bytes = 0

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, place: Place) -> None:
        self._queue.append(place)
        self.held_bytes += place.nbytes

    def answered(self) -> None:
        """Lets all leave that are first and have their answers."""
        queue = self._queue
        while queue and (frames := queue[0].frames) is not None:
            place = queue.popleft()
            self.held_bytes -= place.nbytes
            self._leave(frames, place.names)

    def clear(self) -> None:
        self._queue.clear()
        self.held_bytes = 0


class Place:
    """Of one request. `names` are the channels that its answer names."""

    __slots__ = ("_messages", "_places", "frames", "names", "nbytes")

    def __init__(self, places: Places, messages: list[Message | Refused], nbytes: int) -> None:
        self._places = places
        self._messages = messages
        self.nbytes = nbytes
        self.names: list[str] = []
        self.frames: list[bytes] | None = None
        places.add(self)

    def done(self, outcome: Any) -> None:
        """Of a single message."""
        if self.frames is not None:
            return
        if isinstance(outcome, PenstockError):
            self.frames = [encode_json(error_answer(self._messages[0], outcome))]
        elif isinstance(outcome, list):
            self.frames = [encode_json(answer) for answer in outcome]
        elif outcome is None:
            self.frames = []
        else:
            self._note_channels((outcome,))
            self.frames = [encode_json(outcome)]
        self._places.answered()

    def done_all(self, outcomes: list[Any]) -> None:
        """Of an array of messages."""
        if self.frames is not None:
            return
        self._note_channels(outcomes)
        limit = self._places.max_answer_bytes
        self.frames = [encode_outcomes(self._messages, outcomes, error_answer, limit)]
        self._places.answered()

    def _note_channels(self, outcomes: Iterable[Any]) -> None:
        for outcome in outcomes:
            if isinstance(outcome, Subscribed):
                self.names.append(outcome.subscription_id)
            elif isinstance(outcome, Ok) and outcome.watch_id is not None:
                self.names.append(outcome.watch_id)


def error_answer(message: Message | Refused, error: PenstockError) -> TypedErrorBody:
    kind = "publish_error" if is_publish(message) else "error"
    return typed_error(error, kind, request_id=message.request_id)
