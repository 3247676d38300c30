"""Windows of the journal: the figures, late and open windows, and once through failures."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import IntegerType, StringType, StructField, StructType, TimestampType

from penstock.model.errors import InvalidArgument
from penstock.model.journal import KINDS
from penstock.model.limits import MAX_CACHE_KEY_BYTES
from penstock.spark.lake.lake import Lake
from penstock.spark.lake.table import Table
from penstock.spark.options import BrokerSettings
from penstock.spark.pipelines.metrics import (
    ACCURACY,
    KEYS,
    PIPELINE,
    SCHEMA,
    SCOPE,
    latest,
    metrics_table,
    windows,
)
from penstock.spark.running.failure import PipelineFailed
from penstock.spark.running.run import Run
from tests.broker_process import BrokerProcess
from tests.spark.pipelines.golden import Golden
from tests.spark.pipelines.golden_metrics import by_key, closed, metrics
from tests.spark.sinks import cached

Row = dict[str, Any]

CACHE = "default/default/default"
NOON = datetime(2025, 3, 30, 12, tzinfo=UTC)
COLUMNS = ("timestamp", "kind", "attempt", "produced_at", "delivered_at", *KEYS, *SCOPE)
TIMES = ("timestamp", "produced_at", "delivered_at", "window_start", "window_end")
TYPES = dict.fromkeys(TIMES, TimestampType()) | {"attempt": IntegerType()}
JOURNAL = StructType([StructField(name, TYPES.get(name, StringType())) for name in COLUMNS])


def event(kind: str, at_s: float, **values: Any) -> Row:
    """A row of the journal, so many seconds after noon."""
    row = dict.fromkeys(COLUMNS) | {"topic": "orders", "kind": kind}
    if kind != "produced":
        row |= {"group": "workers", "attempt": 1}
    told: Row = {"timestamp": at_s} | values
    moments = {
        name: NOON + timedelta(seconds=told[name])
        for name in TIMES
        if isinstance(told.get(name), int | float)
    }
    return row | told | moments


def frame_of(spark: SparkSession, rows: Iterable[Row]) -> DataFrame:
    return spark.createDataFrame([tuple(row[name] for name in COLUMNS) for row in rows], JOURNAL)


def told(rows: DataFrame) -> list[Row]:
    """Rows of the table as the plain computation has them."""
    found = [row.asDict() for row in rows.collect()]
    for row in found:
        for name in ("window_start", "window_end"):
            row[name] = row[name].astimezone(UTC)
    return sorted(found, key=by_key)


def counted(rows: Iterable[Row]) -> dict[tuple[int, str], int]:
    """Events by the window's start, in seconds after noon, and by kind."""
    found: dict[tuple[int, str], int] = {}
    for row in rows:
        start = round((row["window_start"] - NOON).total_seconds())
        for kind in KINDS:
            if row[kind]:
                found[start, kind] = found.get((start, kind), 0) + row[kind]
    return found


# -- the figures -----------------------------------------------------------------------------------


def test_a_window_counts_and_measures_what_happened_in_it(spark: SparkSession):
    rows = [
        event("produced", 1),
        event("produced", 2),
        event("delivered", 3, produced_at=1, delivered_at=3),
        event("delivered", 6, produced_at=2, delivered_at=6),
        event("nacked", 7, produced_at=1, delivered_at=3),
        event("delivered", 8, produced_at=1, delivered_at=8, attempt=2),
        event("acked", 10.5, produced_at=2, delivered_at=6),
        event("timed_out", 20, produced_at=1, delivered_at=8, attempt=2),
        event("dead_lettered", 20, produced_at=1, delivered_at=8, attempt=2),
        event("acked", 61, produced_at=2, delivered_at=60),
    ]
    made = windows(frame_of(spark, rows))
    assert made.dtypes == spark.createDataFrame([], SCHEMA).dtypes
    workers, intake, after = told(made)[1], told(made)[0], told(made)[2]
    if workers["group"] is None:
        workers, intake = intake, workers
    assert (intake["group"], intake["produced"], intake["produced_per_s"]) == (None, 2, 2 / 60)
    assert intake["error_share"] is None
    assert intake["waiting_p50_ms"] is None
    wanted = {
        "delivered": 3, "retries": 1, "acked": 1, "nacked": 1, "timed_out": 1, "dead_lettered": 1,
        "failed_per_s": 2 / 60, "error_share": 2 / 3,
        "waiting_p50_ms": 2000.0, "waiting_max_ms": 4000.0, "waiting_avg_ms": 3000.0,
        "running_p99_ms": 4500.0, "end_to_end_max_ms": 8500.0,
        "window_start": NOON, "window_end": NOON + timedelta(minutes=1), "date": NOON.date(),
    }  # fmt: skip
    assert {name: workers[name] for name in wanted} == wanted
    assert (after["acked"], after["running_max_ms"]) == (1, 1000.0)


