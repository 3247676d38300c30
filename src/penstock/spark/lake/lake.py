"""A lake: a directory of tables and checkpoints, on any file system Spark reaches.

Invariant: what is not a table begins with an underscore, which readers of Parquet leave out.
"""

from __future__ import annotations

from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from penstock.spark.lake.table import Table


class Lake:
    def __init__(self, spark: SparkSession, path: str) -> None:
        self.spark = spark
        self.path = path.rstrip("/")

    def table(self, name: str, schema: StructType, partition_by: tuple[str, ...] = ()) -> Table:
        return Table(self.spark, f"{self.path}/{name}", schema, partition_by)

    def checkpoint(self, pipeline: str, query: str) -> str:
        return f"{self.path}/_checkpoints/{pipeline}/{query}"
