"""The journal as asked for: what can happen to messages, what of it is wanted, how far it goes."""

from __future__ import annotations

import msgspec

from penstock.model.ranges import RangeFormat, Selection

PRODUCED = "produced"
DELIVERED = "delivered"
RETURNED = "returned"
"""A delivery that nobody began to handle: it never left, or its owner released it. Its attempt
does not count."""
ACKED = "acked"
NACKED = "nacked"
TIMED_OUT = "timed_out"
DEAD_LETTERED = "dead_lettered"
SKIPPED = "skipped"
"""Finished without a delivery: what it was for had been committed."""

KINDS = (PRODUCED, DELIVERED, RETURNED, ACKED, NACKED, TIMED_OUT, DEAD_LETTERED, SKIPPED)


class JournalSelection(Selection, frozen=True, kw_only=True):
    """Which rows and columns of the journal are wanted."""

    kind: str = ""
    topic: str = ""
    group: str = ""


class JournalRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Positions from `start` to before `end`; None: from the oldest, to what is readable now."""

    start: int | None = None
    end: int | None = None
    selection: JournalSelection = JournalSelection()
    format: RangeFormat = "arrow"


class JournalReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """Every row from position `earliest` to before `next` can be read. `at_time` is the first
    position of the time asked for or later, which is `next` if there is none yet. `archived` is
    how far the archive said it has come; not there, if it never did."""

    earliest: int
    next: int
    at_time: int | None = None
    archived: int | None = None


class JournalArchive(msgspec.Struct, frozen=True):
    """Every row below position `next` is archived elsewhere."""

    next: int
