"""Groups of dead letters: counts, lists with limits, and the same table however rows are spread."""

from __future__ import annotations

import random
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from penstock.model.errors import InvalidArgument
from penstock.spark.lake.lake import Lake
from penstock.spark.options import BrokerSettings
from penstock.spark.pipelines.archive import dated, records_table
from penstock.spark.pipelines.deadletters import PIPELINE, SCHEMA, dead_letters_table, groups
from penstock.spark.running.failure import PipelineFailed
from penstock.spark.running.run import Run
from penstock.spark.schemas import schema_of
from tests.broker_process import eventually
from tests.spark.pipelines.golden import Golden
from tests.spark.pipelines.golden_metrics import by_group, dead_letters
from tests.spark.sources import rows_at

Row = dict[str, Any]

NOON = datetime(2025, 3, 30, 12, tzinfo=UTC)
RECORDS = schema_of("records")


def letter(offset: int, reason: str | None = "no memory", **values: Any) -> Row:
    row: Row = dict.fromkeys(RECORDS.names)
    row |= {
        "topic": "dlq.orders",
        "partition": 0,
        "offset": offset,
        "timestamp": NOON + timedelta(seconds=offset),
        "key": f"key {offset}",
        "value": f"value {offset}",
        "dlq_original_topic": "orders",
        "dlq_group": "workers",
        "dlq_attempts": 3,
        "dlq_last_error": reason,
    }
    return row | values


def frame_of(spark: SparkSession, rows: Iterable[Row]) -> DataFrame:
    return spark.createDataFrame([tuple(row[n] for n in RECORDS.names) for row in rows], RECORDS)


def told(rows: DataFrame) -> list[Row]:
    """Rows of the table as the plain computation has them."""
    found = [row.asDict(recursive=True) for row in rows.collect()]
    for row in found:
        for times, names in ((row, ("first_seen", "last_seen")), *_of_samples(row)):
            for name in names:
                times[name] = times[name].astimezone(UTC)
    return sorted(found, key=by_group)


def _of_samples(row: Row) -> list[tuple[Row, tuple[str, ...]]]:
    return [(sample, ("timestamp",)) for sample in row["samples"]]


def test_letters_that_differ_in_numbers_are_one_group(spark: SparkSession):
    rows = [
        letter(1, "timeout after 30 ms", run_id="a", dlq_attempts=2),
        letter(2, "timeout after 45 ms", run_id="b", dlq_attempts=5, tenant_id="acme"),
        letter(3, "timeout after 5 ms", run_id="a"),
        letter(4, "no route", dlq_group="others"),
    ]
    made = groups(frame_of(spark, rows))
    assert made.dtypes == spark.createDataFrame([], SCHEMA).dtypes
    _, timeouts = told(made)
    wanted = {
        "original_topic": "orders", "group": "workers", "reason": "timeout after <n> ms",
        "count": 3, "share": 0.75, "attempts_min": 2, "attempts_max": 5,
        "affected_runs": 2, "run_ids": ["a", "b"], "affected_tenants": 1, "tenant_ids": ["acme"],
        "first_seen": NOON + timedelta(seconds=1), "last_seen": NOON + timedelta(seconds=3),
    }  # fmt: skip
    assert {name: timeouts[name] for name in wanted} == wanted
    assert [one["reason"] for one in timeouts["samples"]] == [
        "timeout after 5 ms", "timeout after 45 ms", "timeout after 30 ms",
    ]  # fmt: skip


