"""Makes steps of deliveries, by the ids in their envelopes, and runs and critical paths of steps.

A step is what one group did with the messages of one step of a run in one topic. Invariant: what
has not ended is not counted in any length of time, and no length is negative. Dead letters that no
group has received are not steps: the step of the original message says that it was dead-lettered.
A run consists of its steps outside dead-letter topics: what people do with dead letters later
changes neither its outcome nor its times. Must not know the journal's rows.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its name everywhere

from penstock.model.journal import ACKED, DEAD_LETTERED, NACKED, TIMED_OUT
from penstock.model.names import DLQ_PREFIX
from penstock.spark.pipelines.attempts import OF_GROUP, at_least_0, is_below_0, millis
from penstock.spark.pipelines.lineage_tables import (
    COUNTS,
    CRITICAL_PATH,
    FAILED,
    LAST_MESSAGE,
    LENGTHS,
    RUN,
    RUNNING,
    RUNS,
    STEPS,
    SUCCEEDED,
    UNTRACED_STEPS,
    WAITING,
)
from penstock.spark.pipelines.tracing import trace_runs


def is_dead_letter_step() -> Column:
    return F.col("topic").startswith(DLQ_PREFIX)


def steps(deliveries: DataFrame) -> DataFrame:
    """Returns the untraced steps of runs that have an id. The rows of a run are side by side."""
    taken = _messages(deliveries.where("run_id is not null")).where(
        F.col("group").isNotNull() | ~is_dead_letter_step()
    )
    # The journal's order decides between messages that end in the same millisecond.
    ended = (F.coalesce("finished_at", "last_at").alias("ended_at"), "ended_position")
    summed = (
        taken.repartition("run_id")
        .groupBy(*RUN, "step_id", "topic", "group")
        .agg(
            F.array_sort(F.collect_set("parent_step_id")).alias("parents"),
            F.min("tenant_id").alias("tenant_id"),
            _first_found("outcome", RUNNING, WAITING, DEAD_LETTERED, SUCCEEDED).alias("outcome"),
            F.max("failure").alias("failure"),
            F.count("*").alias("messages"),
            F.sum("attempts").alias("attempts"),
            F.sum("failures").alias("failures"),
            F.sum(F.greatest(F.col("attempts") - 1, F.lit(0))).alias("retries"),
            F.count_if(F.col("outcome") == DEAD_LETTERED).alias("dead_letters"),
            F.min("produced_at").alias("produced_at"),
            F.min("delivered_at").alias("delivered_at"),
            F.count("finished_at").alias("finished"),
            F.max("finished_at").alias("last_finished_at"),
            *(F.sum(name).alias(name) for name in LENGTHS),
            F.max(F.struct(*ended, "produced_at", *LENGTHS)).alias("last_message"),
            F.max("has_skew").alias("has_skew"),
        )
    )
    is_finished = F.col("finished") == F.col("messages")
    last = F.struct(*(F.col(f"last_message.{name}") for name in LAST_MESSAGE.names))
    return (
        summed.withColumn("finished_at", F.when(is_finished, F.col("last_finished_at")))
        .withColumn("reason", F.col("failure.reason"))
        .withColumn("last_message", last)
        .select(*UNTRACED_STEPS.names)
        .sortWithinPartitions(*RUN)
    )


def traced(steps: DataFrame) -> DataFrame:
    """Adds the columns of STEPS that depend on the run's other steps."""
    return steps.mapInArrow(trace_runs, STEPS)


def _messages(deliveries: DataFrame) -> DataFrame:
    """Returns a row for each message and group, with group null if no group has received it."""
    is_failure = F.col("outcome").isin(NACKED, TIMED_OUT)
    summed = deliveries.groupBy(*OF_GROUP).agg(
        *(F.max(name).alias(name) for name in ("run_id", "step_id", "parent_step_id", "tenant_id")),
        F.max("produced_at").alias("produced_at"),
        F.min("delivered_at").alias("delivered_at"),
        F.max("last_at").alias("last_at"),
        F.max("last_position").alias("last_position"),
        F.count("attempt").alias("attempts"),
        F.count_if(is_failure).alias("failures"),
        # The last failure is the one that ended last: attempts of several messages overlap.
        F.max(F.when(is_failure, F.struct("end_position", "reason"))).alias("failure"),
        F.max(F.struct("position", "delivered_at", "ended_at", "outcome")).alias("last"),
        F.max("finish").alias("finish"),
        F.max("has_skew").alias("had_skew"),
    )
    # A group that is deleted and made again receives again what it had finished.
    is_done = F.col("finish.position") >= F.col("last.position")
    outcome = (
        F.when(F.col("done.kind") == DEAD_LETTERED, DEAD_LETTERED)
        .when(F.col("done").isNotNull(), SUCCEEDED)
        .when(F.col("last.outcome") == RUNNING, RUNNING)
        .otherwise(WAITING)
    )
    return _measured(
        summed.withColumn("done", F.when(is_done, F.col("finish")))
        .withColumn("outcome", outcome)
        .withColumn("finished_at", F.col("done.at"))
        .withColumn("ended_position", F.coalesce("done.position", "last_position"))
    )


