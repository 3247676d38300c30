"""What Spark tells of a query's windows: how many are open, how much came too late for one.

Spark adds up the events of a task and key before it looks at the watermark, and counts such sums:
so what is late is told as "or more". Must not know what is in the windows.
"""

from __future__ import annotations

from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery


class WindowProgress:
    """Of one query of a run, while it runs and when it has ended."""

    def __init__(self) -> None:
        self._query: StreamingQuery | None = None
        self._told = -1

    def follow(self, spark: SparkSession, query_id: str) -> None:
        """To be called from a batch: only then is it certain that the query is there."""
        if self._query is None:
            self._query = spark.streams.get(query_id)

    def late(self) -> int:
        """Of the batches that were committed since the last call."""
        fresh = [one for one in self._batches() if one.batchId > self._told]
        self._told = max((one.batchId for one in fresh), default=self._told)
        return sum(state.numRowsDroppedByWatermark for one in fresh for state in one.stateOperators)

    def open(self) -> int:
        """Rows of windows that are not over."""
        batches = self._batches()
        return sum(state.numRowsTotal for state in batches[-1].stateOperators) if batches else 0

    def _batches(self) -> list[Any]:
        """The newest last. What Spark tells between batches, when it has none, says nothing."""
        told = [] if self._query is None else self._query.recentProgress
        return [one for one in told if one.stateOperators]
