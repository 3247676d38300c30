"""Splits the bytes of an NDJSON stream into lines. No IO.

Invariant: items come out in the order of their lines, each once, and never from half a line.
Subclasses decode a line; this module must not know what it says.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

import msgspec

from penstock.model.errors import Internal

T = TypeVar("T")


class LineBuffer(Generic[T]):
    """Takes chunks in, gives items out, and measures how long the caller has waited for one.

    `is_open`: the broker has sent the line that precedes the items, if this kind of stream has one.
    """

    is_open = True

    def __init__(self) -> None:
        self._half_line: list[bytes] = []
        self._ready: deque[T] = deque()
        self._waiting_since: float | None = None

    def feed(self, chunk: bytes) -> None:
        """Takes bytes in. Only a newline ends a line; blank lines are heartbeats."""
        end = chunk.rfind(b"\n")
        if end < 0:
            self._half_line.append(chunk)
            return
        lines = b"".join((*self._half_line, chunk[: end + 1]))
        self._half_line = [chunk[end + 1 :]]
        try:
            self._ready.extend(self._read(lines))
        except (msgspec.DecodeError, ValueError) as error:
            raise Internal(f"cannot read a line of the stream: {error}") from error

    def take(self, now_s: float) -> T | None:
        """Returns the next item. If there is none, returns None and begins to measure the wait."""
        if self._ready:
            self._waiting_since = None
            return self._ready.popleft()
        if self._waiting_since is None:
            self._waiting_since = now_s
        return None

    def waited_s(self, now_s: float) -> float:
        """Returns how long the caller has waited for the next item."""
        return 0.0 if self._waiting_since is None else now_s - self._waiting_since

    def begin_again(self) -> None:
        """Notes that the stream goes on over another connection: half a line is not continued."""
        self._half_line.clear()

    def end(self) -> None:
        """Notes that the broker ended the stream. Raises if that is an error."""

    def close(self) -> None:
        """Notes that the caller ended the stream. Items that arrived before can still be taken."""

    def _read(self, lines: bytes) -> Iterable[T]:
        """Decodes whole lines."""
        raise NotImplementedError
