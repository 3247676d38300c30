"""Rows that cannot be processed are kept aside, with what is wrong, once."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import SparkSession

from penstock.spark.lake.lake import Lake
from penstock.spark.options import BrokerSettings
from penstock.spark.pipelines.rejects import SCHEMA, TABLE, keep_rejects
from penstock.spark.running.run import Run


def test_a_batch_of_rejects_is_kept_once_with_what_is_known_of_its_rows(
    spark: SparkSession, tmp_path: Path
):
    run = Run("route", spark, BrokerSettings(), Lake(spark, str(tmp_path)), {})
    known = spark.sql(
        "select 'bad' as error, 'orders' as topic, 1 as partition, 7L as offset, 'k' as key,"
        " 'v' as value, 'more' as another"
    )
    unplaced = spark.sql("select 'worse' as error, 'w' as value")
    assert keep_rejects(run, known, "orders", 3) == 1
    assert keep_rejects(run, known, "orders", 3) == 0
    assert keep_rejects(run, unplaced, "orders", 4) == 1
    assert keep_rejects(run, known, "others", 3) == 1
    rows = run.lake.table(TABLE, SCHEMA).read().orderBy("query", "batch").collect()
    assert [tuple(row)[:-1] for row in rows] == [
        ("route", "orders", 3, "bad", "orders", 1, 7, "k", "v"),
        ("route", "orders", 4, "worse", None, None, None, None, "w"),
        ("route", "others", 3, "bad", "orders", 1, 7, "k", "v"),
    ]
    assert all(row["at"] is not None for row in rows)
