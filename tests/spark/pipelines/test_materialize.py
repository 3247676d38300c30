"""The latest value of every key: what Python's dict says after the same messages."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from pyspark.sql import DataFrame, SparkSession

from penstock.model.errors import FailedPrecondition, InvalidArgument
from penstock.spark.lake.lake import Lake
from penstock.spark.lake.table import Table
from penstock.spark.launching.catalog import find
from penstock.spark.options import BrokerSettings
from penstock.spark.pipelines.materialize import ORIGIN, PIPELINE, latest, merged, states, table
from penstock.spark.pipelines.names import IN_THE_LAKE
from penstock.spark.pipelines.rejects import SCHEMA as REJECTS
from penstock.spark.running.failure import PipelineFailed
from penstock.spark.running.run import Run
from tests.broker_process import BrokerProcess
from tests.contract.checks import new_name
from tests.spark.pipelines.killed import Deadly, DeadlyRun, Killed
from tests.spark.sinks import cached

Messages = list[tuple[str, str]]
StartRun = Callable[..., Run]


@pytest.fixture
def lake(spark: SparkSession, tmp_path: Path) -> Lake:
    return Lake(spark, str(tmp_path / "lake"))


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def start(
    spark: SparkSession, broker: BrokerProcess, lake: Lake, said: list[str]
) -> Iterator[StartRun]:
    started: list[Run] = []

    def start(deadly: Deadly | None = None, **options: str) -> Run:
        settings = PIPELINE.settings(options)
        of_broker = BrokerSettings(url=broker.url, retry_s=10)
        run = DeadlyRun(
            "materialize", spark, of_broker, lake, settings, report=said.append, deadly=deadly
        )
        started.append(run)
        PIPELINE.start(run)
        return run

    yield start
    for run in started:
        run.stop()


def produce(broker: BrokerProcess, topic: str, messages: Messages) -> None:
    items = [{"topic": topic, "key": key, "value": value} for key, value in messages]
    lines = "\n".join(map(json.dumps, items))
    reply = broker.client.post("/v1/produce/batch", content=lines)
    assert all("offset" in each for each in reply.json()["results"]), reply.text


def expected(messages: Messages) -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in messages:
        if key:
            found[key] = value
    return {key: value for key, value in found.items() if value != "null"}


def contents(frame: DataFrame) -> dict[str, str]:
    rows = frame.select("key", "value").collect()
    assert len({row.key for row in rows}) == len(rows)
    return {row.key: row.value for row in rows}


def messages(spark: SparkSession, *rows: tuple[str | None, str, int]) -> DataFrame:
    """Key, value and offset. Time goes backwards, as after a clock was set."""
    texts = [
        ", ".join("null" if part is None else repr(part) for part in (*row, -row[2]))
        for row in rows
    ]
    values = ", ".join(f"({text})" for text in texts)
    return spark.sql(
        "select key, value, timestamp_seconds(1e9 + at) as timestamp, 0 as partition,"
        f" cast(offset as long) as offset from values {values} as t(key, value, offset, at)"
    )


def test_the_highest_offset_of_a_key_counts_and_tombstones_delete(spark: SparkSession):
    rows = messages(
        spark,
        ("a", "1", 0), ("b", "1", 1), ("a", "2", 2), ("c", "null", 3), ("c", "4", 4),
        ("", "no key", 5), (None, "no key", 6), ("b", " null", 7),
    )  # fmt: skip
    found = latest(states(rows, "null"))
    assert [row.messages for row in found.where("key = ''").collect()] == [2]
    found = found.where("key != ''")
    assert contents(found.where("not is_deleted")) == {"a": "2", "c": "4"}
    assert contents(found.where("is_deleted")) == {"b": " null"}
    assert latest(states(rows, "none")).where("is_deleted").count() == 0


def test_news_that_are_merged_twice_change_nothing_and_older_ones_do_not_count(
    spark: SparkSession,
):
    empty = table(Lake(spark, "nowhere"), "t").schema
    first = latest(states(messages(spark, ("a", "1", 0), ("b", "1", 1), ("c", "1", 2)), "null"))
    second = latest(states(messages(spark, ("a", "2", 5), ("b", "null", 6)), "null"))
    there = merged(spark.createDataFrame([], empty), first, 4)
    there = merged(merged(there, second, 4), second, 4)
    assert contents(there) == {"a": "2", "c": "1"}
    older = latest(states(messages(spark, ("a", "1", 0)), "null"))
    assert contents(merged(there, older, 4)) == {"a": "2", "c": "1"}


def test_a_table_has_the_latest_values_after_every_run(
    broker: BrokerProcess, lake: Lake, start: StartRun, said: list[str]
):
    topic = broker.create_topic(new_name("state"), 2)
    sent: Messages = [(f"k{number % 7}", f"v{number}") for number in range(20)]
    sent += [("k1", "null"), ("", "nobody's"), ("k9", "late"), ("k1x", "null")]
    produce(broker, topic, sent)
    options = {"topic": topic, "to": "table:state", "buckets": "4"}
    start(**options, max_rows="12").wait(600)
    assert contents(table(lake, "state").read()) == expected(sent)
    assert [line for line in said if "1 messages without a key" in line]

    before = set(Path(lake.path).glob("state/bucket=*/*.parquet"))
    more: Messages = [("k2", "newest"), ("k2", "null")]
    produce(broker, topic, more)
    start(**options).wait(600)
    assert contents(table(lake, "state").read()) == expected(sent + more)
    kept = before & set(Path(lake.path).glob("state/bucket=*/*.parquet"))
    assert kept, "buckets that nothing was said of stay"

    more += [("k3", "newest")]
    produce(broker, topic, more[-1:])
    start(**options | {"buckets": "3"}).wait(600)
    assert contents(table(lake, "state").read()) == expected(sent + more)
    assert {parts[0].partition("-of-")[2] for parts in table(lake, "state").partitions()} == {"3"}


def test_a_batch_that_is_taken_again_after_a_kill_changes_nothing(
    broker: BrokerProcess, lake: Lake, start: StartRun, monkeypatch: pytest.MonkeyPatch
):
    """The table has the batch, and Spark does not know it yet."""
    topic = broker.create_topic(new_name("state"))
    sent: Messages = [("a", "1"), ("b", "1"), ("a", "null"), ("b", "2")]
    produce(broker, topic, sent)
    options = {"topic": topic, "to": "table:again"}
    replace = Table.replace

    def replace_and_die(self: Table, *arguments: Any) -> int:
        replace(self, *arguments)
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(Table, "replace", replace_and_die)
        with pytest.raises(PipelineFailed, match="Killed"):
            start(**options).wait(600)
    assert contents(table(lake, "again").read()) == expected(sent)
    start(**options).wait(600)
    assert contents(table(lake, "again").read()) == expected(sent)


def test_a_cache_has_the_latest_values_and_none_that_were_deleted(
    broker: BrokerProcess, start: StartRun
):
    topic = broker.create_topic(new_name("state"), 2)
    sent: Messages = [("a", "1"), ("b", "1"), ("c", "null"), ("a", "2"), ("b", "null")]
    cache = "default/default/default"
    options = {"topic": topic, "to": f"cache:{cache}"}
    for news, more in ((sent[:3], {}), (sent[3:], {"ttl_ms": "60000"})):
        produce(broker, topic, news)
        start(**options, **more).wait(600)
    found = {key: cached(broker, cache, key) for key in "abc"}
    assert {key: value for key, value in found.items() if value} == expected(sent)


def test_a_key_that_a_cache_refuses_is_put_aside_and_the_others_go_on(
    spark: SparkSession, broker: BrokerProcess, lake: Lake, start: StartRun, said: list[str]
):
    topic = broker.create_topic(new_name("state"))
    long, bad = "k" * 1025, "tab\there"
    sent: Messages = [("first", "1"), (long, "2"), (bad, "3"), (bad, "4"), ("k\x85", "null")]
    produce(broker, topic, [*sent, ("k" * 1024, "whole"), ("last", "5")])
    cache = "default/default/default"
    run = {"topic": topic, "to": f"cache:{cache}"}
    start(**run).wait(600)
    produce(broker, topic, [("later", "6")])
    start(**run).wait(600)
    keys = ("first", "k" * 1024, "last", "later")
    assert [cached(broker, cache, key) for key in keys] == ["1", "whole", "5", "6"]
    rows = lake.table("rejects", REJECTS).read().orderBy("offset").collect()
    control = "the key has control characters, which a cache refuses"
    assert [(row.topic, row.offset, row.key, row.value, row.error) for row in rows] == [
        (topic, 1, long, "2", "the key is longer than the 1024 bytes that a cache takes"),
        (topic, 3, bad, "4", control),
        (topic, 4, "k\x85", "null", control),
    ]
    assert [line for line in said if line.endswith("3 put aside in the table rejects")]


def test_a_cache_that_has_a_batch_takes_it_no_second_time_after_a_kill(
    broker: BrokerProcess, start: StartRun
):
    """The cache has the batch, with its deletes, and Spark does not know it yet."""
    topic = broker.create_topic(new_name("state"))
    cache = "default/default/default"
    entries = "/v1/tenants/default/namespaces/default/caches/default/entries"
    keys = [f"{topic}/{letter}" for letter in "abcd"]
    a, b, c, d = keys
    sent: Messages = [(a, "1"), (b, "1"), (c, "1"), (a, "2"), (b, "null"), (c, "null")]
    options = {"topic": topic, "to": f"cache:{cache}", "max_rows": "3"}

    def there() -> dict[str, str]:
        found = {key: cached(broker, cache, key) for key in keys}
        return {key: value for key, value in found.items() if value is not None}

    produce(broker, topic, sent)
    with pytest.raises(PipelineFailed, match="Killed: write 1"):
        start(Deadly("write 1"), **options).wait(600)
    assert there() == expected(sent)
    # By hand, so that it shows if the batch is written again.
    for key in (a, b):
        path = f"{entries}/{quote(key, '')}?raw=true"
        assert broker.client.put(path, content=b"by hand").status_code == 200
    more: Messages = [(c, "3"), (d, "1")]
    produce(broker, topic, more)
    start(**options).wait(600)
    assert there() == expected(sent + more) | {a: "by hand", b: "by hand"}
    last: Messages = [(a, "null"), (b, "4")]
    produce(broker, topic, last)
    start(**options).wait(600)
    assert there() == expected(sent + more + last)


def test_two_topics_are_two_runs_and_one_command_for_both_is_told_so(
    broker: BrokerProcess, lake: Lake, start: StartRun
):
    with pytest.raises(
        InvalidArgument, match=r"materialize is named twice, .* second command.*--name"
    ):
        find(["materialize", "materialize"])
    sent: Messages = [("a", "1"), ("b", "1"), ("a", "null")]
    topics = {broker.create_topic(new_name("state")): f"side{number}" for number in range(2)}
    for topic in topics:
        produce(broker, topic, sent)
    for run in [start(topic=topic, to=f"table:{name}") for topic, name in topics.items()]:
        run.wait(600)
    for name in topics.values():
        assert contents(table(lake, name).read()) == expected(sent)


def test_a_table_is_one_topics_and_refuses_another_by_name(
    broker: BrokerProcess, lake: Lake, start: StartRun
):
    first, second = (broker.create_topic(new_name("state")) for _ in range(2))
    sent: Messages = [("a", "1"), ("b", "1")]
    produce(broker, first, sent)
    produce(broker, second, [("a", "other"), ("z", "other")])
    with pytest.raises(PipelineFailed, match="typo"):
        start(topic="typo", to="table:mine").wait(600)
    start(topic=first, to="table:mine").wait(600)
    for _ in range(2):
        with pytest.raises(
            FailedPrecondition, match=f"latest values of topic '{first}', and .* '{second}' would"
        ):
            start(topic=second, to="table:mine")
    assert contents(table(lake, "mine").read()) == expected(sent)

    (Path(lake.path) / "mine" / ORIGIN).unlink()  # as an older version has left it
    produce(broker, first, [("b", "2")])
    start(topic=first, to="table:mine").wait(600)
    assert contents(table(lake, "mine").read()) == {"a": "1", "b": "2"}
    with pytest.raises(FailedPrecondition, match=f"latest values of topic '{first}'"):
        start(topic=second, to="table:mine")


def test_a_table_of_others_is_neither_claimed_nor_written(
    spark: SparkSession, lake: Lake, start: StartRun
):
    totals = spark.sql("select 'nut' as item, 3 as count")
    lake.table("totals", totals.schema).replace(totals)
    with pytest.raises(FailedPrecondition, match="totals is partitioned by nothing"):
        start(topic="any", to="table:totals")
    assert not (Path(lake.path) / "totals" / ORIGIN).exists()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("to", "carts"),
        ("to", "table:_checkpoints"),
        ("to", "table:.hidden"),
        *(("to", f"table:{name}") for name in (*IN_THE_LAKE, "Records")),
        ("to", "cache:a/b"),
        ("to", "table:a/b"),
        ("topic", "a,b"),
        ("topic", "a*"),
        ("tombstone", "nothing"),
        ("buckets", "0"),
        ("ttl_ms", "soon"),
    ],
)
def test_an_option_that_does_not_fit_is_refused(option: str, value: str):
    options = {"topic": "t", "to": "table:t"} | {option: value}
    with pytest.raises(InvalidArgument, match=f"materialize, option {option}: '{value[:2]}"):
        PIPELINE.settings(options)