def test_lists_have_limits_and_the_newest_first_however_rows_are_spread(spark: SparkSession):
    """Many of one moment, several topics, runs that come again, values that are cut."""
    rows = [
        letter(
            n,
            f"no user {n}" if n % 3 else "no memory",
            timestamp=NOON + timedelta(seconds=n // 40),
            topic=f"dlq.orders{n % 2}",
            partition=n % 4,
            value="é😀" * n,
            run_id=None if n % 7 == 0 else f"run {n % 53}",
            tenant_id=f"tenant {n % 31}",
            dlq_attempts=n % 5,
        )
        for n in range(200)
    ]
    wanted = dead_letters(rows)
    assert max(row["affected_runs"] for row in wanted) > 20
    random.Random(7).shuffle(rows)
    assert told(groups(frame_of(spark, rows).repartition(3))) == wanted


def test_messages_that_were_put_there_by_hand_are_a_group_of_their_topic(spark: SparkSession):
    by_hand = dict.fromkeys(name for name in RECORDS.names if name.startswith("dlq_"))
    (made,) = told(groups(frame_of(spark, [letter(1) | by_hand])))
    assert (made["original_topic"], made["group"], made["reason"]) == ("orders", None, None)
    assert (made["count"], made["attempts_max"], made["run_ids"]) == (1, None, [])


# -- the golden sample -----------------------------------------------------------------------------


class Reported:
    """One run of the pipeline at the golden broker."""

    def __init__(self, spark: SparkSession, golden: Golden, lake: Lake, **options: str) -> None:
        self.said: list[str] = []
        broker = BrokerSettings(url=golden.broker.url)
        settings = PIPELINE.settings(options)
        with Run(PIPELINE.name, spark, broker, lake, settings, report=self.said.append) as run:
            PIPELINE.start(run)
            run.wait(600)
        self.rows = told(dead_letters_table(lake).read())


def letters_of(golden: Golden) -> list[Row]:
    """As the broker tells them as lines of JSON."""
    topics = {row["topic"] for row in golden.rows if row["topic"].startswith("dlq.")}
    rows = [row for topic in topics for row in rows_at(golden.broker, topic)]
    for row in rows:
        row["timestamp"] = datetime.fromisoformat(row["timestamp"])
    return [dict.fromkeys(RECORDS.names) | row for row in rows]


def test_the_groups_of_the_golden_sample_are_as_computed_in_plain_python(
    spark: SparkSession, golden: Golden, tmp_path: Path
):
    lake = Lake(spark, str(tmp_path))
    letters = letters_of(golden)
    made = Reported(spark, golden, lake)
    assert made.rows == dead_letters(letters)
    assert {(row["original_topic"], row["reason"]): row["count"] for row in made.rows} == {
        ("payments", "timeout after <n> ms for order <n>"): 2,
        ("payments", "no user <uuid>"): 1,
        ("crunch", "ack_timeout"): 1,
        ("work", "second one, twice"): 1,
    }
    (text,) = made.said
    header, _, first, *others = text.splitlines()
    assert header.split()[:3] == ["count", "share", "runs"]
    assert first.split()[:3] == ["2", "40.0%", "2"]
    assert first.endswith("payments  cashiers   timeout after <n> ms for order <n>")
    assert len(others) == 3


def test_since_leaves_older_letters_out_and_the_table_is_made_anew(
    spark: SparkSession, golden: Golden, tmp_path: Path
):
    lake = Lake(spark, str(tmp_path))
    letters = sorted(letters_of(golden), key=lambda row: row["timestamp"])
    since = letters[2]["timestamp"]
    kept = [row for row in letters if row["timestamp"] >= since]
    archived = [*letters, letters[-1] | {"topic": "orders"}]
    records_table(lake).append(dated(frame_of(spark, archived)), "test", 0)
    for origin in ("broker", "lake"):
        made = Reported(spark, golden, lake, since=since.isoformat(), **{"from": origin})
        assert made.rows == dead_letters(kept)
    assert Reported(spark, golden, lake, since="1h").rows == dead_letters(letters)
    late = Reported(spark, golden, lake, since="2999-01-01T00:00:00Z")
    assert (late.rows, late.said) == ([], ["no dead letters"])


def test_a_lake_without_an_archive_is_refused_and_the_table_stays(
    spark: SparkSession, golden: Golden, tmp_path: Path
):
    lake = Lake(spark, str(tmp_path))
    before = Reported(spark, golden, lake).rows
    with pytest.raises(PipelineFailed, match=r"has no table records; .*archive.* makes it"):
        Reported(spark, golden, lake, **{"from": "lake"})
    assert told(dead_letters_table(lake).read()) == before


def test_a_run_that_goes_on_waits_for_the_archive_beside_it(
    spark: SparkSession, golden: Golden, tmp_path: Path
):
    lake, said = Lake(spark, str(tmp_path)), list[str]()
    letters = letters_of(golden)
    run = Run(
        PIPELINE.name, spark, BrokerSettings(url=golden.broker.url), lake,
        PIPELINE.settings({"from": "lake"}), once=False, every_s=0.1, report=said.append,
    )  # fmt: skip
    with run:
        PIPELINE.start(run)
        eventually(lambda: said, bool, timeout_s=60)
        records_table(lake).append(dated(frame_of(spark, letters)), "test", 0)
        eventually(lambda: said[-1], lambda text: text.startswith("count"), timeout_s=60)
        run.check()
    assert "has no table records" in said[0]
    assert told(dead_letters_table(lake).read()) == dead_letters(letters)


@pytest.mark.parametrize("given", [{"from": "history"}, {"since": "yesterday"}, {"until": "1h"}])
def test_an_option_that_does_not_fit_is_refused_by_its_name(given: dict[str, str]):
    with pytest.raises(InvalidArgument, match=f"option {next(iter(given))}"):
        PIPELINE.settings(given)
