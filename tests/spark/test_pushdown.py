"""pushdown=true: the same rows, and fewer of them read."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    In,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
)

from penstock.spark.options import SourceSettings
from penstock.spark.pushdown import PushdownReader
from penstock.spark.schemas import schema_of
from tests.broker_process import BrokerProcess
from tests.contract.checks import new_name
from tests.spark.sources import as_told, frame, produce
from tests.spark.test_source_batch import produce_later


@pytest.fixture(scope="module")
def filled(broker: BrokerProcess) -> tuple[str, int]:
    """A pattern of two topics, and a time between their rows."""
    stem = new_name("pushed")
    for end in ("a", "b"):
        topic = broker.create_topic(f"{stem}-{end}", 2)
        produce(broker, topic, range(200))
        produce(broker, topic, range(200, 250), tenant_id="t1", run_id="r1")
        produce(broker, topic, range(250, 300), tenant_id="t2")
        later = produce_later(broker, topic, range(300, 400))
    return f"{stem}-*", later


CONDITIONS = [
    "offset >= 100",
    "offset > 100 and offset < 120",
    "offset = 7",
    "offset in (3, 5, 300)",
    "offset <= 10 or offset > 390",
    "offset != 5",
    "tenant_id = 't1'",
    "tenant_id = 't1' and run_id = 'r1'",
    "tenant_id <=> 't2'",
    "tenant_id is null",
    "tenant_id = ''",
    "tenant_id in ('t1', 't2')",
    "tenant_id = 't1' and tenant_id = 't2'",
    "run_id = 'nobody'",
    "topic like '%-a'",
    "topic = 'TOPIC-a'",
    "topic in ('TOPIC-a', 'nowhere')",
    "partition = 1",
    "partition > 0 and topic = 'TOPIC-b'",
    "partition = 7",
    "timestamp >= timestamp 'LATER'",
    "timestamp < timestamp 'LATER'",
    "timestamp > timestamp 'LATER' - interval 1 microsecond",
    "timestamp = timestamp 'LATER'",
    "timestamp > timestamp '1960-01-01'",
    "timestamp < timestamp '1960-01-01'",
    "timestamp > timestamp '2500-01-01'",
    "key = 'key value 3' and offset < 50",
    "offset > 9223372036854775806",
    "offset < 0",
]


@pytest.mark.parametrize("condition", CONDITIONS)
def test_the_rows_are_the_same_with_and_without(
    spark: SparkSession, broker: BrokerProcess, filled: tuple[str, int], condition: str
):
    pattern, later = filled
    moment = datetime.fromtimestamp(later / 1000, UTC).replace(tzinfo=None).isoformat(" ")
    condition = condition.replace("TOPIC", pattern[:-2]).replace("LATER", moment)
    plain = frame(spark, broker, topic=pattern).where(condition)
    pushed = frame(spark, broker, topic=pattern, pushdown=True).where(condition)
    assert as_told(pushed.collect()) == as_told(plain.collect())


@pytest.mark.parametrize(
    ("condition", "most"),
    [
        ("offset >= 390", 20),
        ("tenant_id = 't1'", 100),
        ("topic = 'TOPIC-a' and offset <= 10", 11),
        ("timestamp >= timestamp 'LATER'", 200),
        ("partition = 7", 0),
    ],
)
def test_fewer_rows_are_read(
    spark: SparkSession, broker: BrokerProcess, filled: tuple[str, int], condition: str, most: int
):
    pattern, later = filled
    moment = datetime.fromtimestamp(later / 1000, UTC).replace(tzinfo=None).isoformat(" ")
    condition = condition.replace("TOPIC", pattern[:-2]).replace("LATER", moment)
    plain = frame(spark, broker, topic=pattern).where(condition)
    pushed = frame(spark, broker, topic=pattern, pushdown=True).where(condition)
    assert rows_read(plain) == 800
    assert rows_read(pushed) <= most


def rows_read(wanted: DataFrame) -> int:
    """Rows that came out of the source."""
    query = wanted._jdf.queryExecution()
    query.executedPlan().executeCollect()
    plan = query.executedPlan()
    while plan.children().size():
        plan = plan.children().head()
    return int(plan.metrics().get("numOutputRows").get().value())


def reader_with(*filters: Filter, **settings: Any) -> PushdownReader:
    chosen: dict[str, Any] = {"topics": ("t",)} | settings
    made = PushdownReader(SourceSettings(**chosen), schema_of(chosen.get("log", "records")))
    assert list(made.pushFilters(list(filters))) == list(filters), "Spark must check them again"
    return made


def test_what_cannot_be_pushed_is_left_to_spark():
    made = reader_with(
        IsNull(("tenant_id",)),
        Not(EqualTo(("tenant_id",), "t1")),
        EqualTo(("routing_meta", "tenant_id"), "t1"),
        In(("run_id",), ("a", "b")),
        EqualTo(("offset",), None),
        GreaterThan(("timestamp",), datetime(2025, 1, 1)),  # noqa: DTZ001 - it has no zone
    )
    assert made._request.filters == {}
    assert made._narrowed((3, 9)) == (3, 9)
    assert made._times_ms.low is None


@pytest.mark.parametrize(
    ("filters", "asked"),
    [
        ({"topic": "orders"}, {}),
        ({"topic": "orders", "resource_kind": "topic"}, {"topic": "orders"}),
        ({"topic": "orders", "resource_kind": "stream"}, {"stream": "orders"}),
        ({"resource_kind": "stream"}, {"resource_kind": "stream"}),
        ({"topic": "orders", "resource_kind": "cache"}, {}),
    ],
)
def test_the_name_of_a_topic_is_pushed_only_with_what_it_names(
    filters: dict[str, str], asked: dict[str, str]
):
    """Rows of a topic and rows of a stream may have the same name in `topic`."""
    equalities = [EqualTo((column,), value) for column, value in filters.items()]
    assert reader_with(*equalities, log="journal", topics=())._request.filters == asked


def test_the_journal_is_asked_by_kind_group_and_the_end_of_a_time():
    noon = datetime(2025, 1, 1, 12, tzinfo=UTC)
    made = reader_with(
        EqualTo(("kind",), "acked"),
        EqualTo(("topic",), "orders"),
        EqualTo(("group",), "billing"),
        LessThan(("position",), 50),
        LessThanOrEqual(("timestamp",), noon),
        log="journal",
        topics=(),
    )
    assert made._request.filters == {
        "kind": "acked",
        "group": "billing",
        "to_ms": int(noon.timestamp() * 1000) + 1,
    }
    assert made._narrowed((3, 90)) == (3, 51)
