"""Checks the rows of a write and puts them into normal form, column by column.

The rules are those of a produce (envelopes.py, core) and of a cache. A rule about one value is
asked once for each distinct value; a rule about sizes is asked for all rows at once. A refusal
names the column and the row; anything that Arrow raises over a value is a refusal too. Runs on a
thread. Must not know what the broker holds: the loop asks whether a topic or a cache exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from penstock.api.caches import check_key
from penstock.api.messages import check_deadline
from penstock.api.rows import CACHE_COLUMNS, STREAM_COLUMNS, TOPIC_COLUMNS, CheckedRows
from penstock.model.errors import InvalidArgument, PenstockError, TooLarge
from penstock.model.limits import (
    MAX_CACHE_KEY_BYTES,
    MAX_ENVELOPE_FIELD_BYTES,
    MAX_OFFSET,
    MAX_TARGETS,
)
from penstock.model.names import full_name_in
from penstock.model.scopes import Scope, full_name
from penstock.model.writes import RowTarget
from penstock.server.arrow_bodies import UNREADABLE, is_text, reason
from penstock.server.envelopes import RetryPolicyBody, deadline_of, policy_of, target_of

T = TypeVar("T")

_IDS = ("run_id", "step_id", "parent_step_id", "tenant_id", "idempotency_key", "routing_label")
_RETRY = ("retry_max_attempts", "retry_backoff_ms", "retry_max_backoff_ms")
_TEXT, _INT = pa.string(), pa.int64()
_MAX_TEXT_BYTES = 2**31 - 1
_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_FIRST_S = int(datetime(1, 1, 1, tzinfo=UTC).timestamp())
_LAST_S = int(datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC).timestamp())
"""The times that RFC 3339 can write."""


def check_topic_rows(
    table: pa.Table, scope: Scope, topic: str, max_message_bytes: int, now_ms: int
) -> CheckedRows:
    """`topic` is the full name for rows that name none; if it is empty, each row must name one.
    Names in rows are plain names in the scope; the checked rows have full ones."""
    rows = _Columns(table, TOPIC_COLUMNS)
    with rows.refusing_unreadable():
        return _check_topic_rows(rows, scope, topic, max_message_bytes, now_ms)


def check_cache_rows(table: pa.Table, max_message_bytes: int) -> CheckedRows:
    rows = _Columns(table, CACHE_COLUMNS)
    with rows.refusing_unreadable():
        return _check_cache_rows(rows, max_message_bytes)


def check_event_rows(table: pa.Table, log: str, max_message_bytes: int) -> CheckedRows:
    """`log` is the full name of the topic that keeps the events of the stream."""
    rows = _Columns(table, STREAM_COLUMNS)
    with rows.refusing_unreadable():
        payload = rows.payload()
        if payload is None:
            raise InvalidArgument("a row for a stream has the column 'payload'")
        rows.refuse_where(pc.is_null(payload), "payload", "is null")
        _check_sizes(pc.binary_length(payload), max_message_bytes, "payload is")
    targets = [RowTarget(log, "", None, 0)] if rows.count else []
    return CheckedRows(pa.table({"payload": payload}), targets)


def _check_topic_rows(
    rows: _Columns, scope: Scope, topic: str, max_message_bytes: int, now_ms: int
) -> CheckedRows:
    value = rows.text("value")
    if value is None:
        raise InvalidArgument("the column 'value' is missing")
    rows.refuse_where(pc.is_null(value), "value", "is null")
    lengths = pc.binary_length(value)
    rows.refuse_where(pc.equal(lengths, 0), "value", "is empty")
    columns: dict[str, pa.Array] = {}
    key = rows.text("key")
    if key is not None:
        # A null text may still have bytes in the buffer; an empty one has none.
        key = pc.fill_null(key, "")
        lengths = pc.add(lengths, pc.binary_length(key))
    _check_sizes(lengths, max_message_bytes)
    final = _topics(rows, columns, scope, topic)
    for name in _IDS:
        rows.keep_text(columns, name, MAX_ENVELOPE_FIELD_BYTES)
    _deadline(rows, columns, now_ms)
    _override(rows, columns)
    _retry(rows, columns)
    _routing(rows, columns)
    if key is not None and pc.any(pc.greater(pc.binary_length(key), 0)).as_py():
        columns["key"] = key
    columns["value"] = value
    targets = _targets(final, topic, columns, rows.count)
    return CheckedRows(_in_order(columns, TOPIC_COLUMNS), targets, "idempotency_key" in columns)


def _check_cache_rows(rows: _Columns, max_message_bytes: int) -> CheckedRows:
    key = rows.text("key")
    # A column of nulls takes memory when it is expanded; the keys bound how many there can be.
    value = None if key is None else rows.bytes("value")
    if key is None or value is None:
        raise InvalidArgument("a row for a cache has the columns 'key' and 'value'")
    rows.refuse_where(pc.is_null(key), "key", "is null")
    _check_cache_keys(key)
    _check_sizes(pc.fill_null(pc.binary_length(value), 0), max_message_bytes)
    columns = {"key": key, "value": value}
    ttl_ms = rows.numbers("ttl_ms")
    if ttl_ms is not None:
        is_wrong = pc.or_(pc.less(ttl_ms, 0), pc.greater(ttl_ms, MAX_OFFSET))
        rows.refuse_where(is_wrong, "ttl_ms", "must be a whole number, at least 0")
        columns["ttl_ms"] = ttl_ms
    return CheckedRows(_in_order(columns, CACHE_COLUMNS), [])


class _Columns:
    """The columns of a table, each cast to the type that is stored; None for a missing column."""

    def __init__(self, table: pa.Table, known: dict[str, Any]) -> None:
        unknown = [name for name in table.column_names if name not in known]
        if unknown:
            raise InvalidArgument(f"unknown columns {unknown}; there are {', '.join(known)}")
        self._table = table
        self._name = ""
        self.count: int = table.num_rows

    @contextmanager
    def refusing_unreadable(self) -> Iterator[None]:
        """Turns exceptions of Arrow into a refusal that names the column read last."""
        try:
            yield
        except UNREADABLE as error:
            why = f"column {self._name!r} cannot be read: {reason(error)}"
            raise InvalidArgument(why) from error

    def text(self, name: str) -> pa.Array | None:
        return self._get(name, is_text, _TEXT, "text")

    def bytes(self, name: str) -> pa.Array | None:
        """Returns a column of bytes like `text`, but a column of nulls is a column, not a missing
        one."""
        self._name = name
        if name in self._table.column_names and pa.types.is_null(self._table.column(name).type):
            return pa.nulls(self._table.num_rows, pa.binary())
        return self._get(name, is_text, pa.binary(), "text or bytes")

    def payload(self) -> pa.Array | None:
        """Returns None also for a column of nulls, which could be very many."""
        return self._get("payload", is_text, pa.binary(), "text or bytes")

    def numbers(self, name: str) -> pa.Array | None:
        return self._get(name, pa.types.is_integer, _INT, "a whole number")

    def any(self, name: str) -> pa.Array | None:
        return self._get(name, lambda kind: True, None, "")

    def keep_text(self, columns: dict[str, pa.Array], name: str, max_bytes: int) -> None:
        """Adds the column to `columns`, unless all its texts are empty or null."""
        column = self.text(name)
        if column is None:
            return
        lengths = pc.binary_length(column)
        self.refuse_where(pc.greater(lengths, max_bytes), name, f"is longer than {max_bytes} bytes")
        column = pc.if_else(pc.equal(lengths, 0), pa.scalar(None, _TEXT), column)
        if column.null_count < len(column):
            columns[name] = column

    def refuse_where(self, mask: pa.Array, name: str, why: str) -> None:
        row = pc.index(mask, True).as_py()
        if row >= 0:
            raise InvalidArgument(f"row {row}: {name} {why}")

    def _get(
        self, name: str, is_right: Callable[[Any], bool], kind: Any, what: str
    ) -> pa.Array | None:
        if name not in self._table.column_names:
            return None
        self._name = name
        column = self._table.column(name)
        if pa.types.is_null(column.type) and name != "value":
            return None
        if not is_right(column.type):
            raise InvalidArgument(f"column {name!r} is {column.type}, not {what}")
        return _one_array(column if kind is None else _cast(column, kind, name), name)


def _one_array(column: pa.ChunkedArray, name: str) -> pa.Array:
    combined = column.combine_chunks()
    if isinstance(combined, pa.ChunkedArray):
        if combined.num_chunks > 1:
            raise TooLarge(f"column {name!r} is longer than {_MAX_TEXT_BYTES} bytes")
        combined = combined.chunk(0) if combined.num_chunks else pa.array([], column.type)
    return combined


def _cast(column: pa.ChunkedArray, kind: Any, name: str) -> pa.ChunkedArray:
    if column.type == kind:
        return column
    try:
        return column.cast(kind)
    except pa.ArrowInvalid as error:
        row = _first_bad_row(column, kind)
        raise InvalidArgument(f"row {row}: {name} is no {kind}: {reason(error)}") from error


def _first_bad_row(column: pa.ChunkedArray, kind: Any) -> int:
    """Finds the first row that cannot be cast, by bisection."""
    start, end = 0, len(column)
    while end - start > 1:
        middle = (start + end) // 2
        try:
            column.slice(start, middle - start).cast(kind)
            start = middle
        except pa.ArrowInvalid:
            end = middle
    return start


def _in_order(columns: dict[str, pa.Array], known: dict[str, Any]) -> pa.Table:
    return pa.table({name: columns[name] for name in known if name in columns})


def _check_sizes(
    lengths: pa.Array, max_message_bytes: int, what: str = "key and value are"
) -> None:
    row = pc.index(pc.greater(lengths, max_message_bytes), True).as_py()
    if row >= 0:
        raise TooLarge(
            f"row {row}: {what} {lengths[row].as_py()} bytes; "
            f"max_message_bytes is {max_message_bytes}"
        )


def _check_cache_keys(key: pa.Array) -> None:
    """Finds suspicious keys for all rows at once; the rule decides about the first."""
    lengths = pc.binary_length(key)
    suspects = pc.or_(
        pc.or_(pc.equal(lengths, 0), pc.greater(lengths, MAX_CACHE_KEY_BYTES)),
        pc.match_substring_regex(key, r"[\x00-\x1f\x7f-\x{9f}]"),
    )
    row = pc.index(suspects, True).as_py()
    if row >= 0:
        _apply_rule(check_key, key[row].as_py(), row, "key")


def _apply_rule(rule: Callable[[Any], T], value: Any, row: int, name: str) -> T:
    try:
        return rule(value)
    except PenstockError as error:
        raise type(error)(f"row {row}: {name}: {error.message}") from None


def _distinct(column: pa.Array, name: str, rule: Callable[[Any], T]) -> tuple[pa.Array, list[T]]:
    """Applies the rule to each distinct value. Returns each row's index into the results."""
    encoded = column.dictionary_encode()
    indices, results = encoded.indices, []
    for code, value in enumerate(encoded.dictionary.to_pylist()):
        try:
            results.append(rule(value))
        except PenstockError as error:
            row = pc.index(indices, pa.scalar(code, indices.type)).as_py()
            raise type(error)(f"row {row}: {name}: {error.message}") from None
    return indices, results


