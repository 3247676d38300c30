"""Durable streams as source and sink, and caches as tables."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.datasource import InputPartition
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import BinaryType, StructField, StructType

from penstock.model.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from penstock.spark.broker import BrokerConnection
from penstock.spark.cache_source import CacheReader
from penstock.spark.options import CacheSettings, SinkSettings, SourceSettings
from penstock.spark.schemas import cache_schema, schema_of
from penstock.spark.sink import BatchSink, StreamSink
from penstock.spark.source import StreamReader
from penstock.spark.staging import ProducerBatch, cut
from tests.broker_process import BrokerProcess
from tests.contract.checks import new_name
from tests.contract.namespaces import Namespace

PAYLOAD = StructType([StructField("payload", BinaryType())])


def numbered(numbers: Iterable[int]) -> list[bytes]:
    return [b"\xff event %d" % n for n in numbers]


class Events:
    """Durable streams of the default namespace."""

    def __init__(self, broker: BrokerProcess) -> None:
        self.broker = broker
        self.ns = Namespace(broker)

    def create(self, delivery: str = "at_least_once", name: str = "") -> str:
        name = name or new_name()
        reply = self.ns.post(f"{self.ns.path}/streams", name=name, delivery=delivery)
        assert reply.status_code == 201, reply.text
        return name

    def delete(self, stream: str) -> None:
        assert self.broker.client.delete(self.ns.stream_path(stream)).status_code == 204

    def publish(self, stream: str, payloads: list[bytes]) -> None:
        for first in range(0, len(payloads), 500):
            some = [base64.b64encode(each).decode() for each in payloads[first : first + 500]]
            reply = self.ns.post(f"{self.ns.stream_path(stream)}/publish_batch", payloads=some)
            assert reply.status_code == 200, reply.text

    def kept(self, stream: str) -> list[bytes]:
        reply = self.broker.client.get(f"{self.ns.stream_path(stream)}/records")
        assert reply.status_code == 200, reply.text
        found: list[bytes] = pa.ipc.open_stream(reply.content).read_all()["payload"].to_pylist()
        return found

    def named(self, stream: str) -> dict[str, int]:
        reply = self.broker.client.get(f"{self.ns.stream_path(stream)}/subscriptions")
        return {each["name"]: each["messages_behind"] for each in reply.json()["named"]}


@pytest.fixture
def events(broker: BrokerProcess) -> Events:
    return Events(broker)


class Copy:
    """A query from one stream to another, on one checkpoint."""

    def __init__(self, spark: SparkSession, events: Events, checkpoint: Path) -> None:
        self.spark = spark
        self.events = events
        self.checkpoint = checkpoint
        self.source = events.create()
        self.target = events.create("exactly_once")

    def run(self, per_trigger: int = 1_000_000, **options: Any) -> StreamingQuery:
        url = self.events.broker.url
        stream = (
            self.spark.readStream.format("penstock")
            .options(url=url, stream=self.source, maxRowsPerTrigger=per_trigger, **options)
            .load()
        )
        query = (
            stream.select("payload")
            .writeStream.format("penstock")
            .options(url=url, stream=self.target)
            .option("checkpointLocation", str(self.checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination(120)
        return query

    def forget_last_commit(self) -> None:
        """As if the driver had died between the sink's commit and Spark's own."""
        commits = self.checkpoint / "commits"
        last = max(int(path.name) for path in commits.iterdir() if path.name.isdigit())
        (commits / str(last)).unlink()
        (commits / f".{last}.crc").unlink(missing_ok=True)


def read(spark: SparkSession, broker: BrokerProcess, **options: Any) -> list[Any]:
    chosen: dict[str, Any] = {"url": broker.url, "retrySeconds": 20} | options
    return spark.read.format("penstock").options(**chosen).load().collect()


def test_a_batch_read_has_the_events_and_its_bounds(spark: SparkSession, events: Events):
    """felix: with offsets, times, splits and columns as for topics."""
    stream = events.create()
    events.publish(stream, numbered(range(2000)))
    rows = read(spark, events.broker, stream=stream, rowsPerPartition=300)
    assert rows[0].asDict().keys() == {"stream", "offset", "timestamp", "payload"}
    assert {row.stream for row in rows} == {stream}
    found = sorted((row.offset, bytes(row.payload)) for row in rows)
    assert found == list(enumerate(numbered(range(2000))))
    bounds = {
        "startingOffsets": f'{{"{stream}": 10}}',
        "endingOffsets": f'{{"{stream}": 13}}',
        "columns": "payload",
    }
    rows = read(spark, events.broker, stream=stream, **bounds)
    assert [bytes(row.payload) for row in rows] == numbered(range(10, 13))
    assert list(rows[0].asDict()) == ["payload"]
    after = read(spark, events.broker, stream=stream, startingTimestamp="2100-01-01T00:00:00Z")
    assert after == []


def test_a_pattern_means_durable_streams_only(spark: SparkSession, events: Events):
    prefix = new_name()
    for n in range(2):
        events.publish(events.create(name=f"{prefix}-{n}"), numbered([n]))
    events.ns.post(f"{events.ns.path}/streams", name=f"{prefix}-plain")
    rows = read(spark, events.broker, stream=f"{prefix}-*")
    assert {(row.stream, bytes(row.payload)) for row in rows} == {
        (f"{prefix}-0", numbered([0])[0]),
        (f"{prefix}-1", numbered([1])[0]),
    }
    where = read_where(spark, events.broker, f"stream = '{prefix}-1'", stream=f"{prefix}-*")
    assert [row.stream for row in where] == [f"{prefix}-1"]


def read_where(
    spark: SparkSession, broker: BrokerProcess, predicate: str, **options: Any
) -> list[Any]:
    frame = spark.read.format("penstock").options(url=broker.url, pushdown=True, **options).load()
    return frame.where(predicate).collect()


def test_a_stream_is_copied_and_a_restarted_query_goes_on(
    spark: SparkSession, events: Events, tmp_path: Path
):
    """felix-122: every event once, over a restart and a batch that is repeated; and the named
    subscription shows the query's progress."""
    copy = Copy(spark, events, tmp_path / "checkpoint")
    events.publish(copy.source, numbered(range(1000)))
    query = copy.run(per_trigger=300, group="copy")
    assert [each["numInputRows"] for each in query.recentProgress] == [300, 300, 300, 100]
    assert sorted(events.kept(copy.target)) == sorted(numbered(range(1000)))
    copy.forget_last_commit()
    copy.run(per_trigger=300, group="copy")
    assert sorted(events.kept(copy.target)) == sorted(numbered(range(1000)))
    events.publish(copy.source, numbered(range(1000, 1500)))
    copy.run(group="copy")
    assert sorted(events.kept(copy.target)) == sorted(numbered(range(1500)))
    spark.sparkContext._jsc.sc().listenerBus().waitUntilEmpty(60_000)
    assert events.named(copy.source) == {"copy": 0}