def test_percentiles_are_exact_to_thousands_of_values(spark: SparkSession):
    most = ACCURACY // 2 - 1
    seconds = [(7919 * n) % most for n in range(most)]
    rows = [event("acked", s, produced_at=0, delivered_at=0) for s in seconds]
    day_ms = 86_400_000
    assert told(windows(frame_of(spark, rows).repartition(3), day_ms)) == metrics(rows, day_ms)


def test_messages_that_retention_has_removed_count_and_have_no_latency(spark: SparkSession):
    rows = [event("acked", 1, delivered_at=0.5), event("delivered", 1, delivered_at=1)]
    (made,) = told(windows(frame_of(spark, rows)))
    assert (made["acked"], made["delivered"]) == (1, 1)
    assert (made["waiting_avg_ms"], made["end_to_end_p95_ms"]) == (None, None)
    assert made["running_p95_ms"] == 500.0


def test_the_date_is_that_of_utc_whatever_the_sessions_zone(spark: SparkSession):
    rows = [event("produced", 12 * 3600 + 60)]
    zone = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    try:
        (made,) = windows(frame_of(spark, rows)).collect()
        (entry,) = latest(windows(frame_of(spark, rows))).collect()
    finally:
        spark.conf.set("spark.sql.session.timeZone", str(zone))
    assert made.date == datetime(2025, 3, 31).date()  # noqa: DTZ001 - a date
    assert json.loads(entry.value)["window_start"] == "2025-03-31T00:01:00.000Z"


# -- the newest windows, for a cache ---------------------------------------------------------------


def test_a_cache_gets_the_newest_window_of_each_key(spark: SparkSession):
    rows = [
        event("acked", 1, tenant_id='a"|,'),
        event("acked", 70, tenant_id='a"|,'),
        event("acked", 71, tenant_id='a"|,'),
        event("produced", 1),
        event("produced", 2, tenant_id="t" * MAX_CACHE_KEY_BYTES),
    ]
    entries = {
        row.key: json.loads(row.value) for row in latest(windows(frame_of(spark, rows))).collect()
    }
    by_keys = {tuple(json.loads(key)): value for key, value in entries.items()}
    assert set(by_keys) == {("orders", "workers", 'a"|,', None), ("orders", None, None, None)}
    newest = by_keys["orders", "workers", 'a"|,', None]
    assert (newest["acked"], newest["window_start"]) == (2, "2025-03-30T12:01:00.000Z")
    assert set(newest) == set(SCHEMA.names) - {"date", *SCOPE}


def test_topics_of_two_tenants_are_counted_apart(spark: SparkSession):
    acme = {"tenant": "acme", "namespace": "prod"}
    rows = [event("produced", 1), event("produced", 2, **acme), event("produced", 3, **acme)]
    made = windows(frame_of(spark, rows))
    found = {(row.tenant, row.namespace, row.topic): row.produced for row in made.collect()}
    assert found == {(None, None, "orders"): 1, ("acme", "prod", "orders"): 2}
    entries = {row.key: json.loads(row.value) for row in latest(made).collect()}
    assert set(entries) == {
        '["orders",null,null,null]',
        '["orders",null,null,null,"acme","prod"]',
    }
    newest = entries['["orders",null,null,null,"acme","prod"]']
    assert (newest["tenant"], newest["topic"], newest["produced"]) == ("acme", "orders", 2)


