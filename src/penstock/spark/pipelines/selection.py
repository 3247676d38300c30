"""Selects the stored messages of a replay, their targets, their order and their chunks.

Invariant: all functions take and return DataFrames. A message is identified by topic, partition,
offset and time: the time tells it from one of an earlier topic of the same name. Messages of one
topic are numbered in the order of their offsets, even if the broker's clock was set back; topics
are merged by time. Must not know where messages are read, or how they are sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812

from penstock.model.errors import InvalidArgument
from penstock.spark.pipelines.reasons import normalised_column
from penstock.spark.pipelines.targets import ENVELOPE, ENVELOPE_FIELDS
from penstock.spark.schemas import INTEGER, LONG, STRING, TIMESTAMP, struct

POSITION = {
    "source_topic": STRING,
    "source_partition": INTEGER,
    "source_offset": LONG,
    "source_timestamp": TIMESTAMP,
}
IDENTITY = (*POSITION, "target")
"""The columns that identify what is replayed once."""

SELECTED = struct(
    {"number": LONG, "chunk": LONG, "txn": STRING, **POSITION, "target": STRING, **ENVELOPE_FIELDS}
)


@dataclass(frozen=True, kw_only=True)
class Criteria:
    """The options that select messages. Without `to`, dead letters go where they came from."""

    to: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    run: str | None = None
    tenant: str | None = None
    reason: str | None = None
    where: str | None = None
    keep_keys: bool = False


def chosen(records: DataFrame, criteria: Criteria) -> DataFrame:
    """Returns the selected messages with their `target`, their source and the envelope to send."""
    rows = records
    for condition in _conditions(criteria):
        rows = rows.filter(condition)
    if criteria.where is not None:
        rows = _where(rows, criteria.where)
    target = F.col("dlq_original_topic") if criteria.to is None else F.lit(criteria.to)
    key = F.col("idempotency_key") if criteria.keep_keys else F.lit(None).cast("string")
    return rows.select(
        F.col("topic").alias("source_topic"),
        F.col("partition").alias("source_partition"),
        F.col("offset").alias("source_offset"),
        F.col("timestamp").alias("source_timestamp"),
        target.alias("target"),
        "dlq_last_error",
        *(key.alias(name) if name == "idempotency_key" else F.col(name) for name in ENVELOPE),
    )


def without(rows: DataFrame, done: DataFrame) -> DataFrame:
    """Returns the rows whose identity is not in `done`."""
    return rows.join(done.select(*IDENTITY), list(IDENTITY), "left_anti")


def marked(rows: DataFrame, done: DataFrame) -> DataFrame:
    """Adds `is_done`: whether the row's identity is in `done`."""
    known = done.select(*IDENTITY).distinct().withColumn("is_done", F.lit(True))
    return rows.join(known, list(IDENTITY), "left").fillna(False, ["is_done"])


def in_chunks(rows: DataFrame, chunk_rows: int, txn: str, limit: int | None = None) -> DataFrame:
    """Returns the first `limit` rows, numbered from 0 and divided into chunks."""
    of_topic = Window.partitionBy("source_topic").orderBy("source_offset")
    reached = F.max("source_timestamp").over(of_topic)
    order = Window.orderBy("reached", "source_topic", "source_offset")
    numbered = rows.withColumn("reached", reached).withColumn(
        "number", F.row_number().over(order).cast("long") - 1
    )
    if limit is not None:
        numbered = numbered.filter(F.col("number") < limit)
    chunk = F.floor(F.col("number") / chunk_rows).cast("long")
    return numbered.withColumn("chunk", chunk).withColumn("txn", F.lit(txn)).select(*SELECTED.names)


def _conditions(criteria: Criteria) -> list[Column]:
    """Returns plain comparisons, which Spark pushes down to the broker."""
    conditions = []
    if criteria.since is not None:
        conditions.append(F.col("timestamp") >= F.lit(criteria.since))
    if criteria.until is not None:
        conditions.append(F.col("timestamp") < F.lit(criteria.until))
    if criteria.run is not None:
        conditions.append(F.col("run_id") == criteria.run)
    if criteria.tenant is not None:
        conditions.append(F.col("tenant_id") == criteria.tenant)
    if criteria.reason is not None:
        error = F.col("dlq_last_error")
        same_group = normalised_column(error) == criteria.reason
        conditions.append(error.contains(criteria.reason) | same_group)
    return conditions


def _where(rows: DataFrame, where: str) -> DataFrame:
    try:
        return rows.filter(where)
    except AnalysisException as error:
        first = str(error).strip().splitlines()[0].partition(" SQLSTATE")[0]
        raise InvalidArgument(
            f"option where: {where!r} is not a predicate over the columns: {first} The columns are "
            f"{', '.join(rows.columns)}"
        ) from None
