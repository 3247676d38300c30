"""A job: work that is done once, or again and again, on a thread of its own.

Invariant: one piece of work at a time; stopping waits for it, or cancels its Spark jobs and then
waits. Work that fails is not taken for done, and ends the job; but for a table that was joined or
replaced while the work read it, which is no fault of anybody's: then it is done anew.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark import InheritableThread
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from penstock.spark.running.activity import Activity

READ_TRIES = 5
_FILE_IS_GONE = "FAILED_READ_FILE.FILE_NOT_EXIST"


class PipelineJob(Activity):
    """`after`: in a run that ends, the job begins when these have ended, and not at all if one of
    them has failed. `every_s` None: once."""

    kind = "job"

    def __init__(
        self,
        pipeline: str,
        name: str,
        spark: SparkSession,
        work: Callable[[], int],
        *,
        after: Sequence[Activity] = (),
        every_s: float | None = None,
    ) -> None:
        super().__init__(pipeline, name)
        self._spark = spark
        self._work = work
        self._after = after
        self._every_s = every_s
        self._stopping = threading.Event()
        self._group = f"{pipeline}/{name}/{id(self)}"
        if after:
            self.state = "waiting"

    def start(self) -> None:
        InheritableThread(target=self._run, name=self._group, daemon=True).start()

    def stop(self, patience_s: float, hurry: threading.Event | None = None) -> None:
        self._stopping.set()
        if not self.bear_with(patience_s, hurry):
            give_up(self._spark, self._group)
            self.wait()

    def _run(self) -> None:
        try:
            self._go()
        except BaseException as error:  # noqa: BLE001 - kept, and told by whoever watches the run
            if self._stopping.is_set():
                self.end("stopped")
            else:
                self.end("failed", error)

    def _go(self) -> None:
        for other in self._after:
            while not other.wait(0.2):
                if self._stopping.is_set():
                    return self.end("stopped")
            if other.state not in ("finished", "stopped"):
                return self.end("skipped")
        self.begin()
        _make_active(self._spark)
        self._spark.sparkContext.setJobGroup(self._group, self._group)
        while not self._stopping.is_set():
            self.last_batch = self.batches
            self.rows += self._done()
            self.batches += 1
            if self._every_s is None:
                return self.end("finished")
            self._stopping.wait(self._every_s)
        return self.end("stopped")

    def _done(self) -> int:
        """The rows of a piece of work."""
        for _ in range(READ_TRIES - 1):
            try:
                return self._work()
            except (Py4JJavaError, PySparkException) as error:
                if self._stopping.is_set() or _FILE_IS_GONE not in str(error):
                    raise
        return self._work()


def give_up(spark: SparkSession, group: str) -> None:
    """Ends the Spark jobs of a group, and those that it would begin from now on."""
    context: Any = spark.sparkContext._jsc.sc()
    context.cancelJobGroupAndFutureJobs(group)


def _make_active(spark: SparkSession) -> None:
    """On this thread: where a write looks for format("penstock")."""
    kind: Any = SparkSession._get_j_spark_session_class(spark._jvm)
    kind.setActiveSession(spark._jsparkSession)
