"""A journal of any length, made by Spark: runs of five steps, each the parent of the next.

Of 1,000 messages 100 fail once, one is dead-lettered and one is still being worked at; the others
are produced, delivered and acked. A message has 3.2 rows on average: a round number of rows, such
as 100,000 or a million, is met exactly.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its name everywhere

from penstock.spark.schemas import schema_of

STEPS_OF_RUN = 5
EVENTS_AT_MOST = 8
BEGINS_MS = 1_767_225_600_000


def messages_of(rows: int) -> int:
    return rows * 10 // 32


def journal_of(spark: SparkSession, rows: int) -> DataFrame:
    number, step = F.col("id"), F.col("id") % STEPS_OF_RUN
    stored = F.lit(BEGINS_MS) + F.floor(number / STEPS_OF_RUN) * 10 + step * 100
    fails = (_event("nacked", 40, 1, "no answer", 60), _event("delivered", 65, 2))
    last = [_event("nacked", 40, 1, "no answer"), _event("dead_lettered", 40, 1, "no answer")]
    begins = [_event("produced", 0), _event("delivered", 20, 1)]
    events = (
        F.when(number % 1000 == 7, F.array(*begins, *last))
        .when(number % 1000 == 8, F.array(*begins))
        .when(number % 10 == 0, F.array(*begins, *fails, _event("acked", 90, 2)))
        .otherwise(F.array(*begins, _event("acked", 45, 1)))
    )
    told = spark.range(messages_of(rows)).select(
        "id", stored.alias("stored"), step.alias("step"), F.posexplode(events).alias("nth", "event")
    )
    known = {
        "position": number * EVENTS_AT_MOST + F.col("nth"),
        "timestamp": _moment(F.col("event.after")),
        "kind": F.col("event.kind"),
        "topic": F.concat(F.lit("topic-"), step),
        "partition": (number % 7).cast("int"),
        "offset": number,
        "group": F.when(F.col("event.kind") != "produced", F.lit("workers")),
        "owner": F.when(F.col("event.attempt").isNotNull(), F.concat(F.lit("w-"), number % 100)),
        "attempt": F.col("event.attempt"),
        "reason": F.col("event.reason"),
        "run_id": F.concat(F.lit("run-"), F.floor(number / STEPS_OF_RUN)),
        "step_id": F.concat(F.lit("step-"), step),
        "parent_step_id": F.when(step > 0, F.concat(F.lit("step-"), step - 1)),
        "tenant_id": F.concat(F.lit("tenant-"), F.floor(number / STEPS_OF_RUN) % 50),
        "retry_at": _moment(F.col("event.retry_after")),
        "produced_at": _moment(F.lit(0)),
        "delivered_at": F.when(
            F.col("event.attempt").isNotNull(),
            _moment(F.when(F.col("event.attempt") == 1, 20).otherwise(65)),
        ),
    }
    schema = schema_of("journal")
    return told.select(
        *(
            known.get(field.name, F.lit(None)).cast(field.dataType).alias(field.name)
            for field in schema.fields
        )
    )


def _event(
    kind: str,
    after: int,
    attempt: int | None = None,
    reason: str | None = None,
    retry_after: int | None = None,
) -> Column:
    return F.struct(
        F.lit(kind).alias("kind"),
        F.lit(after).cast("long").alias("after"),
        F.lit(attempt).cast("int").alias("attempt"),
        F.lit(reason).cast("string").alias("reason"),
        F.lit(retry_after).cast("long").alias("retry_after"),
    )


def _moment(after: Column) -> Column:
    return F.timestamp_millis(F.col("stored") + after)