def test_a_stream_that_is_created_again_fails_the_query(
    spark: SparkSession, events: Events, tmp_path: Path
):
    copy = Copy(spark, events, tmp_path / "checkpoint")
    events.publish(copy.source, numbered(range(10)))
    copy.run()
    events.delete(copy.source)
    events.create(name=copy.source)
    events.publish(copy.source, numbered(range(100, 130)))
    with pytest.raises(Exception, match=f"stream '{copy.source}' was deleted and made again"):
        copy.run()
    assert sorted(events.kept(copy.target)) == sorted(numbered(range(10)))
    copy.run(failOnDataLoss=False)
    found = numbered([*range(10), *range(100, 130)])
    assert sorted(events.kept(copy.target)) == sorted(found)


def test_a_write_under_one_name_is_published_once(spark: SparkSession, events: Events):
    stream = events.create()
    frame = spark.createDataFrame([("text",), ("more",)], "payload string")
    for _ in range(2):
        writer = frame.write.format("penstock").mode("append")
        writer.options(url=events.broker.url, stream=stream, txn=f"load-{stream}").save()
    assert sorted(events.kept(stream)) == [b"more", b"text"]


def test_the_options_tenant_and_namespace_name_the_stream(spark: SparkSession, events: Events):
    client, scope = events.broker.client, {"tenant": new_name(), "namespace": "prod"}
    base = f"/v1/tenants/{scope['tenant']}/namespaces"
    for path, body in (
        ("/v1/tenants", {"tenant_id": scope["tenant"]}),
        (base, {"namespace": "prod"}),
        (f"{base}/prod/streams", {"name": "orders", "delivery": "at_least_once"}),
        (f"{base}/prod/caches", {"name": "carts"}),
    ):
        assert client.post(path, json=body).status_code == 201
    frame = spark.createDataFrame([("text",)], "payload string")
    writer = frame.write.format("penstock").mode("append")
    writer.options(url=events.broker.url, stream="orders", **scope).save()
    (row,) = read(spark, events.broker, stream="orders", **scope)
    assert (row.stream, bytes(row.payload)) == ("orders", b"text")
    frame = spark.createDataFrame([("k", "v")], "key string, value string")
    writer = frame.write.format("penstock").mode("append")
    writer.options(url=events.broker.url, cache="carts", **scope).save()
    (row,) = read(spark, events.broker, cache="carts", **scope)
    assert (row.key, bytes(row.value)) == ("k", b"v")


