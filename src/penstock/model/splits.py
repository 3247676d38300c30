"""Splits of a range as asked for, and as answered: how the work of reading it is shared out."""

from __future__ import annotations

import msgspec

from penstock.model.limits import MAX_OFFSET

SPLIT_ROWS = 131_072
"""Rows of a split when nothing is said: two whole batches of history."""

MAX_SPLIT_ROWS = 10_000_000

MAX_SPLITS = 10_000
"""Splits of one answer; who wants more asks again from its `next`."""


class SplitRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Offsets from `start` to before `end`; None: from the oldest, to what is there now. At most
    `rows` in each split, and `max_rows` in all. `topic_id`: of that topic only, not of one that was
    made later under its name."""

    topic: str
    partition: int
    topic_id: int | None = None
    start: int | None = None
    end: int | None = None
    rows: int = SPLIT_ROWS
    max_rows: int = MAX_OFFSET


class Split(msgspec.Struct, frozen=True, gc=False):
    """The range from `start` to before `end` has so many rows."""

    start: int
    end: int
    rows: int


class Splits(msgspec.Struct, frozen=True):
    """Neighbouring ranges in order. All up to `next` is in them, or has no rows."""

    splits: list[Split]
    next: int
