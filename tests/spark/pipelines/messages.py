"""Stored messages as frames, for tests that need no broker."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from penstock.spark.schemas import schema_of

NOON = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


def message(offset: int, **said: Any) -> dict[str, Any]:
    """Minute by minute from noon, in topic `orders`, unless it is said otherwise."""
    return {
        "topic": "orders",
        "partition": 0,
        "offset": offset,
        "timestamp": NOON + timedelta(minutes=offset),
        "key": f"key {offset}",
        "value": f"value {offset}",
    } | said


def records(spark: SparkSession, *messages: dict[str, Any]) -> DataFrame:
    """With the columns of format("penstock")."""
    schema = schema_of("records")
    rows = [tuple(one.get(name) for name in schema.names) for one in messages]
    return spark.createDataFrame(rows, schema)
