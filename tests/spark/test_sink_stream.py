"""df.writeStream.format("penstock"): what went in comes out once, over restarts and repetitions."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StringType, StructField, StructType

from penstock.model.errors import NotFound
from penstock.spark.broker import BrokerConnection
from penstock.spark.options import SinkSettings
from penstock.spark.sink import BatchSink, StreamSink
from penstock.spark.staging import ProducerBatch, cut
from tests.broker_process import BrokerProcess
from tests.contract.checks import new_name
from tests.spark.sinks import cached, numbered, values


def fill(broker: BrokerProcess, topic: str, numbers: range) -> None:
    items = [{"topic": topic, "value": value} for value in numbered(numbers)]
    for first in range(0, len(items), 1000):
        reply = broker.client.post("/v1/produce/batch", json=items[first : first + 1000])
        assert reply.status_code == 200, reply.text


class Copy:
    """A query from one topic to another, on one checkpoint."""

    def __init__(self, spark: SparkSession, broker: BrokerProcess, checkpoint: Path) -> None:
        self.spark = spark
        self.broker = broker
        self.checkpoint = checkpoint
        self.source = broker.create_topic(new_name(), 2)
        self.target = broker.create_topic(new_name())

    def start(self, per_trigger: int = 1_000_000, **options: Any) -> StreamingQuery:
        stream = (
            self.spark.readStream.format("penstock")
            .options(url=self.broker.url, topic=self.source, maxRowsPerTrigger=per_trigger)
            .load()
        )
        return (
            stream.select("key", "value")
            .writeStream.format(options.pop("format", "penstock"))
            .options(url=self.broker.url, topic=self.target, **options)
            .option("checkpointLocation", str(self.checkpoint))
            .trigger(availableNow=True)
            .start()
        )

    def run(self, **options: Any) -> None:
        self.start(**options).awaitTermination()

    def forget_last_commit(self) -> int:
        """As if the driver had died between the sink's commit and Spark's own."""
        commits = self.checkpoint / "commits"
        last = max(int(path.name) for path in commits.iterdir() if path.name.isdigit())
        (commits / str(last)).unlink()
        (commits / f".{last}.crc").unlink(missing_ok=True)
        return last


@pytest.fixture
def copy(spark: SparkSession, broker: BrokerProcess, tmp_path: Path) -> Copy:
    return Copy(spark, broker, tmp_path / "checkpoint")


def test_a_topic_is_copied_and_a_restarted_query_goes_on(copy: Copy):
    fill(copy.broker, copy.source, range(1000))
    copy.run(per_trigger=300)
    assert sorted(values(copy.broker, copy.target)) == sorted(numbered(range(1000)))
    fill(copy.broker, copy.source, range(1000, 1500))
    copy.run()
    assert sorted(values(copy.broker, copy.target)) == sorted(numbered(range(1500)))


@pytest.mark.parametrize("options", [{}, {"producerId": "named"}])
def test_a_batch_that_is_repeated_is_stored_once(copy: Copy, options: dict[str, str]):
    fill(copy.broker, copy.source, range(500))
    copy.run(**options)
    first = values(copy.broker, copy.target)
    copy.forget_last_commit()
    copy.run(**options)
    assert values(copy.broker, copy.target) == first
    fill(copy.broker, copy.source, range(500, 700))
    copy.run(**options)
    assert sorted(values(copy.broker, copy.target)) == sorted(numbered(range(700)))


def test_the_producer_is_the_query_and_stays_it(copy: Copy):
    fill(copy.broker, copy.source, range(10))
    query = copy.start()
    query.awaitTermination()
    producer = copy.broker.client.get(f"/v1/writes/spark-{query.id}").json()
    assert producer["last_batch"] == query.recentProgress[-1]["batchId"]


def test_a_producer_id_that_another_checkpoint_has_used_is_refused(copy: Copy, tmp_path: Path):
    fill(copy.broker, copy.source, range(100))
    copy.run(per_trigger=30, producerId="shared")
    copy.checkpoint = tmp_path / "another"
    with pytest.raises(Exception, match="producer 'shared' has committed batch"):
        copy.run(per_trigger=30, producerId="shared")
    assert len(values(copy.broker, copy.target)) == 100


def test_an_older_checkpoint_that_is_put_back_is_refused_and_loses_nothing(
    copy: Copy, tmp_path: Path
):
    """What it would write now has the numbers of batches that are stored."""
    older, newest = tmp_path / "older", copy.checkpoint
    fill(copy.broker, copy.source, range(100))
    copy.run()
    shutil.copytree(newest, older)
    for first in (100, 200):
        fill(copy.broker, copy.source, range(first, first + 100))
        copy.run()
    fill(copy.broker, copy.source, range(300, 400))
    copy.checkpoint = older
    with pytest.raises(Exception, match="its checkpoint is older than what it has written"):
        copy.run()
    assert sorted(values(copy.broker, copy.target)) == sorted(numbered(range(300)))
    copy.checkpoint = newest
    copy.run()
    assert sorted(values(copy.broker, copy.target)) == sorted(numbered(range(400)))


@pytest.mark.parametrize("target", [{"topic": "nowhere"}, {"cache": "default/default/nowhere"}])
def test_a_target_that_does_not_exist_is_named_before_a_task_has_begun(
    copy: Copy, target: dict[str, Any]
):
    settings = SinkSettings(url=copy.broker.url, retry_s=5, **target)
    schema = StructType([StructField(name, StringType()) for name in ("key", "value")])
    for kind in (BatchSink, StreamSink):
        with pytest.raises(NotFound, match="nowhere' does not exist at http"):
            kind(settings, schema, overwrite=False)


def test_other_rows_under_a_number_that_is_stored_are_told(
    copy: Copy, caplog: pytest.LogCaptureFixture
):
    settings = SinkSettings(url=copy.broker.url, retry_s=20, topic=copy.target)
    sink = StreamSink(settings, StructType([StructField("value", StringType())]), overwrite=False)
    name = new_name("producer")
    with BrokerConnection(settings) as broker:
        for count in (3, 3, 5):
            rows = pa.RecordBatch.from_pydict({"value": numbered(range(count))})
            sent = ProducerBatch(broker, name, 0).send(0, cut([rows]), {"topic": copy.target})
            assert not caplog.records
            sink.commit([sent], 0)
    (said,) = [record.getMessage() for record in caplog.records]
    assert f"batch 0 of producer {name} was stored before with 3 rows; the 5 rows of now" in said
    assert values(copy.broker, copy.target) == numbered(range(3))


def test_a_query_writes_into_a_cache(copy: Copy):
    fill(copy.broker, copy.source, range(5))
    stream = (
        copy.spark.readStream.format("penstock")
        .options(url=copy.broker.url, topic=copy.source)
        .load()
        .select(f.concat(f.lit("stream "), "value").alias("key"), "value")
    )
    (
        stream.writeStream.format("penstock")
        .options(url=copy.broker.url, cache="default/default/default")
        .option("checkpointLocation", str(copy.checkpoint))
        .trigger(availableNow=True)
        .start()
        .awaitTermination()
    )
    for value in numbered(range(5)):
        assert cached(copy.broker, "default/default/default", f"stream {value}") == value


def test_complete_mode_is_refused(copy: Copy):
    fill(copy.broker, copy.source, range(5))
    counts = (
        copy.spark.readStream.format("penstock")
        .options(url=copy.broker.url, topic=copy.source)
        .load()
        .groupBy("value")
        .count()
        .select("value")
    )
    query = (
        counts.writeStream.format("penstock")
        .outputMode("complete")
        .options(url=copy.broker.url, topic=copy.target)
        .option("checkpointLocation", str(copy.checkpoint))
        .trigger(availableNow=True)
    )
    with pytest.raises(Exception, match="only adds"):
        query.start().awaitTermination()


def test_a_column_that_the_sink_does_not_know_fails_the_query_by_name(copy: Copy):
    fill(copy.broker, copy.source, range(5))
    stream = (
        copy.spark.readStream.format("penstock")
        .options(url=copy.broker.url, topic=copy.source)
        .load()
    )
    query = (
        stream.writeStream.format("penstock")
        .options(url=copy.broker.url, topic=copy.target)
        .option("checkpointLocation", str(copy.checkpoint))
        .trigger(availableNow=True)
    )
    with pytest.raises(Exception, match="does not take `partition`, `offset`, `timestamp`"):
        query.start().awaitTermination()
