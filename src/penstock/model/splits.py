"""Splits of a range: the request, and the parts in which readers share the work."""

from __future__ import annotations

import msgspec

from penstock.model.limits import MAX_OFFSET

SPLIT_ROWS = 131_072
"""The default number of rows in a split: two whole batches of history."""

MAX_SPLIT_ROWS = 10_000_000

MAX_SPLITS = 10_000
"""Splits of one answer. For more, ask again from its `next`."""


class SplitRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Offsets from `start` to before `end`. None means the oldest, and the current end. At most
    `rows` in each split, and `max_rows` in all. With `topic_id`, only that topic is read, not one
    that was created later under the same name."""

    topic: str
    partition: int
    topic_id: int | None = None
    start: int | None = None
    end: int | None = None
    rows: int = SPLIT_ROWS
    max_rows: int = MAX_OFFSET


class Split(msgspec.Struct, frozen=True, gc=False):
    """The range from `start` to before `end`, with `rows` rows."""

    start: int
    end: int
    rows: int


class Splits(msgspec.Struct, frozen=True):
    """Consecutive ranges. Together they hold every row below `next`."""

    splits: list[Split]
    next: int
