"""Tells the queries of runs what Spark has committed of them, and when Spark is done with them.

Events of all queries of a session come here one after the other, after the fact and from a thread
of Java's: nothing here may wait or fail.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from pyspark.sql import SparkSession
from pyspark.sql.streaming.listener import StreamingQueryListener

from penstock.spark.running.query import PipelineQuery


class QueryListener(StreamingQueryListener):
    """Queries are known by their names, which Spark keeps apart while they run."""

    def __init__(self) -> None:
        self._by_name: WeakValueDictionary[str, PipelineQuery] = WeakValueDictionary()
        self._by_id: WeakValueDictionary[str, PipelineQuery] = WeakValueDictionary()

    def expect(self, name: str, query: PipelineQuery) -> None:
        self._by_name[name] = query

    def onQueryStarted(self, event: Any) -> None:  # noqa: N802 - Spark's name
        query = self._by_name.get(event.name or "")
        if query is not None:
            self._by_id[str(event.runId)] = query

    def onQueryProgress(self, event: Any) -> None:  # noqa: N802
        query = self._by_id.get(str(event.progress.runId))
        if query is not None:
            query.saw(event.progress)

    def onQueryIdle(self, event: Any) -> None:  # noqa: N802
        pass

    def onQueryTerminated(self, event: Any) -> None:  # noqa: N802
        query = self._by_id.get(str(event.runId))
        if query is not None:
            query.heard_last()


_watches: WeakKeyDictionary[SparkSession, QueryListener] = WeakKeyDictionary()


def watch_of(spark: SparkSession) -> QueryListener:
    watch = _watches.get(spark)
    if watch is None:
        watch = _watches[spark] = QueryListener()
        spark.streams.addListener(watch)
    return watch