def test_a_task_that_runs_again_and_a_killed_broker_store_a_batch_once(
    spark: SparkSession, start_broker: Any
):
    broker = start_broker()
    events = Events(broker)
    stream = events.create()
    settings = SinkSettings(url=broker.url, retry_s=20, stream=f"default/default/{stream}")
    sink = StreamSink(settings, PAYLOAD, overwrite=False)
    rows = pa.RecordBatch.from_pydict({"payload": numbered(range(3000))})
    with BrokerConnection(settings) as connection:
        batch = ProducerBatch(connection, "query", 0)
        target = {"stream": settings.stream}
        lost = batch.send(0, cut([rows]), target)
        sent = batch.send(0, cut([rows]), target)
    assert lost.attempt != sent.attempt
    broker.restart(kill=True)
    sink = StreamSink(
        SinkSettings(url=broker.url, retry_s=20, stream=settings.stream), PAYLOAD, overwrite=False
    )
    sink.commit([sent], 0)
    broker.restart(kill=True)
    settings = SinkSettings(url=broker.url, retry_s=20, stream=settings.stream)
    StreamSink(settings, PAYLOAD, overwrite=False).commit([sent], 0)
    assert Events(broker).kept(stream) == numbered(range(3000))


def schema_from(text: str) -> StructType:
    found = StructType.fromDDL(text)
    assert isinstance(found, StructType)
    return found


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ("value string", "does not take `value`: leave it out, or put it into the payload"),
        ("payload int", "`payload` is int, and the sink takes string or binary"),
        ("payload void", "`payload` is null in every row"),
    ],
)
def test_columns_that_are_no_payload_are_refused(schema: str, text: str):
    settings = SinkSettings(url="http://127.0.0.1:1", retry_s=0, stream="a/b/c")
    with pytest.raises(InvalidArgument) as refused:
        BatchSink(settings, schema_from(schema), overwrite=False)
    assert text in refused.value.message


def test_a_stream_that_is_absent_or_not_durable_is_named(events: Events):
    plain = events.ns.create_stream()
    for name, kind in (("nowhere", NotFound), (plain, FailedPrecondition)):
        settings = SourceSettings(url=events.broker.url, retry_s=5, log="events", topics=(name,))
        reader = StreamReader(settings, schema_of("events"))
        with pytest.raises(kind, match=name):
            reader.initialOffset()
        reader.stop()
    target = SinkSettings(url=events.broker.url, retry_s=5, stream="default/default/nowhere")
    with pytest.raises(NotFound, match="stream 'default/default/nowhere' does not exist at http"):
        BatchSink(target, PAYLOAD, overwrite=False)


def test_a_checkpoint_of_a_topic_is_not_one_of_a_stream(events: Events):
    stream = events.create()
    settings = SourceSettings(url=events.broker.url, retry_s=5, log="events", topics=(stream,))
    reader = StreamReader(settings, schema_of("events"))
    found = reader.initialOffset()
    assert found["events"] == {stream: 0}
    assert found["ids"][stream] > 0
    with pytest.raises(InvalidArgument, match="give streams a checkpoint of its own"):
        reader.partitions({"records": {}}, {"records": {}})
    reader.stop()


# -- caches ----------------------------------------------------------------------------------------


