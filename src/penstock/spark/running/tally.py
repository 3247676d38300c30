"""Counts how many rows a query has read, and how many it has still to read.

Spark counts the rows that its sources give, which is too much if it evaluates a batch more than
once. Positions at the broker have gaps. So this module asks the broker how many rows there are
between two positions; if the broker cannot say, it takes Spark's count.

Spark's listener adds progress and must not wait; `settle` asks the broker, on another thread.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from penstock.model.errors import PenstockError
from penstock.model.splits import MAX_SPLIT_ROWS
from penstock.model.tenancy import DEFAULT
from penstock.spark.broker import BrokerConnection
from penstock.spark.logs import (
    JOURNAL,
    JournalLog,
    Positions,
    RecordLog,
    SourceLog,
    TopicPartition,
    splits,
)
from penstock.spark.options import BrokerSettings
from penstock.spark.planning import find_spans


@dataclass
class _Stretch:
    """The rows that a source has read since the last `settle`. `start` is None from the beginning
    of the log. `rows` counts them as Spark reports them."""

    start: Positions | None
    end: Positions | None
    latest: Positions | None
    rows: int = 0


class Tally:
    def __init__(self) -> None:
        self._settled = 0
        self._lag: int | None = None
        self._stretches: dict[int, _Stretch] = {}
        self._lock = threading.Lock()

    @property
    def rows(self) -> int:
        with self._lock:
            return self._settled + sum(each.rows for each in self._stretches.values())

    @property
    def lag(self) -> int | None:
        return self._lag

    def add(self, sources: list[Any]) -> None:
        """Adds a committed batch, as Spark reports its sources."""
        with self._lock:
            for number, source in enumerate(sources):
                end = positions(source.endOffset)
                stretch = self._stretches.get(number)
                if stretch is None:
                    stretch = _Stretch(positions(source.startOffset), end, None)
                    self._stretches[number] = stretch
                stretch.end = end
                stretch.latest = positions(source.latestOffset)
                stretch.rows += max(0, source.numInputRows)

    def settle(self, settings: BrokerSettings) -> None:
        """Asks the broker for the rows of what was added since the last call, and for the lag."""
        with self._lock:
            taken = {number: replace(each) for number, each in self._stretches.items()}
        lags: list[int | None] = []
        # Tries once only: a count is not worth waiting for.
        with BrokerConnection(replace(settings, retry_s=0)) as broker:
            for number, stretch in taken.items():
                self._enter(number, stretch, _rows(broker, stretch))
                lags.append(_lag(broker, stretch))
        known = [lag for lag in lags if lag is not None]
        self._lag = sum(known) if known else None

    def _enter(self, number: int, stretch: _Stretch, rows: int) -> None:
        with self._lock:
            self._settled += rows
            self._stretches[number].rows -= stretch.rows
            self._stretches[number].start = stretch.end


def positions(offset: str | None) -> Positions | None:
    """Returns the positions in a Spark offset of a Penstock source. None for other sources, or
    without an offset."""
    try:
        known = json.loads(offset or "null")
    except ValueError:
        return None
    if not isinstance(known, dict):
        return None
    if isinstance(known.get("journal"), int):
        return {JOURNAL: known["journal"]}
    events = known.get("events")
    if isinstance(events, dict):
        scope = (known.get("tenant", DEFAULT), known.get("namespace", DEFAULT))
        return {TopicPartition(each, 0, 0, scope): at for each, at in events.items()}
    records = known.get("records")
    if not isinstance(records, dict):
        return None
    return {
        TopicPartition(topic, int(partition)): position
        for topic, partitions in records.items()
        for partition, position in partitions.items()
    }


def _rows(broker: BrokerConnection, stretch: _Stretch) -> int:
    if not stretch.rows or stretch.end is None:
        return stretch.rows
    try:
        start = _earliest(broker, stretch.end) if stretch.start is None else stretch.start
        return min(stretch.rows, _between(broker, start, stretch.end))
    except PenstockError:
        return stretch.rows  # the broker is away, or no longer has the rows


def _lag(broker: BrokerConnection, stretch: _Stretch) -> int | None:
    if stretch.end is None or stretch.latest is None:
        return None
    try:
        return _between(broker, stretch.end, stretch.latest)
    except PenstockError:
        return None


def _earliest(broker: BrokerConnection, places: Iterable[TopicPartition]) -> Positions:
    topics = {place.topic for place in places}
    log: SourceLog = JournalLog(broker) if topics == {JOURNAL.topic} else RecordLog(broker, topics)
    return {place.by_name(): span.earliest for place, span in find_spans(log).items()}


def _between(broker: BrokerConnection, start: Positions, end: Positions) -> int:
    return sum(
        split.rows
        for place, stop in end.items()
        if start.get(place, stop) < stop
        for split in splits(broker, place, start[place], stop, MAX_SPLIT_ROWS)[0]
    )