# -- a stream --------------------------------------------------------------------------------------


class Feed:
    """A journal in files, which the tests add to, and a run of the pipeline on it."""

    def __init__(
        self, spark: SparkSession, path: Path, broker: BrokerProcess | None = None
    ) -> None:
        self.spark = spark
        self.path = path
        self.said: list[str] = []
        self._url = broker.url if broker else "http://127.0.0.1:9"
        self._files = 0
        (path / "journal").mkdir()

    def add(self, *rows: Row) -> None:
        """A file, which is a batch."""
        self._files += 1
        target = self.path / "journal" / f"{self._files:03}"
        frame_of(self.spark, rows).coalesce(1).write.parquet(str(target))

    def run(self, change: Callable[[Run], None] = lambda run: None, **options: str) -> Run:
        lake = Lake(self.spark, str(self.path / "lake"))
        settings = PIPELINE.settings(options)
        run = Run(
            PIPELINE.name,
            self.spark,
            BrokerSettings(url=self._url, retry_s=20),
            lake,
            settings,
            report=self.said.append,
        )
        vars(run)["stream"] = lambda **_: (
            self.spark.readStream.schema(JOURNAL)
            .option("recursiveFileLookup", "true")
            .option("maxFilesPerTrigger", 1)
            .parquet(str(self.path / "journal"))
        )
        change(run)
        with run:
            PIPELINE.start(run)
            run.wait(600)
        return run

    def table(self) -> list[Row]:
        return told(metrics_table(Lake(self.spark, str(self.path / "lake"))).read())


@pytest.fixture
def feed(spark: SparkSession, tmp_path: Path) -> Feed:
    return Feed(spark, tmp_path)


def test_a_window_is_written_when_the_watermark_has_passed_it_and_the_next_run_goes_on(feed: Feed):
    feed.add(event("produced", 30), event("produced", 70))
    feed.add(event("produced", 59), event("produced", 119))
    feed.run()
    assert counted(feed.table()) == {}
    feed.add(event("produced", 121))
    feed.run()
    assert counted(feed.table()) == {(0, "produced"): 2}
    feed.add(event("produced", 1000))
    feed.run()
    assert counted(feed.table()) == {
        (0, "produced"): 2,
        (60, "produced"): 2,
        (120, "produced"): 1,
    }


def test_an_event_is_late_only_when_its_window_was_written_and_that_is_told_once(feed: Feed):
    feed.add(event("produced", 30), event("produced", 70))
    feed.add(event("produced", 185))
    feed.run()
    feed.add(event("produced", 400))
    # Two are late, in two windows, and come in a batch that writes other windows.
    feed.add(event("produced", 31), event("acked", 69), event("produced", 130))
    feed.run()
    assert counted(feed.table()) == {
        (0, "produced"): 1,
        (60, "produced"): 1,
        (120, "produced"): 1,
        (180, "produced"): 1,
    }
    told_late = [text.split()[0] for text in feed.said if "or more events came" in text]
    assert told_late == ["2"]


def test_the_report_shows_the_newest_window_and_says_what_is_open(feed: Feed):
    feed.add(event("produced", 10), event("acked", 20, produced_at=10, delivered_at=19))
    feed.run()
    assert feed.said[-1].splitlines() == [
        "no window is over yet",
        "rows left for a later run, because their windows are not over: 2",
    ]
    feed.add(event("produced", 300))
    feed.run()
    first, header, _, *rows, last = feed.said[-1].splitlines()
    assert first == "the newest window, 1m from 2025-03-30 12:00:00Z on:"
    assert header.split()[:3] == ["topic", "group", "tenant"]
    assert [row.split()[0] for row in rows] == ["orders", "orders"]
    assert last.endswith("windows are not over: 1")


class Killed(Exception):
    """Stands for the end of the driver: nothing after it is done."""


