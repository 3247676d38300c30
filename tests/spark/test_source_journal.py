"""log=journal: what happened, as a table and as a stream."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from penstock.spark.pipelines.attempts import deliveries
from penstock.spark.pipelines.metrics import windows
from penstock.storage.vfs import Vfs
from tests.broker_process import BrokerProcess
from tests.spark.conftest import StartBroker
from tests.spark.sources import Copy, frame, produce
from tests.storage.old_journal import make_old

Event = tuple[str, int | None]


@pytest.fixture
def own(start_broker: StartBroker) -> BrokerProcess:
    """A broker whose journal holds the test's events only."""
    broker = start_broker()
    broker.create_topic("orders")
    return broker


def work(broker: BrokerProcess, count: int) -> None:
    """Takes so many messages and acks them."""
    with broker.consume("orders") as stream:
        for item in stream.take(count):
            assert broker.ack("orders", item).status_code == 204


def journal(broker: BrokerProcess) -> list[dict[str, Any]]:
    """As the broker tells it as lines of JSON."""
    reply = broker.client.get("/v1/journal", params={"format": "ndjson"})
    assert reply.status_code == 200, reply.text
    return [json.loads(line) for line in reply.text.splitlines()]


def test_every_event_is_read_as_it_is_told(spark: SparkSession, own: BrokerProcess):
    produce(own, "orders", range(5), run_id="run 1", tenant_id="tenant 1")
    work(own, 3)
    rows = frame(spark, own, log="journal").orderBy("position").collect()
    told = journal(own)
    assert [(row.kind, row.offset) for row in rows].count(("acked", 2)) == 1
    assert [row.kind for row in rows].count("produced") == 5
    assert len(rows) == len(told)
    for row, event in zip(rows, told, strict=True):
        known = {k: as_text(v) for k, v in row.asDict().items() if v is not None}
        assert known == event
    acked = [row for row in rows if row.kind == "acked"]
    assert all(row.produced_at <= row.delivered_at <= row.timestamp for row in acked)


def as_text(value: Any) -> Any:
    """A time as the broker spells it: on a whole second without a fraction."""
    return f"{value.isoformat()}Z" if isinstance(value, datetime) else value


def test_events_of_before_there_were_times_of_storing_and_delivery_are_read(
    spark: SparkSession, own: BrokerProcess
):
    produce(own, "orders", range(3))
    work(own, 1)
    frame(spark, own, log="journal").count()
    assert own.terminate() == 0
    assert make_old(Vfs(), str(own.data_dir))
    own.start()
    produce(own, "orders", [3])
    rows = frame(spark, own, log="journal").orderBy("position").collect()
    stored = [row.produced_at is not None for row in rows if row.kind == "produced"]
    assert stored == [False] * 3 + [True]
    assert [row.delivered_at for row in rows if row.kind == "acked"] == [None]


def test_columns_and_positions_bound_the_read(spark: SparkSession, own: BrokerProcess):
    produce(own, "orders", range(10))
    frame(spark, own, log="journal").count()
    positions = [event["position"] for event in journal(own)]
    read = frame(
        spark,
        own,
        log="journal",
        columns="kind,position",
        startingOffsets=positions[2],
        endingOffsets=json.dumps({"journal": positions[5]}),
    )
    assert read.columns == ["kind", "position"]
    assert sorted(row.position for row in read.collect()) == positions[2:5]


def test_a_stream_reads_every_event_once(spark: SparkSession, own: BrokerProcess, tmp_path: Path):
    copy = Copy(spark, tmp_path)
    produce(own, "orders", range(20))
    copy.run(own, log="journal", maxRowsPerTrigger=15)
    work(own, 5)
    copy.run(own, log="journal")
    copied = sorted(row.position for row in copy.rows().collect())
    assert copied == [event["position"] for event in journal(own)]
    kinds = [row.kind for row in copy.rows().collect()]
    assert (kinds.count("produced"), kinds.count("acked")) == (20, 5)


def test_events_of_a_stream_are_told_from_messages_of_the_topic_of_the_same_name(
    spark: SparkSession, own: BrokerProcess
):
    """Every pipeline counts the messages only; pushdown keeps the rows of both."""
    path = "/v1/tenants/default/namespaces/default/streams"
    settings = {"name": "orders", "delivery": "at_least_once"}
    assert own.client.post(path, json=settings).status_code == 201
    assert own.client.post(f"{path}/orders/publish", json={"payload": ""}).status_code == 200
    produce(own, "orders", range(3), run_id="r")
    work(own, 2)
    rows = frame(spark, own, log="journal")
    counts = {row[0]: row[1] for row in rows.groupBy("resource_kind").count().collect()}
    assert counts["stream"] == 1
    assert counts["topic"] >= 7
    (windowed,) = windows(rows, 3_600_000).agg({"produced": "sum"}).collect()
    assert windowed[0] == 3
    assert deliveries(rows).where("partition = 0 and offset = 0").count() == 1
    pushed = frame(spark, own, log="journal", pushdown=True)
    for condition in (
        "topic = 'orders' and kind = 'produced'",
        "topic = 'orders' and resource_kind = 'stream'",
        "topic = 'orders' and resource_kind = 'topic' and kind = 'produced'",
        "resource_kind = 'stream'",
        "resource_kind = 'cache'",
    ):
        wanted = sorted(map(str, rows.where(condition).collect()))
        assert sorted(map(str, pushed.where(condition).collect())) == wanted, condition


CONDITIONS = [
    "kind = 'acked'",
    "kind = 'delivered' and topic = 'orders' and `group` = 'g'",
    "tenant_id = 't1'",
    "offset = 3",
    "position > 0",
    "timestamp < timestamp '2500-01-01' and timestamp > timestamp '2000-01-01'",
    "timestamp < timestamp '2000-01-01'",
]


def test_pushdown_gives_the_same_events(spark: SparkSession, own: BrokerProcess):
    produce(own, "orders", range(5), tenant_id="t1")
    produce(own, "orders", range(5))
    work(own, 4)
    plain = frame(spark, own, log="journal")
    pushed = frame(spark, own, log="journal", pushdown=True)
    for condition in CONDITIONS:
        wanted = sorted(map(str, plain.where(condition).collect()))
        assert sorted(map(str, pushed.where(condition).collect())) == wanted, condition


def test_a_broker_without_a_journal_says_so(spark: SparkSession, tmp_path: Path):
    broker = BrokerProcess(None)
    try:
        broker.start()
        with pytest.raises(PySparkException, match="journal"):
            frame(spark, broker, log="journal").collect()
    finally:
        broker.close()
