"""A job: work on a thread of its own, done once or again and again.

Invariant: it does one thing at a time. Stopping waits for it, or cancels its Spark jobs and then
waits. Work that fails ends the job, except if a table was compacted or replaced while the work read
it: then the work is done again.
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
    """`after`: activities that must end before the job begins; if one of them fails, the job is
    skipped. `every_s` is None for a job that is done once."""

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
        if not self.wait_patiently(patience_s, hurry):
            cancel_jobs(self._spark, self._group)
            self.wait()

    def _run(self) -> None:
        try:
            self._go()
        except BaseException as error:  # noqa: BLE001 - kept, and reported by the supervisor of the run
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
            self.rows += self._work_with_retries()
            self.batches += 1
            if self._every_s is None:
                return self.end("finished")
            self._stopping.wait(self._every_s)
        return self.end("stopped")

    def _work_with_retries(self) -> int:
        for _ in range(READ_TRIES - 1):
            try:
                return self._work()
            except (Py4JJavaError, PySparkException) as error:
                if self._stopping.is_set() or _FILE_IS_GONE not in str(error):
                    raise
        return self._work()


def cancel_jobs(spark: SparkSession, group: str) -> None:
    """Cancels the Spark jobs of a group, and those that it would start later."""
    context: Any = spark.sparkContext._jsc.sc()
    context.cancelJobGroupAndFutureJobs(group)


def _make_active(spark: SparkSession) -> None:
    """Makes the session active on this thread: writes look for format("penstock") there."""
    kind: Any = SparkSession._get_j_spark_session_class(spark._jvm)
    kind.setActiveSession(spark._jsparkSession)
