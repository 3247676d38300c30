"""A streaming query of a run, whose batches a function writes.

Invariant: the function receives a batch as a whole, with its number, and never after a stop was
requested. A batch that the function did not finish comes again when the query continues. An
exception of the function is kept as it is: Spark's report of it is a page of two languages.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.listener import StreamingQueryListener
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from penstock.spark.options import BrokerSettings
from penstock.spark.running.activity import Activity
from penstock.spark.running.job import cancel_jobs
from penstock.spark.running.tally import Tally

WriteBatch = Callable[[DataFrame, int], None]

MOST_STARTING = 2
"""The most queries of a session whose sources start at the same time. Spark ends a query if its
source does not answer within 10 s, as when many start on few cores."""

MOST_STARTS = 3
"""The most tries to start a query whose source was too late, on a busy machine."""

_TOO_LATE = "Python worker failed to connect back"
_STARTING_S = 30.0
_POLL_S = 0.05
_LAST_EVENTS_S = 5.0
_CANCEL_S = 10.0


class StopRequested(Exception):
    """Leaves a batch for the next start of the query."""


class PipelineQuery(Activity):
    kind = "query"

    def __init__(
        self,
        pipeline: str,
        name: str,
        spark: SparkSession,
        write: WriteBatch,
        broker: BrokerSettings,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        super().__init__(pipeline, name)
        self._spark = spark
        self._write = write
        self._broker = broker
        self._warn = warn
        self._starts = 0
        self._tally = Tally()
        self._stopping = threading.Event()
        self._raised: BaseException | None = None
        self._query: StreamingQuery | None = None
        self._has_all_progress = threading.Event()

    def start(self, writer: DataStreamWriter) -> None:
        writer = writer.foreachBatch(self._take)
        self._begin(writer)
        threading.Thread(target=self._await, args=(writer,), name=self.where(), daemon=True).start()

    def _begin(self, writer: DataStreamWriter) -> None:
        _await_others(self._spark)
        self._starts += 1
        self._query = writer.start()

    def stop(self, patience_s: float, hurry: threading.Event | None = None) -> None:
        self._stopping.set()
        query = self._query
        if query is None:
            return
        if not self.wait_patiently(patience_s, hurry, lambda: not query.status["isTriggerActive"]):
            # To interrupt Java while it waits for Python can hang. So the batch's jobs are
            # cancelled first, which makes the function fail.
            cancel_jobs(self._spark, str(query.runId))
            self.wait_patiently(_CANCEL_S)
        query.stop()
        self.wait()

    def add_progress(self, progress: Any) -> None:
        """Counts a batch that Spark has committed; called by the session's listener."""
        self.batches += 1
        self._tally.add(progress.sources)

    def count(self) -> None:
        self._tally.settle(self._broker)
        self.rows, self.lag = self._tally.rows, self._tally.lag

    def no_more_progress(self) -> None:
        """Called when the session's listener has received the query's last event."""
        self._has_all_progress.set()

    def where(self) -> str:
        where = super().where()
        return where if self.last_batch is None else f"{where}, batch {self.last_batch}"

    def _take(self, frame: DataFrame, batch: int) -> None:
        if self._stopping.is_set():
            raise StopRequested
        self.last_batch = batch
        try:
            self._write(frame, batch)
        except BaseException as error:
            if not self._stopping.is_set():
                self._raised = error
            if isinstance(error, Exception):
                raise
            # SystemExit would end the thread that answers Java, which would then wait for ever.
            raise RuntimeError(f"{type(error).__name__} in a batch") from error

    def _await(self, writer: DataStreamWriter) -> None:
        failure = self._failure()
        while failure is not None and self._was_too_late(failure):
            self._warn(f"{self.where()}: its source did not start in time; it is started again")
            try:
                self._has_all_progress.clear()
                self._begin(writer)
                failure = self._failure()
            except Exception as error:  # noqa: BLE001 - kept, as the query's own failure is
                failure = error
        self.count()
        if self._raised is not None:
            self.end("failed", self._raised)
        elif self._stopping.is_set():
            self.end("stopped")
        elif failure is not None:
            self.end("failed", failure)
        else:
            self.end("finished")

    def _failure(self) -> BaseException | None:
        """Waits for the query's end. Returns the error that it ended with, if there is one."""
        query = self._query
        failure: BaseException | None = None
        try:
            if query is not None:
                if self._stopping.is_set():
                    query.stop()  # a stop was requested between two starts
                query.awaitTermination()
        except Exception as error:  # noqa: BLE001 - kept, and reported by the supervisor of the run
            failure = error
        # Events of the last batches may still come.
        self._has_all_progress.wait(_LAST_EVENTS_S)
        return failure

    def _was_too_late(self, failure: BaseException) -> bool:
        """Returns whether to start the query again. Only before its first batch: nothing has
        happened yet that could happen twice."""
        has_begun = self.last_batch is not None or self.batches > 0 or self._stopping.is_set()
        return not has_begun and self._starts < MOST_STARTS and _TOO_LATE in str(failure)


def starting(spark: SparkSession) -> int:
    """Returns how many queries wait for their sources to start."""
    messages = [query.status["message"] for query in spark.streams.active]
    return sum(message.startswith("Initializing") for message in messages)


def _await_others(spark: SparkSession) -> None:
    """Waits for other queries' sources, but not for ever: one that never starts fails itself."""
    deadline = time.monotonic() + _STARTING_S
    while starting(spark) >= MOST_STARTING and time.monotonic() < deadline:
        time.sleep(_POLL_S)


class QueryListener(StreamingQueryListener):
    """Tells the queries of runs what Spark has committed, and when Spark is done with them.

    A session has one. Spark calls it from a thread of Java, for the events of all queries one after
    the other: nothing here may wait or fail. Queries are known by their unique names.
    """

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
            query.add_progress(event.progress)

    def onQueryIdle(self, event: Any) -> None:  # noqa: N802
        pass

    def onQueryTerminated(self, event: Any) -> None:  # noqa: N802
        query = self._by_id.get(str(event.runId))
        if query is not None:
            query.no_more_progress()


_listeners: WeakKeyDictionary[SparkSession, QueryListener] = WeakKeyDictionary()


def listener_of(spark: SparkSession) -> QueryListener:
    listener = _listeners.get(spark)
    if listener is None:
        listener = _listeners[spark] = QueryListener()
        spark.streams.addListener(listener)
    return listener
