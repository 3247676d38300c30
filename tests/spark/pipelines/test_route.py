"""route: every message of the intake ends in one target or among the rejects, once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from penstock.model.errors import InvalidArgument
from penstock.spark.lake.lake import Lake
from penstock.spark.lake.table import Table
from penstock.spark.options import BrokerSettings
from penstock.spark.pipelines.functions import load
from penstock.spark.pipelines.rejects import SCHEMA
from penstock.spark.pipelines.route import PIPELINE, routed
from penstock.spark.running.failure import PipelineFailed
from tests.broker_process import BrokerProcess
from tests.contract.checks import new_name
from tests.spark.pipelines.killed import Deadly, DeadlyRun, Killed
from tests.spark.pipelines.messages import message, records
from tests.spark.sinks import stored, values

Routed = Callable[..., list[str]]
WriteFunction = Callable[[str], str]


@pytest.fixture
def function(tmp_path: Path) -> WriteFunction:
    def write(text: str) -> str:
        (tmp_path / "rules.py").write_text(text)
        return f"{tmp_path}/rules.py:label"

    return write


@pytest.fixture
def route(spark: SparkSession, broker: BrokerProcess, tmp_path: Path) -> Routed:
    """Runs the pipeline over what the intake has; what it said."""

    def run(deadly: Deadly | None = None, url: str | None = None, **given: str) -> list[str]:
        said: list[str] = []
        settings = PIPELINE.settings(given)
        lake = Lake(spark, str(tmp_path / "lake"))
        at = BrokerSettings(url=url or broker.url, retry_s=10)
        with DeadlyRun(
            "route", spark, at, lake, settings, report=said.append, deadly=deadly
        ) as made:
            PIPELINE.start(made)
            made.wait(600)
        return said

    return run


@pytest.fixture(scope="module")
def small_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """Takes messages of up to 1000 bytes."""
    process = BrokerProcess(
        tmp_path_factory.mktemp("small"), env={"PENSTOCK_MAX_MESSAGE_BYTES": "1000"}
    )
    try:
        yield process.start()
    finally:
        process.close()


def rejects(spark: SparkSession, tmp_path: Path) -> list[tuple[Any, ...]]:
    rows = Lake(spark, str(tmp_path / "lake")).table("rejects", SCHEMA).read().collect()
    return sorted((row.topic, row.offset, row.key, row.value, row.error) for row in rows)


# -- what becomes of messages ----------------------------------------------------------------------

CLERK = """
def label(row):
    what, _, rest = row["value"].partition(" ")
    if what == "raise":
        raise RuntimeError(rest)
    if what == "topic":
        return {"topic": rest, "label": "named", "meta": {"n": row["offset"]}}
    if what == "value":
        return {"label": "changed", "value": rest.upper()}
    return {"long": "x" * 1025, "control": "a\\nb", "wide": "x" * 300}.get(what) or what or None
"""


def test_a_message_goes_where_the_function_says_or_is_rejected_with_its_error(
    spark: SparkSession, function: WriteFunction
):
    made = load(function(CLERK))
    envelope = {"run_id": "run-1", "step_id": "s1", "deadline": "2999-01-01T00:00:00Z"}
    rows = records(
        spark,
        message(0, value="spam", partition_override=7, target_topic="elsewhere", **envelope),
        message(1, value="topic  mine "),
        message(2, value="value loud"),
        message(3, value=" nothing"),
        message(4, value="raise it"),
        message(5, value="long"),
        message(6, value="control"),
        message(7, value="wide"),
    )
    found = {row.offset: row for row in routed(rows, made, "work.{label}", None).collect()}
    targets = {offset: row.target for offset, row in found.items() if row.error is None}
    assert targets == {0: "work.spam", 1: "mine", 2: "work.changed"}
    assert {offset: row.error for offset, row in found.items() if row.error is not None} == {
        3: "the function returned no topic and no label",
        4: f"RuntimeError: it ({made.path}:5)",
        5: "the topic's name is longer than 200 bytes",
        6: "the topic's name has control characters in it",
        7: "the topic's name is longer than 200 bytes",
    }
    first = found[0]
    kept = (first.run_id, first.step_id, first.deadline, first.key, first.value)
    assert kept == ("run-1", "s1", "2999-01-01T00:00:00Z", "key 0", "spam")
    assert (first.partition_override, first.source_topic, first.partition) == (None, "orders", 0)
    assert (found[1].routing_label, found[1].routing_meta) == ("named", {"n": "1"})
    assert found[2].value == "LOUD"

    plain = {row.offset: row for row in routed(rows, made, "all", "rest").collect()}
    assert [plain[at].target for at in (0, 1, 2, 3, 7)] == ["all", "mine", "all", "rest", "all"]
    assert plain[5].error == "the label is longer than 1024 bytes"
    no_place = routed(rows.filter("offset = 0"), made, None, None).collect()[0]
    assert "the option to is not set" in no_place.error


FRAMES = """
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

