"""A user's own pipelines: what a decorator takes, what feeds what, and rows from end to end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from penstock.model.errors import FailedPrecondition, InvalidArgument, NotFound, PenstockError
from penstock.spark import pipeline as exported
from penstock.spark.lake.lake import Lake
from penstock.spark.launching.catalog import choose
from penstock.spark.options import BrokerSettings
from penstock.spark.pipelines import pipeline, user_file
from penstock.spark.pipelines.user import UserPipeline
from penstock.spark.running.failure import PipelineFailed
from penstock.spark.running.run import Run
from tests.broker_process import BrokerProcess, eventually
from tests.contract.checks import new_name
from tests.spark.sinks import cached
from tests.spark.sources import rows_at

WAIT_S = 600

FILE = """
from pyspark.sql import functions as F
from penstock.spark import pipeline

FACTOR = 10

def times(count):
    return count * FACTOR

@F.udf("int")
def scaled(count):
    return None if count is None else times(count)

@pipeline(source="table:totals", sink="cache:default/default/default")
def cached(totals):
    return totals.selectExpr("item as key", "string(count) as value")

@pipeline(source="{topic}", options={{"maxRowsPerTrigger": 10}})
def parsed(orders):
    "Orders as columns."
    order = F.from_json("value", "item string, count int").alias("order")
    return orders.select("topic", "partition", "offset", "key", "value", order)

@pipeline(source=parsed, sink="table:totals", mode="complete")
def totals(rows, *, least: int = 1):
    "What was ordered, by item."
    sums = rows.groupBy("order.item").agg(F.sum(scaled("order.count")).alias("count"))
    return sums.where(F.col("count") >= least)

@pipeline(source=parsed, sink="topic:{target}", rejects="problem")
def loud(rows):
    problem = F.when(F.col("order.item").isNull(), "no item").alias("problem")
    value = F.upper("value").alias("value")
    return rows.select("topic", "partition", "offset", "key", value, problem)

@pipeline(source={{"lines": "{topic}"}}, sink="table:lines", partition_by="key")
def lines(lines):
    return lines.select("key", "value")
