"""Remembers which events of a stream were handled, so that a repeat is not handled again.

Invariant: an offset that `add` returned for is known to every later `has`, also after a crash.
Handled offsets are kept as ranges; these are few, since events come nearly in order. Must not know
the broker.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from typing import Protocol

import msgspec


class HandledEvents(Protocol):
    """Says which events were handled. Keep it where the effects of handling are kept, in the same
    transaction, and every event has its effect exactly once."""

    def has(self, offset: int) -> bool: ...

    def add(self, offset: int) -> None:
        """Remembers the offset, durably."""
        ...


class _Handled(msgspec.Struct):
    """Ranges of handled offsets, each from its first to before its second number, in order."""

    ranges: list[tuple[int, int]] = []


class PositionFile:
    """Keeps the handled offsets in a small file, which is replaced as a whole.

    If the program stops between the effect of an event and `add`, the event is handled again. Use a
    position of your own, in the database of the effects, where that must not happen.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        try:
            with open(self._path, "rb") as file:
                self.ranges = msgspec.json.decode(file.read(), type=_Handled).ranges
        except FileNotFoundError:
            self.ranges = []

    def has(self, offset: int) -> bool:
        at = bisect_right(self.ranges, offset, key=_first)
        return at > 0 and offset < self.ranges[at - 1][1]

    def add(self, offset: int) -> None:
        if self.has(offset):
            return
        ranges = self.ranges
        at = bisect_right(ranges, offset, key=_first)
        first, end = offset, offset + 1
        if at < len(ranges) and ranges[at][0] == end:
            end = ranges.pop(at)[1]
        if at > 0 and ranges[at - 1][1] == first:
            at -= 1
            first = ranges.pop(at)[0]
        ranges.insert(at, (first, end))
        self._save()

    def _save(self) -> None:
        data = msgspec.json.encode(_Handled(self.ranges))
        temporary = f"{self._path}.new"
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self._path)
        directory = os.open(os.path.dirname(os.path.abspath(self._path)), os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def _first(handled: tuple[int, int]) -> int:
    return handled[0]
