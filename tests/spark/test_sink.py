"""df.write.format("penstock"): topics and caches hold exactly the DataFrame's rows, once."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from pyspark.sql import DataFrame, DataFrameWriter, SparkSession
from pyspark.sql import functions as f

from tests.broker_process import BrokerProcess, eventually
from tests.contract.checks import new_name
from tests.spark.sinks import cached, numbered, stored, values


def writer(frame: DataFrame, broker: BrokerProcess, **options: Any) -> DataFrameWriter:
    return frame.write.format("penstock").mode("append").options(url=broker.url, **options)


def test_the_rows_of_every_partition_are_stored_in_their_order(
    spark: SparkSession, broker: BrokerProcess
):
    topic = broker.create_topic(new_name())
    frame = spark.range(0, 10_000, numPartitions=5).select(
        f.format_string("value %d", "id").alias("value")
    )
    writer(frame, broker, topic=topic).save()
    assert values(broker, topic) == [f"value {n}" for n in range(10_000)]


def test_every_column_arrives(spark: SparkSession, broker: BrokerProcess):
    one, other = broker.create_topic(new_name(), 3), broker.create_topic(new_name())
    frame = spark.createDataFrame(
        [
            (
                "everything", "k", one, "run", "step", "parent", "tenant", "once", 2,
                datetime(2099, 1, 2, 3, 4, 5, 678000, UTC), 3, 100, 2000, "label", {"a": "b"},
            ),
            ("little", *[None] * 14),
        ],
        "value string, key string, topic string, run_id string, step_id string, "
        "parent_step_id string, tenant_id string, idempotency_key string, partition_override int, "
        "deadline timestamp, retry_max_attempts int, retry_backoff_ms bigint, "
        "retry_max_backoff_ms bigint, routing_label string, routing_meta map<string,string>",
    )  # fmt: skip
    writer(frame, broker, topic=other).save()
    (row,) = stored(broker, one)
    assert abs((datetime.now(UTC) - row.pop("timestamp")).total_seconds()) < 60
    assert row.pop("offset") >= 0
    deadline = datetime.fromisoformat(row.pop("deadline"))
    assert deadline == datetime(2099, 1, 2, 3, 4, 5, 678000, UTC)
    assert row == {
        "partition": 2, "key": "k", "value": "everything", "run_id": "run", "step_id": "step",
        "parent_step_id": "parent", "tenant_id": "tenant", "idempotency_key": "once",
        "partition_override": 2, "retry_max_attempts": 3, "retry_backoff_ms": 100,
        "retry_max_backoff_ms": 2000, "routing_label": "label", "routing_meta": [("a", "b")],
    }  # fmt: skip
    (row,) = stored(broker, other)
    assert row["value"] == "little"
    assert set(row) == {"partition", "offset", "timestamp", "value"}


def test_binary_values_that_hold_text_are_stored_as_text(
    spark: SparkSession, broker: BrokerProcess
):
    topic = broker.create_topic(new_name())
    frame = spark.createDataFrame([(bytearray("grüße".encode()),)], "value binary")
    writer(frame, broker, topic=topic).save()
    assert values(broker, topic) == ["grüße"]


def test_a_large_partition_is_sent_in_pieces(spark: SparkSession, broker: BrokerProcess):
    topic = broker.create_topic(new_name())
    frame = spark.range(0, 600, numPartitions=2).select(
        f.rpad(f.format_string("value %d ", "id"), 50_000, ".").alias("value")
    )
    writer(frame, broker, topic=topic).save()
    assert values(broker, topic) == numbered(range(600), 50_000)


def test_nothing_is_stored_of_a_frame_without_rows(spark: SparkSession, broker: BrokerProcess):
    topic = broker.create_topic(new_name())
    writer(spark.createDataFrame([], "value string"), broker, topic=topic).save()
    assert values(broker, topic) == []


def test_a_write_with_the_same_txn_is_done_once(spark: SparkSession, broker: BrokerProcess):
    topic, txn = broker.create_topic(new_name()), new_name("txn")
    for _ in range(2):
        frame = spark.createDataFrame([("a",), ("b",)], "value string").coalesce(1)
        writer(frame, broker, topic=topic, txn=txn).save()
    assert values(broker, topic) == ["a", "b"]
    frame = spark.createDataFrame([("c",)], "value string")
    for _ in range(2):
        writer(frame, broker, topic=topic).save()
    assert values(broker, topic) == ["a", "b", "c", "c"]


def test_a_batch_of_a_txn_is_written_once_and_those_below_it_not_at_all(
    spark: SparkSession, broker: BrokerProcess
):
    topic, txn = broker.create_topic(new_name()), new_name("txn")
    for batch, value in ((0, "a"), (0, "b"), (3, "c"), (3, "d"), (2, "e"), (4, "f")):
        frame = spark.createDataFrame([(value,)], "value string")
        writer(frame, broker, topic=topic, txn=txn, txnBatch=batch).save()
    assert values(broker, topic) == ["a", "c", "f"]
    assert broker.client.get(f"/v1/writes/{txn}").json()["last_batch"] == 4


def test_a_cache_is_written_by_key(spark: SparkSession, broker: BrokerProcess):
    cache = "default/default/default"
    rows = [
        ("kept", "1", None),
        ("brief", "2", 300),
        ("gone", "3", None),
        ("schlüssel/x", "4", None),
    ]
    frame = spark.createDataFrame(rows, "key string, value string, ttl_ms int")
    writer(frame, broker, cache=cache).save()
    assert cached(broker, cache, "kept") == "1"
    assert cached(broker, cache, "schlüssel/x") == "4"
    eventually(lambda: cached(broker, cache, "brief"), lambda value: value is None)
    deletes = spark.createDataFrame([("gone", None), ("never", None)], "key string, value string")
    writer(deletes, broker, cache=cache).save()
    assert cached(broker, cache, "gone") is None
    assert cached(broker, cache, "kept") == "1"


@pytest.mark.parametrize(
    ("columns", "options", "said"),
    [
        ({"value": 1}, {"topic": "t"}, "`value` is int"),
        ({"text": "a"}, {"topic": "t"}, "does not take `text`"),
        ({"key": "a"}, {"topic": "t"}, "no column `value`"),
        ({"value": "a"}, {}, "option `topic`"),
        ({"value": "a"}, {"cache": "a/b/c"}, "no column `key`"),
        ({"value": "a"}, {"topic": "t", "producerId": "p"}, "producerId"),
    ],
)
def test_what_cannot_be_written_is_refused_before_anything_is_sent(
    spark: SparkSession, columns: dict[str, Any], options: dict[str, str], said: str
):
    """There is no broker at this address: it is not asked."""
    frame = spark.range(1).select(*(f.lit(value).alias(name) for name, value in columns.items()))
    write = frame.write.format("penstock").mode("append").option("url", "http://127.0.0.1:1")
    with pytest.raises(Exception, match=said):
        write.options(**options).save()


def test_overwrite_is_refused(spark: SparkSession, broker: BrokerProcess):
    frame = spark.createDataFrame([("a",)], "value string")
    with pytest.raises(Exception, match="only adds"):
        writer(frame, broker, topic="t").mode("overwrite").save()


def test_an_unknown_topic_is_named(spark: SparkSession, broker: BrokerProcess):
    frame = spark.createDataFrame([("a",)], "value string")
    with pytest.raises(Exception, match="no-such-topic"):
        writer(frame, broker, topic="no-such-topic").save()


def test_one_bad_row_stores_none(spark: SparkSession, broker: BrokerProcess):
    topic = broker.create_topic(new_name())
    frame = spark.range(0, 100, numPartitions=2).select(
        f.when(f.col("id") != 77, f.format_string("value %d", "id")).alias("value")
    )
    with pytest.raises(Exception, match="value"):
        writer(frame, broker, topic=topic).save()
    assert values(broker, topic) == []
