"""A query's progress is a group's: after every batch, the last one too, and never at its cost."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import SparkSession

from penstock.spark.options import BrokerSettings
from penstock.spark.progress import ProgressListener, follow
from tests.broker_process import BrokerProcess, eventually
from tests.contract.checks import new_name
from tests.spark.conftest import StartBroker
from tests.spark.sources import free_port


def progressed(*end_offsets: object) -> Any:
    sources = [SimpleNamespace(endOffset=offset) for offset in end_offsets]
    return SimpleNamespace(progress=SimpleNamespace(sources=sources))


def offset(broker: BrokerProcess, topic: str, **partitions: int) -> str:
    records = {topic: {name.removeprefix("p"): at for name, at in partitions.items()}}
    return json.dumps({"records": records, "group": "g", "url": broker.url})


def lags(broker: BrokerProcess, topic: str, group: str = "g") -> list[int] | None:
    reply = broker.client.get(f"/v1/topics/{topic}")
    groups = {each["name"]: each for each in reply.json()["groups"]}
    if group not in groups:
        return None
    return [partition["lag"] for partition in groups[group]["partitions"]]


@pytest.fixture
def topic(broker: BrokerProcess) -> str:
    name = broker.create_topic(new_name(), 2)
    for number in range(20):
        broker.put(name, f"{number}", envelope={"partition_override": number % 2})
    return name


def test_all_batches_of_a_query_are_told_the_last_one_too(
    spark: SparkSession, broker: BrokerProcess, topic: str, tmp_path: Path
):
    follow(spark, broker.url)
    query = (
        spark.readStream.format("penstock")
        .options(url=broker.url, topic=topic, group="g", maxRowsPerTrigger=7)
        .load()
        .writeStream.format("noop")
        .option("checkpointLocation", str(tmp_path))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    eventually(lambda: lags(broker, topic), lambda found: found == [0, 0])


def test_a_session_has_one_listener(spark: SparkSession, broker: BrokerProcess):
    def count() -> int:
        return len(spark._jsparkSession.streams().listListeners())

    follow(spark, broker.url)
    before = count()
    follow(spark, "http://elsewhere:8080")
    assert count() == before


def test_what_a_batch_has_reached_is_told(broker: BrokerProcess, topic: str):
    listener = ProgressListener()
    listener.onQueryProgress(progressed(offset(broker, topic, p0=8, p1=3)))
    assert lags(broker, topic) == [6, 9]


def test_how_far_the_journal_is_archived_is_told(broker: BrokerProcess, topic: str):
    end = broker.client.get("/v1/journal/offsets?fresh=true").json()["next"]
    told = {"journal": end, "group": "archive", "url": broker.url}
    ProgressListener().onQueryProgress(progressed(json.dumps(told)))
    assert broker.client.get("/v1/journal/offsets").json()["archived"] == end


def test_what_could_not_be_told_is_told_with_the_next_event(start_broker: StartBroker):
    broker = start_broker(port=free_port())
    topic = broker.create_topic("t")
    broker.put(topic, "a")
    end = offset(broker, topic, p0=1)
    broker.kill()
    listener = ProgressListener()
    listener.onQueryProgress(progressed(end))
    broker.start()
    listener.onQueryIdle(None)
    assert lags(broker, topic) == [0]


def test_what_the_broker_refuses_is_left(
    broker: BrokerProcess, topic: str, caplog: pytest.LogCaptureFixture
):
    listener = ProgressListener()
    bad, good = offset(broker, topic, p0=10**6), offset(broker, topic, p0=2)
    for end in (bad, bad, good):
        listener.onQueryProgress(progressed(end))
    assert len(caplog.records) == 1
    assert lags(broker, topic) == [9, 10]


@pytest.mark.parametrize(
    "end", [None, "", "17", "null", '{"topic-0": 3}', '{"records": 3}', '{"journal": 5}', "no json"]
)
def test_sources_of_another_kind_are_left_alone(end: str | None):
    listener = ProgressListener()
    listener.onQueryProgress(progressed(end))


def test_the_broker_that_the_source_reads_is_told_and_no_other(
    broker: BrokerProcess, topic: str, caplog: pytest.LogCaptureFixture
):
    listener = ProgressListener()
    listener.know(BrokerSettings(url=broker.url))
    elsewhere = {"records": {topic: {"0": 5}}, "group": "g", "url": "http://127.0.0.1:1"}
    listener.onQueryProgress(progressed(json.dumps(elsewhere)))
    assert lags(broker, topic) is None
    assert "no broker answers at http://127.0.0.1:1" in caplog.text
    assert "tried for" not in caplog.text


def test_a_broker_that_wants_a_token_gets_the_one_that_is_known(
    start_broker: StartBroker, caplog: pytest.LogCaptureFixture
):
    broker = start_broker(env={"PENSTOCK_TOKEN": "secret"})
    broker.client.headers["Authorization"] = "Bearer secret"
    topic = broker.create_topic("t")
    broker.put(topic, "a")
    listener = ProgressListener()
    listener.onQueryProgress(progressed(offset(broker, topic, p0=1)))
    assert lags(broker, topic) is None
    assert "is published only when its query plans the next batch" in caplog.text
    assert f"no token that {broker.url} accepts" in caplog.text
    assert "follow(spark, url, token)" in caplog.text
    assert "option" not in caplog.text
    listener.know(BrokerSettings(url=broker.url, token="secret"))
    listener.onQueryProgress(progressed(offset(broker, topic, p0=1)))
    assert lags(broker, topic) == [0]
