"""Faults of a read: what is lost is said, what is away is waited for, what is wrong is told."""

from __future__ import annotations

import json
import time
from pathlib import Path
from threading import Event, Thread

import pytest
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable

from penstock.model.errors import NotFound, OutOfRange
from penstock.spark.options import SourceSettings
from penstock.spark.schemas import schema_of
from penstock.spark.source import StreamReader
from tests.broker_process import BrokerProcess
from tests.contract.checks import new_name
from tests.spark.conftest import StartBroker
from tests.spark.sources import Copy, frame, free_port, produce, trim, values_of


@pytest.fixture
def copy(spark: SparkSession, tmp_path: Path) -> Copy:
    return Copy(spark, tmp_path)


def delete(broker: BrokerProcess, topic: str) -> None:
    assert broker.client.delete(f"/v1/topics/{topic}").status_code == 204


def reader_of(broker: BrokerProcess, topic: str, *, fail: bool = True) -> StreamReader:
    """As Spark makes it, but in this process, where its log can be seen."""
    settings = SourceSettings(url=broker.url, retry_s=20, topics=(topic,), fail_on_data_loss=fail)
    return StreamReader(settings, schema_of("records"))


# -- what is lost ----------------------------------------------------------------------------------


def test_retention_past_the_checkpoint_fails_the_query_with_place_and_offsets(
    copy: Copy, broker: BrokerProcess
):
    topic = broker.create_topic(new_name("trimmed"))
    produce(broker, topic, range(10))
    copy.run(broker, topic=topic)
    produce(broker, topic, range(10, 20))
    trim(broker, topic)
    produce(broker, topic, range(20, 30))
    with pytest.raises(StreamingQueryException) as failure:
        copy.run(broker, topic=topic)
    for said in (repr(topic), "partition 0", "offsets 10 to 19", "failOnDataLoss"):
        assert said in str(failure.value)
    copy.run(broker, topic=topic, failOnDataLoss=False)
    kept = [*range(10), *range(20, 30)]
    assert copy.values() == sorted(f"value {n}" for n in kept)


def test_what_is_skipped_is_counted_in_a_line_of_the_drivers_log(
    broker: BrokerProcess, caplog: pytest.LogCaptureFixture
):
    topic = broker.create_topic(new_name("trimmed"))
    produce(broker, topic, range(10))
    reader = reader_of(broker, topic, fail=False)
    start = reader.initialOffset()
    trim(broker, topic)
    produce(broker, topic, range(10, 12))
    end = reader.latestOffset(start, ReadAllAvailable())
    rows = [
        row.as_py()
        for task in reader.partitions(start, end)
        for batch in reader.read(task)
        for row in batch["value"]
    ]
    reader.stop()
    assert rows == ["value 10", "value 11"]
    assert [record.message for record in caplog.records] == [
        f"topic {topic!r} partition 0: offsets 0 to 9 are no longer kept: 10 offsets are skipped"
    ]


def test_rows_that_go_between_planning_and_reading_are_a_loss(broker: BrokerProcess):
    topic = broker.create_topic(new_name("trimmed"))
    produce(broker, topic, range(10))
    for fail in (True, False):
        reader = reader_of(broker, topic, fail=fail)
        start = reader.initialOffset()
        tasks = reader.partitions(start, reader.latestOffset(start, ReadAllAvailable()))
        trim(broker, topic)
        if fail:
            with pytest.raises(OutOfRange, match="offsets 0 to 9 are no longer kept"):
                list(reader.read(tasks[0]))
            produce(broker, topic, range(10, 12))
        else:
            assert list(reader.read(tasks[0])) == []
        reader.stop()


def test_a_deleted_topic_fails_the_query_or_is_left_out(copy: Copy, broker: BrokerProcess):
    stem = new_name("going")
    going, staying = (broker.create_topic(f"{stem}-{end}") for end in "ab")
    wanted = produce(broker, going, range(5)) + produce(broker, staying, range(5, 10))
    copy.run(broker, topic=f"{stem}-*")
    delete(broker, going)
    wanted += produce(broker, staying, range(10, 15))
    with pytest.raises(StreamingQueryException, match=f"topic '{going}' does not exist any more"):
        copy.run(broker, topic=f"{stem}-*")
    copy.run(broker, topic=f"{stem}-*", failOnDataLoss=False)
    assert copy.values() == sorted(wanted)


def test_a_topic_that_was_made_again_fails_the_query_or_is_read_from_its_beginning(
    copy: Copy, broker: BrokerProcess
):
    topic = broker.create_topic(new_name("again"))
    wanted = produce(broker, topic, range(20))
    copy.run(broker, topic=topic)
    delete(broker, topic)
    broker.create_topic(topic)
    wanted += produce(broker, topic, range(20, 25))
    with pytest.raises(StreamingQueryException, match="deleted and made again"):
        copy.run(broker, topic=topic)
    copy.run(broker, topic=topic, failOnDataLoss=False)
    assert copy.values() == sorted(wanted)


