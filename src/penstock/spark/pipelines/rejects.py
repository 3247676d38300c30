"""The rows a pipeline cannot process, kept aside with what is wrong with them: the table `rejects`.

Invariant: a batch's rejects are in the table once, however often the batch is tried. A batch is
named by pipeline, query and number, and by the query's id: one whose checkpoint was removed counts
from 0 again. Must not know why a row was rejected.
"""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import (
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from penstock.spark.lake.table import Table
from penstock.spark.running.run import Run

TABLE = "rejects"

_TEXT = StringType()

SCHEMA = StructType(
    [
        StructField("pipeline", _TEXT),
        StructField("query", _TEXT),
        StructField("batch", LongType()),
        StructField("error", _TEXT),
        StructField("topic", _TEXT),
        StructField("partition", IntegerType()),
        StructField("offset", LongType()),
        StructField("key", _TEXT),
        StructField("value", _TEXT),
        StructField("at", TimestampType()),
    ]
)
_OF_ROW = ("error", "topic", "partition", "offset", "key", "value")


class Rejects:
    def __init__(self, run: Run) -> None:
        self._run = run

    @property
    def table(self) -> Table:
        return self._run.lake.table(TABLE, SCHEMA)

    def keep(self, frame: DataFrame, query: str, batch: int) -> int:
        """The rows added. `frame` says the `error`, and of where a row is from what it knows."""
        known = {name: F.col(name) for name in _OF_ROW if name in frame.columns}
        said = known | {
            "pipeline": F.lit(self._run.name),
            "query": F.lit(query),
            "batch": F.lit(batch),
            "at": F.current_timestamp(),
        }
        rows = frame.select(
            *(said.get(one.name, F.lit(None)).cast(one.dataType).alias(one.name) for one in SCHEMA)
        )
        return self.table.append(rows, self._writer(query), batch)

    def _writer(self, query: str) -> str:
        return "/".join(filter(None, (self._run.name, query, self._run.query_id())))