def _texts(indices: pa.Array, results: list[str]) -> pa.Array:
    """The text of each row, null where it is empty."""
    texts = pa.array([text or None for text in results], _TEXT)
    return pc.take(texts, indices)


def _topics(
    rows: _Columns, columns: dict[str, pa.Array], scope: Scope, default: str
) -> pa.Array | None:
    """The full name of each row's topic; None if that is `default` for all rows."""
    final = None
    named = rows.text("topic")
    if named is not None:
        final = _texts(*_distinct(named, "topic", partial(_topic, scope)))
    if not default:
        if final is None:
            raise InvalidArgument("no topic: name one in the query, or have a column 'topic'")
        rows.refuse_where(pc.is_null(final), "topic", "is required")
    targets = rows.text("target_topic")
    if targets is not None:
        indices, names = _distinct(targets, "target_topic", target_of)
        target = _texts(indices, names)
        if target.null_count < len(target):
            columns["target_topic"] = target
            target = _texts(indices, [name and full_name(scope, name) for name in names])
            final = target if final is None else pc.coalesce(target, final)
    if final is not None and final.null_count < len(final):
        columns["topic"] = final
        return final
    return None


def _topic(scope: Scope, raw: str) -> str:
    return full_name_in(scope, raw) if raw.strip() else ""


