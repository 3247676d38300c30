"""Ranges: reading stored messages as often as needed, without a lease."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from penstock.api.outcomes import Done
from penstock.model.errors import PenstockError
from penstock.model.ranges import OffsetsPage, RangeRequest, RowBytes, TopicOffsets
from penstock.model.scopes import Scope
from penstock.model.splits import SplitRequest, Splits


class Range(Protocol):
    """A range that is being read. `head`, all pieces and `tail` are one stream of bytes."""

    head: bytes
    tail: bytes

    def is_over(self) -> bool:
        """Returns whether all pieces were given."""
        ...

    def next(self, got: Callable[[RowBytes | PenstockError | None], None]) -> None:
        """Gives the next piece, None after the last, or the error that ends the read."""
        ...


class RangesPart(Protocol):
    def open(self, request: RangeRequest, done: Done[Range]) -> None:
        """Fixes a range of a partition for reading."""
        ...

    def offsets(self, name: str, time_ms: int | None, done: Done[TopicOffsets]) -> None:
        """Gives the first and the next offset of each partition, and the first at or after
        `time_ms` if that is given."""
        ...

    def all_offsets(self, scope: Scope, after: str, done: Done[OffsetsPage]) -> None:
        """Gives the offsets of the scope's topics whose names follow `after`, a page at a time."""
        ...

    def splits(self, request: SplitRequest, done: Done[Splits]) -> None:
        """Divides a range into parts that several readers can share."""
        ...
