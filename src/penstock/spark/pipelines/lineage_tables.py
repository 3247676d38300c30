"""The four tables of the lineage: their columns, and the words in them.

Columns are only ever added at the end. Must not know how a row is made.
"""

from __future__ import annotations

from typing import Any

from pyspark.sql.types import ArrayType, BooleanType, DataType

from penstock.spark.schemas import INTEGER, LONG, STRING, TIMESTAMP, struct

RUNNING = "running"
WAITING = "waiting"
SUCCEEDED = "succeeded"
FAILED = "failed"
UNKNOWN = "unknown"
"""The outcome of an attempt that left no record of its end before the next delivery."""

_BOOL = BooleanType()

Columns = dict[str, DataType]

IDS: Columns = dict.fromkeys(
    ("run_id", "step_id", "parent_step_id", "tenant_id", "routing_label"), STRING
)
COUNTS: Columns = dict.fromkeys(
    ("messages", "attempts", "failures", "retries", "dead_letters"), LONG
)
LENGTHS: Columns = dict.fromkeys(("waiting_ms", "running_ms", "retry_ms"), LONG)

SCOPE: Columns = dict.fromkeys(("tenant", "namespace"), STRING)
"""The place of a topic. Null in the default namespace, as in the journal."""

RUN = ("run_id", *SCOPE)
"""The columns that name a run. Runs of two tenants may have the same id."""


def scoped(row: Any, name: str) -> str:
    """Returns a name of the row as people are shown it: with tenant and namespace before it if they
    are not the default."""
    parts = (row["tenant"], row["namespace"], row[name])
    return "/".join(part for part in parts if part is not None)


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
        **SCOPE,
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
    **SCOPE,
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
        **SCOPE,
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
        **SCOPE,
    }
)
