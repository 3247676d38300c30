"""The logs that a broker offers to Spark: the records of topics, the events of durable streams, and
the journal.

A `TopicPartition` is one sequence of rows with rising positions, which may have gaps. Invariant:
positions are encoded in one way only, because Spark compares them as text. Positions of a deleted
topic are never used for a new topic of the same name. Must not know Spark.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from penstock.client.calls import encode, segment
from penstock.model.errors import Internal, InvalidArgument, NotFound
from penstock.model.journal import JournalReport
from penstock.model.ranges import NamedOffsets, OffsetReport, OffsetsPage, StreamOffsets
from penstock.model.scopes import Scope
from penstock.model.splits import Split, Splits
from penstock.spark.bounds import LogName
from penstock.spark.broker import BrokerConnection, RetryTime
from penstock.spark.options import PATTERN_SIGNS, SourceSettings

T = TypeVar("T")

MANY_TOPICS = 8
"""More topics than this are asked for together, in pages with all topics of the broker."""


class TopicPartition(NamedTuple):
    """A partition of a topic, or the journal (`JOURNAL`). `topic_id` is 0 if it is not known, as in
    a checkpoint of an older version. A durable stream counts as a topic with one partition;
    `stream_in` is then its tenant and namespace, else None."""

    topic: str
    partition: int
    topic_id: int = 0
    stream_in: Scope | None = None

    def __str__(self) -> str:
        if self == JOURNAL:
            return "the journal"
        if self.stream_in is not None:
            return f"stream {self.topic!r}"
        return f"topic {self.topic!r} partition {self.partition}"

    @property
    def noun(self) -> str:
        return "topic" if self.stream_in is None else "stream"

    @property
    def rows_path(self) -> str:
        return "/v1/journal" if self == JOURNAL else f"{self._path}/records"

    @property
    def splits_path(self) -> str:
        return "/v1/journal/splits" if self == JOURNAL else f"{self._path}/splits"

    def between(self, start: int, end: int) -> dict[str, str | int]:
        """Returns the query parameters that name a range."""
        if self == JOURNAL:
            return {"from": start, "to": end}
        named: dict[str, str | int] = {}
        if self.topic_id:
            named = {f"{self.noun}_id": self.topic_id}
        return {"start": start, "end": end} | named

    def by_name(self) -> TopicPartition:
        """Returns the partition without a topic id: of the topic that has the name now."""
        return self._replace(topic_id=0)

    @property
    def _path(self) -> str:
        if self.stream_in is not None:
            return stream_path(self.stream_in, self.topic)
        return f"/v1/topics/{segment(self.topic)}/partitions/{self.partition}"


JOURNAL = TopicPartition("", 0)


def streams_path(scope: Scope) -> str:
    tenant, namespace = scope
    return f"/v1/tenants/{segment(tenant)}/namespaces/{segment(namespace)}/streams"


def stream_path(scope: Scope, stream: str) -> str:
    return f"{streams_path(scope)}/{segment(stream)}"


class Span(NamedTuple):
    """The positions that can be read: from `earliest`, the oldest one kept, to before `next`."""

    earliest: int
    next: int


Positions = dict[TopicPartition, int]
Spans = dict[TopicPartition, Span]


def span_of(spans: Spans, place: TopicPartition) -> Span | None:
    """Returns the partition's span. Without a topic id it is that of the topic of this name now."""
    if place.topic_id or place == JOURNAL:
        return spans.get(place)
    return next((span for other, span in spans.items() if other.by_name() == place), None)


class SourceLog(Protocol):
    def find(self) -> list[str]:
        """Returns the topics that exist and are wanted, and those that must exist. The journal has
        one, with an empty name."""
        ...

    def is_named(self, topic: str) -> bool:
        """Returns whether the topic must exist."""
        ...

    def is_wanted(self, topic: str) -> bool:
        """Returns whether the topic would be read if it existed."""
        ...

    def spans(self, topic: str) -> Spans: ...

    def spans_of(self, topics: list[str]) -> dict[str, Spans | NotFound]:
        """Returns the spans of each topic, or NotFound for a topic that does not exist."""
        ...

    def at_time(self, topic: str, time_ms: int) -> Positions:
        """Returns the first positions at that time or later."""
        ...

    def encode(self, positions: Positions) -> dict[str, Any]: ...

    def decode(self, offset: Mapping[str, Any]) -> Positions: ...


def log_of(broker: BrokerConnection, settings: SourceSettings) -> SourceLog:
    if settings.log == "journal":
        return JournalLog(broker)
    if settings.log == "events":
        return EventLog(broker, settings.topics, settings.scope())
    return RecordLog(broker, settings.topics)