def test_a_named_topic_must_exist_when_a_query_begins(broker: BrokerProcess):
    for fail in (True, False):
        reader = reader_of(broker, "nowhere", fail=fail)
        with pytest.raises(NotFound, match="topic 'nowhere' does not exist"):
            reader.initialOffset()
        reader.stop()


# -- who is away -----------------------------------------------------------------------------------


def test_a_query_goes_on_when_the_broker_is_restarted(copy: Copy, start_broker: StartBroker):
    broker = start_broker("--port", str(free_port()))
    topic = broker.create_topic("orders", 2)
    wanted = produce(broker, topic, range(200))
    with copy.running(broker, topic=topic, maxRowsPerTrigger=100) as query:
        for first in (200, 400):
            broker.restart(kill=True)
            wanted += produce(broker, topic, range(first, first + 200))
        copy.await_values(query, wanted)


def test_a_batch_read_goes_on_when_the_broker_is_restarted_in_the_middle(
    spark: SparkSession, start_broker: StartBroker, tmp_path: Path
):
    broker = start_broker("--port", str(free_port()))
    topic = broker.create_topic("orders", 2)
    wanted = produce(broker, topic, range(60_000))
    begun = tmp_path / "begun"
    stop = Event()

    def restart_when_begun() -> None:
        while not begun.exists() and not stop.wait(0.01):
            pass
        broker.restart(kill=True)

    def note(rows):
        for row in rows:
            begun.touch()
            yield row.value

    restarter = Thread(target=restart_when_begun)
    restarter.start()
    try:
        read = frame(spark, broker, topic=topic, rowsPerPartition=10_000, minPartitions=8)
        values = read.select("value").rdd.mapPartitions(note).collect()
    finally:
        stop.set()
        restarter.join()
    assert sorted(values) == sorted(wanted)


def test_a_broker_that_is_away_is_a_clear_error_within_the_bound(spark: SparkSession):
    url = f"http://127.0.0.1:{free_port()}"
    read = spark.read.format("penstock").options(url=url, topic="orders", retrySeconds=1).load()
    begun = time.monotonic()
    with pytest.raises(PySparkException, match=f"no broker answers at {url}.*tried for 1 s"):
        read.collect()
    assert time.monotonic() - begun < 30


def test_a_stream_whose_broker_stays_away_fails_and_goes_on_when_started_again(
    copy: Copy, start_broker: StartBroker
):
    broker = start_broker("--port", str(free_port()))
    topic = broker.create_topic("orders")
    wanted = produce(broker, topic, range(50))
    with copy.running(broker, topic=topic, retrySeconds=1) as query:
        copy.await_values(query, wanted)
        broker.kill()
        with pytest.raises(StreamingQueryException, match="tried for 1 s"):
            query.awaitTermination(600)
    broker.start()
    wanted += produce(broker, topic, range(50, 60))
    copy.run(broker, topic=topic)
    assert copy.values() == sorted(wanted)


def test_a_wrong_token_is_told_at_once_and_never_shown(
    spark: SparkSession, start_broker: StartBroker, tmp_path: Path
):
    token = tmp_path / "token"
    token.write_text("right")
    broker = start_broker("--token-file", str(token))
    read = spark.read.format("penstock").options(url=broker.url, topic="t", token="s3cret").load()
    begun = time.monotonic()
    with pytest.raises(PySparkException, match="does not take the token") as failure:
        read.collect()
    assert time.monotonic() - begun < 30
    assert "s3cret" not in str(failure.value)
    with broker.new_client(headers={"Authorization": "Bearer right"}) as client:
        client.post("/v1/topics", json={"name": "t"})
        client.post("/v1/produce", json={"topic": "t", "value": "v"})
    assert values_of(frame(spark, broker, topic="t", token="right")) == ["v"]


def test_a_checkpoint_of_another_log_is_refused(copy: Copy, broker: BrokerProcess, topic: str):
    reader = reader_of(broker, topic)
    with pytest.raises(Exception, match="give log=records a checkpoint"):
        reader.latestOffset({"journal": 3}, ReadAllAvailable())
    reader.stop()


def test_a_replayed_batch_has_the_rows_it_had(broker: BrokerProcess, topic: str):
    """What a restarted query does with a batch that it planned and did not commit."""
    produce(broker, topic, range(100))
    first = reader_of(broker, topic)
    start = first.initialOffset()
    end = json.loads(json.dumps(first.latestOffset(start, ReadAllAvailable())))
    produce(broker, topic, range(100, 200))
    again = reader_of(broker, topic)
    rows = [
        value
        for task in again.partitions(start, end)
        for batch in again.read(task)
        for value in batch["value"].to_pylist()
    ]
    assert sorted(rows) == sorted(f"value {n}" for n in range(100))
    first.stop()
    again.stop()
