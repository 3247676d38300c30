"""Every pipeline in a process of its own, killed at random instants under load and started again.

Tables, topics and caches are compared in contents with what plain Python makes of the broker's
messages and journal. PENSTOCK_TEST_KILLS says how often they are killed; KILL_LOOP_SEED, which a
failure tells, draws the same kills again.
"""

from __future__ import annotations

import io
import json
import os
import secrets
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from glob import glob
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from penstock.client import Client
from penstock.spark.lake.lake import Lake
from penstock.spark.launching.catalog import choose
from penstock.spark.launching.register import Register, default_directory
from penstock.spark.launching.screen import Screen
from penstock.spark.launching.supervisor import Supervisor
from penstock.spark.options import BrokerSettings
from penstock.spark.pipelines import materialize, rejects, replays
from penstock.spark.pipelines.archive import journal_table, records_table
from penstock.spark.pipelines.deadletters import dead_letters_table
from penstock.spark.pipelines.metrics import SCOPE, metrics_table
from tests.broker_process import BrokerProcess
from tests.spark.conftest import StartBroker
from tests.spark.pipelines import golden_lineage, golden_metrics, test_deadletters, test_metrics
from tests.spark.pipelines.golden import journal_rows
from tests.spark.pipelines.pipeline_process import Kills, Look, PipelineProcess
from tests.spark.pipelines.test_archive import produced
from tests.spark.pipelines.test_lineage import SCHEMAS, told
from tests.spark.pipelines.traffic import Traffic
from tests.spark.sinks import cached, stored
from tests.spark.sources import as_told, frame, offsets, rows_at

KILLS = int(os.environ.get("PENSTOCK_TEST_KILLS", "2"))
TOPICS = {
    "intake": 2, "orders": 2, "state": 2, "jobs": 1,
    "work.a": 1, "work.b": 2, "loud": 2, "again": 3,
}  # fmt: skip
MADE_HERE = ("latest", "rejects", "replayed", "totals")
MADE_THERE = ("records", "journal", "attempts", "steps", "critical_path", "metrics", "dead_letters")
CACHE = "default/default/default"
WINDOW_MS, WATERMARK_MS = 1000, 500

RULES = """
import random

def label(row):
    "Says something else each time."
    cast = random.choice("abx")
    if cast == "x":
        raise ValueError("bad luck")
    place = f"{row['partition']}/{row['offset']}"
    return {"label": cast, "value": f"{row['value']} to {cast}", "meta": {"place": place}}
"""

MINE = """
from penstock.spark import pipeline
from pyspark.sql import functions as F

@pipeline(source="orders", options={"maxRowsPerTrigger": 1000})
def parsed(orders):
    order = F.from_json("value", "item string, count int").alias("order")
    return orders.select("topic", "partition", "offset", "key", "value", order)

@pipeline(source=parsed, sink="topic:loud", rejects="problem")
def loud(rows):
    problem = F.when(F.col("order.item").isNull(), "no item").alias("problem")
    value = F.upper("value").alias("value")
    return rows.select("topic", "partition", "offset", "key", value, problem)

@pipeline(source=parsed, sink="table:totals", mode="complete")
def totals(rows):
    return rows.groupBy("order.item").agg(F.sum("order.count").alias("count"))
"""