def splits(
    broker: BrokerConnection,
    place: TopicPartition,
    start: int,
    end: int,
    rows: int,
    max_rows: int | None = None,
) -> tuple[list[Split], int]:
    """Cuts a range into parts of at most `rows` rows, together at most `max_rows`. Returns the
    parts and the position after the last."""
    found: list[Split] = []
    left, at = max_rows, start
    while at < end and left != 0:
        query = place.between(at, end) | {"rows": rows}
        if left is not None:
            query["max_rows"] = left
        answer = _decoded(Splits, broker.call("GET", place.splits_path, query=query))
        found += [split for split in answer.splits if split.rows]
        if left is not None:
            left -= sum(split.rows for split in answer.splits)
        if answer.next <= at:
            break
        at = answer.next
    return found, at


def publish(broker: BrokerConnection, group: str, positions: Positions) -> None:
    """Publishes that the group has done everything below the positions. For the journal, the group
    is always the archive. Tries once."""
    once = RetryTime(0)
    if JOURNAL in positions:
        body = encode({"next": positions[JOURNAL]})
        broker.call("POST", "/v1/journal/archived", body=body, retry_time=once)
    by_topic: dict[tuple[str, int], list[dict[str, int]]] = {}
    for place, position in sorted(positions.items()):
        if place.stream_in is not None:
            path = stream_path(place.stream_in, place.topic)
            body = encode({"next": position, "stream_id": place.topic_id or None})
            path = f"{path}/subscriptions/{segment(group)}/progress"
            broker.call("POST", path, body=body, retry_time=once)
        elif place != JOURNAL:
            done = by_topic.setdefault((place.topic, place.topic_id), [])
            done.append({"partition": place.partition, "next": position})
    for (topic, topic_id), partitions in by_topic.items():
        progress: dict[str, Any] = {"partitions": partitions}
        if topic_id:
            progress["topic_id"] = topic_id
        path = f"/v1/topics/{segment(topic)}/groups/{segment(group)}/progress"
        broker.call("POST", path, body=encode(progress), retry_time=once)


class RecordLog:
    """The records of topics. `topics` are names, which must exist, and patterns."""

    def __init__(self, broker: BrokerConnection, topics: Iterable[str]) -> None:
        self._broker = broker
        self._names = [topic for topic in topics if not is_pattern(topic)]
        self._patterns = [topic for topic in topics if is_pattern(topic)]

    def find(self) -> list[str]:
        if not self._patterns:
            return self._names
        return sorted({*self._names, *filter(self.is_wanted, self._all_names())})

    def _all_names(self) -> list[str]:
        return _decoded(TopicNamesAnswer, self._broker.call("GET", "/v1/topics")).topics

    def is_named(self, topic: str) -> bool:
        return topic in self._names

    def is_wanted(self, topic: str) -> bool:
        return self.is_named(topic) or is_among(topic, self._patterns)

    def spans(self, topic: str) -> Spans:
        found = self._offsets(topic, {})
        return _spans(NamedOffsets(topic, found.topic_id, found.partitions))

    def spans_of(self, topics: list[str]) -> dict[str, Spans | NotFound]:
        if len(topics) > MANY_TOPICS:
            # A broker of an older version does not have this route.
            with suppress(NotFound):
                there = {each.topic: _spans(each) for each in self._all_offsets()}
                return {topic: there.get(topic) or self._absence(topic) for topic in topics}
        return self._spans_of_each(topics)

    def _spans_of_each(self, topics: list[str]) -> dict[str, Spans | NotFound]:
        found: dict[str, Spans | NotFound] = {}
        for topic in topics:
            try:
                found[topic] = self.spans(topic)
            except NotFound as error:
                found[topic] = error
        return found

    def at_time(self, topic: str, time_ms: int) -> Positions:
        found = self._offsets(topic, {"time_ms": time_ms})
        return {
            TopicPartition(topic, report.partition, found.topic_id): report.next
            if report.at_time is None
            else report.at_time
            for report in found.partitions
        }

    def encode(self, positions: Positions) -> dict[str, Any]:
        records: dict[str, dict[str, int]] = {}
        for place in sorted(positions):
            records.setdefault(place.topic, {})[str(place.partition)] = positions[place]
        ids = {place.topic: place.topic_id for place in sorted(positions) if place.topic_id}
        return {"records": records} | ({"ids": ids} if ids else {})

    def decode(self, offset: Mapping[str, Any]) -> Positions:
        records = offset.get("records")
        if not isinstance(records, dict):
            raise _other_log("records")
        ids = offset.get("ids", {})
        return {
            TopicPartition(topic, int(partition), ids.get(topic, 0)): position
            for topic, partitions in records.items()
            for partition, position in partitions.items()
        }

    def _offsets(self, topic: str, query: dict[str, str | int]) -> TopicOffsetsAnswer:
        path = f"/v1/topics/{segment(topic)}/offsets"
        try:
            content = self._broker.call("GET", path, query=query)
        except NotFound:
            raise self._absence(topic) from None
        return _decoded(TopicOffsetsAnswer, content)

    def _absence(self, topic: str) -> NotFound:
        return NotFound(f"topic {topic!r} does not exist at {self._broker.url}")

    def _all_offsets(self) -> Iterator[NamedOffsets]:
        after: str | None = ""
        while after is not None:
            query: dict[str, str | int] = {"after": after} if after else {}
            page = _decoded(OffsetsPage, self._broker.call("GET", "/v1/offsets", query=query))
            yield from page.topics
            after = page.after


