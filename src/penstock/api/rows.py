"""The rows of a staged piece: their columns, and a table of them that passed all checks."""

from __future__ import annotations

from typing import Any

import msgspec
import pyarrow as pa

from penstock.model.writes import RowTarget

_TEXT = pa.string()
_INT = pa.int64()

ENVELOPE_COLUMNS = {
    "run_id": _TEXT,
    "step_id": _TEXT,
    "parent_step_id": _TEXT,
    "tenant_id": _TEXT,
    "idempotency_key": _TEXT,
    "target_topic": _TEXT,
    "partition_override": pa.int32(),
    "deadline": _TEXT,
}
RETRY_COLUMNS = {
    "retry_max_attempts": _INT,
    "retry_backoff_ms": _INT,
    "retry_max_backoff_ms": _INT,
}
ROUTING_COLUMNS = {
    "routing_label": _TEXT,
    "routing_meta": pa.map_(_TEXT, _TEXT),
}

TOPIC_COLUMNS: dict[str, Any] = {
    "topic": _TEXT,
    "key": _TEXT,
    "value": _TEXT,
    **ENVELOPE_COLUMNS,
    "partition_override": _INT,
    **RETRY_COLUMNS,
    **ROUTING_COLUMNS,
}
"""The columns that clients may send in rows for a topic: those of history, except the ones that the
broker fills in."""

CACHE_COLUMNS: dict[str, Any] = {"key": _TEXT, "value": pa.binary(), "ttl_ms": _INT}
"""Columns of rows for a cache. A row without a value deletes its key."""


STREAM_COLUMNS: dict[str, Any] = {"payload": pa.binary()}
"""Columns of rows for a durable stream."""


class CheckedRows(msgspec.Struct):
    """A piece in normal form, and the targets of its rows; there are none for a cache. `is_keyed`:
    some rows have an idempotency key."""

    table: pa.Table
    targets: list[RowTarget]
    is_keyed: bool = False
