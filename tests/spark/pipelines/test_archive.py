"""The archive: everything that was produced, and all that happened to it, once each in the lake."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from threading import Event
from urllib.parse import quote

import pytest
from pyspark.sql import DataFrame, SparkSession

from penstock.spark.lake.lake import Lake
from penstock.spark.lake.table import Table
from penstock.spark.options import BrokerSettings
from penstock.spark.pipelines import archive
from penstock.spark.pipelines.archive import PIPELINE, dated, journal_table, records_table
from penstock.spark.running.failure import PipelineFailed
from penstock.spark.running.run import Run
from tests.broker_process import BrokerProcess, eventually
from tests.contract.checks import new_name
from tests.spark.sources import Rows, as_told, frame, produce, rows_at, trim, values_of

ODD = "odd/{x},* ü=%41"
"""A name of which a path needs most of it in other words."""

StartRun = Callable[..., Run]


@pytest.fixture
def lake(spark: SparkSession, tmp_path: Path) -> Lake:
    return Lake(spark, str(tmp_path / "lake"))


@pytest.fixture
def start(spark: SparkSession, broker: BrokerProcess, lake: Lake) -> Iterator[StartRun]:
    started: list[Run] = []

    def start(once: bool = True, **options: str) -> Run:
        settings = PIPELINE.settings(options)
        broker_settings = BrokerSettings(url=broker.url, retry_s=10)
        run = Run("archive", spark, broker_settings, lake, settings, once=once, every_s=0.1)
        started.append(run)
        PIPELINE.start(run)
        return run

    yield start
    for run in started:
        run.stop()


def lags(broker: BrokerProcess, topic: str) -> list[int]:
    groups = broker.client.get(f"/v1/topics/{topic}").json()["groups"]
    return [part["lag"] for one in groups if one["name"] == "archive" for part in one["partitions"]]


def produced(broker: BrokerProcess, topics: Iterable[str]) -> Rows:
    """All of it, in order, and times as Spark tells them: without a zone, which is UTC."""
    rows = [
        row | {"topic": name, "timestamp": row["timestamp"].removesuffix("Z")}
        for name in topics
        for row in rows_at(broker, quote(name, safe=""))
    ]
    return sorted(rows, key=lambda row: (row["topic"], row["partition"], row["offset"]))


def test_the_date_is_that_of_utc_in_every_time_zone(spark: SparkSession):
    rows = spark.sql("select timestamp'2026-03-29 00:30:00+02:00' as timestamp")
    zone = spark.conf.get("spark.sql.session.timeZone") or "UTC"
    spark.conf.set("spark.sql.session.timeZone", "Pacific/Auckland")
    try:
        found = dated(rows).selectExpr("cast(date as string) as date").collect()
        assert [row.date for row in found] == ["2026-03-28"]
    finally:
        spark.conf.set("spark.sql.session.timeZone", zone)


def archived(broker: BrokerProcess) -> int:
    """How far the broker thinks that its journal is archived."""
    found: int = broker.client.get("/v1/journal/offsets").json().get("archived", 0)
    return found


def test_all_rows_of_all_topics_and_of_the_journal_are_in_the_lake_once(
    spark: SparkSession,
    broker: BrokerProcess,
    lake: Lake,
    start: StartRun,
    topic: str,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("penstock.spark.lake.table.FEW", 2)
    broker.create_topic(ODD)
    produce(broker, topic, range(10), run_id="r", retry_policy={"max_attempts": 2})
    produce(broker, ODD, range(10, 13))
    start(max_rows="8").wait(600)
    eventually(lambda: lags(broker, topic), lambda found: found == [0, 0])

    later = broker.create_topic(new_name("dlq.later"))
    produce(broker, later, range(20, 23))
    produce(broker, topic, range(30, 33))
    start().wait(600)

    there = records_table(lake).read()
    names = broker.client.get("/v1/topics").json()["topics"]
    assert {topic, ODD, later} <= set(names)
    assert as_told(there.drop("date").collect()) == produced(broker, names)
    assert {row.date for row in there.select("date", "timestamp").collect()} == {
        row.timestamp.date() for row in there.select("timestamp").collect()
    }
    by_folder = Counter(path.parent for path in Path(lake.path).glob("records/*/*/*.parquet"))
    assert len(by_folder) == 3
    assert set(by_folder.values()) == {1}, "small files are joined"

    journal = journal_table(lake).read()
    last = max(row.position for row in journal.select("position").collect())
    eventually(lambda: archived(broker), lambda position: position > last)
    of_broker = frame(spark, broker, log="journal")
    assert sorted(journal.drop("date").collect()) == sorted(of_broker.collect())
    assert journal.where("kind = 'produced'").count() == 19


def test_a_deleted_topic_does_not_stop_the_others_and_what_retention_took_does(
    broker: BrokerProcess, lake: Lake, start: StartRun
):
    stem = new_name("some")
    going, staying = (broker.create_topic(f"{stem}-{end}") for end in "ab")
    wanted = produce(broker, going, range(5)) + produce(broker, staying, range(5, 10))
    options = {"topics": f"{stem}-*", "journal": "false", "compact": "false"}
    start(**options).wait(600)

    reply = broker.client.delete(f"/v1/topics/{going}")
    assert reply.status_code == 204, reply.text
    broker.create_topic(going)
    wanted += produce(broker, staying, range(10, 15)) + produce(broker, going, range(15, 17))
    start(**options).wait(600)
    assert values_of(records_table(lake).read()) == sorted(wanted)

    produce(broker, staying, range(20, 25))
    # While there is the group, retention waits for it.
    assert broker.client.delete(f"/v1/topics/{staying}/groups/archive").status_code == 204
    trim(broker, staying)
    wanted += produce(broker, staying, range(25, 27))
    with pytest.raises(PipelineFailed, match=f"'{staying}' partition 0: offsets 10 to 14 are no"):
        start(**options).wait(600)
    start(**options, fail_on_data_loss="false").wait(600)
    assert values_of(records_table(lake).read()) == sorted(wanted)


def test_a_topic_that_is_deleted_under_a_batch_does_not_end_a_running_archive(
    broker: BrokerProcess, lake: Lake, start: StartRun, monkeypatch: pytest.MonkeyPatch
):
    """Spark has planned the batch, and its tasks have read nothing yet."""
    stem = new_name("under")
    going, staying = (broker.create_topic(f"{stem}-{end}") for end in "ab")
    run = start(once=False, topics=f"{going},{staying}", journal="false")
    wanted: list[str] = []

    def settles() -> None:
        def there() -> list[str]:
            run.check()
            return values_of(records_table(lake).read())

        eventually(there, sorted(wanted).__eq__, timeout_s=60)

    wanted += produce(broker, going, range(5)) + produce(broker, staying, range(5, 10))
    settles()
    append, deleted = Table.append, Event()

    def append_late(self: Table, frame: DataFrame, writer: str, batch: int) -> int:
        if not deleted.is_set():
            assert broker.client.delete(f"/v1/topics/{going}").status_code == 204
            deleted.set()
        return append(self, frame, writer, batch)

    monkeypatch.setattr(Table, "append", append_late)
    produce(broker, going, range(10, 15))
    assert deleted.wait(600)
    wanted += produce(broker, staying, range(15, 20))
    settles()
    wanted += produce(broker, broker.create_topic(going), range(20, 23))
    settles()


def test_a_running_archive_takes_new_topics_and_a_lost_checkpoint_is_refused(
    broker: BrokerProcess, lake: Lake, start: StartRun, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("penstock.spark.lake.table.FEW", 2)
    monkeypatch.setattr(archive, "COMPACT_EVERY", 1)
    stem = new_name("new")
    options = {"topics": f"{stem}-*", "journal": "false"}
    run = start(once=False, **options)
    wanted: list[str] = []

    def there() -> list[str]:
        run.check()
        return values_of(records_table(lake).read())

    for number in range(2):
        name = broker.create_topic(f"{stem}-{number}")
        wanted += produce(broker, name, range(number * 10, number * 10 + 5))
        expected = sorted(wanted)
        eventually(there, expected.__eq__, timeout_s=60)
    run.stop()

    shutil.rmtree(Path(lake.path) / "_checkpoints")
    with pytest.raises(PipelineFailed, match=r"of another checkpoint\. Nothing was written"):
        start(**options).wait(600)
    assert values_of(records_table(lake).read()) == sorted(wanted)
