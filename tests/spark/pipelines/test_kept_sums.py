"""Sums that Spark keeps from batch to batch, and a table that has a batch already."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import LongType, StringType, StructField, StructType

from penstock.spark.lake.lake import Lake
from penstock.spark.options import BrokerSettings
from penstock.spark.running.failure import PipelineFailed
from penstock.spark.running.run import Run
from tests.broker_process import BrokerProcess
from tests.contract.checks import new_name
from tests.spark.sources import produce

SCHEMA = StructType([StructField("value", StringType()), StructField("count", LongType())])


def test_a_batch_that_is_in_the_table_still_counts_for_those_after_it(
    spark: SparkSession, broker: BrokerProcess, topic: str, tmp_path: Path
):
    """Killed between the table's commit and Spark's, the batch comes again; its sums are needed."""
    name, lake = new_name("sums"), Lake(spark, str(tmp_path / "lake"))
    table = lake.table("sums", SCHEMA)
    is_dying = True

    def write(frame: DataFrame, batch: int) -> None:
        table.append(frame, "sums", batch)
        if is_dying:
            raise SystemExit(3)

    def take_what_is_there() -> None:
        run = Run(name, spark, BrokerSettings(url=broker.url, retry_s=10), lake, {})
        sums = run.stream(topic=topic).groupBy("value").count()
        run.start("sums", sums, write, output_mode="update")
        run.wait(90)

    produce(broker, topic, [1, 1, 2])
    with pytest.raises(PipelineFailed, match="SystemExit: 3"):
        take_what_is_there()
    is_dying = False
    take_what_is_there()
    produce(broker, topic, [1])
    take_what_is_there()
    rows = sorted((row["value"], row["count"]) for row in table.read().collect())
    assert rows == [("value 1", 2), ("value 1", 3), ("value 2", 1)]
