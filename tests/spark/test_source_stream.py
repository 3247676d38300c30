"""spark.readStream.format("penstock"): every row once, over triggers and restarts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable

from penstock.spark.options import SourceSettings
from penstock.spark.schemas import schema_of
from penstock.spark.source import StreamReader
from tests.broker_process import BrokerProcess
from tests.contract.checks import new_name
from tests.spark.sources import Copy, offsets, produce, rows_of_batches


@pytest.fixture
def copy(spark: SparkSession, tmp_path: Path) -> Copy:
    return Copy(spark, tmp_path)


def test_a_query_reads_everything_once_and_goes_on_after_a_restart(
    copy: Copy, broker: BrokerProcess, topic: str
):
    wanted = produce(broker, topic, range(500))
    copy.run(broker, topic=topic)
    assert copy.values() == sorted(wanted)
    wanted += produce(broker, topic, range(500, 700))
    query = copy.run(broker, topic=topic)
    assert copy.values() == sorted(wanted)
    assert sum(rows_of_batches(query)) == 200
    query = copy.run(broker, topic=topic)
    assert sum(rows_of_batches(query)) == 0


def test_a_running_query_sees_what_is_produced_between_triggers(
    copy: Copy, broker: BrokerProcess, topic: str
):
    wanted = produce(broker, topic, range(10))
    with copy.running(broker, topic=topic) as query:
        copy.await_values(query, wanted)
        for first in (10, 20):
            wanted += produce(broker, topic, range(first, first + 10))
            copy.await_values(query, wanted)


def test_no_batch_has_more_rows_than_allowed_and_partitions_share_them(
    copy: Copy, broker: BrokerProcess, topic: str
):
    wanted = produce(broker, topic, range(1000))
    query = copy.run(broker, topic=topic, maxRowsPerTrigger=300)
    assert rows_of_batches(query) == [300, 300, 300, 100]
    assert copy.values() == sorted(wanted)
    first = query.recentProgress[0]["sources"][0]["endOffset"]
    reached = json.loads(first) if isinstance(first, str) else first
    ends = offsets(broker, topic)
    for partition, offset in reached["records"][topic].items():
        assert 0 < offset < ends[partition]["next"] / 2


def test_the_latest_offset_is_reported(copy: Copy, broker: BrokerProcess, topic: str):
    produce(broker, topic, range(100))
    query = copy.run(broker, topic=topic, maxRowsPerTrigger=60)
    latest = query.recentProgress[0]["sources"][0]["latestOffset"]
    known = json.loads(latest) if isinstance(latest, str) else latest
    ends = {partition: one["next"] for partition, one in offsets(broker, topic).items()}
    assert known["records"][topic] == ends


def test_a_topic_that_appears_is_read_from_its_beginning(copy: Copy, broker: BrokerProcess):
    stem = new_name("appearing")
    wanted = produce(broker, broker.create_topic(f"{stem}-1", 2), range(50))
    with copy.running(broker, topic=f"{stem}-*", startingOffsets="earliest") as query:
        copy.await_values(query, wanted)
        wanted += produce(broker, broker.create_topic(f"{stem}-2"), range(50, 90))
        copy.await_values(query, wanted)
    wanted += produce(broker, broker.create_topic(f"{stem}-3"), range(90, 100))
    copy.run(broker, topic=f"{stem}-*")
    assert copy.values() == sorted(wanted)


def test_a_topic_that_appears_is_begun_at_its_beginning_even_when_others_begin_at_the_end(
    copy: Copy, broker: BrokerProcess
):
    stem = new_name("late")
    produce(broker, broker.create_topic(f"{stem}-1"), range(10))
    copy.run(broker, topic=f"{stem}-*", startingOffsets="latest")
    wanted = produce(broker, broker.create_topic(f"{stem}-2"), range(10, 20))
    copy.run(broker, topic=f"{stem}-*", startingOffsets="latest")
    assert copy.values() == sorted(wanted)


def test_a_query_begins_at_the_end_when_it_is_told_to(
    copy: Copy, broker: BrokerProcess, topic: str
):
    produce(broker, topic, range(50))
    copy.run(broker, topic=topic, startingOffsets="latest")
    wanted = produce(broker, topic, range(50, 60))
    copy.run(broker, topic=topic, startingOffsets="latest")
    assert copy.values() == sorted(wanted)


def test_a_query_begins_at_offsets_and_the_checkpoint_comes_before_them(
    copy: Copy, broker: BrokerProcess, topic: str
):
    produce(broker, topic, range(50))
    starts = json.dumps({topic: {"0": 25, "1": 25}})
    copy.run(broker, topic=topic, startingOffsets=starts)
    assert copy.values() == sorted(f"value {n}" for n in range(25, 50))
    copy.run(broker, topic=topic, startingOffsets=starts)
    assert copy.rows().count() == 25


def test_only_the_columns_asked_for_are_read(copy: Copy, broker: BrokerProcess, topic: str):
    produce(broker, topic, range(20))
    copy.run(broker, topic=topic, columns="value,partition")
    assert copy.rows().columns == ["value", "partition"]
    assert copy.rows().count() == 20


def test_a_group_is_told_what_is_done(copy: Copy, broker: BrokerProcess, topic: str):
    produce(broker, topic, range(100))
    for _ in range(2):  # what the first run has committed is told when the second plans
        copy.run(broker, topic=topic, group="spark")
    report = broker.client.get(f"/v1/topics/{topic}").json()
    [group] = [one for one in report["groups"] if one["name"] == "spark"]
    assert [one["lag"] for one in group["partitions"]] == [0, 0]


def test_a_group_that_cannot_be_told_is_a_warning_and_no_failure(
    broker: BrokerProcess, topic: str, caplog: pytest.LogCaptureFixture
):
    produce(broker, topic, range(10))
    reader = StreamReader(
        SourceSettings(url=broker.url, topics=(topic,), group="x" * 300), schema_of("records")
    )
    start = reader.initialOffset()
    assert start["group"] == "x" * 300
    assert start["url"] == broker.url
    for _ in range(2):
        end = reader.latestOffset(start, ReadAllAvailable())
    reader.stop()
    assert sum(end["records"][topic].values()) > 0
    assert len(caplog.records) == 1, "said once"
    assert "is not published" in caplog.text
