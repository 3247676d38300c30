"""Reads the pieces of a write that are lines of JSON into columns.

Runs on a thread. Decoding holds up the loop, so only some lines are decoded at a time, with a pause
in between. Must not know what is allowed in a column.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec
import pyarrow as pa

from penstock.model.errors import InvalidArgument
from penstock.server.envelopes import EnvelopeBody, RetryPolicyBody
from penstock.server.members import StrictBody
from penstock.server.routes.messages import ProduceBody

STEP_LINES = 256

Body = TypeVar("Body")

_TEXT, _INT = pa.string(), pa.int64()
_ENVELOPE_TEXTS = (
    "run_id",
    "step_id",
    "parent_step_id",
    "tenant_id",
    "idempotency_key",
    "target_topic",
    "deadline",
)
_RETRY_NUMBERS = ("max_attempts", "backoff_ms", "max_backoff_ms")


class CacheRowBody(StrictBody):
    """A line for a cache; `value` is base64, and without one the key is deleted."""

    key: str | None = None
    value: bytes | None = None
    ttl_ms: int | None = None


class EventRowBody(StrictBody):
    """A line for a stream; `payload` is base64."""

    payload: bytes | None = None


_produces = msgspec.json.Decoder(ProduceBody)
_cache_rows = msgspec.json.Decoder(CacheRowBody)
_event_rows = msgspec.json.Decoder(EventRowBody)
_NO_ENVELOPE = EnvelopeBody()
_NO_POLICY = RetryPolicyBody()


def produce_table(body: bytes) -> pa.Table:
    """Reads lines that are each the body of a produce."""
    return _table(body, _produces, _produce_columns)


def cache_table(body: bytes) -> pa.Table:
    """Reads lines that are each a key, its value in base64 (null deletes the key) and `ttl_ms`."""
    return _table(body, _cache_rows, _cache_columns)


def event_table(body: bytes) -> pa.Table:
    """Reads lines that are each the payload of an event in base64."""
    return _table(body, _event_rows, _event_columns)


def _table(body: bytes, decoder: msgspec.json.Decoder[Any], columns_of: Any) -> pa.Table:
    tables = []
    for first, lines in _steps(body):
        rows = [_decoded(decoder, first + n, line) for n, line in enumerate(lines)]
        try:
            tables.append(pa.table(columns_of(rows)))
        except (pa.ArrowException, OverflowError) as error:
            raise InvalidArgument(f"rows {first} to {first + len(rows) - 1}: {error}") from error
        time.sleep(0)
    return pa.concat_tables(tables) if tables else pa.table(columns_of([]))


def _steps(body: bytes) -> Iterator[tuple[int, list[bytes]]]:
    """Yields lines that are not blank, some at a time, with the number of the first."""
    count, start, lines = 0, 0, []
    while start < len(body):
        end = body.find(b"\n", start)
        end = len(body) if end < 0 else end
        line = body[start:end]
        start = end + 1
        if line.strip():
            lines.append(line)
        if len(lines) == STEP_LINES:
            yield count, lines
            count, lines = count + STEP_LINES, []
    if lines:
        yield count, lines


def _decoded(decoder: msgspec.json.Decoder[Body], row: int, line: bytes) -> Body:
    try:
        return decoder.decode(line)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"row {row}: invalid JSON: {error}") from error


def _produce_columns(rows: list[ProduceBody]) -> dict[str, pa.Array]:
    envelopes = [row.envelope or _NO_ENVELOPE for row in rows]
    policies = [envelope.retry_policy or _NO_POLICY for envelope in envelopes]
    columns = {name: _texts(rows, name) for name in ("topic", "key", "value")}
    columns |= {name: _texts(envelopes, name) for name in _ENVELOPE_TEXTS}
    columns["partition_override"] = _numbers(envelopes, "partition_override")
    columns |= {f"retry_{name}": _numbers(policies, name) for name in _RETRY_NUMBERS}
    return columns


def _cache_columns(rows: list[CacheRowBody]) -> dict[str, pa.Array]:
    return {
        "key": _texts(rows, "key"),
        "value": pa.array([row.value for row in rows], pa.binary()),
        "ttl_ms": _numbers(rows, "ttl_ms"),
    }


def _event_columns(rows: list[EventRowBody]) -> dict[str, pa.Array]:
    return {"payload": pa.array([row.payload for row in rows], pa.binary())}


def _texts(rows: list[Any], name: str) -> pa.Array:
    return pa.array([getattr(row, name) for row in rows], _TEXT)


def _numbers(rows: list[Any], name: str) -> pa.Array:
    return pa.array([getattr(row, name) for row in rows], _INT)
