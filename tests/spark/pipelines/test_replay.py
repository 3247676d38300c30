"""replay: what is sent is what was asked for, once, whatever is run twice or killed when."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import Row, SparkSession

from penstock.model.errors import InvalidArgument
from penstock.spark.lake.lake import Lake
from penstock.spark.options import BrokerSettings
from penstock.spark.pipelines.archive import dated, records_table
from penstock.spark.pipelines.replay import PIPELINE, default_name, plan
from penstock.spark.pipelines.replays import SCHEMA, Pending
from penstock.spark.running.failure import PipelineFailed
from tests.broker_process import BrokerProcess
from tests.contract.checks import new_name
from tests.spark.pipelines.killed import Deadly, DeadlyRun
from tests.spark.pipelines.messages import message, records
from tests.spark.sinks import stored, values

Replayed = Callable[..., "Told"]


class Told:
    """What a run said, and did."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.steps: list[str] = []

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


@pytest.fixture
def replayed(spark: SparkSession, broker: BrokerProcess, tmp_path: Path) -> Replayed:
    """Runs the pipeline as a command would, into one lake."""

    def run(deadly: Deadly | None = None, **given: str) -> Told:
        told = Told()
        settings = PIPELINE.settings({key.rstrip("_"): value for key, value in given.items()})
        lake = Lake(spark, str(tmp_path / "lake"))
        at = BrokerSettings(url=broker.url, retry_s=10)
        watch = deadly or Deadly()
        say = told.lines.append
        with DeadlyRun("replay", spark, at, lake, settings, report=say, deadly=watch) as made:
            PIPELINE.start(made)
            made.wait(600)
        told.steps = watch.steps
        return told

    return run


def bury(broker: BrokerProcess, topic: str, *reasons: str, **envelope: Any) -> None:
    """A dead letter for each reason."""
    policy = {"retry_policy": {"max_attempts": 1}}
    for number, reason in enumerate(reasons):
        broker.put(topic, f"{reason} {number}", f"key {number}", envelope | policy)
    with broker.consume(topic) as stream:
        for reason in reasons:
            item = stream.next()
            assert broker.nack(topic, item, reason=reason).status_code == 204


def ledger(spark: SparkSession, tmp_path: Path) -> list[tuple[Any, ...]]:
    rows = Lake(spark, str(tmp_path / "lake")).table("replayed", SCHEMA).read()
    return sorted((row.name, row.source_offset, row.target, row.batch) for row in rows.collect())


def test_dead_letters_go_home_once_and_nothing_goes_without_apply(
    spark: SparkSession, broker: BrokerProcess, replayed: Replayed, tmp_path: Path
):
    topic = broker.create_topic(new_name("orders"), 1)
    bury(broker, topic, "no memory", "timeout", "no memory", run_id="run-1", step_id="s1")
    asked = {"topic": f"dlq.{topic}", "reason": "no memory"}
    before = values(broker, topic)

    dry = replayed(**asked)
    assert values(broker, topic) == before
    assert f"2 from dlq.{topic} to {topic}" in dry.text
    assert re.search(rf"dlq.{topic}/0 @0 .* run=run-1 error=no memory value=no memory 0", dry.text)
    assert "left out" not in dry.text
    assert "write 0" not in dry.steps

    replayed(**asked, apply="true")
    assert values(broker, topic) == [*before, "no memory 0", "no memory 2"]
    again = replayed(**asked, apply="true")
    assert values(broker, topic) == [*before, "no memory 0", "no memory 2"]
    assert "nothing is left to send" in again.text
    assert "2 left out: sent before" in replayed(**asked).text

    sent = stored(broker, topic)[-1]
    kept = {key: sent.get(key) for key in ("key", "run_id", "step_id", "dlq_last_error")}
    assert kept == {"key": "key 2", "run_id": "run-1", "step_id": "s1", "dlq_last_error": None}
    assert sent.get("retry_max_attempts") == 1, "the policy of a dead letter comes back"
    name = default_name([f"dlq.{topic}"], None)
    assert ledger(spark, tmp_path) == [(name, 0, topic, 0), (name, 2, topic, 0)]

    replayed(**asked, name="once-more", apply="true")
    assert values(broker, topic) == [*before, *(["no memory 0", "no memory 2"] * 2)]


