"""Runs pipelines in one session: starts them, shows their progress, stops them, and sums up.

With `once`, pipelines run one after the other in the given order, because one may read what another
has written. Otherwise all run side by side until they are stopped. A failure is shown at once, with
its query and batch, and does not stop the others: each has its own checkpoint.

Invariant: after a stop nothing is half done: the current batch is finished, or given up as a whole.
Must not know what any pipeline does.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.logger import PySparkLogger
from pyspark.sql import SparkSession

from penstock.spark.lake.lake import Lake
from penstock.spark.launching.catalog import Chosen
from penstock.spark.launching.register import Figures
from penstock.spark.launching.screen import Screen, rate_text
from penstock.spark.launching.signals import Stop
from penstock.spark.options import BrokerSettings
from penstock.spark.running.activity import Activity
from penstock.spark.running.failure import describe_error
from penstock.spark.running.run import STOP_PATIENCE_S, Run
from penstock.spark.running.text_table import text_table

_POLL_S = 0.1
_KEPT_EVERY_S = 2.0
LOGGERS_OF_RAISED_ERRORS = (
    "org.apache.spark.sql.execution.streaming.runtime.MicroBatchExecution",
    "org.apache.spark.executor.Executor",
    "org.apache.spark.scheduler.TaskSetManager",
    "org.apache.spark.sql.execution.datasources.FileFormatWriter",
    "org.apache.spark.sql.execution.datasources.v2.AppendDataExec",
    "org.apache.spark.util.Utils",
)
"""Spark's loggers of errors that reach us as exceptions too."""

PYTHON_LOGGERS_OF_RAISED_ERRORS = ("py4j", "SQLQueryContextLogger", "DataFrameQueryContextLogger")
"""Python's loggers of the same errors."""

JAVA_HAS_ENDED = (
    "Java, in which Spark runs, has ended: somebody killed it, or the machine is short of memory. "
    "Start the pipelines again: each continues from its checkpoint"
)
JAVA_WAS_STOPPED_TOO = (
    "Spark was stopped too: its current batches are given up, and the next start continues from "
    "the checkpoints"
)

Keep = Callable[[list[Figures]], None]


