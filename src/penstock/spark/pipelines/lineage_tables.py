"""The four tables of the lineage: their columns, and the words in them.

Columns are only ever added at the end. Must not know how a row is made.
"""

from __future__ import annotations

from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

RUNNING = "running"
WAITING = "waiting"
SUCCEEDED = "succeeded"
FAILED = "failed"
UNKNOWN = "unknown"
"""The outcome of an attempt whose message was delivered again without a record of how the attempt
ended."""

DEAD_LETTER_PREFIX = "dlq."

_TEXT, _INT, _LONG = StringType(), IntegerType(), LongType()
_TIME, _BOOL = TimestampType(), BooleanType()

Columns = dict[str, DataType]

IDS: Columns = dict.fromkeys(
    ("run_id", "step_id", "parent_step_id", "tenant_id", "routing_label"), _TEXT
)
COUNTS: Columns = dict.fromkeys(
    ("messages", "attempts", "failures", "retries", "dead_letters"), _LONG
)
LENGTHS: Columns = dict.fromkeys(("waiting_ms", "running_ms", "retry_ms"), _LONG)


def is_dead_letter(topic: str) -> bool:
    return topic.startswith(DEAD_LETTER_PREFIX)


def _schema(columns: Columns) -> StructType:
    return StructType([StructField(name, kind) for name, kind in columns.items()])


ATTEMPTS = _schema(
    {
        "topic": _TEXT,
        "partition": _INT,
        "offset": _LONG,
        "group": _TEXT,
        "attempt": _INT,
        **IDS,
        "owner": _TEXT,
        "outcome": _TEXT,
        "reason": _TEXT,
        "produced_at": _TIME,
        "available_at": _TIME,
        "delivered_at": _TIME,
        "ended_at": _TIME,
        "retry_at": _TIME,
        "waiting_ms": _LONG,
        "running_ms": _LONG,
        "has_skew": _BOOL,
        "position": _LONG,
    }
)
LAST_MESSAGE = _schema({"produced_at": _TIME, "ended_at": _TIME, **LENGTHS})
_SUMMED: Columns = {
    "run_id": _TEXT,
    "step_id": _TEXT,
    "topic": _TEXT,
    "group": _TEXT,
    "parents": ArrayType(_TEXT),
    "tenant_id": _TEXT,
    "outcome": _TEXT,
    "reason": _TEXT,
    **COUNTS,
    "produced_at": _TIME,
    "delivered_at": _TIME,
    "finished_at": _TIME,
    **LENGTHS,
    "last_message": LAST_MESSAGE,
    "has_skew": _BOOL,
}
UNTRACED_STEPS = _schema(_SUMMED)
STEPS = _schema(
    _SUMMED | {"path_position": _INT, "children": _INT, "missing_parents": _INT, "in_cycle": _BOOL}
)
RUNS = _schema(
    {
        "run_id": _TEXT,
        "tenant_id": _TEXT,
        "outcome": _TEXT,
        "started_at": _TIME,
        "finished_at": _TIME,
        "duration_ms": _LONG,
        "steps": _LONG,
        **COUNTS,
        **LENGTHS,
        "path_steps": _LONG,
        "path_ms": _LONG,
        "missing_parents": _LONG,
        "has_cycle": _BOOL,
        "has_skew": _BOOL,
        "is_traced": _BOOL,
        "topics": ArrayType(_TEXT),
    }
)
CRITICAL_PATH = _schema(
    {
        "run_id": _TEXT,
        "path_position": _INT,
        "step_id": _TEXT,
        "topic": _TEXT,
        "group": _TEXT,
        "outcome": _TEXT,
        "started_at": _TIME,
        "ended_at": _TIME,
        **LENGTHS,
    }
)
