"""The four tables of the lineage: their columns, and the words in them.

Columns are only ever added at the end. Must not know how a row is made.
"""

from __future__ import annotations

from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
)

from penstock.spark.schemas import INTEGER, LONG, STRING, TIMESTAMP, struct

RUNNING = "running"
WAITING = "waiting"
SUCCEEDED = "succeeded"
FAILED = "failed"
UNKNOWN = "unknown"
"""The outcome of an attempt whose message was delivered again without a record of how the attempt
ended."""

DEAD_LETTER_PREFIX = "dlq."

_BOOL = BooleanType()

Columns = dict[str, DataType]

IDS: Columns = dict.fromkeys(
    ("run_id", "step_id", "parent_step_id", "tenant_id", "routing_label"), STRING
)
COUNTS: Columns = dict.fromkeys(
    ("messages", "attempts", "failures", "retries", "dead_letters"), LONG
)
LENGTHS: Columns = dict.fromkeys(("waiting_ms", "running_ms", "retry_ms"), LONG)


def is_dead_letter(topic: str) -> bool:
    return topic.startswith(DEAD_LETTER_PREFIX)


ATTEMPTS = struct(
    {
        "topic": STRING,
        "partition": INTEGER,
        "offset": LONG,
        "group": STRING,
        "attempt": INTEGER,
        **IDS,
        "owner": STRING,
        "outcome": STRING,
        "reason": STRING,
        "produced_at": TIMESTAMP,
        "available_at": TIMESTAMP,
        "delivered_at": TIMESTAMP,
        "ended_at": TIMESTAMP,
        "retry_at": TIMESTAMP,
        "waiting_ms": LONG,
        "running_ms": LONG,
        "has_skew": _BOOL,
        "position": LONG,
    }
)
LAST_MESSAGE = struct({"produced_at": TIMESTAMP, "ended_at": TIMESTAMP, **LENGTHS})
_SUMMED: Columns = {
    "run_id": STRING,
    "step_id": STRING,
    "topic": STRING,
    "group": STRING,
    "parents": ArrayType(STRING),
    "tenant_id": STRING,
    "outcome": STRING,
    "reason": STRING,
    **COUNTS,
    "produced_at": TIMESTAMP,
    "delivered_at": TIMESTAMP,
    "finished_at": TIMESTAMP,
    **LENGTHS,
    "last_message": LAST_MESSAGE,
    "has_skew": _BOOL,
}
UNTRACED_STEPS = struct(_SUMMED)
STEPS = struct(
    _SUMMED
    | {"path_position": INTEGER, "children": INTEGER, "missing_parents": INTEGER, "in_cycle": _BOOL}
)
RUNS = struct(
    {
        "run_id": STRING,
        "tenant_id": STRING,
        "outcome": STRING,
        "started_at": TIMESTAMP,
        "finished_at": TIMESTAMP,
        "duration_ms": LONG,
        "steps": LONG,
        **COUNTS,
        **LENGTHS,
        "path_steps": LONG,
        "path_ms": LONG,
        "missing_parents": LONG,
        "has_cycle": _BOOL,
        "has_skew": _BOOL,
        "is_traced": _BOOL,
        "topics": ArrayType(STRING),
    }
)
CRITICAL_PATH = struct(
    {
        "run_id": STRING,
        "path_position": INTEGER,
        "step_id": STRING,
        "topic": STRING,
        "group": STRING,
        "outcome": STRING,
        "started_at": TIMESTAMP,
        "ended_at": TIMESTAMP,
        **LENGTHS,
    }
)