def test_a_cache_is_a_table(spark: SparkSession, events: Events):
    ns = events.ns
    cache = new_name()
    assert ns.post(f"{ns.path}/caches", name=cache).status_code == 201
    path = f"{ns.path}/caches/{cache}/entries"
    for n in range(300):
        reply = events.broker.client.put(f"{path}/k{n}?raw=true", content=numbered([n])[0])
        assert reply.status_code == 200
    events.broker.client.put(f"{path}/k0?raw=true&ttl_ms=600000", content=b"")
    for name in (cache, f"default/default/{cache}"):
        rows = read(spark, events.broker, cache=name)
        found = {row.key: bytes(row.value) for row in rows}
        assert found == {f"k{n}": numbered([n])[0] if n else b"" for n in range(300)}
        assert len({row.version for row in rows}) == 300
        assert [row.key for row in rows if row.expires_at is not None] == ["k0"]
    frame = spark.read.format("penstock").options(url=events.broker.url, cache=cache)
    assert frame.load().count() == 300
    only = frame.option("columns", "value,key").load()
    assert only.columns == ["value", "key"]
    (row,) = only.where("key = 'k7'").collect()
    assert row.asDict() == {"value": numbered([7])[0], "key": "k7"}


def test_a_cache_cannot_be_followed_as_a_stream(
    spark: SparkSession, events: Events, tmp_path: Path
):
    with pytest.raises(Exception, match="option cache is for read, not for readStream"):
        (
            spark.readStream.format("penstock")
            .options(url=events.broker.url, cache="default")
            .load()
            .writeStream.format("noop")
            .option("checkpointLocation", str(tmp_path))
            .start()
            .awaitTermination(60)
        )
    with pytest.raises(Exception, match="cache 'default/default/nowhere' does not exist at http"):
        read(spark, events.broker, cache="nowhere")


class Rows:
    """A stream of rows that breaks off after its batches."""

    def __init__(self, batches: list[pa.RecordBatch], *, is_broken: bool) -> None:
        self._batches = batches
        self._is_broken = is_broken

    def __enter__(self) -> Rows:
        return self

    def __exit__(self, *error: object) -> None: ...

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        yield from self._batches
        if self._is_broken:
            raise Unavailable("the rows broke off")


def test_a_snapshot_that_breaks_off_is_not_continued_with_another_one(
    monkeypatch: pytest.MonkeyPatch,
):
    """Two snapshots are of two moments. One that never began is asked for again."""
    batch = pa.record_batch({"key": ["a", "b"]})
    answers = [
        Rows([], is_broken=True),
        Rows([batch], is_broken=False),
        Rows([batch], is_broken=True),
        Rows([batch], is_broken=False),
    ]
    monkeypatch.setattr(BrokerConnection, "rows", lambda *_: answers.pop(0))
    settings = CacheSettings(url="http://127.0.0.1:1", retry_s=5, cache="a/b/c")
    reader = CacheReader(settings, cache_schema(["key"]))
    assert [each.num_rows for each in reader.read(InputPartition(0))] == [2]
    with pytest.raises(Unavailable, match="the next one would be of another moment"):
        list(reader.read(InputPartition(0)))
    assert len(answers) == 1


# -- the audit log ---------------------------------------------------------------------------------


def test_the_audit_log_is_read_like_a_topic(spark: SparkSession, start_broker: Any):
    token = "an-admin-of-the-tests"
    broker = start_broker(env={"PENSTOCK_ACCESS_CONTROL": "true", "PENSTOCK_TOKEN": token})
    headers = {"Authorization": f"Bearer {token}"}
    reply = broker.client.post("/v1/topics", json={"name": "watched"}, headers=headers)
    assert reply.status_code == 201, reply.text
    frame = spark.read.format("penstock").options(
        url=broker.url, token=token, topic="penstock.audit"
    )
    rows = frame.load().selectExpr("from_json(value, 'action string, resource string') as r")
    actions = {(row.r.action, row.r.resource) for row in rows.collect()}
    assert ("topic.create", "topic:watched") in actions
    with pytest.raises(Exception, match="does not take the token, or wants one"):
        read(spark, broker, topic="penstock.audit", retrySeconds=0)


def test_settings_of_a_cache_do_not_show_the_token():
    settings = CacheSettings.from_options({"cache": "c", "token": "secret-token"}, "read")
    assert "secret-token" not in repr(settings)