"""


def put(broker: BrokerProcess, topic: str, *values: str) -> None:
    for number, value in enumerate(values):
        broker.put(topic, value, key=f"k{number % 2}")


def run_file(
    path: Path, spark: SparkSession, broker: BrokerProcess, lake: Lake, *options: tuple[str, str]
) -> dict[str, Run]:
    runs: dict[str, Run] = {}
    for chosen in choose([str(path)], options):
        settings = BrokerSettings(url=broker.url, retry_s=10)
        with Run(
            chosen.name, spark, settings, lake, chosen.settings, report=lambda text: None
        ) as run:
            runs[chosen.name] = run
            chosen.pipeline.start(run)
            run.wait(WAIT_S)
    return runs


def rows_of(run: Run, table: str) -> list[dict[str, Any]]:
    return [row.asDict() for row in run.lake.find(table).read().collect()]


def test_the_pipelines_of_a_file_feed_each_other_and_each_row_arrives_once(
    spark: SparkSession, broker: BrokerProcess, topic: str, tmp_path: Path
):
    target = broker.create_topic(new_name("loud"))
    file = tmp_path / "mine.py"
    file.write_text(FILE.format(topic=topic, target=target))
    lake = Lake(spark, str(tmp_path / "lake"))
    orders = [
        json.dumps({"item": item, "count": n}) for n, item in enumerate(["fig", "fig", "nut"])
    ]
    put(broker, topic, *orders, "junk")

    runs = run_file(file, spark, broker, lake, ("least", "15"))
    assert list(runs) == ["totals", "cached", "loud", "lines"]
    run = runs["totals"]
    assert rows_of(run, "totals") == [{"item": "nut", "count": 20}]
    assert sorted(row["value"] for row in rows_at(broker, target)) == sorted(
        order.upper() for order in orders
    )
    (reject,) = rows_of(run, "rejects")
    assert (reject["pipeline"], reject["error"]) == ("loud", "no item")
    assert (reject["topic"], reject["value"]) == (topic, "JUNK")
    assert {(row["key"], row["value"]) for row in rows_of(run, "lines")} == {
        ("k0", orders[0]), ("k1", orders[1]), ("k0", orders[2]), ("k1", "junk"),
    }  # fmt: skip
    assert (tmp_path / "lake" / "lines" / "key=k0").is_dir()

    put(broker, topic, json.dumps({"item": "nut", "count": 7}))
    for name in ("totals", "cached", "loud"):
        runs |= run_file(Path(f"{file}:{name}"), spark, broker, lake)
    totals = {row["item"]: row["count"] for row in rows_of(runs["totals"], "totals")}
    assert totals == {"fig": 10, "nut": 90}
    assert cached(broker, "default/default/default", "nut") == "90"
    assert len(rows_at(broker, target)) == 4
    assert len(rows_of(runs["loud"], "rejects")) == 1
    with pytest.raises(NotFound, match=f"there is no table _checkpoints in {lake.path}"):
        lake.find("_checkpoints")
    with pytest.raises(NotFound, match="there is no table none"):
        lake.find("none")


class Watched(Run):
    """Knows what was written, and does something before it is."""

    def __init__(self, *arguments: Any, before: Callable[[], object], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.before = before
        self.producers: list[str] = []

    def write(self, frame: DataFrame, txn: str, **options: Any) -> None:
        self.before()
        super().write(frame, txn, **options)
        self.producers.append(txn)


def test_what_is_made_anew_for_a_cache_again_and_again_is_of_one_producer(
    spark: SparkSession, broker: BrokerProcess, tmp_path: Path
):
    """The broker remembers 100,000 producers, each for days."""
    lake = Lake(spark, str(tmp_path / "lake"))
    totals = spark.sql("select 'anew' as key, '1' as value")
    table = lake.table("totals", totals.schema)
    table.replace(totals)
    news = [spark.sql("select 'anew' as key, '2' as value")]

    def meanwhile() -> None:
        """Removes the files that are about to be read."""
        if news:
            table.replace(news.pop())

    made = pipeline(source="table:totals", sink="cache:default/default/default")(one).as_pipeline()
    at = BrokerSettings(url=broker.url, retry_s=10)
    run = Watched("one", spark, at, lake, {}, before=meanwhile, once=False, every_s=0.1)
    with run:
        made.start(run)

        def written() -> int:
            run.check()
            return len(run.producers)

        eventually(written, lambda count: count >= 2, timeout_s=WAIT_S)
    assert cached(broker, "default/default/default", "anew") == "2"
    (activity,) = run.activities
    assert (activity.state, activity.rows) == ("stopped", len(run.producers))
    (producer,) = set(run.producers)
    known = broker.client.get(f"/v1/writes/{producer}").json()
    assert known["last_batch"] >= len(run.producers) - 1


def test_a_function_that_raises_is_told_with_its_own_lines_only(
    spark: SparkSession, broker: BrokerProcess, topic: str, tmp_path: Path
):
    file = tmp_path / "poor.py"
    file.write_text(
        "from pyspark.sql import functions as F\n"
        "from penstock.spark import pipeline\n"
        '@F.udf("string")\n'
        "def spoil(value):\n"
        "    return value.no_such()\n"
        f'@pipeline(source="{topic}", sink="table:poor")\n'
        "def poor(rows):\n"
        "    return rows.select(spoil('value').alias('value'))\n"
        f'@pipeline(source="{topic}", sink="table:poor")\n'
        "def worse(rows):\n"
        "    return rows.nothing\n"
    )
    put(broker, topic, "one")
    lake = Lake(spark, str(tmp_path / "lake"))
    with pytest.raises(PipelineFailed) as failure:
        run_file(Path(f"{file}:poor"), spark, broker, lake)
    assert failure.value.message.splitlines() == [
        "pipeline poor, query rows, batch 0: "
        "AttributeError: 'str' object has no attribute 'no_such'",
        f'  File "{file}", line 5, in spoil',
        "    return value.no_such()",
    ]
    with pytest.raises(Exception, match="nothing"):
        run_file(Path(f"{file}:worse"), spark, broker, lake)
    assert not (tmp_path / "lake" / "poor").exists() or not list(
        (tmp_path / "lake" / "poor").glob("*.parquet")
    )


def test_what_does_not_fit_the_sink_is_refused_before_a_batch(
    spark: SparkSession, broker: BrokerProcess, topic: str, tmp_path: Path
):
    def refused(user: UserPipeline) -> str:
        settings = BrokerSettings(url=broker.url, retry_s=5)
        run = Run(user.name, spark, settings, Lake(spark, str(tmp_path / "lake")), {})
        with pytest.raises(PenstockError) as failure:
            user.as_pipeline().start(run)
        assert run.activities == []
        return failure.value.message

    def plain(rows: DataFrame) -> Any:
        return rows.select("offset")

    def nothing(rows: DataFrame) -> Any:
        return None

    assert "no column `value`" in refused(pipeline(source=topic, sink="topic:x")(only_key))
    assert "offset" in refused(pipeline(source=topic, sink="cache:a/b/c")(plain))
    assert "to partition by" in refused(
        pipeline(source=topic, sink="table:x", partition_by="day")(plain)
    )
    assert "returned NoneType" in refused(pipeline(source=topic, sink="table:x")(nothing))
    assert "no column problem" in refused(
        pipeline(source=topic, sink="table:x", rejects="problem")(plain)
    )


def test_a_table_whose_columns_were_others_is_refused_before_a_batch(
    spark: SparkSession, broker: BrokerProcess, topic: str, tmp_path: Path
):
    lake = Lake(spark, str(tmp_path / "lake"))
    before = spark.sql("select 7 as key")
    lake.table("kept", before.schema).replace(before)
    user = pipeline(source=topic, sink="table:kept")(only_key)
    run = Run(user.name, spark, BrokerSettings(url=broker.url, retry_s=5), lake, {})
    with pytest.raises(FailedPrecondition, match="column key is int, not string"):
        user.as_pipeline().start(run)
    assert run.activities == []


def test_a_pipeline_goes_on_without_a_topic_that_was_deleted_if_its_options_say_so(
    spark: SparkSession, broker: BrokerProcess, tmp_path: Path
):
    gone, stays = (broker.create_topic(new_name("orders")) for _ in range(2))
    target = broker.create_topic(new_name("target"))
    text = (
        "from penstock.spark import pipeline\n"
        f'@pipeline(source="{gone},{stays}", sink="topic:{target}", options={{options}})\n'
        "def copied(rows):\n"
        "    return rows.select('key', 'value')\n"
    )
    file = tmp_path / "copied.py"
    file.write_text(text.format(options={}))
    lake = Lake(spark, str(tmp_path / "lake"))
    put(broker, gone, "one")
    put(broker, stays, "two")
    run_file(file, spark, broker, lake)
    broker.client.delete(f"/v1/topics/{gone}").raise_for_status()
    put(broker, stays, "three")
    with pytest.raises(PipelineFailed, match="does not exist any more; failOnDataLoss=false"):
        run_file(file, spark, broker, lake)
    file.write_text(text.format(options={"failOnDataLoss": False}))
    run_file(file, spark, broker, lake)
    assert sorted(row["value"] for row in rows_at(broker, target)) == ["one", "three", "two"]


POISON = """
from pyspark.sql import functions as F
from penstock.spark import pipeline