class Supervisor:
    """`keep` receives the figures from time to time."""

    def __init__(
        self,
        spark: SparkSession,
        broker: BrokerSettings,
        lake: Lake,
        *,
        once: bool,
        every_s: float,
        stop: Stop | None = None,
        screen: Screen | None = None,
        keep: Keep | None = None,
        claim: Callable[[str, str], None] = lambda pipeline, name: None,
    ) -> None:
        self._spark = spark
        self._broker = broker
        self._lake = lake
        self._once = once
        self._every_s = every_s
        self._stop = stop or Stop()
        self._screen = screen or Screen()
        self._keep = keep or (lambda figures: None)
        self._claim = claim
        self._kept_at = 0.0
        self._runs: list[Run] = []
        self._failed: set[str] = set()
        self._may_lose: set[str] = set()
        self._reported: set[int] = set()
        self._rates: dict[int, _Rate] = {}
        self._is_java_gone = False
        self._lock = threading.Lock()

    def run(self, chosen: Sequence[Chosen]) -> bool:
        """Runs until all pipelines have ended, or until a stop. Returns whether none has failed."""
        try:
            for each in chosen:
                if self._stop.requested.is_set():
                    break
                self._start(each)
                if self._once:
                    self._watch()
            self._watch()
        finally:
            self._end()
        self._sum_up()
        return not self._failed

    def _start(self, chosen: Chosen) -> None:
        run = Run(
            chosen.name,
            self._spark,
            self._broker,
            self._lake,
            chosen.settings,
            once=self._once,
            every_s=self._every_s,
            report=self._screen.print,
            warn=self._screen.warn,
            claim=self._claim,
        )
        self._runs.append(run)
        if "fail_on_data_loss" in chosen.settings:
            self._may_lose.add(chosen.name)
        try:
            chosen.pipeline.start(run)
        except Exception as error:  # noqa: BLE001 - the pipeline may be a user's
            self._failed.add(chosen.name)
            text, where = describe_error(error), f"pipeline {chosen.name}"
            self._screen.warn(text if text.startswith(where) else f"{where}: {text}")

    def _watch(self) -> None:
        """Waits until everything that was started has ended, or a stop is requested."""
        while any(each.is_running for each in self._activities()):
            if self._stop.requested.wait(_POLL_S):
                return
            self._update()

    def _update(self) -> None:
        """Reports new failures, and updates the screen and the register if it is time."""
        for activity in self._activities():
            if activity.error is not None and id(activity) not in self._reported:
                self._reported.add(id(activity))
                self._failed.add(activity.pipeline)
                if not self._has_java_ended():
                    self._screen.warn(f"{activity.where()}: {self._why(activity)}")
        now = time.monotonic()
        if not (self._screen.is_due or now - self._kept_at > _KEPT_EVERY_S):
            return
        figures = self._figures()
        running = [each for each in figures if each.state == "running"]
        if self._screen.is_due and running:
            self._screen.progress(running)
        self._kept_at = now
        self._keep(figures)

    def _why(self, activity: Activity) -> str:
        """Describes the failure, with options named as the pipeline names them."""
        if activity.error is None:
            return ""
        text = describe_error(activity.error)
        if activity.pipeline in self._may_lose:
            return text.replace("failOnDataLoss=false", "fail_on_data_loss=false")
        return text

    def _figures(self) -> list[Figures]:
        for activity in self._activities():
            if activity.is_running:
                activity.count()
        return [self._figures_of(activity) for activity in self._activities()]

    def _figures_of(self, activity: Activity) -> Figures:
        rate = self._rates.setdefault(id(activity), _Rate())
        return Figures(
            pipeline=activity.pipeline,
            name=activity.name,
            state=activity.state,
            batches=activity.batches,
            rows=activity.rows,
            rows_per_s=rate.at(activity.rows) if activity.is_running else 0.0,
            lag=activity.lag,
            error=self._why(activity),
        )

    def _end(self) -> None:
        """Stops all activities at the same time, because each may have a batch to finish."""
        self._screen.clear()
        running = [each for each in self._activities() if each.is_running]
        if running:
            self._screen.warn("stopping: current batches are finished first")
        threads = [
            threading.Thread(target=self._end_one, args=(each,), daemon=True) for each in running
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(_POLL_S)  # so that signals are handled
        if running:
            self._has_java_ended()
        self._update()
        self._screen.clear()
        self._keep(self._figures())

    def _end_one(self, activity: Activity) -> None:
        try:
            activity.stop(STOP_PATIENCE_S, self._stop.hurry)
        except Exception as error:  # noqa: BLE001 - nobody else catches it on this thread
            if self._has_java_ended():
                activity.end("stopped" if self._stop.requested.is_set() else "failed")
            else:
                activity.end("failed", error)

    def _has_java_ended(self) -> bool:
        """Warns once if Java has ended; otherwise every activity would report it at length."""
        with self._lock:
            if not self._is_java_gone and is_stopped(self._spark):
                self._is_java_gone = True
                self._screen.warn(
                    JAVA_WAS_STOPPED_TOO if self._stop.requested.is_set() else JAVA_HAS_ENDED
                )
            return self._is_java_gone

    def _sum_up(self) -> None:
        rows = [
            (
                each.pipeline,
                each.name,
                each.batches,
                f"{each.rows:,}",
                rate_text(each.rows / each.seconds) if each.seconds else "",
                f"{each.seconds:.1f}",
                each.state,
            )
            for each in self._activities()
        ]
        columns = ("pipeline", "query", " batches", " rows", " rows/s", " seconds", "state")
        if rows:
            self._screen.print(text_table(columns, rows))

    def _activities(self) -> Iterator[Activity]:
        for run in self._runs:
            yield from list(run.activities)


class _Rate:
    """Rows a second, over the last few updates."""

    UPDATES = 20

    def __init__(self) -> None:
        self._seen: list[tuple[float, int]] = [(time.monotonic(), 0)]

    def at(self, rows: int) -> float:
        now = time.monotonic()
        self._seen = [*self._seen[-self.UPDATES :], (now, rows)]
        then, before = self._seen[0]
        return (rows - before) / (now - then) if now > then else 0.0


def is_stopped(spark: SparkSession) -> bool:
    """Returns whether the session's Java has ended, or is about to."""
    try:
        context: Any = spark.sparkContext._jsc.sc()
        return bool(context.isStopped())
    except (Py4JError, ConnectionError):
        return True


def quieten(spark: SparkSession) -> None:
    """Silences the loggers of errors that Spark raises too, each as a page of Java."""
    server: Any = spark.sparkContext._accumulatorServer
    if server is not None:
        server.handle_error = lambda request, address: None  # it prints a stack when Java is killed
    for name in PYTHON_LOGGERS_OF_RAISED_ERRORS:
        PySparkLogger.getLogger(name).setLevel(logging.CRITICAL)
    log4j: Any = spark._jvm.org.apache.logging.log4j  # type: ignore[union-attr]
    for name in LOGGERS_OF_RAISED_ERRORS:
        log4j.core.config.Configurator.setLevel(name, log4j.Level.OFF)