def test_a_replay_that_dies_after_any_step_goes_on_where_it_was(
    spark: SparkSession, broker: BrokerProcess, replayed: Replayed, tmp_path: Path
):
    source, target = (broker.create_topic(new_name(name), 2) for name in ("history", "target"))
    for number in range(5):
        broker.put(source, f"value {number}", "one key")
    asked = {"topic": source, "to": target, "apply": "true", "rate": "2", "name": "again"}
    deaths = ["append _replays/", "write 0", "write 1", "write 2", "append replayed"]
    for death in deaths:
        with pytest.raises(PipelineFailed, match="Killed"):
            replayed(Deadly(death), **asked)
        # It is not in the selection that is there, whatever is selected again.
        broker.put(source, f"late, {death}", "one key")
    old = [f"value {number}" for number in range(5)]
    assert values(broker, target) == old
    last = replayed(**asked | {"rate": "100"})
    late = [f"late, {death}" for death in deaths]
    assert values(broker, target) == old + late
    assert [row[1:] for row in ledger(spark, tmp_path)] == [
        (offset, target, 0 if offset < 5 else 1) for offset in range(10)
    ]
    assert last.steps == ["append _replays/again/1", "write 0", "append replayed"]
    assert not list((tmp_path / "lake" / "_replays" / "again").iterdir())


def test_a_selection_that_is_there_is_told_and_finished_first(
    broker: BrokerProcess, replayed: Replayed
):
    source, target = (broker.create_topic(new_name(name), 1) for name in ("history", "target"))
    broker.put(source, "first")
    with pytest.raises(PipelineFailed):
        replayed(Deadly("append _replays/"), topic=source, to=target, apply="true")
    broker.put(source, "second")
    dry = replayed(topic=source, to=target)
    assert "what an earlier run has not sent: a selection of 1 messages" in dry.text
    assert f"1 from {source} to {target}" in dry.text
    assert "1 left out" in dry.text
    told = replayed(topic=source, to=target, apply="true")
    assert "it is finished first" in told.text
    assert values(broker, target) == ["first", "second"]


def test_a_lake_that_is_begun_anew_does_not_lose_messages(
    broker: BrokerProcess, replayed: Replayed, tmp_path: Path
):
    source, target = (broker.create_topic(new_name(name), 1) for name in ("history", "target"))
    broker.put(source, "value")
    replayed(topic=source, to=target, apply="true")
    (tmp_path / "lake").rename(tmp_path / "old")
    replayed(topic=source, to=target, apply="true")
    assert values(broker, target) == ["value"] * 2


def test_a_topic_into_itself_needs_an_end_and_its_copies_are_not_copied(
    broker: BrokerProcess, replayed: Replayed
):
    topic = broker.create_topic(new_name("orders"), 1)
    broker.put(topic, "value", envelope={"idempotency_key": "k"})
    for wrong in ({}, {"until": "1s"}, {"until": "2999-01-01T00:00:00Z"}):
        with pytest.raises(InvalidArgument, match=r"is source and target.*Set until="):
            replayed(topic=f"{topic[:-1]}*", to=topic, apply="true", **wrong)
    # The key was seen a moment ago, and a copy that had it would not be stored.
    until = datetime.now(UTC).isoformat()
    for _ in range(2):
        replayed(topic=topic, to=topic, until=until, apply="true")
    assert values(broker, topic) == ["value"] * 2


def test_the_archive_is_replayed_as_the_broker_is_and_counts_as_the_same(
    spark: SparkSession, broker: BrokerProcess, replayed: Replayed, tmp_path: Path
):
    target = broker.create_topic(new_name("target"), 1)
    lake = Lake(spark, str(tmp_path / "lake"))
    rows = [
        message(at, topic=topic, run_id="run-1") for topic in ("a-1", "a-2", "b") for at in (0, 1)
    ]
    records_table(lake).append(dated(records(spark, *rows)), "archive", 0)
    asked = {"from": "lake", "to": target, "apply": "true"}
    replayed(**asked, topic="a-*", where="offset = 1", name="one")
    assert values(broker, target) == ["value 1"] * 2
    replayed(**asked, topic="a-1", name="one")
    assert values(broker, target) == ["value 1", "value 1", "value 0"]
    with pytest.raises(
        PipelineFailed, match=r"has no messages of 'c'; it has those of a-1, a-2, b"
    ):
        replayed(**asked, topic="b,c")


