"""Spark in a tenant and namespace: reads, writes, progress and checkpoints."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pyspark.sql import SparkSession

from penstock.model.errors import InvalidArgument
from penstock.spark.options import BrokerSettings, SourceSettings
from penstock.spark.schemas import schema_of
from penstock.spark.source import StreamReader
from tests.broker_process import BrokerProcess
from tests.contract.scoped import ACME, DEFAULT, ScopedBroker, create_namespaces

SCOPE = {"tenant": "acme", "namespace": "prod"}


@pytest.fixture(scope="module")
def scoped(broker: BrokerProcess) -> dict[str, ScopedBroker]:
    """`orders` of everybody, with one message each."""
    create_namespaces(broker)
    found = {"plain": ScopedBroker(broker, DEFAULT), "acme": ScopedBroker(broker, ACME)}
    for each in found.values():
        each.must("POST", "/v1/topics", json={"name": "orders"})
        each.produce("orders")
    return found


def read(spark: SparkSession, broker: BrokerProcess, **options: Any) -> list[Any]:
    return spark.read.format("penstock").options(url=broker.url, **options).load().collect()


def test_a_read_has_the_rows_of_its_namespace(
    spark: SparkSession, broker: BrokerProcess, scoped: dict[str, ScopedBroker]
):
    for options, each in (({}, scoped["plain"]), (SCOPE, scoped["acme"])):
        for topic in ("orders", "ord*"):
            (row,) = read(spark, broker, topic=topic, **options)
            assert (row.topic, row.value) == ("orders", f"value of {each.word}")
    rows = read(spark, broker, log="journal")
    assert {(row.tenant, row.namespace) for row in rows} == {(None, None), ACME}
    rows = read(spark, broker, log="journal", tenant="acme")
    assert {(row.tenant, row.topic) for row in rows} == {("acme", "orders")}


def test_a_write_goes_to_its_namespace_once_for_each(
    spark: SparkSession, broker: BrokerProcess, scoped: dict[str, ScopedBroker]
):
    """The same txn in two namespaces is two writes."""
    for each in scoped.values():
        each.must("POST", "/v1/topics", json={"name": "written"})
    frame = spark.createDataFrame([("v",)], "value string")
    for options in ({}, SCOPE, SCOPE):
        writer = frame.write.format("penstock").mode("append")
        writer.options(url=broker.url, topic="written", txn="same", **options).save()
    assert [each.values("written") for each in scoped.values()] == [["v"], ["v"]]


def reader_of(broker: BrokerProcess, **settings: Any) -> StreamReader:
    chosen = SourceSettings(url=broker.url, retry_s=20, topics=("orders",), **settings)
    return StreamReader(chosen, schema_of("records"))


def test_a_checkpoint_of_another_namespace_is_refused(
    broker: BrokerProcess, scoped: dict[str, ScopedBroker]
):
    plain, acme = reader_of(broker), reader_of(broker, **SCOPE)
    for each, other in ((plain, acme), (acme, plain)):
        at = json.loads(json.dumps(each.initialOffset()))
        with pytest.raises(InvalidArgument, match="checkpoint is of a query that read"):
            other.partitions(at, at)
    assert "tenant" not in plain.initialOffset()
    named = reader_of(broker, tenant="default", namespace="default")
    assert named.initialOffset() == plain.initialOffset()
    for each in (plain, acme, named):
        each.stop()


def test_progress_is_that_of_the_group_in_the_namespace(
    spark: SparkSession,
    broker: BrokerProcess,
    scoped: dict[str, ScopedBroker],
    tmp_path: Any,
):
    stream = spark.readStream.format("penstock").options(
        url=broker.url, topic="orders", group="archive", **SCOPE
    )
    query = (
        stream.load()
        .writeStream.format("noop")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination(600)
    spark.sparkContext._jsc.sc().listenerBus().waitUntilEmpty(60_000)
    groups = {
        name: [group["name"] for group in each.must("GET", "/v1/topics/orders").json()["groups"]]
        for name, each in scoped.items()
    }
    assert groups == {"plain": [], "acme": ["archive"]}


def test_the_archived_position_of_the_journal_is_not_one_tenants():
    options = {"log": "journal", "group": "archive", "tenant": "acme"}
    with pytest.raises(InvalidArgument, match="archived position for the rows of all tenants"):
        SourceSettings.from_options(options, "readStream")


def test_the_environment_names_the_namespace(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PENSTOCK_TENANT", "acme")
    monkeypatch.setenv("PENSTOCK_NAMESPACE", "prod")
    settings = BrokerSettings.of(url="http://x")
    assert (settings.tenant, settings.namespace) == ACME
    assert BrokerSettings.of(url="http://x", tenant="globex").tenant == "globex"
