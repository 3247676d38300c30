"""The batch and streaming readers of format("penstock"), as Spark calls them.

Spark makes a reader on the driver for every batch query, calls its `partitions` once, and sends a
copy of it to each task, which calls `read`. The reader of a stream lives as long as its query, in a
process beside the driver which plans every micro-batch with it; another copy goes to the tasks. So
`read` uses only what was there when the reader was made.

Invariant: a micro-batch is fixed by its two offsets. Planned again after a crash, it has the same
rows or fails. So a new topic is first added to the offsets and read with the batch after: its start
is in the checkpoint before any of its rows is read. A topic that is deleted and made again is a new
topic, and the old one is a loss. The offsets also name the topics that are gone, so that a
restarted query can tell them from names that never existed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from penstock.spark.broker import BrokerConnection
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
    """The slices that one task reads."""

    slices: tuple[TaskSlice, ...]


def _read(request: RowRequest, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    """Reads the slices of a task. Without any, Spark makes a partition of another class."""
    return read(request, partition.slices if isinstance(partition, Task) else ())


def _tasks(broker: BrokerConnection, ranges: Ranges, settings: SourceSettings) -> list[Task]:
    found = slices(broker, ranges, settings)
    return [Task(each) for each in tasks(found, settings.min_partitions)]


class BatchReader(DataSourceReader):
    """spark.read.format("penstock")"""

    def __init__(self, settings: SourceSettings, schema: StructType) -> None:
        check(settings.log, schema)
        self._settings = settings
        self._request = RowRequest(settings, schema)

    def partitions(self) -> Sequence[InputPartition]:
        with BrokerConnection(self._settings) as broker:
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
        self._broker = BrokerConnection(settings)
        self._log = log_of(self._broker, settings)
        self._losses = Losses.of(settings)
        self._target: Spans | None = None
        self._latest: dict[str, Any] | None = None
        self._missing: set[str] = set()
        self._published: Positions = {}
        self._last_failure = ""

    # -- in the process beside the driver ------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        return self._offset(starting(self._log, self._settings, find_spans(self._log)))

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        most = self._settings.max_rows_per_trigger
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Fixes where the query ends. Missing topics are handled when it plans a batch."""
        self._target = {}
        for spans in self._log.spans_of(self._log.find()).values():
            if not isinstance(spans, NotFound):
                self._target |= spans

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Plans the next batch and returns its end. `start` is where the last one ended."""
        done = self._decode(start)
        self._missing.update(start.get(_GONE, ()))
        spans = self._spans(done)
        done = _identified(done, spans)
        self._publish_progress(done)
        self._latest = self._offset({place: span.next for place, span in spans.items()})
        ends, ranges = self._next_batch(done, spans)
        if isinstance(limit, ReadMaxRows):
            try:
                ends |= limited(self._broker, ranges, limit.max_rows)
            except (OutOfRange, NotFound):
                if self._remaining(ranges) == ranges:
                    raise
                return self.latestOffset(start, limit)
        has_changed = ends != self._decode(start) or self._gone != start.get(_GONE, [])
        return self._offset(ends) if has_changed else start

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        return self._latest

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        ends = self._decode(end)
        self._missing.update(end.get(_GONE, ()))
        starts = _identified(self._decode(start), ends)
        ranges = {
            place: (starts[place], ends[place])
            for place in ends
            if starts.get(place, ends[place]) < ends[place]
        }
        while True:
            try:
                return _tasks(self._broker, ranges, self._settings)
            except (OutOfRange, NotFound):
                left = self._remaining(ranges)
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
        return offset | self._settings.named_scope()

    def _decode(self, offset: Mapping[str, Any]) -> Positions:
        self._settings.check_scope(offset)
        return self._log.decode(offset)

    def _spans(self, done: Positions) -> Spans:
        """Returns the spans of the topics that exist. One that was read and is gone is a loss."""
        found: Spans = {}
        known = {place.topic for place in done}
        there = self._log.find()
        for topic, spans in self._log.spans_of(there).items():
            if not isinstance(spans, NotFound):
                found |= spans
                self._missing.discard(topic)
                continue
            is_named = self._log.is_named(topic)
            fails = self._settings.fail_on_data_loss
            if is_named and fails and topic not in known | self._missing:
                raise spans
            if is_named or topic in known:
                self._report_deleted(topic, done)
        for topic in known.difference(there):
            if self._log.is_wanted(topic):
                self._report_deleted(topic, done)
        return found

    @property
    def _gone(self) -> list[str]:
        return sorted(filter(self._log.is_named, self._missing))

    def _report_deleted(self, topic: str, done: Positions) -> None:
        if topic not in self._missing:
            unread = {place: at for place, at in sorted(done.items()) if place.topic == topic}
            self._losses.deleted(f"{self._settings.noun} {topic!r}", unread)
            self._missing.add(topic)

    def _next_batch(self, done: Positions, spans: Spans) -> tuple[Positions, Ranges]:
        """Returns where a batch without a limit ends, and the ranges in it that have rows."""
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
                ends[place] = start  # starts again, and is read with the next batch
                continue
            end = min(end, last[place].next) if place in last else start
            ends[place] = max(start, end)
            ranges[place] = (start, ends[place])
        self._report_replaced(
            {place: at for place, at in done.items() if place not in spans}, spans
        )
        return ends, ranges

    def _report_replaced(self, lost: Positions, spans: Spans) -> None:
        """Reports topics that were deleted and made again, of partitions that no longer exist."""
        for topic in sorted({place.topic for place in lost} & {place.topic for place in spans}):
            unread = {place: at for place, at in lost.items() if place.topic == topic}
            self._losses.replaced(topic, unread)

    def _remaining(self, ranges: Ranges) -> Ranges:
        """Returns what the broker still has of the ranges."""
        left: Ranges = {}
        starts = {place: start for place, (start, _) in ranges.items()}
        spans = self._spans(starts)
        lost = {place: at for place, at in starts.items() if span_of(spans, place) is None}
        self._report_replaced(lost, spans)
        for place, (start, end) in ranges.items():
            span = span_of(spans, place)
            if span is None:
                continue
            kept = self._losses.between(place, start, end, span)
            if kept[1] == end:
                left[place] = kept
        return left

    def _publish_progress(self, done: Positions) -> None:
        """Publishes the progress of the group. A failure is logged and does not stop the query."""
        changed = {place: at for place, at in done.items() if self._published.get(place) != at}
        if not self._settings.group or not changed:
            return
        try:
            publish(self._broker, self._settings.group, changed)
        except PenstockError as error:
            if error.message != self._last_failure:
                _log.warning(
                    "progress of group %s is not published: %s", self._settings.group, error
                )
            self._last_failure = error.message
            if error.retryable:
                return
        self._published = done


def _identified(positions: Positions, known: Iterable[TopicPartition]) -> Positions:
    """Adds topic ids to positions that have none, as those in a checkpoint of an older version."""
    by_name = {place.by_name(): place for place in known}
    return {
        place if place.topic_id else by_name.get(place, place): at
        for place, at in positions.items()
    }