@F.udf("string")
def shout(text):
    return text.upper()

def label(rows: DataFrame) -> DataFrame:
    return rows.select(
        "key", "offset", "source_topic", F.lit("mine").alias("topic"),
        shout("value").alias("value"),
        F.when(F.col("offset") > 0, F.create_map(F.lit("a"), F.lit(None).cast("string")))
        .alias("routing_meta"),
    )

def no_value(rows: DataFrame):
    return rows.select("key")

def no_target(rows: DataFrame):
    return rows.select("value")

def no_frame(rows: DataFrame):
    return 3
"""


def test_a_function_of_frames_routes_whole_batches(spark: SparkSession, function: WriteFunction):
    spec = function(FRAMES)
    rows = records(spark, message(0, run_id="run-1"), message(1))
    first, second = routed(rows, load(spec), None, None).orderBy("offset").collect()
    assert (first.target, first.value, first.key, first.error) == ("mine", "VALUE 0", "key 0", None)
    assert (first.run_id, first.source_topic) == (None, "orders")
    assert second.error == "the meta has a null in it"
    for name, said in (
        ("no_value", "without the column value"),
        ("no_target", "without the column topic or routing_label"),
        ("no_frame", "returned int, not a DataFrame"),
    ):
        with pytest.raises(InvalidArgument, match=said):
            routed(rows, load(spec.replace("label", name)), None, None)


# -- with a broker ---------------------------------------------------------------------------------

STORED = "the verdicts are stored"
_commit = Table.commit


def commit_and_die(self: Table, *arguments: Any, **options: Any) -> int:
    _commit(self, *arguments, **options)
    raise Killed(STORED)


DICE = """
import uuid

def label(row):
    if row["value"].startswith("poison"):
        raise ValueError(row["value"])
    return {"label": "a", "meta": {"cast": uuid.uuid4().hex}, "value": uuid.uuid4().hex}
"""


def test_a_route_that_dies_after_any_write_loses_and_doubles_nothing(
    spark: SparkSession,
    broker: BrokerProcess,
    function: WriteFunction,
    route: Routed,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """The function never says the same twice, so verdicts of a second call would show."""
    intake, target = (broker.create_topic(new_name(name), 1) for name in ("intake", "target"))
    for number in range(4):
        broker.put(intake, f"{'poison' if number == 2 else 'value'} {number}", f"key {number}")
    asked = {"topic": intake, "function": function(DICE), "to": target}
    verdicts: list[str] = []
    for death in (STORED, "write 0", "append rejects"):
        with monkeypatch.context() as patched:
            if death == STORED:
                patched.setattr(Table, "commit", commit_and_die)
            with pytest.raises(PipelineFailed, match="Killed"):
                route(Deadly(death), **asked)
        (files,) = (tmp_path / "lake" / "_routed").glob("*/*-0")
        rows = spark.read.parquet(str(files)).filter("error is null").orderBy("offset")
        verdicts = verdicts or [row.value for row in rows.collect()]
        assert values(broker, target) == ([] if death == STORED else verdicts)
    assert route(**asked) == ["batch 0: 1 put aside in the table rejects"]
    found = [(row["key"], row["value"]) for row in stored(broker, target)]
    assert found == list(zip(["key 0", "key 1", "key 3"], verdicts, strict=True))
    error = f"ValueError: poison 2 ({tmp_path}/rules.py:6)"
    assert rejects(spark, tmp_path) == [(intake, 2, "key 2", "poison 2", error)]
    assert not list((tmp_path / "lake" / "_routed").glob("*/*"))


SERIES = """
import pandas as pd

def label(values: pd.Series) -> pd.Series:
    return values.where(values != "none", None)
