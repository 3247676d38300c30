"""Makes deliveries of the journal's rows: one row for each attempt at a message.

Rows of durable streams are left out: their events have no envelope, so they belong to no run.
Invariant: in whatever order rows come, an event belongs to the last delivery of its message and
group before it, by position. A delivery that was returned is not an attempt. The computation needs
one shuffle, by message, and no more memory than Spark's sorts, which spill to disk. Must not know
steps and runs.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - its name everywhere

from penstock.model.journal import (
    ACKED,
    DEAD_LETTERED,
    DELIVERED,
    NACKED,
    PRODUCED,
    RETURNED,
    SKIPPED,
    TIMED_OUT,
    TOPIC,
)
from penstock.spark.pipelines.lineage_tables import ATTEMPTS, IDS, RUNNING, SCOPE, UNKNOWN
from penstock.spark.schemas import JOURNAL_COLUMNS

_PLACE = (*SCOPE, "topic", "partition", "offset")
_MESSAGE = (*_PLACE, "life")
"""A topic that is deleted and made again counts its offsets from 0 again: that is another life."""
OF_GROUP = (*_MESSAGE, "group")
_DELIVERY = (*OF_GROUP, "delivery", "attempt")


def deliveries(journal: DataFrame) -> DataFrame:
    """Returns a row for each attempt, and one with attempt null for a message that a group finished
    without an attempt, or that no group has received. The columns are those of ATTEMPTS and:
    `life`; `finish`, how, when and where in the journal the message was finished for its group;
    `end_position`, where the attempt ended; `last_at` and `last_position`, of the last event."""
    found = _by_delivery(_numbered(journal)).where(~F.col("is_returned"))
    message = Window.partitionBy(*_MESSAGE)
    in_order = Window.partitionBy(*OF_GROUP).orderBy("delivery", "attempt")
    before = F.lag(F.coalesce("end.retry_at", "end.at")).over(in_order)
    is_last = F.lead("delivery").over(in_order).isNull()
    is_received = F.max(F.col("group").isNotNull()).over(message)
    is_open = is_last & F.col("finish").isNull()
    timed = found.select(
        "*",
        is_received.alias("is_received"),
        F.when(F.col("attempt") == 1, F.col("produced_at")).otherwise(before).alias("available_at"),
        F.coalesce("end.kind", F.when(is_open, RUNNING).otherwise(UNKNOWN)).alias("how"),
    )
    waiting, running = millis("available_at", "delivered_at"), millis("delivered_at", "end.at")
    named = {
        "ended_at": F.col("end.at"),
        "waiting_ms": at_least_0(waiting),
        "running_ms": at_least_0(running),
        "outcome": F.when(F.col("attempt").isNotNull(), F.col("how")),
        "reason": F.col("end.reason"),
        "retry_at": F.col("end.retry_at"),
        "has_skew": is_below_0(waiting) | is_below_0(running),
    }
    # A message that some group has received needs no row for its production.
    return timed.where(F.col("group").isNotNull() | ~F.col("is_received")).select(
        *(named[n].alias(n) if n in named else F.col(n) for n in ATTEMPTS.names),
        *("life", "finish", "last_at", "last_position"),
        F.col("end.position").alias("end_position"),
    )


def attempts(deliveries: DataFrame) -> DataFrame:
    return deliveries.where("attempt is not null").select(*ATTEMPTS.names)


def _numbered(journal: DataFrame) -> DataFrame:
    """Adds to the journal's rows the life of their message and the number of their delivery."""
    rows = of_topics(journal).select(
        *(
            F.col(name) if name in journal.columns else F.lit(None).cast(kind).alias(name)
            for name, kind in JOURNAL_COLUMNS.items()
        )
    )
    # By rows, not by range: positions are unique, so Spark need not look for equal ones.
    so_far = (Window.unboundedPreceding, Window.currentRow)
    place = Window.partitionBy(*_PLACE).orderBy("position").rowsBetween(*so_far)
    of_group = Window.partitionBy(*OF_GROUP).orderBy("position").rowsBetween(*so_far)
    is_produced = F.col("kind") == PRODUCED
    stored_at = F.last(F.when(is_produced, F.col("timestamp")), ignorenulls=True).over(place)
    return rows.select(
        *(name for name in JOURNAL_COLUMNS if name != "produced_at"),
        F.coalesce("produced_at", stored_at).alias("produced_at"),
        F.sum(is_produced.cast("int")).over(place).alias("life"),
    ).withColumn("delivery", F.sum((F.col("kind") == DELIVERED).cast("int")).over(of_group))


def _by_delivery(rows: DataFrame) -> DataFrame:
    kind = F.col("kind")
    event = F.struct("position", F.col("timestamp").alias("at"), "kind", "reason", "retry_at")
    delivered = F.min(F.when(kind == DELIVERED, F.col("timestamp")))
    return rows.groupBy(*_DELIVERY).agg(
        F.min("position").alias("position"),
        F.max("timestamp").alias("last_at"),
        F.max("position").alias("last_position"),
        *(F.max(name).alias(name) for name in IDS),
        F.max("owner").alias("owner"),
        F.max("produced_at").alias("produced_at"),
        F.coalesce(delivered, F.max("delivered_at")).alias("delivered_at"),
        F.max(kind == RETURNED).alias("is_returned"),
        F.max(F.when(kind.isin(ACKED, NACKED, TIMED_OUT), event)).alias("end"),
        F.max(F.when(kind.isin(ACKED, DEAD_LETTERED, SKIPPED), event)).alias("finish"),
    )


def of_topics(journal: DataFrame) -> DataFrame:
    """Returns the journal's rows of topics. The events of a durable stream would otherwise count as
    messages of the topic of the same name. Rows that were archived before there was the column
    `resource_kind` are of topics."""
    if "resource_kind" not in journal.columns:
        return journal
    return journal.where(F.coalesce("resource_kind", F.lit(TOPIC)) == TOPIC)


def millis(start: str, end: str | Column) -> Column:
    until = F.col(end) if isinstance(end, str) else end
    return F.unix_millis(until) - F.unix_millis(F.col(start))


def at_least_0(length: Column) -> Column:
    """Returns 0 for a negative length, which a clock that was set back can cause."""
    return F.greatest(length, F.when(length.isNotNull(), 0))


def is_below_0(length: Column) -> Column:
    return F.coalesce(length < 0, F.lit(False))
