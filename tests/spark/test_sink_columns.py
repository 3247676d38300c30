"""Which columns the sink takes, what it says of others, and the types in which they travel."""

from __future__ import annotations

from datetime import UTC, datetime

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from penstock.model.errors import InvalidArgument
from penstock.spark.sink_columns import as_sent, check_for_cache, check_for_topics

ALL = (
    "value string, key string, topic string, run_id string, step_id string, parent_step_id string, "
    "tenant_id string, idempotency_key string, target_topic string, partition_override int, "
    "deadline timestamp, retry_max_attempts int, retry_backoff_ms bigint, "
    "retry_max_backoff_ms smallint, routing_label string, routing_meta map<string,string>"
)


@pytest.fixture(autouse=True)
def _parser(spark: SparkSession) -> None:
    """Schemas are written as Spark's DDL, which Spark reads."""


def schema(ddl: str) -> StructType:
    made = StructType.fromDDL(ddl)
    assert isinstance(made, StructType)
    return made


@pytest.mark.parametrize("ddl", [ALL, "value binary", "value string, key binary, deadline string"])
def test_the_columns_of_a_produce_are_taken(ddl: str):
    check_for_topics(schema(ddl), topic="t")


@pytest.mark.parametrize(
    ("ddl", "said"),
    [
        ("key string", "no column `value`"),
        ("value int", "`value` is int, and the sink takes string or binary"),
        ("value double", r"cast\(value as string\)"),
        ("value struct<a:int>", r"to_json\(value\)"),
        ("value array<string>", r"to_json\(value\)"),
        ("value void", "null in every row"),
        ("value string, offset bigint, timestamp timestamp", "not take `offset`, `timestamp`"),
        ("value string, Key string", "not take `Key`"),
        ("value string, topic int", "`topic` is int"),
        ("value string, run_id binary", r"cast\(run_id as string\)"),
        ("value string, deadline timestamp_ntz", r"cast\(deadline as timestamp\)"),
        ("value string, partition_override double", r"cast\(partition_override as int\)"),
        ("value string, retry_backoff_ms string", r"cast\(retry_backoff_ms as long\)"),
        ("value string, routing_meta map<string,int>", "map<string,string>"),
    ],
)
def test_a_schema_that_cannot_be_taken_is_refused_by_name_and_with_a_cure(ddl: str, said: str):
    with pytest.raises(InvalidArgument, match=said):
        check_for_topics(schema(ddl), topic="t")


def test_two_columns_of_one_name_are_refused():
    twice = StructType([*schema("value string").fields, *schema("value string").fields])
    with pytest.raises(InvalidArgument, match="several columns `value`"):
        check_for_topics(twice, topic="t")


def test_rows_need_a_topic_from_the_option_or_the_column():
    check_for_topics(schema("value string, topic string"), topic="")
    with pytest.raises(InvalidArgument, match="option `topic`"):
        check_for_topics(schema("value string"), topic="")


def test_a_cache_takes_key_value_and_ttl():
    check_for_cache(schema("key string, value binary, ttl_ms int"))
    check_for_cache(schema("key string, value void"))
    with pytest.raises(InvalidArgument, match="no column `key`"):
        check_for_cache(schema("value string"))
    with pytest.raises(InvalidArgument, match="does not take `run_id`"):
        check_for_cache(schema("key string, value string, run_id string"))


def test_columns_travel_in_the_types_of_the_wire():
    moment = datetime(2026, 1, 2, 3, 4, 5, 678901, UTC)
    sent = as_sent(
        pa.record_batch(
            {
                "value": pa.array(["v"], pa.large_string()),
                "key": pa.array([b"k"], pa.binary()),
                "run_id": pa.nulls(1),
                "partition_override": pa.array([1], pa.int64()),
                "deadline": pa.array([moment], pa.timestamp("us", "Europe/Berlin")),
                "retry_max_attempts": pa.array([3], pa.int8()),
                "routing_meta": pa.array([[("a", "b")]], pa.map_(pa.string(), pa.string())),
            }
        )
    )
    assert sent.to_pylist() == [
        {
            "value": "v",
            "key": "k",
            "run_id": None,
            "partition_override": 1,
            "deadline": moment,
            "retry_max_attempts": 3,
            "routing_meta": [("a", "b")],
        }
    ]
    assert sent.schema.field("key").type == pa.string()
    assert sent.schema.field("run_id").type == pa.string()
    assert sent.schema.field("partition_override").type == pa.int32()
    assert sent.schema.field("deadline").type == pa.timestamp("us", "UTC")
    assert sent.schema.field("retry_max_attempts").type == pa.int64()


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("key", pa.array([b"\xff"])),
        ("partition_override", pa.array([2**40])),
    ],
)
def test_a_value_that_has_no_such_type_is_refused_with_its_column(name: str, array: pa.Array):
    with pytest.raises(InvalidArgument, match=f"`{name}`"):
        as_sent(pa.record_batch([array], names=[name]))
