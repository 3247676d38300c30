"""Keeps the rows that a pipeline cannot process, with the reason, in the table `rejects`.

Invariant: the rejects of a batch are in the table once, however often the batch is tried. A batch
is named by pipeline, query, number and the query's id, because the numbers start again when the
checkpoint is removed. Must not know why a row was rejected.
"""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from penstock.spark.running.run import Run
from penstock.spark.schemas import INTEGER, LONG, STRING, TIMESTAMP, struct

TABLE = "rejects"

SCHEMA = struct(
    {
        "pipeline": STRING,
        "query": STRING,
        "batch": LONG,
        "error": STRING,
        "topic": STRING,
        "partition": INTEGER,
        "offset": LONG,
        "key": STRING,
        "value": STRING,
        "at": TIMESTAMP,
    }
)
_ROW_COLUMNS = ("error", "topic", "partition", "offset", "key", "value")


def keep_rejects(run: Run, frame: DataFrame, query: str, batch: int) -> int:
    """Returns the number of rows added. `frame` has the column `error`, and whatever it knows of a
    row's topic, partition, offset, key and value."""
    known = {name: F.col(name) for name in _ROW_COLUMNS if name in frame.columns}
    values = known | {
        "pipeline": F.lit(run.name),
        "query": F.lit(query),
        "batch": F.lit(batch),
        "at": F.current_timestamp(),
    }
    rows = frame.select(
        *(values.get(one.name, F.lit(None)).cast(one.dataType).alias(one.name) for one in SCHEMA)
    )
    writer = "/".join(filter(None, (run.name, query, run.query_id())))
    return run.lake.table(TABLE, SCHEMA).append(rows, writer, batch)
