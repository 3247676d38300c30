"""Ranges of a partition: requests for rows, and reports of offsets."""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

from penstock.model.limits import MIB

RangeFormat = Literal["arrow", "ndjson"]

RowBytes = bytes | memoryview
"""Encoded rows."""


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """The rows and columns of a range to read. No columns means all. Times are in ms, and `to_ms`
    is exclusive. `null_means` has the text that a null in a column stands for."""

    null_means: ClassVar[dict[str, str]] = {}

    columns: tuple[str, ...] = ()
    tenant_id: str = ""
    run_id: str = ""
    from_ms: int | None = None
    to_ms: int | None = None

    def texts(self) -> dict[str, str]:
        """Returns the columns that must have a certain text, with that text."""
        values = msgspec.structs.asdict(self).items()
        return {name: value for name, value in values if isinstance(value, str) and value}


EVERYTHING = Selection()


class RangeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Offsets from `start` to before `end`. None means the oldest, and the current end.
    `omit_nulls` leaves out columns that are known to be null in the whole range. With `topic_id`,
    only that topic is read, not one that was created later under the same name."""

    topic: str
    partition: int
    topic_id: int | None = None
    start: int | None = None
    end: int | None = None
    selection: Selection = EVERYTHING
    format: RangeFormat = "arrow"
    omit_nulls: bool = False


class OffsetReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """`earliest` is the oldest offset kept; `next` is one past the newest message. `at_time` is the
    first offset at or after the requested time, or `next` if there is none yet."""

    partition: int
    earliest: int
    next: int
    at_time: int | None = None


class TopicOffsets(msgspec.Struct, frozen=True):
    """A topic that is deleted and created again has another `topic_id`."""

    topic_id: int
    partitions: list[OffsetReport]


class NamedOffsets(msgspec.Struct, frozen=True):
    topic: str
    topic_id: int
    partitions: list[OffsetReport]


class OffsetsPage(msgspec.Struct, frozen=True, omit_defaults=True):
    """Topics in the order of their names. If `after` is present, more topics follow that name."""

    topics: list[NamedOffsets]
    after: str | None = None


EVENT_COLUMNS = ("offset", "timestamp", "payload")
"""The columns of a stream's events. Those of messages are null for them."""


class StreamOffsets(msgspec.Struct, frozen=True, omit_defaults=True):
    """The offsets of a durable stream, as in OffsetReport. A stream that is deleted and created
    again has another `stream_id`."""

    stream_id: int
    earliest: int
    next: int
    at_time: int | None = None


PIECE_BYTES = 2 * MIB
"""The size of a piece of a range, unless a single row is larger. A piece stays in memory until its
reader has taken it."""

PAGE_PARTITIONS = 4096
"""The most partitions in a page of topics. It is several times what one topic may have."""
