"""The source: batch and streaming readers, as Spark calls them.

Who runs what: Spark makes a reader on the driver for every batch query, asks it for `partitions`
once, and sends a copy of it to each task, which calls `read`. A stream's reader lives as long as
its query in a process beside the driver, which plans every micro-batch with it; another copy of it
goes to the tasks. So `read` uses nothing but what was there when the reader was made.

Invariant: a micro-batch is fixed by its two offsets; planned again after a crash, it has the same
rows or fails. Hence a topic that appears is first put into the offsets, and read with the batch
after: where it was begun stands in the checkpoint before a row of it is read. One that is deleted
and made again is such a topic, and the old one a loss. The offsets also say which named topics are
gone, so that a query that is started again tells them from names that were never right.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from penstock.model.errors import NotFound, OutOfRange, PenstockError
from penstock.spark.broker import Broker
from penstock.spark.logs import (
    Positions,
    SourceLog,
    Spans,
    TopicPartition,
    log_of,
    publish,
    span_of,
)
from penstock.spark.losses import Losses
from penstock.spark.options import SourceSettings
from penstock.spark.planning import (
    Ranges,
    TaskSlice,
    ending,
    find_spans,
    limited,
    slices,
    starting,
    tasks,
)
from penstock.spark.reading import RowRequest, read
from penstock.spark.schemas import check

_log = logging.getLogger("penstock.spark")
_GONE = "gone"


@dataclass
class Task(InputPartition):
    """What one task reads."""

    slices: tuple[TaskSlice, ...]


def _read(request: RowRequest, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    """Spark makes a partition of its own where there is nothing to read."""
    return read(request, partition.slices if isinstance(partition, Task) else ())


def _tasks(broker: Broker, ranges: Ranges, settings: SourceSettings) -> list[Task]:
    found = slices(broker, ranges, settings)
    return [Task(each) for each in tasks(found, settings.min_partitions)]


class BatchReader(DataSourceReader):
    """spark.read.format("penstock")"""

    def __init__(self, settings: SourceSettings, schema: StructType) -> None:
        check(settings.log, schema)
        self._settings = settings
        self._request = RowRequest(settings, schema)

    def partitions(self) -> Sequence[InputPartition]:
        with Broker(self._settings) as broker:
            ranges = self._ranges(log_of(broker, self._settings))
            return _tasks(broker, ranges, self._settings)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(self._request, partition)

    def _ranges(self, log: SourceLog) -> Ranges:
        spans = find_spans(log)
        starts = starting(log, self._settings, spans)
        ends = ending(log, self._settings, spans)
        return {place: (starts[place], ends[place]) for place in spans}


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """spark.readStream.format("penstock")"""

    def __init__(self, settings: SourceSettings, schema: StructType) -> None:
        check(settings.log, schema)
        self._settings = settings
        self._request = RowRequest(settings, schema)
        self._broker = Broker(settings)
        self._log = log_of(self._broker, settings)
        self._losses = Losses.of(settings)
        self._target: Spans | None = None
        self._latest: dict[str, Any] | None = None
        self._missing: set[str] = set()
        self._told: Positions = {}
        self._untold = ""

    # -- in the process beside the driver ------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        return self._offset(starting(self._log, self._settings, find_spans(self._log)))

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        most = self._settings.max_rows_per_trigger
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """What is missing is judged when the query looks, at what it knows by then."""
        self._target = {}
        for spans in self._log.spans_of(self._log.find()).values():
            if not isinstance(spans, NotFound):
                self._target |= spans

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """`start` is the end of what Spark has committed."""
        done = self._log.decode(start)
        self._missing.update(start.get(_GONE, ()))
        spans = self._spans(done)
        done = _identified(done, spans)
        self._tell_group(done)
        self._latest = self._offset({place: span.next for place, span in spans.items()})
        ends, ranges = self._next_batch(done, spans)
        if isinstance(limit, ReadMaxRows):
            try:
                ends |= limited(self._broker, ranges, limit.max_rows)
            except (OutOfRange, NotFound):
                if self._what_is_left(ranges) == ranges:
                    raise
                return self.latestOffset(start, limit)
        is_news = ends != self._log.decode(start) or self._gone != start.get(_GONE, [])
        return self._offset(ends) if is_news else start

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        return self._latest

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        ends = self._log.decode(end)
        self._missing.update(end.get(_GONE, ()))
        starts = _identified(self._log.decode(start), ends)
        ranges = {
            place: (starts[place], ends[place])
            for place in ends
            if starts.get(place, ends[place]) < ends[place]
        }
        while True:
            try:
                return _tasks(self._broker, ranges, self._settings)
            except (OutOfRange, NotFound):
                left = self._what_is_left(ranges)
                if left == ranges:
                    raise
                ranges = left

    def stop(self) -> None:
        self._broker.close()

    # -- on the executors ----------------------------------------------------------------------

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(self._request, partition)

    # -- planning ------------------------------------------------------------------------------

    def _offset(self, positions: Positions) -> dict[str, Any]:
        offset = self._log.encode(positions)
        if self._gone:
            offset |= {_GONE: self._gone}
        if self._settings.group:
            offset |= {"group": self._settings.group, "url": self._settings.url}
        return offset

    def _spans(self, done: Positions) -> Spans:
        """Of the topics there are now. One that was read before and is gone is a loss."""
        found: Spans = {}
        known = {place.topic for place in done}
        there = self._log.find()
        for topic, spans in self._log.spans_of(there).items():
            if not isinstance(spans, NotFound):
                found |= spans
                self._missing.discard(topic)
                continue
            is_named = self._log.is_named(topic)
            if is_named and self._fails and topic not in known | self._missing:
                raise spans
            if is_named or topic in known:
                self._is_gone(topic, done)
        for topic in known.difference(there):
            if self._log.is_wanted(topic):
                self._is_gone(topic, done)
        return found

    @property
    def _gone(self) -> list[str]:
        return sorted(filter(self._log.is_named, self._missing))

    @property
    def _fails(self) -> bool:
        return self._settings.fail_on_data_loss

    def _is_gone(self, topic: str, done: Positions) -> None:
        if topic not in self._missing:
            unread = {place: at for place, at in sorted(done.items()) if place.topic == topic}
            self._losses.deleted(f"topic {topic!r}", unread)
            self._missing.add(topic)

    def _next_batch(self, done: Positions, spans: Spans) -> tuple[Positions, Ranges]:
        """The ends of a batch without a limit, and the ranges of it that have rows."""
        ends: Positions = {}
        ranges: Ranges = {}
        last = spans if self._target is None else self._target
        for place, span in spans.items():
            if place not in done:
                if place in last:
                    ends[place] = span.earliest
                continue
            start, end = self._losses.between(place, done[place], span.next, span, is_looking=True)
            if start < done[place]:
                ends[place] = start  # begun anew, and read with the next batch
                continue
            end = min(end, last[place].next) if place in last else start
            ends[place] = max(start, end)
            ranges[place] = (start, ends[place])
        self._say_replaced({place: at for place, at in done.items() if place not in spans}, spans)
        return ends, ranges

    def _say_replaced(self, lost: Positions, spans: Spans) -> None:
        """Of places that are not there any more: which topics were made again."""
        for topic in sorted({place.topic for place in lost} & {place.topic for place in spans}):
            unread = {place: at for place, at in lost.items() if place.topic == topic}
            self._losses.replaced(topic, unread)

    def _what_is_left(self, ranges: Ranges) -> Ranges:
        """Of ranges some of which the broker does not have any more."""
        left: Ranges = {}
        starts = {place: start for place, (start, _) in ranges.items()}
        spans = self._spans(starts)
        lost = {place: at for place, at in starts.items() if span_of(spans, place) is None}
        self._say_replaced(lost, spans)
        for place, (start, end) in ranges.items():
            span = span_of(spans, place)
            if span is None:
                continue
            kept = self._losses.between(place, start, end, span)
            if kept[1] == end:
                left[place] = kept
        return left

    def _tell_group(self, done: Positions) -> None:
        """Lag and retention at the broker follow the query; it does not depend on them."""
        news = {place: at for place, at in done.items() if self._told.get(place) != at}
        if not self._settings.group or not news:
            return
        try:
            publish(self._broker, self._settings.group, news)
        except PenstockError as error:
            if error.message != self._untold:
                _log.warning("progress of group %s is not told: %s", self._settings.group, error)
            self._untold = error.message
            if error.retryable:
                return
        self._told = done


def _identified(positions: Positions, known: Iterable[TopicPartition]) -> Positions:
    """The same, where topics have no id with that of those known: a checkpoint of an older version
    tells none."""
    by_name = {place.by_name(): place for place in known}
    return {
        place if place.topic_id else by_name.get(place, place): at
        for place, at in positions.items()
    }
