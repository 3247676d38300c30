"""The responses of one connection, in the order of their requests: shared by HTTP and WebSockets.

Invariants: responses leave in the order of their requests. A response that may be large is made
only when it is first, its connection accepts bytes and the budget for answers has room. Must not
know what a response holds, nor how it travels.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from penstock.server.http.answer_budget import Claim


class Response:
    """The response to one request. `data` is what its connection writes, once it is known."""

    __slots__ = ("_make", "_make_bytes", "_queue", "data")

    def __init__(self, queue: ResponseQueue[Any]) -> None:
        self._queue = queue
        self.data: Any = None
        self._make: Callable[[], None] | None = None
        self._make_bytes = 0

    def when_room(self, nbytes: int, make: Callable[[], None]) -> None:
        """Runs `make` when all responses before this one have left, the connection accepts more and
        there is memory for an answer of about `nbytes`. A small request may have a large answer,
        and many may be released at once."""
        self._make = make
        self._make_bytes = nbytes
        if self._queue.is_first(self):
            self._queue.advance()

    def is_answered(self) -> bool:
        """Returns whether this response can leave or be made. False while it waits for memory."""
        return self.data is not None or self._make is not None

    def make(self) -> None:
        """Runs what `when_room` was given, as soon as there is memory."""
        make, self._make = self._make, None
        if make is not None:
            self._queue.answers.ask(self._make_bytes, make)


R = TypeVar("R", bound=Response)


class ResponseQueue(Generic[R]):
    """`answers` is the connection's part of the memory for answers in progress."""

    __slots__ = ("_queue", "answers")

    def __init__(self, answers: Claim) -> None:
        self.answers = answers
        self._queue: deque[R] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[R]:
        return iter(self._queue)

    def __contains__(self, response: object) -> bool:
        return response in self._queue

    def add(self, response: R) -> None:
        self._queue.append(response)

    def clear(self) -> None:
        self._queue.clear()

    def is_first(self, response: Response) -> bool:
        return bool(self._queue) and self._queue[0] is response

    def is_first_answered(self) -> bool:
        return bool(self._queue) and self._queue[0].is_answered()

    def has_room(self) -> bool:
        """Returns whether the connection accepts more bytes."""
        raise NotImplementedError

    def write(self, response: R) -> None:
        """Writes a response that has its data and has left the queue."""
        raise NotImplementedError

    def answered(self, response: R) -> None:
        """Writes a response that has its data now, if it is first."""
        if self.is_first(response):
            self._queue.popleft()
            self.write(response)

    def advance(self) -> None:
        """Writes the responses that are first and answered."""
        self.write_answered()

    def write_answered(self) -> bool:
        """Returns False when the first response is answered and the connection has no room."""
        queue = self._queue
        while queue and (first := queue[0]).is_answered():
            if first.data is not None:
                queue.popleft()
                self.write(first)
            elif self.has_room():
                first.make()
            else:
                return False
        return True
