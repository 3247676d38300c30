"""The journal: reading what happened to messages, and recording how far it is archived."""

from __future__ import annotations

from typing import Protocol

from penstock.api.outcomes import Done
from penstock.api.ranges import Range
from penstock.model.journal import JournalArchive, JournalReport, JournalRequest
from penstock.model.splits import Splits


class JournalPart(Protocol):
    def open(self, request: JournalRequest, done: Done[Range]) -> None: ...

    def offsets(self, fresh: bool, time_ms: int | None, done: Done[JournalReport]) -> None:
        """Gives the positions that can be read. With `fresh` they include everything that was
        durable at the time of the call."""
        ...

    def set_archived(self, next_: int, done: Done[JournalArchive]) -> None:
        """Records that everything below position `next_` is archived elsewhere."""
        ...

    def splits(
        self, start: int | None, end: int | None, rows: int, max_rows: int, done: Done[Splits]
    ) -> None:
        """Divides a range into parts that several readers can share."""
        ...