class EventLog(RecordLog):
    """The events of durable streams of one namespace. A pattern means durable streams only."""

    def __init__(self, broker: BrokerConnection, streams: Iterable[str], scope: Scope) -> None:
        super().__init__(broker, streams)
        self._scope = scope

    def spans(self, topic: str) -> Spans:
        found = self._stream_offsets(topic, {})
        return {self._place(topic, found.stream_id): Span(found.earliest, found.next)}

    def spans_of(self, topics: list[str]) -> dict[str, Spans | NotFound]:
        return self._spans_of_each(topics)

    def at_time(self, topic: str, time_ms: int) -> Positions:
        found = self._stream_offsets(topic, {"time_ms": time_ms})
        at = found.next if found.at_time is None else found.at_time
        return {self._place(topic, found.stream_id): at}

    def encode(self, positions: Positions) -> dict[str, Any]:
        places = sorted(positions)
        events = {place.topic: positions[place] for place in places}
        ids = {place.topic: place.topic_id for place in places if place.topic_id}
        return {"events": events} | ({"ids": ids} if ids else {})

    def decode(self, offset: Mapping[str, Any]) -> Positions:
        if "events" not in offset:
            raise _other_log("events")
        ids = offset.get("ids", {})
        return {
            self._place(stream, ids.get(stream, 0)): position
            for stream, position in offset["events"].items()
        }

    def _place(self, stream: str, stream_id: int) -> TopicPartition:
        return TopicPartition(stream, 0, stream_id, self._scope)

    def _all_names(self) -> list[str]:
        content = self._broker.call("GET", streams_path(self._scope))
        return [each.name for each in _decoded(FoundStreams, content).streams if each.durable]

    def _stream_offsets(self, stream: str, query: dict[str, str | int]) -> StreamOffsets:
        path = f"{stream_path(self._scope, stream)}/offsets"
        try:
            content = self._broker.call("GET", path, query=query)
        except NotFound:
            raise self._absence(stream) from None
        return _decoded(StreamOffsets, content)

    def _absence(self, topic: str) -> NotFound:
        where = "/".join(self._scope)
        return NotFound(f"stream {topic!r} of {where} does not exist at {self._broker.url}")


class JournalLog:
    def __init__(self, broker: BrokerConnection) -> None:
        self._broker = broker

    def find(self) -> list[str]:
        return [JOURNAL.topic]

    def is_named(self, topic: str) -> bool:
        return True

    def is_wanted(self, topic: str) -> bool:
        return True

    def spans(self, topic: str) -> Spans:
        """Asks for a fresh answer, which includes everything that happened before the request."""
        report = self._offsets({"fresh": "true"})
        return {JOURNAL: Span(report.earliest, report.next)}

    def spans_of(self, topics: list[str]) -> dict[str, Spans | NotFound]:
        return {topic: self.spans(topic) for topic in topics}

    def at_time(self, topic: str, time_ms: int) -> Positions:
        report = self._offsets({"time_ms": time_ms})
        return {JOURNAL: report.next if report.at_time is None else report.at_time}

    def encode(self, positions: Positions) -> dict[str, Any]:
        return {"journal": positions[JOURNAL]}

    def decode(self, offset: Mapping[str, Any]) -> Positions:
        if "journal" not in offset:
            raise _other_log("journal")
        return {JOURNAL: int(offset["journal"])}

    def _offsets(self, query: dict[str, str | int]) -> JournalReport:
        content = self._broker.call("GET", "/v1/journal/offsets", query=query)
        return _decoded(JournalReport, content)


def _other_log(log: LogName) -> InvalidArgument:
    this = "streams" if log == "events" else f"log={log}"
    return InvalidArgument(
        f"the checkpoint is of a query that read another log; give {this} a checkpoint of its own"
    )


def _spans(found: NamedOffsets) -> Spans:
    return {
        TopicPartition(found.topic, report.partition, found.topic_id): Span(
            report.earliest, report.next
        )
        for report in found.partitions
    }


def is_pattern(topic: str) -> bool:
    return any(sign in topic for sign in PATTERN_SIGNS)


def is_among(topic: str, wanted: Iterable[str]) -> bool:
    """Returns whether the topic is one of these names, or matches one of these patterns."""
    return any(topic == each or fnmatchcase(topic, each) for each in wanted)


# -- answers ---------------------------------------------------------------------------------------


class TopicOffsetsAnswer(msgspec.Struct):
    partitions: list[OffsetReport]
    topic_id: int = 0


class FoundStream(msgspec.Struct):
    name: str
    durable: bool = False


class FoundStreams(msgspec.Struct):
    streams: list[FoundStream]


class TopicNamesAnswer(msgspec.Struct):
    topics: list[str]


def _decoded(kind: type[T], content: bytes) -> T:
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.DecodeError as error:
        raise Internal(
            f"the broker's answer cannot be read ({error}); is this a Penstock broker?"
        ) from error