# -- when to kill ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Pipelines that are killed together. `small` settings keep their batches small until then;
    `looks` are where something happens that a kill may follow."""

    words: tuple[str, ...]
    settings: dict[str, str]
    small: dict[str, int]
    looks: dict[str, Look]


def groups_of(broker: BrokerProcess, path: Path) -> list[Group]:
    """In the order in which the rest is taken: first those that write to the broker."""
    (path / "rules.py").write_text(RULES)
    (path / "mine.py").write_text(MINE)
    lake = path / "lake"
    return [
        Group(
            ("replay", "materialize", "route", str(path / "mine.py")),
            {
                "replay.topic": "orders",
                "replay.to": "again",
                "apply": "true",
                "materialize.topic": "state",
                "materialize.to": "table:latest",
                "route.topic": "intake",
                "route.to": "work.{label}",
                "function": f"{path}/rules.py:label",
            },
            {"rate": 60, "max_rows": 50},
            files(lake, "_replays/*/*/_commits/*/*", "_routed/*/*/_commits/*/*")
            | files(lake, *(f"{table}/_commits/*/*" for table in MADE_HERE))
            | files(lake, "_checkpoints/*/*/offsets/*")
            | ends(broker, "again", "work.a", "loud"),
        ),
        Group(
            ("materialize", "archive", "lineage", "metrics", "deadletters"),
            {
                "topic": "state",
                "to": f"cache:{CACHE}",
                "window": f"{WINDOW_MS}ms",
                "watermark": f"{WATERMARK_MS}ms",
                "cache": CACHE,
            },
            {"max_rows": 200},
            files(lake, *(f"{table}/_commits/*/*" for table in MADE_THERE))
            | files(lake, "_checkpoints/materialize/state.cache*/*/*")
            | files(lake, "_checkpoints/metrics/*/*/*"),
        ),
    ]


def files(lake: Path, *patterns: str) -> dict[str, Look]:
    return {name: partial(_names, str(lake / name)) for name in patterns}


def _names(pattern: str) -> Hashable:
    return frozenset(glob(pattern))


def ends(broker: BrokerProcess, *topics: str) -> dict[str, Look]:
    return {f"topic {name}": partial(_next_offsets, broker, name) for name in topics}


def _next_offsets(broker: BrokerProcess, topic: str) -> Hashable:
    return tuple(one["next"] for one in offsets(broker, topic).values())


@pytest.fixture
def seed() -> int:
    return int(os.environ.get("KILL_LOOP_SEED") or secrets.randbits(32))


def test_every_pipeline_that_is_killed_and_started_again_leaves_tables_and_topics_exact(
    spark: SparkSession, start_broker: StartBroker, tmp_path: Path, seed: int
):
    """Two groups take turns: on few cores, all at once would need a minute to begin."""
    broker = start_broker()
    for topic, partitions in TOPICS.items():
        broker.create_topic(topic, partitions)
    lake = Lake(spark, str(tmp_path / "lake"))
    groups = groups_of(broker, tmp_path)
    kills = Kills(seed)
    with Traffic(broker):
        for number in range(KILLS):
            group = groups[number % len(groups)]
            process = PipelineProcess(broker, Path(lake.path), tmp_path, *group.words)
            try:
                process.start("--every", "500ms", **group.settings, **group.small)
                kills.kill(process, group.looks)
            finally:
                process.kill()
    for group in groups:
        finish(group, broker, lake, tmp_path)

    said = str(kills)
    journal = journal_of(broker)
    check_archive(broker, lake, said)
    check_route(broker, lake, said)
    check_mine(broker, lake, said)
    check_latest(broker, lake, said)
    check_replay(broker, lake, said)
    check_lineage(lake, journal, said)
    check_metrics(broker, lake, journal, said)
    check_dead_letters(broker, lake, said)


def finish(group: Group, broker: BrokerProcess, lake: Lake, state: Path) -> None:
    """Takes what is left, as `--once` does, in the session of the tests: it is warm. What was
    claimed by those who were killed is free."""
    register = Register(default_directory({"XDG_STATE_HOME": str(state)}))
    died = [entry for entry in register.entries() if entry.state == "died"]
    assert len(died) == KILLS
    entry = register.enter("rest", list(group.words), lake.path, "local", broker.url, once=True)
    out = io.StringIO()
    supervisor = Supervisor(
        lake.spark,
        BrokerSettings(url=broker.url, retry_s=20),
        lake,
        once=True,
        every_s=1,
        screen=Screen(out, out),
        claim=lambda pipeline, name: register.claim(entry, pipeline, name),
    )
    chosen = choose(group.words, group.settings.items())
    assert supervisor.run(chosen), out.getvalue()
    entry.exit_code = 0
    register.keep(entry)


# -- what must be there ----------------------------------------------------------------------------


def journal_of(broker: BrokerProcess) -> list[dict[str, Any]]:
    with Client(broker.url) as client:
        return journal_rows(client)


def rejected_by(lake: Lake, pipeline: str) -> list[Any]:
    rows = lake.table(rejects.TABLE, rejects.SCHEMA).read().where(f"pipeline = '{pipeline}'")
    return rows.collect()


def check_archive(broker: BrokerProcess, lake: Lake, said: str) -> None:
    topics = broker.client.get("/v1/topics").json()["topics"]
    assert {*TOPICS, "dlq.jobs"} == set(topics)
    found = as_told(records_table(lake).read().drop("date").collect())
    assert found == produced(broker, topics), said
    journal = sorted(journal_table(lake).read().drop("date").collect())
    assert journal == sorted(frame(lake.spark, broker, log="journal").collect()), said


def check_route(broker: BrokerProcess, lake: Lake, said: str) -> None:
    """Each message in one target, with the label of it, or among the rejects."""
    wanted = {f"{row['partition']}/{row['offset']}": row for row in stored(broker, "intake")}
    places: Counter[str] = Counter()
    for label in "ab":
        for row in stored(broker, f"work.{label}"):
            place = dict(row["routing_meta"])["place"]
            sent = (row["key"], row["value"], row["routing_label"])
            assert sent == (wanted[place]["key"], f"{wanted[place]['value']} to {label}", label)
            places[place] += 1
    assert places, said
    rejected = rejected_by(lake, "route")
    places.update(f"{row.partition}/{row.offset}" for row in rejected)
    assert places == Counter(wanted.keys()), said
    for row in rejected:
        message = wanted[f"{row.partition}/{row.offset}"]
        assert (row.topic, row.key, row.value) == ("intake", message["key"], message["value"])
    assert not glob(f"{lake.path}/_routed/*/*"), said


def check_mine(broker: BrokerProcess, lake: Lake, said: str) -> None:
    orders = stored(broker, "orders")
    good = [row for row in orders if row["value"].startswith("{")]
    loud = sorted((row["key"], row["value"]) for row in stored(broker, "loud"))
    assert loud == sorted((row["key"], row["value"].upper()) for row in good), said
    found = sorted((row.partition, row.offset, row.value) for row in rejected_by(lake, "loud"))
    assert found == sorted(
        (row["partition"], row["offset"], row["value"].upper()) for row in orders if row not in good
    ), said
    totals: Counter[str | None] = Counter()
    for row in good:
        order = json.loads(row["value"])
        totals[order["item"]] += order["count"]
    table = lake.spark.read.parquet(f"{lake.path}/totals").collect()
    assert len({row.item for row in table}) == len(table), said
    assert {row.item: row["count"] for row in table} == {**totals, None: None}, said


def _latest(broker: BrokerProcess) -> dict[str, tuple[str, int, int]]:
    found = {}
    for row in sorted(stored(broker, "state"), key=lambda row: row["offset"]):
        found[row["key"]] = (row["value"], row["partition"], row["offset"])
    return {key: said for key, said in found.items() if said[0] != "null"}


def check_latest(broker: BrokerProcess, lake: Lake, said: str) -> None:
    rows = materialize.table(lake, "latest").read().collect()
    assert len({row.key for row in rows}) == len(rows), said
    found = {row.key: (row.value, row.partition, row.offset) for row in rows}
    latest = _latest(broker)
    assert found == latest, said
    keys = {row["key"] for row in stored(broker, "state")}
    cache = {key: cached(broker, CACHE, key) for key in keys}
    assert cache == {key: latest.get(key, (None,))[0] for key in keys}, said


def check_replay(broker: BrokerProcess, lake: Lake, said: str) -> None:
    """Each order once more, those of a key in their order; and a note of each."""
    orders, again = stored(broker, "orders"), stored(broker, "again")
    assert _by_key(again) == _by_key(orders), said
    noted = lake.table(replays.TABLE, replays.SCHEMA).read().collect()
    assert sorted(
        (row.source_topic, row.source_partition, row.source_offset, row.target) for row in noted
    ) == sorted(("orders", row["partition"], row["offset"], "again") for row in orders), said
    assert not glob(f"{lake.path}/_replays/*/*"), said


def _by_key(rows: Iterable[dict[str, Any]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        found[row["key"]].append(row["value"])
    return found


def check_lineage(lake: Lake, journal: list[dict[str, Any]], said: str) -> None:
    plain = {
        "attempts": golden_lineage.attempts,
        "steps": golden_lineage.steps,
        "runs": golden_lineage.runs,
        "critical_path": golden_lineage.critical_paths,
    }
    for table, compute in plain.items():
        found = told(lake.table(table, SCHEMAS[table]).read().collect(), table)
        assert found == told(compute(journal), table), f"{table}: {said}"


def check_metrics(
    broker: BrokerProcess, lake: Lake, journal: list[dict[str, Any]], said: str
) -> None:
    """Each window that is over, once; the newest of each key in the cache."""
    all_of_them = golden_metrics.metrics(journal, WINDOW_MS)
    over = golden_metrics.closed(all_of_them, journal, WATERMARK_MS)
    assert len({window["window_start"] for window in over}) > 5
    assert test_metrics.told(metrics_table(lake).read()) == over, said
    newest = {
        (window["topic"], window["group"], window["tenant_id"], window["routing_label"]): window
        for window in sorted(over, key=lambda window: window["window_start"])
    }
    for keys, window in newest.items():
        text = cached(broker, CACHE, json.dumps(keys, separators=(",", ":")))
        assert text is not None, f"{keys}: {said}"
        entry = json.loads(text)
        for name in ("window_start", "window_end"):
            entry[name] = datetime.fromisoformat(entry[name])
        # An entry names its tenant and namespace only where they are not the default ones.
        left_out = ("date", *SCOPE)
        wanted = {name: value for name, value in window.items() if name not in left_out}
        assert entry == wanted, said


def check_dead_letters(broker: BrokerProcess, lake: Lake, said: str) -> None:
    letters = []
    for row in rows_at(broker, "dlq.jobs"):
        at = datetime.fromisoformat(row["timestamp"])
        letters.append(dict.fromkeys(test_deadletters.RECORDS.names) | row | {"timestamp": at})
    found = test_deadletters.told(dead_letters_table(lake).read())
    assert len(found) > 1
    assert found == golden_metrics.dead_letters(letters), said
