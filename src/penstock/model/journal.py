"""The journal: kinds of events, requests for ranges of it, and reports."""

from __future__ import annotations

from typing import ClassVar, Final

import msgspec

from penstock.model.access import ResourceKind, VisibleTopics
from penstock.model.ranges import RangeFormat, Selection
from penstock.model.tenancy import DEFAULT

PRODUCED = "produced"
DELIVERED = "delivered"
RETURNED = "returned"
"""A delivery that was not handled: it was never sent, or its owner released it. Its attempt does
not count."""
ACKED = "acked"
NACKED = "nacked"
TIMED_OUT = "timed_out"
DEAD_LETTERED = "dead_lettered"
SKIPPED = "skipped"
"""Finished without a delivery, because its effect was committed already."""

KINDS = (PRODUCED, DELIVERED, RETURNED, ACKED, NACKED, TIMED_OUT, DEAD_LETTERED, SKIPPED)

TOPIC: Final = "topic"
STREAM: Final = "stream"
RESOURCE_KINDS: tuple[ResourceKind, ...] = (TOPIC, STREAM)
"""The resource that a row is about. A stream's name is in the column `topic`."""


class JournalSelection(Selection, frozen=True, kw_only=True):
    """The rows and columns of the journal to read. `topic` is the name of a topic or of a stream,
    as `resource_kind` says; without that, of either. `visible` limits the rows to those of some
    topics and streams."""

    null_means: ClassVar[dict[str, str]] = {"tenant": DEFAULT, "namespace": DEFAULT}

    kind: str = ""
    topic: str = ""
    group: str = ""
    resource_kind: str = ""
    visible: VisibleTopics | None = None
    tenant: str = ""
    namespace: str = ""


class JournalRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Positions from `start` to before `end`. None means the oldest, and the end of what is
    readable now."""

    start: int | None = None
    end: int | None = None
    selection: JournalSelection = JournalSelection()
    format: RangeFormat = "arrow"


class JournalReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """Every row from position `earliest` to before `next` can be read. `at_time` is the first
    position at or after the requested time, or `next` if there is none yet. `archived` is the
    position that the archive has reported, absent if it never did."""

    earliest: int
    next: int
    at_time: int | None = None
    archived: int | None = None


class JournalArchive(msgspec.Struct, frozen=True):
    """Every row below position `next` is archived elsewhere."""

    next: int
