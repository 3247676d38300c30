"""Ranges of a partition as asked for, and what can be said of its offsets."""

from __future__ import annotations

from typing import Literal

import msgspec

from penstock.model.limits import MIB

RangeFormat = Literal["arrow", "ndjson"]

RowBytes = bytes | memoryview
"""Rows in their format."""


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """Which rows and columns of a range are wanted. No columns: all. The times are in ms, `to_ms`
    not included."""

    columns: tuple[str, ...] = ()
    tenant_id: str = ""
    run_id: str = ""
    from_ms: int | None = None
    to_ms: int | None = None

    def texts(self) -> dict[str, str]:
        """Columns that must have a certain text, and that text."""
        values = msgspec.structs.asdict(self).items()
        return {name: value for name, value in values if isinstance(value, str) and value}


EVERYTHING = Selection()


class RangeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Offsets from `start` to before `end`; None: from the oldest, to what is there now. With
    `omit_nulls` columns that are known to be null in all of the range are left out. `topic_id`: of
    that topic only, not of one that was made later under its name."""

    topic: str
    partition: int
    topic_id: int | None = None
    start: int | None = None
    end: int | None = None
    selection: Selection = EVERYTHING
    format: RangeFormat = "arrow"
    omit_nulls: bool = False


class OffsetReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """`earliest` is the oldest offset kept; `next` the one after the newest message. `at_time` is
    the first of the time asked for or later, which is `next` if there is none yet."""

    partition: int
    earliest: int
    next: int
    at_time: int | None = None


class TopicOffsets(msgspec.Struct, frozen=True):
    """A topic that is deleted and made again has another `topic_id`."""

    topic_id: int
    partitions: list[OffsetReport]


class NamedOffsets(msgspec.Struct, frozen=True):
    topic: str
    topic_id: int
    partitions: list[OffsetReport]


class OffsetsPage(msgspec.Struct, frozen=True, omit_defaults=True):
    """Of topics in the order of their names; there are more behind `after` if it is there."""

    topics: list[NamedOffsets]
    after: str | None = None


PIECE_BYTES = 2 * MIB
"""Most bytes of a piece of a range, unless a single row is larger: it stays in memory until its
reader has taken it."""

PAGE_PARTITIONS = 4096
"""What a page of topics has at most; several times what one topic may have."""
