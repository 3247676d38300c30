"""A run of a pipeline: its Spark session, broker and lake, and the queries and jobs it has started.

Invariant: a query's checkpoint is named by pipeline and query and lies beside the lake's tables, so
that the same command continues where the last run ended. A batch that fails is not taken for done.
The token is an option of reads and writes, which Spark does not show.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from penstock.spark.lake.lake import Lake
from penstock.spark.options import BrokerSettings
from penstock.spark.progress import follow
from penstock.spark.running.activity import Activity
from penstock.spark.running.failure import PipelineFailed
from penstock.spark.running.job import PipelineJob
from penstock.spark.running.query import PipelineQuery, WriteBatch, listener_of
from penstock.spark.sink import QUERY_ID

STOP_PATIENCE_S = 30.0

__all__ = ["Run", "WriteBatch"]


@dataclass(eq=False, repr=False)
class Run:
    """Reads what is there and ends if `once` is set; otherwise it checks for new rows every
    `every_s`. `report` shows a line or a small table to the person who started the run. `claim` is
    called before a query or job starts, and may refuse it."""

    name: str
    spark: SparkSession
    broker: BrokerSettings
    lake: Lake
    settings: Mapping[str, Any]
    _: KW_ONLY
    once: bool = True
    every_s: float = 10.0
    report: Callable[[str], None] = print
    warn: Callable[[str], None] = print
    claim: Callable[[str, str], None] = lambda pipeline, name: None
    activities: list[Activity] = field(default_factory=list, init=False)

    # -- for pipelines -------------------------------------------------------------------------

    def read(self, **options: Any) -> DataFrame:
        """Reads a batch of format("penstock") from the run's broker."""
        return self.spark.read.format("penstock").options(**self._options(options)).load()

    def stream(self, **options: Any) -> DataFrame:
        """Reads a stream of format("penstock") from the run's broker."""
        if "group" in options:
            follow(self.spark, self.broker.url, self.broker.token)
        return self.spark.readStream.format("penstock").options(**self._options(options)).load()

    def write(self, frame: DataFrame, txn: str, **options: Any) -> None:
        """Writes a batch to a topic or a cache of the run's broker, once for all tries with the
        same `txn`. In a batch of a query, the query's id is added to the name, because batch
        numbers start again with a new checkpoint."""
        chosen = self._options({"txn": "-".join(filter(None, (txn, self.query_id())))} | options)
        frame.write.format("penstock").mode("append").options(**chosen).save()

    def start(
        self, query: str, frame: DataFrame, write: WriteBatch, *, output_mode: str = "append"
    ) -> None:
        """Starts a streaming query. `write` receives each batch at least once, with its number; it
        must do nothing the second time."""
        self.claim(self.name, query)
        begun = PipelineQuery(self.name, query, self.spark, write, self.broker, self.warn)
        name = f"{self.name}-{query}"
        listener_of(self.spark).expect(name, begun)
        writer = (
            frame.writeStream.queryName(name)
            .outputMode(output_mode)
            .option("checkpointLocation", self.lake.checkpoint(self.name, query))
        )
        if self.once:
            writer = writer.trigger(availableNow=True)
        else:
            writer = writer.trigger(processingTime=f"{round(self.every_s * 1000)} milliseconds")
        begun.start(writer)
        self.activities.append(begun)

    def repeat(self, job: str, work: Callable[[], int]) -> None:
        """Starts a job that makes tables and returns their number of rows: with `once` one time,
        when everything started before has ended, otherwise every `every_s`."""
        self.claim(self.name, job)
        begun = PipelineJob(
            self.name,
            job,
            self.spark,
            work,
            after=tuple(self.activities) if self.once else (),
            every_s=None if self.once else self.every_s,
        )
        begun.start()
        self.activities.append(begun)

    def query_id(self) -> str:
        """Returns the id in the checkpoint of the query whose batch is written; else empty."""
        return self.spark.sparkContext.getLocalProperty(QUERY_ID) or ""

    # -- for the supervisor ----------------------------------------------------------------------

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits until everything has ended, or for `timeout_s`. Raises the first failure."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for activity in self.activities:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not activity.wait(left):
                raise TimeoutError(f"{activity.where()}: still running after {timeout_s:g} s")
        self.check()

    def check(self) -> None:
        """Raises the first failure, if there is one."""
        for activity in self.activities:
            if activity.error is not None:
                raise PipelineFailed(activity.where(), activity.error) from activity.error

    def stop(self, patience_s: float = STOP_PATIENCE_S) -> None:
        """Ends everything, the last started first, and nothing in the middle of a batch."""
        for activity in reversed(self.activities):
            activity.stop(patience_s)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Adds the run's broker to options of format("penstock"), and leaves out None."""
        own = {"url": self.broker.url, "retrySeconds": f"{self.broker.retry_s:g}"}
        for name in ("token", "tenant", "namespace"):
            if getattr(self.broker, name):
                own[name] = getattr(self.broker, name)
        return own | {name: value for name, value in options.items() if value is not None}
