"""Lineage of a long journal: attempts, steps, runs and critical paths, from the lake's archive.

The journal is made by Spark, in the archive's own table: a broker would take minutes for what is
not measured here. Spark has both cores and its usual gigabyte. The rate counts the whole job, from
the first row that is read to the last of the four tables that is committed; the shorter journal
comes first, and pays for Java's start.

Memory is Spark's after a journal of one length and, in the same process, of five times that. Java
enlarges its heap little by little up to its limit, whatever is in it: left to that, the ratio was
1.42 (1,262 MiB, then 1,793). Here the heap has its whole size from the start, so that the ratio
tells of what is beside it; what is in it is bounded by its limit.
"""

from __future__ import annotations

from bench.rows import BenchFailed, Row, Target
from bench.setting import Setting
from bench.spark_process import SparkProcess
from bench.synthetic_journal import messages_of

LOAD = "pipelines"
TIMES = 5
WHOLE_HEAP = "-Xms1g -XX:+AlwaysPreTouch"


def measure(setting: Setting) -> list[Row]:
    counts = [setting.messages, TIMES * setting.messages]
    rates = [Row(LOAD, f"lineage of {count:,} journal rows", "rows/s", []) for count in counts]
    what = f"memory of Spark, after {counts[1]:,} journal rows : after {counts[0]:,}"
    memory = Row(LOAD, what, "×", [], Target(1.2, at_most=True))
    out = setting.out / LOAD
    with SparkProcess(setting.cores, out, java_options=WHOLE_HEAP) as spark:
        taken: list[int] = []
        for count, rate in zip(counts, rates, strict=True):
            setting.say(f"{LOAD}: lineage of {count:,} journal rows")
            lake = str(out / f"lake-{count}")
            _expect(count, spark.run("journal_to_lake", path=lake, count=count).rows)
            done = spark.run("lineage", path=lake)
            _expect(_tables_rows(count), done.rows)
            rate.values.append(count / done.seconds)
            rate.note = f"{done.seconds:,.1f} s"
            taken.append(spark.memory_bytes())
    memory.values.append(taken[1] / taken[0])
    memory.note = f"{taken[0] / 2**20:,.0f} MiB, then {taken[1] / 2**20:,.0f}"
    return [*rates, memory]


def _tables_rows(count: int) -> int:
    """1.1 attempts, a step and a place on a path for each message; a run for each five."""
    return messages_of(count) * 33 // 10


def _expect(count: int, found: int) -> None:
    if found != count:
        raise BenchFailed(f"{found:,} rows instead of {count:,}")
