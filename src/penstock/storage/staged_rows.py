"""The rows of staged pieces, read slice by slice and converted when they are stored.

Invariant: rows are read as they were normalised: empty text is null, and columns without a value
are left out. The caller that stores the rows converts a few at a time. Must not know files, nor
whether the content of a row is allowed.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from operator import add, sub

import msgspec
import pyarrow as pa

from penstock.api.rows import CACHE_COLUMNS, STREAM_COLUMNS, TOPIC_COLUMNS
from penstock.core.write_rules import RowColumns
from penstock.model.scopes import is_stream_log, split_name
from penstock.model.tenancy import Path
from penstock.storage.columns import extras_of
from penstock.storage.staging import PieceContent


class CacheRow(msgspec.Struct, frozen=True, gc=False):
    """A row for a cache. A `value` of None deletes the key."""

    key: str
    value: bytes | None
    ttl_ms: int | None


class RowSlice:
    """A slice of a piece, to take a few rows at a time. `first_row` is its place in the piece."""

    def __init__(self, data: pa.Buffer, content: PieceContent, first_row: int) -> None:
        self.first_row = first_row
        self.cache: Path | None = _path(content.cache)
        self.stream: Path | None = None
        kinds = CACHE_COLUMNS if content.cache else TOPIC_COLUMNS
        if is_stream_log(content.topic):
            (tenant, namespace), name = split_name(content.topic)
            self.stream = (tenant, namespace, name)
            kinds = STREAM_COLUMNS
        schema = pa.schema([(name, kinds[name]) for name in content.columns])
        self.batch = pa.ipc.read_record_batch(data, schema)
        self.rows: int = self.batch.num_rows
        self.topic = content.topic
        self._has_extras = any(name not in _PLAIN for name in content.columns)
        self._columns = dict(zip(content.columns, self.batch.columns, strict=True))

    def rows_within(self, start: int, max_rows: int, max_bytes: int) -> int:
        """Returns how many rows from `start` on fit into `max_bytes`; at least one."""
        ends = _offsets(self._columns["value" if self.stream is None else "payload"])
        most = min(max_rows, self.rows - start)
        within = bisect_right(ends, ends[start] + max_bytes, start + 1, start + most + 1)
        return max(1, within - start - 1)

    def take(self, start: int, rows: int) -> RowColumns:
        """Converts rows for topics."""
        values, value_sizes = _texts(self._columns["value"].slice(start, rows))
        keys, sizes = [""] * rows, value_sizes
        if "key" in self._columns:
            keys, key_sizes = _texts(self._columns["key"].slice(start, rows))
            sizes = list(map(add, key_sizes, value_sizes))
        topics = None
        if "topic" in self._columns:
            topics = [
                topic or self.topic
                for topic in self._columns["topic"].slice(start, rows).to_pylist()
            ]
        envelopes, routings = None, None
        if self._has_extras:
            envelopes, routings = extras_of(self.batch.slice(start, rows))
        return RowColumns(self.topic, topics, keys, values, sizes, envelopes, routings)

    def take_payloads(self, start: int, rows: int) -> list[bytes]:
        """Converts rows for a stream."""
        payloads: list[bytes] = self._columns["payload"].slice(start, rows).to_pylist()
        return payloads

    def take_for_cache(self, start: int, rows: int) -> list[CacheRow]:
        keys = self._columns["key"].slice(start, rows).to_pylist()
        values = self._columns["value"].slice(start, rows).to_pylist()
        ttls = [None] * rows
        if "ttl_ms" in self._columns:
            ttls = self._columns["ttl_ms"].slice(start, rows).to_pylist()
        return list(map(CacheRow, keys, values, ttls))


def _path(parts: list[str]) -> Path | None:
    return (parts[0], parts[1], parts[2]) if parts else None


_PLAIN = frozenset({"topic", "key", "value"})


def _texts(column: pa.Array) -> tuple[list[str], list[int]]:
    """Returns the texts of a column, empty for null, and their lengths in UTF-8. Pure ASCII is
    decoded as one text and then sliced, which is several times faster."""
    offsets = _offsets(column).tolist()
    first, last = offsets[0], offsets[-1]
    sizes = list(map(sub, offsets[1:], offsets))
    data = column.buffers()[2]
    if data is None or first == last:
        return [""] * len(column), sizes
    raw = bytes(memoryview(data)[first:last])
    if raw.isascii():
        text = raw.decode("ascii")
        return [text[start - first : end - first] for start, end in pairwise(offsets)], sizes
    return [raw[start - first : end - first].decode() for start, end in pairwise(offsets)], sizes


def _offsets(column: pa.Array) -> memoryview[int]:
    """Returns where each value begins and, at the end, where the last one ends."""
    buffer: memoryview[int] = memoryview(column.buffers()[1])
    return buffer.cast("B").cast("i")[column.offset : column.offset + len(column) + 1]
