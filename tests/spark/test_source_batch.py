"""spark.read.format("penstock"): every row of the range, exactly as the broker has it."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from tests.broker_process import BrokerProcess, eventually
from tests.contract.checks import new_name
from tests.spark.conftest import StartBroker
from tests.spark.sources import (
    as_told,
    await_history,
    frame,
    offsets,
    produce,
    rows_at,
    values_of,
)

ENVELOPE = {
    "run_id": "run 1",
    "step_id": "step 1",
    "parent_step_id": "step 0",
    "tenant_id": "tenant 1",
    "idempotency_key": "key 1",
    "deadline": "2100-01-01T00:00:00Z",
    "partition_override": 1,
    "retry_policy": {"max_attempts": 3, "backoff_ms": 10, "max_backoff_ms": 100},
}


def test_every_row_and_column_is_read_as_it_is_stored(
    spark: SparkSession, broker: BrokerProcess, topic: str
):
    produce(broker, topic, range(300))
    broker.put(topic, "with an envelope", "é", ENVELOPE)
    assert as_told(frame(spark, broker, topic=topic).collect()) == rows_at_iso(broker, topic)


def test_dead_letters_and_routing_are_read(spark: SparkSession, start_broker: StartBroker):
    broker = start_broker("--router", "tests.spark.labels:route")
    topic = broker.create_topic("orders")
    broker.put(topic, "poison", "k", {"retry_policy": {"max_attempts": 1}})
    with broker.consume(topic) as stream:
        assert broker.nack(topic, stream.next()).status_code == 204
    read = frame(spark, broker, topic=topic).collect()
    assert [row.routing_meta for row in read] == [{"reason": "because", "empty": ""}]
    assert as_told(read) == rows_at_iso(broker, topic)
    dlq = f"dlq.{topic}"
    eventually(lambda: rows_at(broker, dlq))
    rows = frame(spark, broker, topic=dlq).collect()
    assert [(row.value, row.dlq_original_topic, row.dlq_attempts) for row in rows] == [
        ("poison", topic, 1)
    ]
    assert as_told(rows) == rows_at_iso(broker, dlq)


def rows_at_iso(broker: BrokerProcess, topic: str) -> list[dict[str, Any]]:
    """Times as Spark tells them: without a zone, which is UTC."""
    rows = rows_at(broker, topic)
    for row in rows:
        moment = datetime.fromisoformat(row["timestamp"]).astimezone(UTC)
        row["timestamp"] = moment.replace(tzinfo=None).isoformat()
    return rows


def test_sealed_history_and_the_tail_are_one_range(spark: SparkSession, start_broker: StartBroker):
    broker = start_broker(env={"PENSTOCK_SEGMENT_BYTES": str(64 * 1024)})
    topic = broker.create_topic("orders", 3)
    wanted = produce(broker, topic, range(6000))
    await_history(broker)
    wanted += produce(broker, topic, range(6000, 6100))
    read = frame(spark, broker, topic=topic)
    assert as_told(read.collect()) == rows_at_iso(broker, topic)
    assert values_of(read) == sorted(wanted)


def test_several_topics_and_patterns_are_read_together(spark: SparkSession, broker: BrokerProcess):
    stem = new_name("many")
    names = [broker.create_topic(f"{stem}-{end}", 2) for end in ("a", "b", "x y/ü", "?")]
    other = broker.create_topic(f"other-{stem}")
    for name in (*names, other):
        produce(broker, name, range(20))
    read = frame(spark, broker, topic=f"{stem}-*,{other}")
    wanted = [row for name in sorted((*names, other)) for row in rows_at_iso(broker, quoted(name))]
    for row in wanted:
        row["topic"] = unquoted(row["topic"])
    assert as_told(read.collect()) == wanted
    assert frame(spark, broker, topic="no-such-*").count() == 0


def quoted(name: str) -> str:
    from urllib.parse import quote

    return quote(name, safe="")


def unquoted(name: str) -> str:
    from urllib.parse import unquote

    return unquote(name)


def test_columns_prune_the_schema(spark: SparkSession, broker: BrokerProcess, topic: str):
    produce(broker, topic, range(10))
    read = frame(spark, broker, topic=topic, columns="value, topic")
    assert read.columns == ["value", "topic"]
    assert sorted(row.value for row in read.collect()) == sorted(f"value {n}" for n in range(10))
    assert frame(spark, broker, topic=topic, columns="partition").distinct().count() == 2
    own = spark.read.format("penstock").schema("offset bigint, key string")
    rows = own.options(url=broker.url, topic=topic).load().collect()
    assert sorted(row.offset for row in rows) == list(range(10))


def test_a_read_begins_and_ends_where_it_is_told(
    spark: SparkSession, broker: BrokerProcess, topic: str
):
    produce(broker, topic, range(100))
    starts = {topic: {"0": 40}}
    ends = {topic: {"0": 60, "1": 70}}
    read = frame(
        spark,
        broker,
        topic=topic,
        startingOffsets=json.dumps(starts),
        endingOffsets=json.dumps(ends),
    )
    wanted = [
        row
        for row in rows_at_iso(broker, topic)
        if (40 <= row["offset"] < 60 if row["partition"] == 0 else row["offset"] < 70)
    ]
    assert as_told(read.collect()) == wanted


def test_a_read_begins_and_ends_at_times(spark: SparkSession, broker: BrokerProcess, topic: str):
    produce(broker, topic, range(50))
    middle = produce_later(broker, topic, range(50, 100))
    end = produce_later(broker, topic, range(100, 150))
    read = frame(spark, broker, topic=topic, startingTimestamp=middle, endingTimestamp=end)
    assert values_of(read) == sorted(f"value {n}" for n in range(50, 100))
    moment = datetime.fromtimestamp(end / 1000, UTC).isoformat()
    read = frame(spark, broker, topic=topic, startingTimestamp=moment)
    assert values_of(read) == sorted(f"value {n}" for n in range(100, 150))


def produce_later(broker: BrokerProcess, topic: str, numbers: range) -> int:
    """Produces in a millisecond of its own, which is the answer."""
    newest = max(moment_ms(row) for row in rows_at(broker, topic))
    while int(datetime.now(UTC).timestamp() * 1000) <= newest:
        pass
    produce(broker, topic, numbers)
    wanted = {f"value {n}" for n in numbers}
    return min(moment_ms(row) for row in rows_at(broker, topic) if row["value"] in wanted)


def moment_ms(row: dict[str, Any]) -> int:
    return round(datetime.fromisoformat(row["timestamp"]).timestamp() * 1000)


def test_a_large_range_is_split_into_tasks(spark: SparkSession, broker: BrokerProcess, topic: str):
    wanted = produce(broker, topic, range(1000))
    assert frame(spark, broker, topic=topic).rdd.getNumPartitions() == 1
    for options in ({"rowsPerPartition": 100, "minPartitions": 10}, {"minPartitions": 10}):
        read = frame(spark, broker, topic=topic, **options)
        assert read.rdd.getNumPartitions() >= 10
        assert values_of(read) == sorted(wanted)


def test_a_topic_without_rows_is_an_empty_table(
    spark: SparkSession, broker: BrokerProcess, topic: str
):
    assert frame(spark, broker, topic=topic).collect() == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"topic": "nowhere"}, "topic 'nowhere' does not exist"),
        ({"startingOffsets": '{"nowhere": {"0": 1}}'}, "'nowhere', which is not among those read"),
        ({"startingOffsets": '{"TOPIC": {"7": 1}}'}, "has no partition 7"),
        ({"startingOffsets": '{"TOPIC": {"0": 999}}'}, "partition 0 ends at"),
        ({"endingOffsets": '{"TOPIC": {"0": 999}}'}, "partition 0 ends at"),
        ({"startingOffsets": "nowhere"}, "option startingOffsets: 'nowhere' is not allowed"),
        ({"columns": "valeu"}, "no valeu"),
        ({"topics": "a"}, "unknown option topics; did you mean topic"),
        ({"group": "g"}, "option group is for readStream"),
    ],
)
def test_a_wrong_option_fails_the_read_by_name(
    spark: SparkSession, broker: BrokerProcess, topic: str, options: dict[str, str], said: str
):
    produce(broker, topic, range(4))
    chosen = {"topic": topic} | {k: v.replace("TOPIC", topic) for k, v in options.items()}
    with pytest.raises(PySparkException, match=said):
        frame(spark, broker, **chosen).collect()


def test_the_format_works_in_sql(spark: SparkSession, broker: BrokerProcess, topic: str):
    produce(broker, topic, range(10))
    spark.sql(
        f"create or replace temporary view o using penstock options (url '{broker.url}', "
        f"topic '{topic}')"
    )
    [row] = spark.sql("select count(*) as n, max(offset) as last from o").collect()
    assert (row.n, row.last) == (10, max(o["next"] for o in offsets(broker, topic).values()) - 1)