"""


def test_a_target_that_is_missing_is_named_and_when_it_is_there_the_route_goes_on(
    broker: BrokerProcess, function: WriteFunction, route: Routed
):
    intake, rest = (broker.create_topic(new_name(name), 2) for name in ("intake", "rest"))
    name = new_name("spam")
    envelope = {"run_id": "run-1", "step_id": "s1", "partition_override": 1, "tenant_id": "ada"}
    broker.put(intake, name, "key 0", envelope)
    broker.put(intake, "none", "key 1")
    asked = {"topic": intake, "function": function(SERIES), "to": "work.{label}", "unrouted": rest}
    with pytest.raises(
        PipelineFailed, match=f"batch 0: topic 'work.{name}' does not exist .*create"
    ):
        route(**asked)
    assert values(broker, rest) == []
    broker.create_topic(f"work.{name}", 1)
    assert route(**asked) == []
    (row,) = stored(broker, f"work.{name}")
    kept = {key: row[key] for key in ("key", "value", "run_id", "step_id", "tenant_id")}
    assert kept == {
        "key": "key 0", "value": name, "run_id": "run-1", "step_id": "s1", "tenant_id": "ada",
    }  # fmt: skip
    assert row["routing_label"] == name
    assert values(broker, rest) == ["none"]


@pytest.mark.parametrize("wrong", ["missing", "circle"])
def test_a_function_that_named_a_wrong_target_is_asked_again_when_it_is_mended(
    spark: SparkSession,
    broker: BrokerProcess,
    function: WriteFunction,
    route: Routed,
    tmp_path: Path,
    wrong: str,
):
    """Of three messages one goes wrong: what is right in its batch waits with it."""
    intake, good = (broker.create_topic(new_name(name), 1) for name in ("intake", "good"))
    bad = {"missing": new_name("missing"), "circle": intake}[wrong]
    for value in ("one", "two", "poison"):
        broker.put(intake, value, f"key {value}")
    text = "def label(row):\n    if row['value'] == 'poison': return None\n    return {'topic': %s}"
    asked = {
        "topic": intake,
        "function": function(text % f"{bad!r} if 'w' in row['value'] else {good!r}"),
    }
    for _ in range(2):
        with pytest.raises(PipelineFailed, match=f"topic '{bad}' (does not exist|is a target)"):
            route(**asked)
    assert values(broker, good) == []
    assert not (tmp_path / "lake" / "rejects").exists()
    function(text % f"{good!r}")
    assert route(**asked) == ["batch 0: 1 put aside in the table rejects"]
    assert values(broker, good) == ["one", "two"]
    said = "the function returned no topic and no label, or a label, and the option to is not set"
    assert rejects(spark, tmp_path) == [(intake, 2, "key poison", "poison", said)]
    assert values(broker, intake) == ["one", "two", "poison"]


def test_verdicts_by_which_messages_were_sent_stay_when_a_target_is_deleted_since(
    broker: BrokerProcess, function: WriteFunction, route: Routed
):
    """Asked again, the function would send to another target what the first has had."""
    intake, first, second = (broker.create_topic(new_name(one), 1) for one in ("in", "a", "b"))
    broker.put(intake, "value")
    text = "def label(row): return {'topic': %r}"
    asked = {"topic": intake, "function": function(text % first)}
    with pytest.raises(PipelineFailed, match="Killed"):
        route(Deadly("write 0"), **asked)
    assert values(broker, first) == ["value"]
    broker.client.delete(f"/v1/topics/{first}").raise_for_status()
    function(text % second)
    with pytest.raises(PipelineFailed, match=f"topic '{first}' does not exist"):
        route(**asked)
    broker.create_topic(first, 1)
    route(**asked)
    assert (values(broker, first), values(broker, second)) == ([], [])


def test_a_route_goes_on_without_an_intake_that_was_deleted_if_it_is_told_to(
    broker: BrokerProcess, function: WriteFunction, route: Routed
):
    gone, stays, target = (broker.create_topic(new_name(one), 1) for one in ("in", "in", "out"))
    broker.put(gone, "one")
    broker.put(stays, "two")
    echo = function(f"def label(row): return {{'topic': {target!r}}}")
    asked = {"topic": f"{gone},{stays}", "function": echo}
    route(**asked)
    assert sorted(values(broker, target)) == ["one", "two"]
    broker.client.delete(f"/v1/topics/{gone}").raise_for_status()
    broker.put(stays, "three")
    with pytest.raises(PipelineFailed, match=f"topic '{gone}' does not exist any more"):
        route(**asked)
    route(**asked, fail_on_data_loss="false")
    assert sorted(values(broker, target)) == ["one", "three", "two"]
    broker.put(stays, "four")
    route(**asked)  # the loss is known by now
    assert sorted(values(broker, target)) == ["four", "one", "three", "two"]


GROWING = """
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

def label(row):
    return {"label": "a", "value": "ü" * int(row["value"])}

