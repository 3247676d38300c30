"""A streaming query whose batches a function of the run's takes.

Invariant: a batch is given to the function whole, by its number, and never after a stop was asked
for; one that the function did not finish is given again when the query goes on. What the function
raises is kept as it is: Spark's own report of it is a page of two languages.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from penstock.spark.options import BrokerSettings
from penstock.spark.running.activity import Activity
from penstock.spark.running.job import give_up
from penstock.spark.running.tally import Tally

WriteBatch = Callable[[DataFrame, int], None]

MOST_STARTING = 2
"""Queries of a session whose sources start at the same time. Spark gives the Python of a source
10 s to answer, and ends the query if it does not: of many at once, on few cores, some would not."""

MOST_STARTS = 3
"""Of a query whose source was too late all the same, on a machine that has much else to do."""

_TOO_LATE = "Python worker failed to connect back"
_STARTING_S = 30.0
_LOOK_S = 0.05
_LAST_WORDS_S = 5.0
_GIVING_UP_S = 10.0


class StopAsked(Exception):
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
        self._last_heard = threading.Event()

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
        if not self.bear_with(patience_s, hurry, lambda: not query.status["isTriggerActive"]):
            # Interrupting Java while it waits for Python ends badly: the batch's jobs are ended
            # first, so that the function fails.
            give_up(self._spark, str(query.runId))
            self.bear_with(_GIVING_UP_S)
        query.stop()
        self.wait()

    def saw(self, progress: Any) -> None:
        """Spark has committed a batch; called by the session's listener."""
        self.batches += 1
        self._tally.add(progress.sources)

    def count(self) -> None:
        self._tally.settle(self._broker)
        self.rows, self.lag = self._tally.rows, self._tally.lag

    def heard_last(self) -> None:
        """There is no more to see."""
        self._last_heard.set()

    def where(self) -> str:
        said = super().where()
        return said if self.last_batch is None else f"{said}, batch {self.last_batch}"

    def _take(self, frame: DataFrame, batch: int) -> None:
        if self._stopping.is_set():
            raise StopAsked
        self.last_batch = batch
        try:
            self._write(frame, batch)
        except BaseException as error:
            if not self._stopping.is_set():
                self._raised = error
            if isinstance(error, Exception):
                raise
            # Who asks to exit here would end the thread that answers Java, which then waits.
            raise RuntimeError(f"{type(error).__name__} in a batch") from error

    def _await(self, writer: DataStreamWriter) -> None:
        failure = self._failure()
        while failure is not None and self._was_too_late(failure):
            self._warn(f"{self.where()}: its source was not there in time, so it is started again")
            try:
                self._last_heard.clear()
                self._begin(writer)
                failure = self._failure()
            except Exception as error:  # noqa: BLE001 - kept, as what it ends with is
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
        """What the query has ended with, when it has."""
        query = self._query
        failure: BaseException | None = None
        try:
            if query is not None:
                if self._stopping.is_set():
                    query.stop()  # it was asked for between two starts
                query.awaitTermination()
        except Exception as error:  # noqa: BLE001 - kept, and told by whoever watches the run
            failure = error
        # Events of the last batches are still on their way.
        self._last_heard.wait(_LAST_WORDS_S)
        return failure

    def _was_too_late(self, failure: BaseException) -> bool:
        """Before the first batch only: nothing has happened yet that could happen twice."""
        has_begun = self.last_batch is not None or self.batches > 0 or self._stopping.is_set()
        return not has_begun and self._starts < MOST_STARTS and _TOO_LATE in str(failure)


def starting(spark: SparkSession) -> int:
    """Queries whose sources are not there yet."""
    messages = [query.status["message"] for query in spark.streams.active]
    return sum(message.startswith("Initializing") for message in messages)


def _await_others(spark: SparkSession) -> None:
    """Not for ever: a source that never comes is its own query's failure."""
    deadline = time.monotonic() + _STARTING_S
    while starting(spark) >= MOST_STARTING and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