@pipeline(source="{topic}", sink="topic:{target}", rejects="problem")
def aside(rows):
    grown = F.expr("case value when 'nothing' then null when 'large' then repeat('x', 9000000)"
                   " else value end").cast("binary").alias("value")
    problem = F.when(F.col("value") == "mine", "not wanted").alias("problem")
    return rows.select("topic", "partition", "offset", "key", grown, problem)

@pipeline(source="{topic}", sink="topic:{target}")
def stuck(rows):
    return rows.selectExpr("key", "nullif(value, 'nothing') as value")
"""


def test_a_row_that_the_broker_would_refuse_is_rejected_alone_or_told_with_the_way_out(
    spark: SparkSession, broker: BrokerProcess, tmp_path: Path
):
    topic, target = (broker.create_topic(new_name(name)) for name in ("orders", "target"))
    file = tmp_path / "poison.py"
    file.write_text(POISON.format(topic=topic, target=target))
    lake = Lake(spark, str(tmp_path / "lake"))
    put(broker, topic, "one", "nothing", "large", "mine", "two")
    run = run_file(Path(f"{file}:aside"), spark, broker, lake)["aside"]
    assert [row["value"] for row in rows_at(broker, target)] == ["one", "two"]
    found = {row["offset"]: (row["topic"], row["error"]) for row in rows_of(run, "rejects")}
    large = "key and value are 9000002 bytes; max_message_bytes is 8388608"
    assert found == {
        1: (topic, "the value is null or empty"), 2: (topic, large), 3: (topic, "not wanted"),
    }  # fmt: skip
    with pytest.raises(PipelineFailed) as failure:
        run_file(Path(f"{file}:stuck"), spark, broker, lake)
    assert failure.value.message == (
        "pipeline stuck, query rows, batch 0: a row with key 'k1' cannot be written: the value is "
        "null or empty. Leave such rows out, or keep them in the table rejects with "
        "rejects='column' of @pipeline"
    )
    assert len(rows_at(broker, target)) == 2


def only_key(rows: DataFrame) -> DataFrame:
    return rows.select("key")


# -- without Spark ---------------------------------------------------------------------------------


def one(rows: Any) -> Any:
    return rows


def test_the_decorator_is_the_same_wherever_it_is_imported_from():
    assert exported is pipeline
    made = pipeline(source="orders", sink="table:x")(one)
    assert made("a frame") == "a frame"
    assert (made.name, made.is_stream, made.summary) == ("one", True, "topic:orders → table:x")
    assert pipeline(source="table:x", sink="table:y")(one).is_stream is False


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"source": "queue:x"}, "source 'queue:x' is not allowed"),
        ({"source": 7}, "not 7"),
        ({"source": ["a", "b"]}, "takes 1 frames (rows) and has 2 sources"),
        ({"source": {"orders": "a"}}, "sources are named orders"),
        ({"sink": "somewhere"}, "sink 'somewhere' is not allowed"),
        ({"sink": "cache:x"}, "cache:TENANT/NAMESPACE/CACHE"),
        ({"sink": "table:../x"}, "is not allowed"),
        ({"sink": "table:_checkpoints"}, "is not allowed"),
        ({"sink": "table:rejects"}, "is the name of one of Penstock's own tables"),
        ({"sink": " table :timelines"}, "is the name of one of Penstock's own tables"),
        ({"name": "a b"}, "letters, digits"),
        ({"name": "archive"}, "a built-in pipeline has that name"),
        ({"mode": "all"}, "it takes append, update, complete"),
        ({"mode": "update"}, "use mode='complete'"),
        ({"sink": "topic:x", "mode": "complete"}, "every row again with every batch"),
        ({"sink": "topic:x", "stream": False}, "each run would produce every row again"),
        ({"source": "table:x", "stream": True}, "only topics and the journal"),
        ({"sink": "topic:x", "partition_by": "a"}, "partition_by is for a table"),
        ({"source": "table:x", "rejects": "why"}, "rejects are rows of a stream's batch"),
        ({"mode": "complete", "rejects": "why"}, "rejects are rows of a stream's batch"),
    ],
)
def test_a_decorator_that_cannot_be_is_refused(said: dict[str, Any], why: str):
    with pytest.raises(InvalidArgument) as failure:
        pipeline(**{"source": "orders", "sink": "table:x"} | said)(one)
    assert why in failure.value.message


def test_keyword_parameters_are_options():
    def chosen(rows: Any, *, least: int = 1, share: float = 0.5, on: bool = False, who: str) -> Any:
        return rows

    made = pipeline(source="a", sink="table:x")(chosen).as_pipeline()
    assert made.settings({"who": "ada", "on": "True"}) == {
        "least": 1, "share": 0.5, "on": True, "who": "ada",
    }  # fmt: skip
    with pytest.raises(InvalidArgument, match="option least: 'many' is not allowed"):
        made.settings({"who": "ada", "least": "many"})
    with pytest.raises(InvalidArgument, match="option who is required"):
        made.settings({})


def made(name: str, source: Any, sink: str) -> UserPipeline:
    return pipeline(source=source, sink=sink, name=name)(one)


def test_pipelines_come_after_those_that_feed_them():
    last = made("last", "table:b", "table:c")
    middle = made("middle", "loud-*, other", "table:b")
    first = made("first", "orders", "topic:loud-orders")
    assert user_file.in_order([last, middle, first]) == [first, middle, last]


@pytest.mark.parametrize(
    "circle",
    [
        [("a", "orders", "topic:orders")],
        [("a", "in", "topic:mid"), ("b", "mid", "topic:end"), ("c", "en*", "topic:in")],
        [("a", "table:x", "table:y"), ("b", "table:y", "table:x")],
    ],
)
def test_a_circle_is_refused(circle: list[tuple[str, str, str]]):
    with pytest.raises(InvalidArgument, match=r"in a circle: .*a"):
        user_file.in_order([made(*each) for each in circle])


def test_a_file_that_cannot_be_loaded_says_where(tmp_path: Path):
    file = tmp_path / "broken.py"
    file.write_text("import penstock\n\nraise OSError('no model')\n")
    with pytest.raises(InvalidArgument) as failure:
        user_file.load(str(file))
    first, second, *_ = failure.value.message.splitlines()
    assert first == f"{file} cannot be loaded: OSError: no model"
    assert second == f'  File "{file}", line 3, in <module>'
    file.write_text("x = 1\n")
    with pytest.raises(InvalidArgument, match="has no pipeline"):
        user_file.load(str(file))
    file.write_text(FILE.format(topic="a", target="b"))
    with pytest.raises(NotFound, match="no pipeline nobody; it has parsed, totals, cached"):
        user_file.choose(str(file), "nobody")