def test_a_batch_that_dies_after_its_commit_to_the_table_is_counted_and_cached_once(
    spark: SparkSession, broker: BrokerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    feed = Feed(spark, tmp_path, broker)
    feed.add(event("produced", 1, topic="mortal"), event("acked", 2, topic="mortal"))
    feed.add(event("produced", 62))
    feed.add(event("produced", 200), event("acked", 201))
    append = Table.append

    def append_and_die(table: Table, frame: DataFrame, writer: str, batch: int) -> int:
        append(table, frame, writer, batch)
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(Table, "append", append_and_die)
        with pytest.raises(PipelineFailed):
            feed.run(cache=CACHE)
    written = {(0, "produced"): 1, (0, "acked"): 1, (60, "produced"): 1}
    assert counted(feed.table()) == written
    assert cached(broker, CACHE, '["mortal",null,null,null]') is None
    feed.add(event("produced", 202))
    feed.add(event("produced", 1000))
    feed.run(cache=CACHE)
    assert counted(feed.table()) == written | {(180, "produced"): 2, (180, "acked"): 1}
    assert cached(broker, CACHE, '["mortal",null,null,null]') is not None


def test_a_batch_that_dies_before_its_commit_is_not_lost(
    feed: Feed, monkeypatch: pytest.MonkeyPatch
):
    feed.add(event("produced", 1), event("produced", 200))

    def die(table: Table, frame: DataFrame, writer: str, batch: int) -> int:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(Table, "append", die)
        with pytest.raises(PipelineFailed):
            feed.run()
    assert counted(feed.table()) == {}
    feed.run()
    assert counted(feed.table()) == {(0, "produced"): 1}


def test_windows_of_another_length_are_counted_beside_the_others(feed: Feed):
    feed.add(event("produced", 1), event("produced", 40), event("produced", 200))
    feed.run()
    feed.run(window="30s")
    lengths = {(row["window_ms"], row["produced"]) for row in feed.table()}
    assert lengths == {(60_000, 2), (30_000, 1)}


# -- the golden sample -----------------------------------------------------------------------------


def test_every_window_of_the_golden_sample_is_as_computed_in_plain_python(
    spark: SparkSession, golden: Golden, tmp_path: Path
):
    """All of them from a batch; from a run of the pipeline those that are over."""
    wanted = metrics(golden.rows, 100)
    assert len({window["window_start"] for window in wanted}) > 3
    lake = Lake(spark, str(tmp_path))
    broker = BrokerSettings(url=golden.broker.url)
    settings = PIPELINE.settings({"window": "100ms", "watermark": "50ms"})
    with Run(PIPELINE.name, spark, broker, lake, settings, report=lambda text: None) as run:
        PIPELINE.start(run)
        run.wait(600)
        assert told(windows(run.read(log="journal"), 100)) == wanted
    over = closed(wanted, golden.rows, 50)
    assert over
    assert told(metrics_table(lake).read()) == over


# -- the cache, and options ------------------------------------------------------------------------


def test_the_newest_windows_are_in_the_cache_and_a_second_lake_starts_over(
    spark: SparkSession, broker: BrokerProcess, tmp_path: Path
):
    key = '["orders",null,null,null]'
    for number, count in ((1, 2), (2, 1)):
        (tmp_path / f"{number}").mkdir()
        feed = Feed(spark, tmp_path / f"{number}", broker)
        feed.add(*(event("produced", 1 + n) for n in range(count)), event("produced", 200))
        feed.run(cache=CACHE)
        entry = json.loads(cached(broker, CACHE, key) or "{}")
        assert (entry["produced"], entry["window_start"]) == (count, "2025-03-30T12:00:00.000Z")


@pytest.mark.parametrize(
    "given",
    [
        {"window": "0s"},
        {"window": "32d"},
        {"window": "a minute"},
        {"watermark": "-1s"},
        {"cache": "figures"},
        {"cache": "a/ /c"},
        {"windows": "1m"},
    ],
)
def test_an_option_that_does_not_fit_is_refused_by_its_name(given: dict[str, str]):
    with pytest.raises(InvalidArgument, match=f"option {next(iter(given))}"):
        PIPELINE.settings(given)
