"""A lake: a directory of tables and checkpoints, on any file system that Spark reaches.

Invariant: other names than tables begin with an underscore, so that readers of Parquet skip them.
"""

from __future__ import annotations

from typing import cast

from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from penstock.model.errors import NotFound
from penstock.spark.lake.files import Files
from penstock.spark.lake.table import Table, stored_schema


class Lake:
    def __init__(self, spark: SparkSession, path: str) -> None:
        self.spark = spark
        self.path = path.rstrip("/")

    def table(self, name: str, schema: StructType, partition_by: tuple[str, ...] = ()) -> Table:
        return Table(self.spark, f"{self.path}/{name}", schema, partition_by)

    def find(self, name: str) -> Table:
        """Returns an existing table, with the columns it was made with."""
        made = stored_schema(Files(self.spark, f"{self.path}/{name}"))
        if made is None:
            raise NotFound(f"there is no table {name} in {self.path}")
        columns = ", ".join(f"`{column}` {kind}" for column, kind in made.schema.items())
        schema = cast(StructType, StructType.fromDDL(columns))
        return self.table(name, schema, tuple(made.partition_by))

    def checkpoint(self, pipeline: str, query: str) -> str:
        return f"{self.path}/_checkpoints/{pipeline}/{query}"
