"""The calls that read stored messages as data: offsets, splits, rows and progress. No IO."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

import msgspec

from penstock.client.calls import Call, encode, list_of, query_of, reader, segment
from penstock.client.lines import LineBuffer
from penstock.client.registry import stream_path
from penstock.client.requests import topic_path
from penstock.model.progress import Reached
from penstock.model.ranges import OffsetReport, OffsetsPage, StreamOffsets
from penstock.model.splits import Splits
from penstock.model.tenancy import Path

Row = dict[str, Any]
"""A row as a dict by column, without columns that are null."""

_decode_lines = msgspec.json.Decoder(Row).decode_lines


def offsets(topic: str, time_ms: int | None = None) -> Call[list[OffsetReport]]:
    """Returns where each partition begins and ends and, with `time_ms`, where that time begins."""
    read = reader(_Offsets)
    path = f"{topic_path(topic)}/offsets{_query(time_ms=time_ms)}"
    return Call("GET", path, lambda body: read(body).partitions)


def all_offsets(after: str = "") -> Call[OffsetsPage]:
    """Returns a page of the same for all topics, sorted by name. If `after` of the answer is not
    None, pass it to get the next page."""
    return Call("GET", f"/v1/offsets{_query(after=after or None)}", reader(OffsetsPage))


def splits(
    topic: str,
    partition: int,
    *,
    start: int | None = None,
    end: int | None = None,
    rows: int | None = None,
    max_rows: int | None = None,
) -> Call[Splits]:
    """Splits a range into adjacent ranges of at most `rows` rows, to be read in parallel. The
    answer covers the range up to `next`; ask again from there for the rest."""
    query = _query(start=start, end=end, rows=rows, max_rows=max_rows)
    path = f"{_partition_path(topic, partition)}/splits{query}"
    return Call("GET", path, reader(Splits))


def set_progress(topic: str, group: str, nexts: Mapping[int, int]) -> Call[dict[int, int]]:
    """Tells the broker that a group has finished everything below these offsets, by partition. A
    group never goes back; returns where it is."""
    reached = [Reached(partition, offset) for partition, offset in nexts.items()]
    read = reader(_Progress)
    return Call(
        "POST",
        f"{topic_path(topic)}/groups/{segment(group)}/progress",
        lambda body: {each.partition: each.next for each in read(body).partitions},
        encode({"partitions": reached}),
    )


def range_path(
    topic: str,
    partition: int,
    start: int | None,
    end: int | None,
    columns: Iterable[str],
    **only: str | int | None,
) -> str:
    """Returns the address of the rows of a range, as lines."""
    names = ",".join(list_of(columns, "columns"))
    query = _query(start=start, end=end, columns=names or None, format="ndjson", **only)
    return f"{_partition_path(topic, partition)}/records{query}"


class RowBuffer(LineBuffer[Row]):
    def _read(self, lines: bytes) -> Iterable[Row]:
        return _decode_lines(lines)


# -- ranges of a durable stream --------------------------------------------------------------------


class KeptEvent(msgspec.Struct, frozen=True, gc=False):
    """An event that a durable stream keeps. `timestamp` is when the broker stored it."""

    offset: int
    timestamp: datetime
    payload: bytes


def stream_offsets(path: Path, time_ms: int | None = None) -> Call[StreamOffsets]:
    """Returns where a durable stream begins and ends and, with `time_ms`, where that time
    begins."""
    url_path = f"{stream_path(*path)}/offsets{_query(time_ms=time_ms)}"
    return Call("GET", url_path, reader(StreamOffsets))


def stream_splits(
    path: Path,
    *,
    start: int | None = None,
    end: int | None = None,
    rows: int | None = None,
    max_rows: int | None = None,
) -> Call[Splits]:
    """Splits a range of a durable stream as `splits` does one of a partition."""
    query = _query(start=start, end=end, rows=rows, max_rows=max_rows)
    return Call("GET", f"{stream_path(*path)}/splits{query}", reader(Splits))


def set_stream_progress(path: Path, name: str, next_: int) -> Call[int]:
    """Tells the broker that a named subscription has finished everything below this offset. It
    never goes back; returns where it is."""
    read = reader(_Next)
    url_path = f"{stream_path(*path)}/subscriptions/{segment(name)}/progress"
    return Call("POST", url_path, lambda body: read(body).next, encode({"next": next_}))


def events_path(
    path: Path, start: int | None, end: int | None, from_ms: int | None, to_ms: int | None
) -> str:
    """Returns the address of the events of a range, as lines."""
    query = _query(start=start, end=end, from_ms=from_ms, to_ms=to_ms, format="ndjson")
    return f"{stream_path(*path)}/records{query}"


_decode_events = msgspec.json.Decoder(KeptEvent).decode_lines


class KeptEventBuffer(LineBuffer[KeptEvent]):
    def _read(self, lines: bytes) -> Iterable[KeptEvent]:
        return _decode_events(lines)


class _Next(msgspec.Struct):
    next: int


class _Offsets(msgspec.Struct):
    partitions: list[OffsetReport]


class _Progress(msgspec.Struct):
    partitions: list[Reached]


def _partition_path(topic: str, partition: int) -> str:
    return f"{topic_path(topic)}/partitions/{partition}"


def _query(**parameters: str | int | None) -> str:
    query = query_of(**parameters)
    return f"?{query}" if query else ""
