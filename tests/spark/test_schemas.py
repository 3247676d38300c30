"""Spark's schema is the one of history and of the journal, and batches fit it exactly."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import DoubleType, IntegerType, StructType

from penstock.model.errors import InvalidArgument
from penstock.model.ranges import EVENT_COLUMNS
from penstock.spark.bounds import LogName
from penstock.spark.schemas import (
    RECORD_COLUMNS,
    Shape,
    cache_schema,
    check,
    requested_columns,
    schema_of,
)
from penstock.storage import cache_rows
from penstock.storage.columns import SCHEMA


def test_the_records_have_topic_and_partition_and_the_columns_of_history():
    arrow = to_arrow_schema(schema_of("records"), timezone="UTC")
    assert arrow.names[:2] == ["topic", "partition"]
    # Only the events of durable streams have a payload.
    assert SCHEMA.names[-1] == "payload"
    assert pa.schema(list(arrow)[2:]).equals(SCHEMA.remove(len(SCHEMA) - 1))


def test_events_have_their_stream_and_the_columns_that_the_broker_sends():
    arrow = to_arrow_schema(schema_of("events"), timezone="UTC")
    assert arrow.names == ["stream", *EVENT_COLUMNS]
    assert [arrow.field(name).type for name in EVENT_COLUMNS] == [
        SCHEMA.field(name).type for name in EVENT_COLUMNS
    ]


def test_a_cache_has_the_columns_of_a_snapshot():
    assert to_arrow_schema(cache_schema(), timezone="UTC").equals(cache_rows.SCHEMA)
    with pytest.raises(InvalidArgument, match="a cache has no ttl_ms; it has key, value, version"):
        cache_schema(["ttl_ms"])


def test_columns_come_in_the_order_they_are_asked_for():
    assert schema_of("records", ["value", "partition", "offset"]).names == [
        "value",
        "partition",
        "offset",
    ]


def test_an_unknown_column_is_named_with_those_there_are():
    with pytest.raises(InvalidArgument, match="no valeu; it has topic, partition, offset"):
        schema_of("records", ["valeu"])
    with pytest.raises(InvalidArgument, match="no key; it has position"):
        schema_of("journal", ["key"])


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [("price", DoubleType(), "price"), ("offset", IntegerType(), "offset is int; it is bigint")],
)
def test_a_schema_of_the_users_own_may_only_leave_columns_out(name: str, kind: Any, said: str):
    check("records", schema_of("records", ["value", "offset", "partition"]))
    with pytest.raises(InvalidArgument, match=said):
        check("records", StructType().add("value", "string").add(name, kind))


@pytest.mark.parametrize(
    ("log", "columns", "asked"),
    [
        ("records", (), ()),
        ("records", tuple(RECORD_COLUMNS), ()),
        ("records", ("value", "topic"), ("offset", "value")),
        ("records", ("partition",), ("offset",)),
        ("journal", ("kind", "topic"), ("position", "kind", "topic")),
    ],
)
def test_the_broker_is_asked_for_the_position_and_what_is_wanted(
    log: LogName, columns: tuple[str, ...], asked: tuple[str, ...]
):
    assert requested_columns(log, schema_of(log, columns)) == asked


def test_batches_get_their_topic_and_partition_and_are_not_copied():
    shape = Shape("records", schema_of("records", ["value", "topic", "partition"]), "orders", 3)
    offsets, values = pa.array([4, 9]), pa.array(["a", "b"])
    fitted = shape.fit(pa.record_batch([offsets, values], names=["offset", "value"]))
    assert fitted.to_pylist() == [
        {"value": "a", "topic": "orders", "partition": 3},
        {"value": "b", "topic": "orders", "partition": 3},
    ]
    assert fitted.column("value").buffers()[2].address == values.buffers()[2].address
    shorter = shape.fit(pa.record_batch([offsets[:1], values[:1]], names=["offset", "value"]))
    assert shorter.to_pylist() == [{"value": "a", "topic": "orders", "partition": 3}]
    assert shape.last_position(pa.record_batch([offsets], names=["offset"])) == 9
