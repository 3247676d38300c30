"""Messages as Arrow columns: the schema of history, and the conversion in both directions.

Invariant: `to_messages(to_batch(messages))` returns equal messages, except that an empty envelope
comes back as None. Empty text is stored as null. A retry policy or dead letter has no null among
its numbers, and a routing always has its meta. Topic and partition are not columns, because a batch
holds rows of one partition: messages, or the events of a stream, which alone have a payload. Must
not know files.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import pyarrow as pa

from penstock.api.rows import ENVELOPE_COLUMNS, RETRY_COLUMNS, ROUTING_COLUMNS
from penstock.model.envelope import DeadLetter, Envelope, RetryPolicy, Routing
from penstock.model.records import Message, Stored, StoredEvent

_TEXT = pa.string()
_INT = pa.int64()
_MAX_INT = 2**63 - 1

PLAIN_SCHEMA = pa.schema(
    [
        ("offset", _INT),
        ("timestamp", pa.timestamp("us", "UTC")),
        ("key", _TEXT),
        ("value", _TEXT),
    ]
)

_DLQ_COLUMNS = {
    "dlq_original_topic": _TEXT,
    "dlq_original_partition": pa.int32(),
    "dlq_original_offset": _INT,
    "dlq_group": _TEXT,
    "dlq_attempts": _INT,
    "dlq_last_error": _TEXT,
    "dlq_routed_at_ms": _INT,
}

_EXTRA_COLUMNS = ENVELOPE_COLUMNS | RETRY_COLUMNS | ROUTING_COLUMNS | _DLQ_COLUMNS
MESSAGE_SCHEMA = pa.schema(
    [*PLAIN_SCHEMA, *(pa.field(name, kind) for name, kind in _EXTRA_COLUMNS.items())]
)
"""The columns of files from before there were durable streams."""

SCHEMA = MESSAGE_SCHEMA.append(pa.field("payload", pa.binary()))
"""Columns are only ever added at the end. A reader refuses a file with other columns."""

_NO_ENVELOPE = Envelope()


def to_batch(stored: Sequence[Stored]) -> pa.RecordBatch:
    """Converts messages or events of one partition, in offset order. If no message has an envelope
    or a routing, the batch has only the columns of PLAIN_SCHEMA; `complete` adds the others."""
    times = pa.array([each.ts * 1000 for each in stored], _INT)
    columns = [
        pa.array([each.offset for each in stored], _INT),
        times.view(PLAIN_SCHEMA.field("timestamp").type),
    ]
    if stored and isinstance(stored[0], StoredEvent):
        return _event_batch(columns, [each.value for each in stored])
    messages = [each for each in stored if isinstance(each, Message)]
    columns += [
        pa.array([message.key or None for message in messages], _TEXT),
        pa.array([message.value for message in messages], _TEXT),
    ]
    envelopes = [message.envelope for message in messages]
    routings = [message.routing for message in messages]
    if not any(envelopes) and not any(routings):
        return pa.record_batch(columns, schema=PLAIN_SCHEMA)
    columns += _envelope_columns([envelope or _NO_ENVELOPE for envelope in envelopes])
    columns += _routing_columns(routings)
    columns += _dlq_columns([envelope.dlq if envelope else None for envelope in envelopes])
    return pa.record_batch(columns, schema=MESSAGE_SCHEMA)


def _event_batch(columns: list[pa.Array], payloads: list[Any]) -> pa.RecordBatch:
    rows = len(payloads)
    nulls = [pa.nulls(rows, field.type) for field in list(MESSAGE_SCHEMA)[len(columns) :]]
    return pa.record_batch([*columns, *nulls, pa.array(payloads, pa.binary())], schema=SCHEMA)


def complete(batch: pa.RecordBatch, schema: pa.Schema = SCHEMA) -> pa.RecordBatch:
    """Returns the batch with all columns of the schema. Those missing at the end are null."""
    missing = list(schema)[batch.num_columns :]
    if not missing:
        return batch
    nulls = [pa.nulls(batch.num_rows, field.type) for field in missing]
    return pa.record_batch([*batch.columns, *nulls], schema=schema)


def to_messages(batch: pa.RecordBatch, topic_id: int, partition: int) -> list[Stored]:
    """Converts every row of the batch to a message, or to an event of a stream. Slice the batch
    first to convert fewer."""
    if has_payloads(batch):
        rows = zip(
            batch.column("offset").to_pylist(),
            batch.column("timestamp").view(_INT).to_pylist(),
            batch.column("payload").to_pylist(),
            strict=True,
        )
        return [StoredEvent(topic_id, partition, at, time // 1000, data) for at, time, data in rows]
    envelopes, routings = extras_of(batch)
    found = zip(
        batch.column("offset").to_pylist(),
        batch.column("timestamp").view(_INT).to_pylist(),
        batch.column("key").to_pylist(),
        batch.column("value").to_pylist(),
        envelopes,
        routings,
        strict=True,
    )
    return [
        Message(topic_id, partition, offset, time // 1000, key or "", value, envelope, routing)
        for offset, time, key, value, envelope, routing in found
    ]


def has_payloads(batch: pa.RecordBatch) -> bool:
    """Says whether the rows are events of a stream."""
    index = batch.schema.get_field_index("payload")
    return index >= 0 and bool(batch.column(index).null_count < batch.num_rows)


def extras_of(batch: pa.RecordBatch) -> tuple[list[Envelope | None], list[Routing | None]]:
    """Returns the envelope and the routing of every row. Missing columns count as null."""
    columns = _present(batch)
    return _envelopes(columns, batch.num_rows), _routings(columns, batch.num_rows)


# Messages to columns


def _envelope_columns(envelopes: list[Envelope]) -> list[pa.Array]:
    columns = []
    for name, kind in ENVELOPE_COLUMNS.items():
        values = map(attrgetter(name), envelopes)
        if kind is _TEXT:
            columns.append(pa.array([value or None for value in values], kind))
        else:
            columns.append(pa.array(list(values), kind))
    policies = [_policy_of(envelope) for envelope in envelopes]
    return columns + [_retry_column(policies, name) for name in RETRY_COLUMNS]


def _policy_of(envelope: Envelope) -> RetryPolicy | None:
    """Returns the message's retry policy. A dead letter keeps the original message's policy in
    `dlq`, so that a row written back to its topic has it again."""
    return envelope.retry_policy if envelope.dlq is None else envelope.dlq.retry_policy


def _retry_column(policies: list[RetryPolicy | None], name: str) -> pa.Array:
    # msgpack has larger integers than Arrow. A value that large means "no limit" anyway.
    number = attrgetter(name.removeprefix("retry_"))
    values = [None if policy is None else min(number(policy), _MAX_INT) for policy in policies]
    return pa.array(values, _INT)


def _routing_columns(routings: list[Routing | None]) -> list[pa.Array]:
    labels = [(routing.label or None) if routing else None for routing in routings]
    metas = [None if routing is None else list(routing.meta.items()) for routing in routings]
    return [pa.array(labels, _TEXT), pa.array(metas, ROUTING_COLUMNS["routing_meta"])]


def _dlq_columns(letters: list[DeadLetter | None]) -> list[pa.Array]:
    columns = []
    for name, kind in _DLQ_COLUMNS.items():
        member = attrgetter(name.removeprefix("dlq_"))
        values = [None if letter is None else member(letter) for letter in letters]
        columns.append(pa.array(values, kind))
    return columns


# Columns to messages


def _present(batch: pa.RecordBatch) -> dict[str, list[Any]]:
    """Returns the values of every envelope and routing column that is not all null."""
    named = zip(batch.schema.names, batch.columns, strict=True)
    return {
        name: column.to_pylist()
        for name, column in named
        if name in _EXTRA_COLUMNS and column.null_count < len(column)
    }


def _envelopes(columns: dict[str, list[Any]], rows: int) -> list[Envelope | None]:
    members: dict[str, list[Any]] = {
        name: columns[name] for name in ENVELOPE_COLUMNS if name in columns
    }
    policies: list[RetryPolicy | None] = [None] * rows
    if "retry_max_attempts" in columns:
        policies = members["retry_policy"] = _policies(columns)
    if "dlq_original_topic" in columns:
        letters = members["dlq"] = _dead_letters(columns, policies)
        if "retry_policy" in members:
            members["retry_policy"] = [
                policy if letter is None else None
                for policy, letter in zip(policies, letters, strict=True)
            ]
    if not members:
        return [None] * rows
    names = list(members)
    return [
        _envelope(
            {name: value for name, value in zip(names, row, strict=True) if value is not None}
        )
        for row in zip(*members.values(), strict=True)
    ]


def _envelope(members: dict[str, Any]) -> Envelope | None:
    return Envelope(**members) if members else None


def _policies(columns: dict[str, list[Any]]) -> list[RetryPolicy | None]:
    rows = zip(*(columns[name] for name in RETRY_COLUMNS), strict=True)
    return [None if row[0] is None else RetryPolicy(*row) for row in rows]


def _dead_letters(
    columns: dict[str, list[Any]], policies: list[RetryPolicy | None]
) -> list[DeadLetter | None]:
    rows = zip(*(columns[name] for name in _DLQ_COLUMNS), policies, strict=True)
    return [None if row[0] is None else DeadLetter(*row) for row in rows]


def _routings(columns: dict[str, list[Any]], rows: int) -> list[Routing | None]:
    if "routing_meta" not in columns:
        return [None] * rows
    labels = columns.get("routing_label") or [None] * rows
    return [
        None if meta is None else Routing(label or "", dict(meta))
        for label, meta in zip(labels, columns["routing_meta"], strict=True)
    ]