def _deadline(rows: _Columns, columns: dict[str, pa.Array], now_ms: int) -> None:
    raw = rows.any("deadline")
    if raw is None:
        return
    if pa.types.is_timestamp(raw.type):
        if raw.type.tz is None:
            raise InvalidArgument("column 'deadline' is a time without a zone")
        ticks, per_second = raw.cast(_INT), _PER_SECOND[raw.type.unit]
        first = max(_FIRST_S * per_second, -(2**63))
        last = min(_LAST_S * per_second, 2**63 - 1)
        is_over = pc.or_(pc.less(ticks, first), pc.greater(ticks, last))
        rows.refuse_where(is_over, "deadline", "is not in the years 1 to 9999")
        raw = raw.cast(pa.timestamp("us", "UTC"), safe=False)
    elif not is_text(raw.type):
        raise InvalidArgument(f"column 'deadline' is {raw.type}, not text or a time")
    else:
        raw = rows.text("deadline")

    def rule(value: str | datetime) -> str:
        text = value.isoformat() if isinstance(value, datetime) else value
        deadline, deadline_ms = deadline_of(text)
        check_deadline(deadline_ms, now_ms)
        return deadline

    texts = _texts(*_distinct(raw, "deadline", rule))
    if texts.null_count < len(texts):
        columns["deadline"] = texts


