"""Filters of a batch query that the broker can apply, so that it sends fewer rows.

Invariant: a pushed filter never removes a row that the query wants. It may keep others: all filters
are handed back to Spark, which checks every row again. This is a separate reader because Spark
refuses a reader with filters unless `spark.sql.python.filterPushdown.enabled` is set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.types import StructType

from penstock.model.journal import RESOURCE_KINDS
from penstock.spark.bounds import LogName
from penstock.spark.logs import SourceLog, TopicPartition
from penstock.spark.options import SourceSettings
from penstock.spark.planning import Ranges, at_time
from penstock.spark.schemas import position_column
from penstock.spark.source import BatchReader

_EXACT: dict[LogName, frozenset[str]] = {
    "records": frozenset({"tenant_id", "run_id"}),
    "events": frozenset(),
    "journal": frozenset({"tenant_id", "run_id", "kind", "topic", "group", "resource_kind"}),
}
"""Columns that the broker can compare with one value."""

_RESOURCE = frozenset({"topic", "resource_kind"})
"""Columns of the journal that only together name what a row is about."""

NAME_COLUMNS: dict[LogName, str] = {"records": "topic", "events": "stream"}

_MAX_MS = 2**53 - 1
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Interval:
    """Numbers from `low` to `high`, both included. None means no limit."""

    low: int | None = None
    high: int | None = None

    def cut(self, other: Interval) -> Interval:
        lows = [low for low in (self.low, other.low) if low is not None]
        highs = [high for high in (self.high, other.high) if high is not None]
        return Interval(max(lows, default=None), min(highs, default=None))

    def holds(self, number: int) -> bool:
        return (self.low is None or self.low <= number) and (
            self.high is None or number <= self.high
        )


EVERYTHING = Interval()


class PushdownReader(BatchReader):
    """spark.read.format("penstock").option("pushdown", True)"""

    def __init__(self, settings: SourceSettings, schema: StructType) -> None:
        super().__init__(settings, schema)
        self._positions = EVERYTHING
        self._times_ms = EVERYTHING
        self._partitions = EVERYTHING
        self._topics: frozenset[str] | None = None

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        """Takes the filters that the broker can apply. Spark calls this on the driver, once, before
        `partitions`."""
        exact: dict[str, str | int] = {}
        for given in filters:
            column = ".".join(getattr(given, "attribute", ()))
            log = self._settings.log
            if column in _EXACT[log]:
                exact |= _wanted_value(column, given)
            if column == position_column(log):
                self._positions = self._positions.cut(_interval(given, _number))
            elif column == "timestamp":
                self._times_ms = self._times_ms.cut(_interval(given, _milliseconds))
            elif column == "partition" and log == "records":
                self._partitions = self._partitions.cut(_interval(given, _number))
            elif column == NAME_COLUMNS.get(log):
                self._topics = _cut_names(self._topics, given)
        if self._settings.log == "journal":
            exact = _with_resource(exact)
        if self._settings.log == "journal" and self._times_ms.high is not None:
            # Times in the journal may go back a little, so a time is not a position there.
            exact["to_ms"] = max(0, self._times_ms.high + 1)
        self._request = replace(self._request, filters=exact)
        return filters

    def _ranges(self, log: SourceLog) -> Ranges:
        ranges = {
            place: self._narrowed(bounds)
            for place, bounds in super()._ranges(log).items()
            if self._may_want(place)
        }
        return self._narrowed_by_time(log, ranges)

    def _may_want(self, place: TopicPartition) -> bool:
        is_named = self._topics is None or place.topic in self._topics
        return is_named and self._partitions.holds(place.partition)

    def _narrowed(self, bounds: tuple[int, int]) -> tuple[int, int]:
        low, high = self._positions.low, self._positions.high
        start, end = bounds
        start = start if low is None else max(start, low)
        return start, end if high is None else min(end, high + 1)

    def _narrowed_by_time(self, log: SourceLog, ranges: Ranges) -> Ranges:
        """Turns times into positions, which is exact because times never go back in a partition."""
        low, high = self._times_ms.low, self._times_ms.high
        if low is not None and low > 0:
            begins = at_time(log, ranges, min(low, _MAX_MS))
            ranges = {place: (max(a, begins[place]), b) for place, (a, b) in ranges.items()}
        if high is not None and self._settings.log != "journal":
            ends = at_time(log, ranges, min(max(high + 1, 0), _MAX_MS))
            ranges = {place: (a, min(b, ends[place])) for place, (a, b) in ranges.items()}
        return ranges


def _interval(given: Filter, number: Callable[[Any], int | None]) -> Interval:
    """Returns an interval as wide as the filter, or wider."""
    if isinstance(given, In):
        numbers = [number(value) for value in given.value if value is not None]
        if not numbers or None in numbers:
            return EVERYTHING
        known = [value for value in numbers if value is not None]
        return Interval(min(known), max(known))
    value = number(getattr(given, "value", None))
    if isinstance(given, EqualTo | EqualNullSafe):
        return Interval(value, value)
    if isinstance(given, GreaterThan | GreaterThanOrEqual):
        return Interval(low=value)
    if isinstance(given, LessThan | LessThanOrEqual):
        return Interval(high=value)
    return EVERYTHING


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _milliseconds(value: object) -> int | None:
    """Returns whole milliseconds, as the broker keeps time; None for a time without a zone."""
    if not isinstance(value, datetime) or value.tzinfo is None:
        return None
    return (value - _EPOCH) // timedelta(milliseconds=1)


def _wanted_value(column: str, given: Filter) -> dict[str, str]:
    is_equality = isinstance(given, EqualTo | EqualNullSafe)
    value = getattr(given, "value", None)
    return {column: value} if is_equality and isinstance(value, str) and value else {}


def _with_resource(exact: dict[str, str | int]) -> dict[str, str | int]:
    """Asks for a topic or a stream by its name if the query says which. A name alone is not asked
    for: the rows of both may have it."""
    others = {name: value for name, value in exact.items() if name not in _RESOURCE}
    kind, name = exact.get("resource_kind"), exact.get("topic")
    if kind not in RESOURCE_KINDS:
        return others
    return others | ({"resource_kind": kind} if name is None else {str(kind): name})


def _cut_names(names: frozenset[str] | None, given: Filter) -> frozenset[str] | None:
    if isinstance(given, EqualTo | EqualNullSafe):
        wanted = frozenset({given.value})
    elif isinstance(given, In):
        wanted = frozenset(given.value)
    else:
        return names
    return wanted if names is None else names & wanted