def _measured(messages: DataFrame) -> DataFrame:
    """Adds the lengths. A message waits until its first delivery, runs from the delivery that is
    acked, and is retried in between, or to its end if it is never acked."""
    is_acked = F.coalesce(F.col("done.kind") == ACKED, F.lit(False))
    waiting = millis("produced_at", F.coalesce("delivered_at", "finished_at"))
    running = F.when(is_acked, millis("last.delivered_at", "finished_at"))
    lost_until = (
        F.when(is_acked | (F.col("outcome") == RUNNING), F.col("last.delivered_at"))
        .when(F.col("done").isNotNull(), F.col("finished_at"))
        .otherwise(F.col("last.ended_at"))
    )
    lengths = (waiting, running, millis("delivered_at", lost_until))
    has_skew = F.col("had_skew")
    for length in lengths:
        has_skew = has_skew | is_below_0(length)
    return messages.select(
        "*",
        *(
            F.coalesce(at_least_0(length), F.lit(0)).alias(name)
            for name, length in zip(LENGTHS, lengths, strict=True)
        ),
        has_skew.alias("has_skew"),
    )


def _first_found(name: str, *words: str) -> Column:
    """Returns the first of `words` that occurs in the column."""
    chosen = F.lit(None)
    for word in reversed(words):
        chosen = F.when(F.max(F.col(name) == word), word).otherwise(chosen)
    return chosen


# -- runs ------------------------------------------------------------------------------------------


def runs(steps: DataFrame) -> DataFrame:
    outcome = F.col("outcome")
    on_path = F.col("path_position").isNotNull()
    summed = (
        steps.where(~is_dead_letter_step())
        .groupBy(*RUN)
        .agg(
            F.min("tenant_id").alias("tenant_id"),
            F.max(outcome.isin(RUNNING, WAITING)).alias("is_open"),
            F.max(outcome == DEAD_LETTERED).alias("is_failed"),
            F.min("produced_at").alias("started_at"),
            F.max("finished_at").alias("last_finished_at"),
            F.count("*").alias("steps"),
            *(F.sum(name).alias(name) for name in (*COUNTS, *LENGTHS)),
            F.count("path_position").alias("path_steps"),
            F.min(F.when(on_path, F.col("last_message.produced_at"))).alias("path_from"),
            F.max(F.when(on_path, F.col("last_message.ended_at"))).alias("path_to"),
            F.sum("missing_parents").alias("missing_parents"),
            F.max("in_cycle").alias("has_cycle"),
            F.max("has_skew").alias("has_skew"),
            F.max(on_path).alias("is_traced"),
            F.array_sort(F.collect_set("topic")).alias("topics"),
        )
    )
    open_or_not = F.when(F.col("is_open"), RUNNING).when(F.col("is_failed"), FAILED)
    return (
        summed.withColumn("outcome", open_or_not.otherwise(SUCCEEDED))
        .withColumn("finished_at", F.when(~F.col("is_open"), F.col("last_finished_at")))
        .withColumn("duration_ms", at_least_0(millis("started_at", "finished_at")))
        .withColumn("path_ms", at_least_0(millis("path_from", "path_to")))
        .withColumn("path_steps", F.when(F.col("is_traced"), F.col("path_steps")))
        .select(*RUNS.names)
    )


def critical_paths(steps: DataFrame) -> DataFrame:
    return (
        steps.where("path_position is not null")
        .select(
            "*",
            F.col("last_message.produced_at").alias("started_at"),
            F.col("last_message.ended_at").alias("ended_at"),
            *(F.col(f"last_message.{name}").alias(f"last_{name}") for name in LENGTHS),
        )
        .select(
            *(
                F.col(f"last_{name}").alias(name) if name in LENGTHS else F.col(name)
                for name in CRITICAL_PATH.names
            )
        )
    )