def _override(rows: _Columns, columns: dict[str, pa.Array]) -> None:
    override = rows.numbers("partition_override")
    if override is not None and override.null_count < len(override):
        rows.refuse_where(pc.less(override, 0), "partition_override", "is below 0")
        columns["partition_override"] = override


def _retry(rows: _Columns, columns: dict[str, pa.Array]) -> None:
    """Gives each row all numbers of its policy, or nulls if it has none."""
    given = {name: column for name in _RETRY if (column := rows.numbers(name)) is not None}
    if not given:
        return
    zeros = pa.repeat(pa.scalar(0, _INT), rows.count)
    numbers = {name: pc.fill_null(given[name], 0) if name in given else zeros for name in _RETRY}
    for found in _combinations(numbers, rows.count):
        policy = [found[name] for name in _RETRY]
        _apply_rule(lambda each: policy_of(RetryPolicyBody(*each)), policy, found["row"], "retry")
    has_policy = pc.or_(
        pc.greater(numbers["retry_max_attempts"], 0), pc.greater(numbers["retry_backoff_ms"], 0)
    )
    if pc.any(has_policy).as_py():
        none = pa.scalar(None, _INT)
        columns |= {name: pc.if_else(has_policy, numbers[name], none) for name in _RETRY}


def _routing(rows: _Columns, columns: dict[str, pa.Array]) -> None:
    """Gives each row with a label a meta, if only an empty one. Goes row by row: few have any."""
    meta = rows.any("routing_meta")
    kind = TOPIC_COLUMNS["routing_meta"]
    labels = columns.get("routing_label")
    if meta is not None and meta.type != kind:
        raise InvalidArgument(f"column 'routing_meta' is {meta.type}, not {kind}")
    if meta is None and labels is None:
        return
    count = rows.count
    given = [None] * count if meta is None else meta.to_pylist()
    has_label = [False] * count if labels is None else pc.is_valid(labels).to_pylist()
    kept: list[list[tuple[str, str]] | None] = []
    for row, (pairs, is_labelled) in enumerate(zip(given, has_label, strict=True)):
        if pairs and any(value is None for _, value in pairs):
            raise InvalidArgument(f"row {row}: routing_meta has a null in it")
        kept.append((pairs or []) if pairs or is_labelled else None)
    if any(pairs is not None for pairs in kept):
        columns["routing_meta"] = pa.array(kept, kind)


def _targets(
    final: pa.Array | None, default: str, columns: dict[str, pa.Array], rows: int
) -> list[RowTarget]:
    """The distinct targets of the rows. With very many keys, targets have none: their rows may go
    to any partition of the topic."""
    if not rows:
        return []
    by = {"topic": final, "partition_override": columns.get("partition_override")}
    by = {name: column for name, column in by.items() if column is not None}
    key = columns.get("key")
    no_key: str | None = ""
    targets: list[dict[str, Any]] | None = None
    if key is None:
        targets = _combinations(by, rows)
    elif pc.count_distinct(key).as_py() <= MAX_TARGETS:
        targets = _combinations({**by, "key": key}, rows)
    if targets is None or len(targets) > MAX_TARGETS:
        targets, no_key = _combinations(by, rows), None
    if len(targets) > MAX_TARGETS:
        raise InvalidArgument(f"the rows go to more than {MAX_TARGETS} partitions")
    return [
        RowTarget(
            each.get("topic") or default,
            each.get("key", no_key),
            each.get("partition_override"),
            each["row"],
        )
        for each in targets
    ]


def _combinations(by: dict[str, pa.Array], rows: int) -> list[dict[str, Any]]:
    """The distinct combinations of values in these columns, each with the first `row` of it."""
    if not by or not rows:
        return [{"row": 0}] if rows else []
    table = pa.table({**by, "row": pa.arange(0, rows)})
    grouped = table.group_by(list(by)).aggregate([("row", "min")])
    return [{**found, "row": found["row_min"]} for found in grouped.to_pylist()]
