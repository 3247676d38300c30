"""From the bytes of an NDJSON stream to what its lines say. No IO.

Invariant: things come out in the order of their lines, each once, and never from half a line.
Must not know what a line says: that is its subclasses'.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

import msgspec

from penstock.model.errors import Internal

T = TypeVar("T")


class LineBuffer(Generic[T]):
    """Takes chunks in, gives things out, and knows how long there have been none.

    `is_open`: the broker has said what there is to say before the first of them.
    """

    is_open = True

    def __init__(self) -> None:
        self._half_line: list[bytes] = []
        self._ready: deque[T] = deque()
        self._waiting_since: float | None = None

    def feed(self, chunk: bytes) -> None:
        """Takes bytes in. Lines end at a newline and nowhere else; blank ones are heartbeats."""
        end = chunk.rfind(b"\n")
        if end < 0:
            self._half_line.append(chunk)
            return
        lines = b"".join((*self._half_line, chunk[: end + 1]))
        self._half_line = [chunk[end + 1 :]]
        try:
            self._ready.extend(self._read(lines))
        except (msgspec.DecodeError, ValueError) as error:
            raise Internal(f"the stream has a line that is not understood: {error}") from error

    def take(self, now_s: float) -> T | None:
        """The next thing, if there is one; else the wait for it has begun."""
        if self._ready:
            self._waiting_since = None
            return self._ready.popleft()
        if self._waiting_since is None:
            self._waiting_since = now_s
        return None

    def waited_s(self, now_s: float) -> float:
        """Since the caller began to wait for the next thing."""
        return 0.0 if self._waiting_since is None else now_s - self._waiting_since

    def end(self) -> None:
        """The broker ended the stream; raises if it should not have."""

    def close(self) -> None:
        """The caller ended it. What was taken in before can still be taken out."""

    def _read(self, lines: bytes) -> Iterable[T]:
        """What whole lines say."""
        raise NotImplementedError
