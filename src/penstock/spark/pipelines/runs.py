"""Summarises runs and their critical paths, from the traced steps.

Invariant: a run consists of its steps outside dead-letter topics. What people do with dead letters
later changes neither its outcome nor its times. Must not know messages and attempts.
"""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its name everywhere

from penstock.model.journal import DEAD_LETTERED
from penstock.spark.pipelines.attempts import at_least_0, millis
from penstock.spark.pipelines.lineage_tables import (
    COUNTS,
    CRITICAL_PATH,
    FAILED,
    LENGTHS,
    RUNNING,
    RUNS,
    SUCCEEDED,
    WAITING,
)
from penstock.spark.pipelines.steps import is_dead_letter_step


def runs(steps: DataFrame) -> DataFrame:
    outcome = F.col("outcome")
    on_path = F.col("path_position").isNotNull()
    summed = (
        steps.where(~is_dead_letter_step())
        .groupBy("run_id")
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