def framed(rows: DataFrame) -> DataFrame:
    grown = F.expr("repeat('ü', cast(value as int))").alias("value")
    attempts = F.when(F.col("value") == "4", -1).alias("retry_max_attempts")
    backoff = F.when(F.col("value") == "5", 10).alias("retry_backoff_ms")
    run = F.when(F.col("value") == "6", F.repeat(F.lit("r"), 1025)).alias("run_id")
    return rows.select(
        "source_topic", "partition", "offset", "key", grown, attempts, backoff, run,
        F.lit("a").alias("routing_label"),
    )
"""


@pytest.mark.parametrize("name", ["label", "framed"])
def test_what_the_function_made_larger_than_this_broker_takes_is_rejected_alone(
    spark: SparkSession,
    small_broker: BrokerProcess,
    function: WriteFunction,
    route: Routed,
    tmp_path: Path,
    name: str,
):
    """The limit is the broker's own, of the bytes of key and value together."""
    intake, target = (small_broker.create_topic(new_name(one), 1) for one in ("intake", "target"))
    for value in ("499", "500", "501", "1"):
        small_broker.put(intake, value, "")
    for value in ("498", "499", "4", "5", "6"):
        small_broker.put(intake, value, "key")
    spec = function(GROWING).replace("label", name)
    route(url=small_broker.url, topic=intake, function=spec, to=target)
    kept = [499, 500, 1, 498] + ([4, 5, 6] if name == "label" else [5])
    assert [len(value) for value in values(small_broker, target)] == kept
    found = {offset: error for _, offset, _, _, error in rejects(spark, tmp_path)}
    large = "key and value are {} bytes; max_message_bytes is 1000"
    others = {
        6: "the retry policy has a negative number in it",
        8: "the run_id is longer than 1024 bytes",
    }
    expected = {2: large.format(1002), 5: large.format(1001)}
    assert found == expected | (others if name == "framed" else {})


def test_a_route_does_not_feed_its_own_intake(
    broker: BrokerProcess, function: WriteFunction, route: Routed
):
    intake = broker.create_topic(new_name("intake"), 1)
    broker.put(intake, "value")
    echo = function(f"def label(row): return {{'topic': {intake!r}}}")
    with pytest.raises(PipelineFailed, match="is a target of the route and its intake"):
        route(topic=f"{intake[:-1]}*", function=echo)
    assert values(broker, intake) == ["value"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"function": "x.py:f"}, "option topic is required"),
        ({"topic": "a"}, "option function is required"),
        ({"topic": "a", "function": "no/such.py:f"}, "there is no file"),
        ({"topic": "a", "function": "x.py:f", "to": "work.{name}"}, "option to"),
        ({"topic": "a", "function": "x.py:f", "max_rows": "0"}, "option max_rows"),
        ({"topic": "a", "function": "x.py:f", "start": "now"}, "option start"),
    ],
)
def test_an_option_that_does_not_fit_is_refused_by_name(
    route: Routed, given: dict[str, str], said: str
):
    with pytest.raises(InvalidArgument, match=said):
        route(**given)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1\ndef label(row:\n", r"SyntaxError: .* \(.*rules.py:2\)"),
        ("def other(row): return 'a'\n", "the file has no `label`; it has other"),
        (SERIES, "option to is required: label returns labels"),
        (
            "def label(values: 'pandas.Series'): return values",
            "option to is required: label returns",
        ),
    ],
)
def test_a_function_that_cannot_be_is_refused_before_anything_starts(
    function: WriteFunction, text: str, said: str
):
    """By what the file says: it is not run, for that may need Spark, or take its time."""
    with pytest.raises(InvalidArgument, match=said):
        PIPELINE.settings({"topic": "a", "function": function(f"{text}\n")})


@pytest.mark.parametrize(
    "text",
    [
        "raise OSError('no model')\ndef label(row): return 'a'",
        "label = str.upper",
        "from codecs import encode as label",
        "from codecs import *",
        "if True:\n    def label(row): return 'a'",
        "globals()['label'] = len",
    ],
)
def test_what_a_file_has_when_it_is_run_is_not_guessed(function: WriteFunction, text: str):
    assert PIPELINE.settings({"topic": "a", "function": function(text)})["topic"] == "a"


def test_a_function_of_labels_needs_a_target(route: Routed, function: WriteFunction):
    """Also one that only shows when the file is run."""
    hidden = SERIES.replace("label", "hidden") + "\nlabel = hidden\n"
    with pytest.raises(InvalidArgument, match=r"option to is required: label returns labels"):
        route(topic="a", function=function(hidden))
