"""A process with its own Spark session: reads one job per line and reports how long it took.

An input line is `{"job": name, ...arguments}`, an output line `{"seconds": s, "rows": n}`; for
`live_heap`, `rows` are bytes. The session uses every core that the process may use; its Java gets
the options of the command line. It uses the broker only through the connector.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from bench.synthetic_journal import journal_of
from penstock.spark import session
from penstock.spark.lake.lake import Lake
from penstock.spark.options import BrokerSettings
from penstock.spark.pipelines import archive, lineage, replay
from penstock.spark.pipelines.archive import dated, journal_table
from penstock.spark.running.run import Run

Job = Callable[..., int]


def main() -> None:
    java_options = sys.argv[1] if len(sys.argv) > 1 else ""
    spark = session("bench", config={"spark.driver.extraJavaOptions": java_options})
    print(flush=True)  # an empty line: the session is there
    for line in sys.stdin:
        arguments = msgspec.json.decode(line)
        job = JOBS[arguments.pop("job")]
        began = time.perf_counter()
        rows = job(spark, **arguments)
        answer = {"seconds": time.perf_counter() - began, "rows": rows}
        print(msgspec.json.encode(answer).decode(), flush=True)


def to_parquet(spark: SparkSession, url: str, topic: str, path: str) -> int:
    """Writes the same rows for Spark's own reader; this is not measured."""
    _history(spark, url, topic).write.mode("overwrite").parquet(path)
    return spark.read.parquet(path).count()


def parquet_to_noop(spark: SparkSession, path: str, columns: Sequence[str] = ()) -> int:
    rows = spark.read.parquet(path)
    _to_noop(rows.select(*columns) if columns else rows)
    return 0


def history_to_noop(spark: SparkSession, url: str, topic: str, columns: Sequence[str] = ()) -> int:
    chosen = {"columns": ",".join(columns)} if columns else {}
    _to_noop(_history(spark, url, topic, **chosen))
    return 0


def history_again(spark: SparkSession, url: str, topic: str, end: int, seconds: float) -> int:
    """Reads everything before offset `end` repeatedly for the given time; returns how often."""
    until = time.monotonic() + seconds
    times = 0
    while time.monotonic() < until:
        _to_noop(_history(spark, url, topic, endingOffsets=f'{{"{topic}":{{"0":{end}}}}}'))
        times += 1
    return times


def stream_to_parquet(
    spark: SparkSession, url: str, topic: str, path: str, per_batch: int = 0
) -> int:
    stream = _stream(spark, url, topic, per_batch)
    return _finished(
        stream.writeStream.format("parquet")
        .option("checkpointLocation", f"{path}-checkpoint")
        .trigger(availableNow=True)
        .start(path)
    )


def stream_to_sink(spark: SparkSession, url: str, topic: str, target: str, path: str) -> int:
    return _finished(
        _stream(spark, url, topic)
        .select("key", "value")
        .writeStream.format("penstock")
        .option("url", url)
        .option("topic", target)
        .option("checkpointLocation", f"{path}-checkpoint")
        .trigger(availableNow=True)
        .start()
    )


def journal_to_lake(spark: SparkSession, path: str, count: int) -> int:
    """Writes a journal in the archive's format; this is not measured."""
    return journal_table(Lake(spark, path)).replace(dated(journal_of(spark, count)))


def pipeline(spark: SparkSession, name: str, url: str, path: str, **options: str) -> int:
    """Runs a pipeline once; returns the rows that it processed."""
    chosen = PIPELINES[name]
    settings = chosen.settings(options)
    lake = Lake(spark, path)
    with Run(name, spark, BrokerSettings(url=url), lake, settings, report=lambda _: None) as run:
        chosen.start(run)
        run.wait()
    return sum(activity.rows for activity in run.activities)


def live_heap(spark: SparkSession) -> int:
    """Returns the bytes of Java's heap that are live after a full collection."""
    java: Any = spark.sparkContext._jvm
    for _ in range(2):  # what the first finds to be closed is gone with the second
        java.java.lang.System.gc()
    runtime = java.java.lang.Runtime.getRuntime()
    return int(runtime.totalMemory() - runtime.freeMemory())


PIPELINES = {each.PIPELINE.name: each.PIPELINE for each in (archive, lineage, replay)}


JOBS: dict[str, Job] = {
    job.__name__: job
    for job in (
        to_parquet,
        parquet_to_noop,
        history_to_noop,
        history_again,
        stream_to_parquet,
        stream_to_sink,
        journal_to_lake,
        pipeline,
        live_heap,
    )
}


def _history(spark: SparkSession, url: str, topic: str, **options: str) -> DataFrame:
    return spark.read.format("penstock").options(url=url, topic=topic, **options).load()


def _stream(spark: SparkSession, url: str, topic: str, per_batch: int = 0) -> DataFrame:
    reader = spark.readStream.format("penstock").option("url", url).option("topic", topic)
    if per_batch:
        reader = reader.option("maxRowsPerTrigger", per_batch)
    return reader.load()


def _to_noop(frame: DataFrame) -> None:
    frame.write.format("noop").mode("overwrite").save()


def _finished(query: StreamingQuery) -> int:
    """Returns the rows that the query has read."""
    query.awaitTermination()
    progress: list[Any] = list(query.recentProgress)
    return sum(int(batch["numInputRows"]) for batch in progress)


if __name__ == "__main__":
    main()
