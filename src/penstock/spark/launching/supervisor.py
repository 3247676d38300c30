"""Runs pipelines in one session: starts them, shows how far they are, stops them, sums up.

What is to be taken once is taken pipeline after pipeline, in the order given, since one may read
what another has written. Else all run side by side until somebody stops them. One that fails is
told at once, with its query and batch, and leaves the others alone: each has its own checkpoint.
Whether one has failed is the answer at the end.

Invariant: after a stop nothing is half done: a batch under way is finished, or given up as a whole.
Must not know what any pipeline does.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from pyspark.logger import PySparkLogger
from pyspark.sql import SparkSession

from penstock.spark.lake.lake import Lake
from penstock.spark.launching.catalog import Chosen
from penstock.spark.launching.register import Figures
from penstock.spark.launching.screen import Screen, rate_text
from penstock.spark.options import BrokerSettings
from penstock.spark.running.activity import Activity
from penstock.spark.running.failure import said
from penstock.spark.running.run import STOP_PATIENCE_S, Run
from penstock.spark.running.text_table import text_table

_LOOK_S = 0.1
_KEPT_EVERY_S = 2.0
TOLD_BY_US = (
    "org.apache.spark.sql.execution.streaming.runtime.MicroBatchExecution",
    "org.apache.spark.executor.Executor",
    "org.apache.spark.scheduler.TaskSetManager",
    "org.apache.spark.sql.execution.datasources.FileFormatWriter",
    "org.apache.spark.sql.execution.datasources.v2.AppendDataExec",
    "org.apache.spark.util.Utils",
)
"""Loggers of Spark's whose errors reach us as exceptions."""

TOLD_IN_PYTHON = ("py4j", "SQLQueryContextLogger", "DataFrameQueryContextLogger")
"""The same on Python's side."""

Keep = Callable[[list[Figures]], None]


class Supervisor:
    """`keep` is told the figures now and then. `stop` may come from any thread, or a signal; the
    second time it does not wait for batches under way."""

    def __init__(
        self,
        spark: SparkSession,
        broker: BrokerSettings,
        lake: Lake,
        *,
        once: bool,
        every_s: float,
        screen: Screen | None = None,
        keep: Keep | None = None,
        claim: Callable[[str, str], None] = lambda pipeline, name: None,
    ) -> None:
        self._spark = spark
        self._broker = broker
        self._lake = lake
        self._once = once
        self._every_s = every_s
        self._screen = screen or Screen()
        self._keep = keep or (lambda figures: None)
        self._claim = claim
        self._kept_at = 0.0
        self._runs: list[Run] = []
        self._failed: set[str] = set()
        self._told: set[int] = set()
        self._rates: dict[int, _Rate] = {}
        self._stop_asked = threading.Event()
        self._hurry = threading.Event()

    def run(self, chosen: Sequence[Chosen]) -> bool:
        """Until all have ended, or it was stopped. Has none failed?"""
        began = time.monotonic()
        try:
            for each in chosen:
                if self._stop_asked.is_set():
                    break
                self._start(each)
                if self._once:
                    self._watch()
            self._watch()
        finally:
            self._end()
        self._sum_up(time.monotonic() - began)
        return not self._failed

    def stop(self) -> None:
        if self._stop_asked.is_set():
            self._hurry.set()
        self._stop_asked.set()

    def _start(self, chosen: Chosen) -> None:
        run = Run(
            chosen.name,
            self._spark,
            self._broker,
            self._lake,
            chosen.settings,
            once=self._once,
            every_s=self._every_s,
            say=self._screen.say,
            claim=self._claim,
        )
        self._runs.append(run)
        try:
            chosen.pipeline.start(run)
        except Exception as error:  # noqa: BLE001 - of a pipeline, which may be a user's
            self._failed.add(chosen.name)
            self._screen.warn(f"pipeline {chosen.name}: {said(error)}")

    def _watch(self) -> None:
        """Until what has been started has ended, or a stop is asked for."""
        while any(each.is_running for each in self._activities()):
            if self._stop_asked.wait(_LOOK_S):
                return
            self._look()

    def _look(self) -> None:
        for activity in self._activities():
            if activity.error is not None and id(activity) not in self._told:
                self._told.add(id(activity))
                self._failed.add(activity.pipeline)
                self._screen.warn(f"{activity.where()}: {said(activity.error)}")
        now = time.monotonic()
        if not (self._screen.is_due or now - self._kept_at > _KEPT_EVERY_S):
            return
        figures = self._figures()
        running = [each for each in figures if each.state == "running"]
        if self._screen.is_due and running:
            self._screen.progress(running)
        self._kept_at = now
        self._keep(figures)

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
            error="" if activity.error is None else said(activity.error),
        )

    def _end(self) -> None:
        """All at the same time: each may have a batch to finish."""
        self._screen.clear()
        running = [each for each in self._activities() if each.is_running]
        if running:
            self._screen.warn("stopping: batches under way are finished first")
        threads = [
            threading.Thread(target=each.stop, args=(STOP_PATIENCE_S, self._hurry), daemon=True)
            for each in running
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(_LOOK_S)  # so that signals are heard
        self._look()
        self._screen.clear()
        self._keep(self._figures())

    def _sum_up(self, seconds: float) -> None:
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
            self._screen.say(text_table(columns, rows))

    def _activities(self) -> Iterator[Activity]:
        for run in self._runs:
            yield from list(run.activities)


class _Rate:
    """Rows a second, over the last few looks."""

    LOOKS = 20

    def __init__(self) -> None:
        self._seen: list[tuple[float, int]] = [(time.monotonic(), 0)]

    def at(self, rows: int) -> float:
        now = time.monotonic()
        self._seen = [*self._seen[-self.LOOKS :], (now, rows)]
        then, before = self._seen[0]
        return (rows - before) / (now - then) if now > then else 0.0


@contextmanager
def stopped_by_signals(supervisor: Supervisor) -> Iterator[None]:
    """SIGTERM and SIGINT. Only in the main thread; Spark has a handler of its own for the second,
    which would cancel jobs in the middle."""

    def stop(number: int, frame: FrameType | None) -> None:
        supervisor.stop()

    before: dict[int, Any] = {
        number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def quieten(spark: SparkSession) -> None:
    """Spark logs what it also raises, as a page of Java, and so does what joins it to Python."""
    for name in TOLD_IN_PYTHON:
        PySparkLogger.getLogger(name).setLevel(logging.CRITICAL)
    log4j: Any = spark._jvm.org.apache.logging.log4j  # type: ignore[union-attr]
    for name in TOLD_BY_US:
        log4j.core.config.Configurator.setLevel(name, log4j.Level.OFF)
