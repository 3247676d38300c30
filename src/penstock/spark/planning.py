"""Plans what is read next, and by how many tasks. Runs on the driver.

Invariant: the slices of a plan cover the wanted ranges without overlap. A limit of rows is exact,
and each partition gets a share of it in proportion to its rows, so that none waits for another.
Must not know Spark's offsets.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from penstock.model.errors import InvalidArgument, NotFound, NotYet
from penstock.model.splits import MAX_SPLIT_ROWS
from penstock.spark.bounds import Bound
from penstock.spark.broker import BrokerConnection
from penstock.spark.logs import JOURNAL, Positions, SourceLog, Spans, TopicPartition, splits
from penstock.spark.losses import Losses
from penstock.spark.options import SourceSettings

SMALL_ROWS = 8192
"""Starting a task costs as much as reading this many rows, so smaller slices share a task."""


@dataclass(frozen=True)
class TaskSlice:
    """Rows of one partition that a task reads: from `start` to before `end`."""

    place: TopicPartition
    start: int
    end: int
    rows: int


Ranges = dict[TopicPartition, tuple[int, int]]


def find_spans(log: SourceLog) -> Spans:
    """Returns the spans of everything to be read. Raises NotFound if a named topic is missing."""
    found: Spans = {}
    for spans in log.spans_of(log.find()).values():
        if isinstance(spans, NotFound):
            raise spans
        found |= spans
    return found


def starting(log: SourceLog, settings: SourceSettings, spans: Spans) -> Positions:
    """Returns where a query that has read nothing yet begins."""
    found = _positions(log, settings.start, "startingOffsets", spans)
    losses = Losses.of(settings)
    return {
        place: losses.between(place, position, spans[place].next, spans[place])[0]
        for place, position in found.items()
    }


def ending(log: SourceLog, settings: SourceSettings, spans: Spans) -> Positions:
    """Returns where a batch read ends."""
    return _positions(log, settings.end, "endingOffsets", spans)


def _positions(log: SourceLog, bound: Bound, option: str, spans: Spans) -> Positions:
    _check_names(bound, option, spans)
    if bound.time_ms is not None:
        found = at_time(log, spans, bound.time_ms)
        return {place: min(found[place], span.next) for place, span in spans.items()}
    found = {}
    for place, span in spans.items():
        usual = span.earliest if bound.default == "earliest" else span.next
        if place == JOURNAL and bound.position is not None:
            found[place] = bound.position
        else:
            found[place] = bound.offsets.get(place.topic, {}).get(place.partition, usual)
        if found[place] > span.next:
            raise NotYet(f"{place} ends at {span.next}; {option} says {found[place]}")
    return found


def at_time(log: SourceLog, places: Iterable[TopicPartition], time_ms: int) -> Positions:
    """Returns the first positions at that time or later."""
    wanted = set(places)
    topics = sorted({place.topic for place in wanted})
    found = {place: at for topic in topics for place, at in log.at_time(topic, time_ms).items()}
    if wanted - found.keys():
        raise NotFound(
            f"{min(wanted - found.keys())} was deleted and made again while the read was planned"
        )
    return {place: found[place] for place in wanted}


def _check_names(bound: Bound, option: str, spans: Spans) -> None:
    topics = {place.topic for place in spans}
    known = {(place.topic, place.partition) for place in spans}
    for topic, partitions in bound.offsets.items():
        if topic not in topics:
            noun = next((place.noun for place in spans), "topic")
            raise InvalidArgument(f"{option} names {noun} {topic!r}, which is not among those read")
        for partition in partitions:
            if (topic, partition) not in known:
                raise InvalidArgument(f"{option}: topic {topic!r} has no partition {partition}")


# -- a limit of rows -------------------------------------------------------------------------------


def limited(broker: BrokerConnection, ranges: Ranges, max_rows: int) -> Positions:
    """Returns where each range ends, so that all of them have at most `max_rows` rows together."""
    has = {
        place: sum(split.rows for split in splits(broker, place, *ends, MAX_SPLIT_ROWS)[0])
        for place, ends in ranges.items()
    }
    if sum(has.values()) <= max_rows:
        return {place: end for place, (_, end) in ranges.items()}
    return {
        place: splits(broker, place, *ranges[place], MAX_SPLIT_ROWS, rows)[1]
        for place, rows in shares(max_rows, has).items()
    }


def shares(limit: int, has: dict[TopicPartition, int]) -> dict[TopicPartition, int]:
    """Divides `limit` in proportion to the rows of each partition, which together have more than
    `limit`. The remainder goes to the partitions that rounding cost most."""
    total = sum(has.values())
    given = {place: limit * rows // total for place, rows in has.items()}
    by_rest = sorted(has, key=lambda place: (-(limit * has[place] % total), place))
    for place in by_rest[: limit - sum(given.values())]:
        given[place] += 1
    return given


# -- tasks -----------------------------------------------------------------------------------------


def slices(broker: BrokerConnection, ranges: Ranges, settings: SourceSettings) -> list[TaskSlice]:
    """Cuts the ranges into slices of at most `rows_per_partition` rows. There are at least
    `min_partitions` slices if there are that many rows."""
    found = _slices(broker, ranges, settings.rows_per_partition)
    rows = sum(one.rows for one in found)
    if len(found) < settings.min_partitions and rows > len(found):
        return _slices(broker, ranges, max(1, rows // settings.min_partitions))
    return found


def _slices(broker: BrokerConnection, ranges: Ranges, rows: int) -> list[TaskSlice]:
    return [
        TaskSlice(place, split.start, split.end, split.rows)
        for place, (start, end) in sorted(ranges.items())
        for split in splits(broker, place, start, end, rows)[0]
    ]


def tasks(found: Iterable[TaskSlice], at_least: int) -> list[tuple[TaskSlice, ...]]:
    """Gives each slice its own task. Small slices share one, as long as `at_least` tasks remain."""
    todo = list(found)
    room = min(SMALL_ROWS, sum(one.rows for one in todo) // at_least)
    packed: list[list[TaskSlice]] = []
    left = 0
    for one in todo:
        if one.rows > left:
            packed.append([])
            left = room
        packed[-1].append(one)
        left -= one.rows
    return [tuple(each) for each in packed]