def test_a_message_that_the_broker_would_refuse_is_left_out_and_told(
    spark: SparkSession, broker: BrokerProcess, replayed: Replayed, tmp_path: Path
):
    """As one of a lake that another broker filled."""
    target = broker.create_topic(new_name("target"))
    rows = [message(0), message(1, run_id="r" * 1025), message(2)]
    lake = Lake(spark, str(tmp_path / "lake"))
    records_table(lake).append(dated(records(spark, *rows)), "archive", 0)
    asked = {"from": "lake", "topic": rows[0]["topic"], "to": target}
    left_out = "1 left out, the broker would refuse them: the run_id is longer than 1024 bytes"
    for apply in ("false", "true"):
        assert left_out in replayed(**asked, apply=apply).text
    assert values(broker, target) == ["value 0", "value 2"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"topic": "orders"}, "option to is required"),
        ({"topic": "dlq.a,orders"}, "option to is required"),
        ({"topic": "a", "to": "b*"}, "option to: 'b\\*' is not allowed"),
        ({"topic": "a", "to": "b", "since": "yesterday"}, "option since: .* RFC 3339"),
        ({"topic": "a", "to": "b", "since": "2026-01-01T00:00:00"}, "option since"),
        ({"topic": "a", "to": "b", "since": "120"}, "option since"),
        ({"topic": "a", "to": "b", "rate": "0"}, "option rate"),
        ({"topic": "a", "to": "b", "rate": "nan"}, "option rate"),
        ({"topic": "a", "to": "b", "limit": "0"}, "option limit"),
        ({"topic": "a", "to": "b", "name": "../up"}, "option name"),
        ({"topic": "a", "to": "b", "apply": "yes"}, "option apply"),
        ({"topic": "a", "to": "b", "from": "tape"}, "option from"),
        ({"to": "b"}, "option topic is required"),
    ],
)
def test_an_option_that_does_not_fit_is_refused_by_name(given: dict[str, str], said: str):
    with pytest.raises(InvalidArgument, match=said):
        PIPELINE.settings(given)


def test_a_topic_that_is_not_there_is_named(broker: BrokerProcess, replayed: Replayed):
    topic = broker.create_topic(new_name("orders"), 1)
    missing = new_name("missing")
    for given, said in (
        ({"topic": topic, "to": missing}, f"topic '{missing}' does not exist .*topic create"),
        ({"topic": missing, "to": topic}, f"topic '{missing}' does not exist"),
        ({"topic": f"{missing}*", "to": topic}, f"no topic .* matches {re.escape(missing)}"),
        ({"topic": topic, "to": missing, "from": "lake"}, f"'{missing}' does not exist"),
        ({"topic": topic, "to": topic, "until": "2026-01-01T00:00:00Z", "from": "lake"}, "archive"),
    ):
        with pytest.raises(PipelineFailed, match=said):
            replayed(**given)


def test_a_plan_says_what_would_be_done_line_by_line():
    at = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
    groups = [
        Row(
            source_topic="dlq.a", target="a", left=3, done=1, first=at, last=at + timedelta(hours=1)
        ),
        Row(source_topic="dlq.b", target="b", left=0, done=2, first=None, last=None),
    ]
    sample = Row(
        source_topic="dlq.a", source_partition=0, source_offset=7, source_timestamp=at,
        key="", run_id="run-1", dlq_last_error="line\nbreak", value="v" * 100,
    )  # fmt: skip
    pending = Pending(0, 5, 1, 5, "txn", ("a", "b"))
    assert plan("mine", groups, [sample], pending, limit=2).splitlines() == [
        "replay mine: a dry run, nothing is sent; apply=true sends the messages",
        "  first, what an earlier run has not sent: a selection of 5 messages to a, b",
        "  3 from dlq.a to a, of 2026-03-01 12:00:00 to 2026-03-01 13:00:00",
        "  3 left out: sent before under this name, or selected already",
        "  limit: the first 2 of 3",
        "  such as dlq.a/0 @7 2026-03-01 12:00:00 run=run-1 error=line break value="
        + "v" * 79
        + "…",
    ]
    assert "no message is left" in plan("mine", groups[1:], [])


def test_a_name_is_made_of_source_and_target():
    assert default_name(["dlq.orders"], None) == "dlq.orders-to-origin"
    assert default_name(["orders"], "again") == "orders-to-again"
    patterns = {default_name([f"a{sign}"], "t/u") for sign in "*?["}
    assert len(patterns) == 3
    assert all(re.fullmatch(r"[A-Za-z0-9.-]+-[0-9a-f]{8}", name) for name in patterns)
