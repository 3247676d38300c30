"""Pipelines: archive a broker, replay from the lake, and compute the lineage of a long journal.

Spark has both cores and its default heap of one gigabyte; the broker shares one of the cores. A
rate covers a pipeline's whole work, from its start to the last commit.

Spark itself writes the journal for lineage, in the archive's own table, because a broker would
need minutes for it. The shorter journal comes first, and includes the start of Java. The heap
limits the memory of lineage; five million rows need several times that, so the rest goes to disk.
Two figures show whether memory leaks, after one journal and, in the same process, after one that
is five times as long: the live heap after a full collection, and the memory of all processes. For
the latter the heap has its full size from the start, because Java enlarges it gradually whatever
is in it; without that the ratio was 1.42.
"""

from __future__ import annotations

from itertools import chain

import uvloop

from bench.batches import batch_requests, produce_batches
from bench.processes import TOPIC
from bench.rows import Row, Target
from bench.setting import Setting
from bench.spark_process import SparkProcess, expect_rows
from bench.synthetic_journal import messages_of

LOAD = "pipelines"
TIMES = 5
WHOLE_HEAP = "-Xms1g -XX:+AlwaysPreTouch"


def measure(setting: Setting) -> list[Row]:
    return [*_archive_and_replay(setting), *_lineage(setting)]


def _archive_and_replay(setting: Setting) -> list[Row]:
    count, out = setting.messages, setting.out / f"{LOAD}-lake"
    archive = Row(LOAD, f"archive of {count:,} messages and their journal", "rows/s", [])
    replay = Row(LOAD, f"replay of {count:,} messages, lake → topic", "messages/s", [])
    with setting.broker(f"{LOAD}-broker") as broker, SparkProcess(setting.cores, out) as spark:
        broker.create_topic()
        setting.say(f"{LOAD}: preparing {count:,} messages")
        uvloop.run(produce_batches(broker.port, batch_requests(count)))
        broker.seal_everything()
        url = f"http://127.0.0.1:{broker.port}"
        for run in setting.each_run(LOAD):
            work = {"url": url, "path": str(out / f"lake-{run}")}
            done = spark.run("pipeline", name="archive", topics=TOPIC, **work)
            expect_rows(2 * count + (run - 1) * count, done.rows)
            archive.values.append(done.rows / done.seconds)
            target = f"again-{run}"
            broker.create_topic(target)
            asked = {"from": "lake", "topic": TOPIC, "to": target, "apply": "true"}
            done = spark.run("pipeline", name="replay", **asked, **work)
            expect_rows(count, broker.stored(target))
            replay.values.append(count / done.seconds)
    return [archive, replay]


def _lineage(setting: Setting) -> list[Row]:
    counts = [setting.messages, TIMES * setting.messages]
    rates = [Row(LOAD, f"lineage of {count:,} journal rows", "rows/s", []) for count in counts]
    what = f"after {counts[1]:,} journal rows : after {counts[0]:,}"
    kept = [
        Row(LOAD, f"{whose}, {what}", "×", [], Target(1.2, at_most=True))
        for whose in ("live heap of Spark", "memory of Spark")
    ]
    out = setting.out / LOAD
    taken: list[list[int]] = []
    with SparkProcess(setting.cores, out, java_options=WHOLE_HEAP) as spark:
        for count, rate in zip(counts, rates, strict=True):
            setting.say(f"{LOAD}: lineage of {count:,} journal rows")
            lake = str(out / f"lake-{count}")
            expect_rows(count, spark.run("journal_to_lake", path=lake, count=count).rows)
            asked = {"name": "lineage", "from": "lake", "url": "http://127.0.0.1:1"}
            done = spark.run("pipeline", **asked, path=lake)
            expect_rows(_tables_rows(count), done.rows)
            rate.values.append(count / done.seconds)
            rate.note = f"{done.seconds:,.1f} s"
            taken.append([spark.run("live_heap").rows, spark.memory_bytes()])
    for row, before, after in zip(kept, *taken, strict=True):
        row.values.append(after / before)
        row.note = f"{before / 2**20:,.0f} MiB, then {after / 2**20:,.0f}"
    return list(chain(rates, kept))


def _tables_rows(count: int) -> int:
    """Counts 1.1 attempts, a step and a path position per message, and a run per five messages."""
    return messages_of(count) * 33 // 10
