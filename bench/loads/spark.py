"""Spark reads and writes the broker, beside Spark's own Parquet in the same run.

A million messages of 100 bytes are sealed history. Spark has both cores, and the broker shares one
of them, as on a small machine. The rate of a query covers its whole life, from start to
termination. The produce load beside a read comes from wrk, and Spark then runs at a lower
priority: this measures whether serving a read slows the broker down, not how the scheduler divides
two cores among three processes.
"""

from __future__ import annotations

import msgspec
import uvloop

from bench.batches import batch_requests, produce_batches
from bench.generators import run_produce
from bench.processes import TOPIC, Broker
from bench.rows import Row, Target
from bench.setting import Setting
from bench.spark_process import Done, SparkProcess, expect_rows, memory_bytes

LOAD = "spark"
YIELD = 19
FIRST, ALL = 2, 10
"""Millions of rows that a stream reads before its memory is measured, and in total."""
WARM = 10
"""Number of reads until a session is warm, that is, until Java has compiled the code."""
SIX = ["topic", "partition", "offset", "timestamp", "key", "value"]
"""The columns that have values here; the other twenty are null."""
MEMORY_BYTES = 64 << 20
"""Small, so that messages that were just produced do not count as growth."""


def measure(setting: Setting) -> list[Row]:
    with setting.broker("spark-broker") as broker:
        broker.create_topic()
        _add_history(setting, broker, setting.messages)
        rows = [*_rates(setting, broker), *_beside(setting, broker)]
    return [*rows, *_memory(setting)]


def _add_history(setting: Setting, broker: Broker, count: int) -> None:
    setting.say(f"{LOAD}: preparing {count:,} messages of history")
    uvloop.run(produce_batches(broker.port, batch_requests(count)))
    broker.seal_everything()


def _rates(setting: Setting, broker: Broker) -> list[Row]:
    native = Row(LOAD, "native Parquet → noop", "rows/s", [])
    history = Row(LOAD, "sealed history → noop, all columns", "rows/s", [])
    ratio = Row(LOAD, "history : native Parquet", "×", [], Target(0.8, best=True))
    parquet = Row(LOAD, "stream → Parquet", "rows/s", [], Target(250_000, best=True))
    sink = Row(LOAD, "stream → broker sink", "rows/s", [], Target(200_000, best=True))
    out, count = setting.out / "spark", setting.messages
    source = {"url": _url(broker), "topic": TOPIC}
    with SparkProcess(setting.cores, out) as spark:
        same = str(out / "same-rows")
        expect_rows(count, spark.run("to_parquet", **source, path=same).rows)
        spark.run("parquet_to_noop", path=same)  # Java is slow at first, whatever it does
        spark.run("history_to_noop", **source)
        for run in setting.each_run(LOAD):
            native.values.append(count / spark.run("parquet_to_noop", path=same).seconds)
            history.values.append(count / spark.run("history_to_noop", **source).seconds)
            ratio.values.append(history.values[-1] / native.values[-1])
            done = spark.run("stream_to_parquet", **source, path=str(out / f"parquet-{run}"))
            parquet.values.append(_rate(count, done))
            copy = f"copy-{run}"
            broker.create_topic(copy)
            path = str(out / f"sink-{run}")
            done = spark.run("stream_to_sink", **source, target=copy, path=path)
            sink.values.append(_rate(count, done))
            expect_rows(count, broker.stored(copy))
        warm = _warm_ratios(setting, spark, source, same)
    return [native, history, ratio, *warm, parquet, sink]


def _warm_ratios(
    setting: Setting, spark: SparkProcess, source: dict[str, str], same: str
) -> list[Row]:
    """Measures a session that has run for a while; there is no target for these figures."""
    every = Row(LOAD, "history : native Parquet in a warm session, all columns", "×", [])
    some = Row(LOAD, "history : native Parquet in a warm session, six columns", "×", [])
    for row, columns in ((every, []), (some, SIX)):
        for _ in range(WARM):
            _history_to_parquet_ratio(spark, source, same, columns)
        for _ in setting.each_run(f"{LOAD}, warm"):
            row.values.append(_history_to_parquet_ratio(spark, source, same, columns))
    return [every, some]


def _history_to_parquet_ratio(
    spark: SparkProcess, source: dict[str, str], same: str, columns: list[str]
) -> float:
    native = spark.run("parquet_to_noop", path=same, columns=columns).seconds
    return native / spark.run("history_to_noop", **source, columns=columns).seconds


def _beside(setting: Setting, broker: Broker) -> list[Row]:
    what = "produce beside reads of history : alone"
    row = Row(LOAD, what, "×", [], Target(0.8), setting.lacks("wrk"))
    if row.note:
        return [row]
    source = {"url": _url(broker), "topic": TOPIC}
    offsets = msgspec.json.decode(broker.ask("GET", f"/v1/topics/{TOPIC}/offsets"))
    end = offsets["partitions"][0]["next"]
    with SparkProcess(setting.cores, setting.out / "spark-beside", nice=YIELD) as spark:
        spark.run("history_to_noop", **source)
        for _ in setting.each_run(f"{LOAD}, beside"):
            alone = run_produce(broker, setting.seconds / 2).rate
            spark.begin("history_again", **source, end=end, seconds=setting.seconds / 2)
            beside = run_produce(broker, setting.seconds / 2).rate
            done = spark.end()
            row.values.append(beside / alone)
            read = done.rows * setting.messages / done.seconds
            row.note = f"{beside:,.0f}/s against {alone:,.0f}/s; {read:,.0f} rows/s read meanwhile"
    return [row]


def _memory(setting: Setting) -> list[Row]:
    """Measures the memory of one stream that stops and resumes. Runs once, because it is long."""
    counts = [FIRST * setting.messages, (ALL - FIRST) * setting.messages]
    what = f"after {sum(counts):,} rows of a stream : after {counts[0]:,}"
    rows = [
        Row(LOAD, f"memory of {whose}, {what}", "×", [], Target(1.2, at_most=True))
        for whose in ("the broker", "Spark")
    ]
    out = setting.out / "spark-memory"
    taken: list[list[int]] = []
    with (
        setting.broker("spark-memory-broker", memory_bytes=MEMORY_BYTES) as broker,
        SparkProcess(setting.cores, out) as spark,
    ):
        broker.create_topic()
        job = {"url": _url(broker), "topic": TOPIC, "path": str(out / "rows")}
        for count in counts:
            _add_history(setting, broker, count)
            done = spark.run("stream_to_parquet", **job, per_batch=setting.messages // 2)
            expect_rows(count, done.rows)
            taken.append([memory_bytes(broker.pid), spark.memory_bytes()])
    for row, before, after in zip(rows, *taken, strict=True):
        row.values.append(after / before)
        row.note = f"{before / 2**20:,.0f} MiB, then {after / 2**20:,.0f}"
    return rows


def _rate(count: int, done: Done) -> float:
    expect_rows(count, done.rows)
    return count / done.seconds


def _url(broker: Broker) -> str:
    return f"http://127.0.0.1:{broker.port}"
