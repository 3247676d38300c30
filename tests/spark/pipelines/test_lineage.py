"""The lineage of a journal: attempts, steps, runs and critical paths."""

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
from penstock.spark.pipelines.archive import dated, journal_table
from penstock.spark.pipelines.attempts import attempts, deliveries
from penstock.spark.pipelines.lineage import PIPELINE, steps_table
from penstock.spark.pipelines.lineage_tables import ATTEMPTS, CRITICAL_PATH, RUNS, STEPS
from penstock.spark.pipelines.steps import critical_paths, runs, steps, traced
from penstock.spark.running.failure import PipelineFailed
from penstock.spark.running.run import Run
from penstock.spark.schemas import schema_of
from tests.spark.pipelines import golden_lineage
from tests.spark.pipelines.golden import COLUMNS, TIMES, Golden

Row = dict[str, Any]
Key = tuple[Any, ...]
Tables = dict[str, dict[Key, Row]]

KEYS = {
    "attempts": ("topic", "partition", "offset", "group", "position"),
    "steps": ("run_id", "step_id", "topic", "group"),
    "runs": ("run_id",),
    "critical_path": ("run_id", "path_position"),
}
SCHEMAS = {"attempts": ATTEMPTS, "steps": STEPS, "runs": RUNS, "critical_path": CRITICAL_PATH}
NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


def told(rows: Iterable[Any], table: str) -> dict[Key, Row]:
    """Rows by their key, times with a zone."""
    found: dict[Key, Row] = {}
    for row in rows:
        known = _zoned(row if isinstance(row, dict) else row.asDict(recursive=True))
        key = tuple(known[name] for name in KEYS[table])
        assert key not in found, key
        found[key] = known
    return found


def _zoned(row: Row) -> Row:
    return {name: _value(value) for name, value in row.items()}


def _value(value: Any) -> Any:
    if isinstance(value, dict):
        return _zoned(value)
    if isinstance(value, datetime) and value.tzinfo is None:
        return value.astimezone(UTC)
    return value


def journal_of(spark: SparkSession, rows: list[Row]) -> DataFrame:
    values = [tuple(row[name] for name in COLUMNS) for row in rows]
    return spark.createDataFrame(values, schema_of("journal", COLUMNS))


# -- the golden sample -------------------------------------------------------------------------


def run_of(spark: SparkSession, golden: Golden, lake: Path, said: list[str], **given: str) -> Run:
    return Run(
        "lineage",
        spark,
        BrokerSettings(url=golden.broker.url, retry_s=20),
        Lake(spark, str(lake)),
        PIPELINE.settings(given),
        report=said.append,
    )


def finished(run: Run) -> Run:
    with run:
        PIPELINE.start(run)
        run.wait(300)
    return run


def test_a_lake_without_an_archive_is_refused(spark: SparkSession, golden: Golden, tmp_path: Path):
    said: list[str] = []
    with pytest.raises(PipelineFailed, match=r"has no table journal; .*archive.* makes it"):
        finished(run_of(spark, golden, tmp_path, said, **{"from": "lake"}))
    assert said == []
    assert not (tmp_path / "runs").exists()


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lake")


@pytest.fixture(scope="module")
def of_second_part(spark: SparkSession, golden: Golden, lake: Path) -> list[Any]:
    """The runs since a moment, from the archive."""
    archived = dated(journal_of(spark, golden.rows))
    journal_table(Lake(spark, str(lake))).append(archived, "test", 0)
    since = golden.second_part.isoformat()
    run = finished(run_of(spark, golden, lake, [], since=since, **{"from": "lake"}))
    return run.lake.table("runs", RUNS).read().collect()


@pytest.fixture(scope="module")
def made(
    spark: SparkSession, golden: Golden, lake: Path, of_second_part: list[Any]
) -> tuple[Run, list[str]]:
    """All of it, from the broker, in place of the tables that were made of less."""
    said: list[str] = []
    return finished(run_of(spark, golden, lake, said)), said


def test_the_archive_is_read_from_a_moment_on(of_second_part: list[Any], golden: Golden):
    rows = [row for row in golden.rows if row["timestamp"] >= golden.second_part]
    assert len(of_second_part) == 2
    assert told(of_second_part, "runs") == told(golden_lineage.runs(rows), "runs")


PLAIN = {
    "attempts": golden_lineage.attempts,
    "steps": golden_lineage.steps,
    "runs": golden_lineage.runs,
    "critical_path": golden_lineage.critical_paths,
}


def same(found: dict[Key, Row], rows: list[Row], table: str) -> None:
    expected = told(PLAIN[table](rows), table)
    assert found.keys() == expected.keys()
    for key, row in expected.items():
        assert found[key] == row, key


@pytest.mark.parametrize("table", KEYS)
def test_the_golden_tables_equal_a_plain_computation(
    made: tuple[Run, list[str]], golden: Golden, table: str
):
    read = made[0].lake.table(table, SCHEMAS[table]).read().collect()
    same(told(read, table), golden.rows, table)


@pytest.mark.parametrize("tick_ms", [7, 50, 100_000])
def test_they_do_where_much_happens_in_the_same_moment(
    spark: SparkSession, golden: Golden, tick_ms: int
):
    rows = [row | {name: ticked(row[name], tick_ms) for name in TIMES} for row in golden.rows]
    tables = _tables(journal_of(spark, rows))
    for table, found in tables.items():
        same(found, rows, table)


def ticked(moment: datetime | None, tick_ms: int) -> datetime | None:
    if moment is None:
        return None
    return moment - (moment - NOON) % timedelta(milliseconds=tick_ms)


def test_the_run_tells_how_runs_ended_and_which_took_longest(made: tuple[Run, list[str]]):
    run, said = made
    assert said[0].startswith("15 runs: 6 succeeded, 5 failed, 4 running\nslowest runs  outcome ")
    counts = [run.lake.table(name, schema).read().count() for name, schema in SCHEMAS.items()]
    assert run.activities[0].rows == sum(counts)


def test_one_run_is_shown_and_drawn_and_no_table_is_touched(
    spark: SparkSession, golden: Golden, tmp_path: Path
):
    said: list[str] = []
    finished(run_of(spark, golden, tmp_path, said, run="run-11"))
    assert [line.split()[:4] for line in said[0].splitlines()[2:]] == [
        ["left", "plans", "planners", "succeeded"],
        ["right", "plans", "planners", "succeeded"],
        ["join", "work", "workers", "dead_lettered"],
        ["join", "dlq.work", "people", "succeeded"],
    ]
    path = tmp_path / "timelines" / "run-11.png"
    assert said[1] == f"timeline: {path}"
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [child.name for child in tmp_path.iterdir()] == ["timelines"]


def test_the_picture_of_a_run_goes_where_plot_says_and_nothing_to_the_lake(
    spark: SparkSession, golden: Golden, tmp_path: Path
):
    lake, path = tmp_path / "lake", tmp_path / "pictures" / "of" / "one.png"
    said: list[str] = []
    finished(run_of(spark, golden, lake, said, run="run-11", plot=str(path)))
    assert said[1] == f"timeline: {path}"
    assert path.read_bytes().startswith(b"\x89PNG")
    assert not lake.exists()


def test_a_run_that_the_journal_does_not_know_is_named(
    spark: SparkSession, golden: Golden, tmp_path: Path
):
    with pytest.raises(PipelineFailed, match="nothing of a run 'run-99'"):
        finished(run_of(spark, golden, tmp_path, [], run="run-99"))


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"from": "disk"}, "broker or lake"),
        ({"since": "yesterday"}, "RFC 3339"),
        ({"plot": "one.png"}, "plot is for one run"),
        ({"since": "2026-01-31T12:00:00"}, "RFC 3339"),
    ],
)
def test_an_option_that_does_not_fit_is_refused(given: dict[str, str], why: str):
    with pytest.raises(InvalidArgument, match=why):
        PIPELINE.settings(given)


# -- what the golden sample cannot show --------------------------------------------------------


class Story:
    """Rows of a journal as they are told, with times in milliseconds after noon."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def tell(
        self,
        at: int,
        kind: str,
        run: str,
        attempt: int | None = None,
        *,
        group: str | None = "g",
        offset: int = 0,
        retry_at: int | None = None,
        **columns: Any,
    ) -> None:
        self.rows.append(
            dict.fromkeys(COLUMNS)
            | {"position": len(self.rows), "timestamp": _at(at), "kind": kind, "topic": run}
            | {"partition": 0, "offset": offset, "run_id": run, "step_id": "s", "attempt": attempt}
            | {"group": None if kind == "produced" else group}
            | {"owner": None if attempt is None else "ada"}
            | {"retry_at": None if retry_at is None else _at(retry_at)}
            | columns
        )


def _at(ms: int) -> datetime:
    return NOON + timedelta(milliseconds=ms)


def story() -> Story:
    told = Story()
    told.tell(0, "produced", "returned")
    told.tell(10, "delivered", "returned", 1)
    told.tell(11, "returned", "returned", 1)
    told.tell(30, "delivered", "returned", 1)
    told.tell(35, "acked", "returned", 1)

    told.tell(0, "produced", "only returned")
    told.tell(10, "delivered", "only returned", 1)
    told.tell(11, "returned", "only returned", 1)

    told.tell(0, "produced", "late nack")
    told.tell(10, "delivered", "late nack", 1)
    told.tell(110, "timed_out", "late nack", 1, reason="ack_timeout", retry_at=200)
    told.tell(120, "nacked", "late nack", 1, reason="out of memory", retry_at=200)
    told.tell(205, "delivered", "late nack", 2)

    told.tell(0, "produced", "late ack")
    told.tell(10, "delivered", "late ack", 1)
    told.tell(110, "timed_out", "late ack", 1, reason="ack_timeout", retry_at=900)
    told.tell(130, "acked", "late ack", 1)

    told.tell(5000, "produced", "skew")
    told.tell(1000, "delivered", "skew", 1)
    told.tell(900, "acked", "skew", 1)

    told.tell(0, "produced", "skewed end")
    told.tell(100, "delivered", "skewed end", 1)
    told.tell(110, "nacked", "skewed end", 1, reason="no")
    told.tell(60, "dead_lettered", "skewed end", 1, reason="no")
    told.tell(70, "produced", "skewed end", offset=1, step_id="after")

    told.tell(0, "produced", "half")
    told.tell(1, "produced", "half", offset=1)
    told.tell(10, "delivered", "half", 1)
    told.tell(20, "nacked", "half", 1, reason="no")
    told.tell(20, "dead_lettered", "half", 1, reason="no")
    told.tell(30, "delivered", "half", 1, offset=1)
    told.tell(40, "nacked", "half", 1, offset=1, reason="not yet", retry_at=9000)

    told.tell(0, "produced", "overlap")
    told.tell(1, "produced", "overlap", offset=1)
    told.tell(10, "delivered", "overlap", 1)
    told.tell(20, "delivered", "overlap", 1, offset=1)
    told.tell(30, "nacked", "overlap", 1, offset=1, reason="early", retry_at=9000)
    told.tell(40, "nacked", "overlap", 1, reason="late", retry_at=9000)

    told.tell(0, "produced", "at once")
    told.tell(0, "produced", "at once", offset=1)
    told.tell(3, "delivered", "at once", 1)
    told.tell(4, "delivered", "at once", 1, offset=1)
    told.tell(9, "acked", "at once", 1, offset=1)
    told.tell(9, "acked", "at once", 1)

    told.tell(0, "produced", "skipped")
    told.tell(50, "skipped", "skipped")

    told.tell(0, "produced", "new topic")
    told.tell(10, "delivered", "new topic", 1)
    told.tell(15, "nacked", "new topic", 1, reason="no", retry_at=15)
    told.tell(100, "produced", "new topic", step_id="t")
    told.tell(107, "delivered", "new topic", 1, step_id="t")
    told.tell(109, "acked", "new topic", 1, step_id="t")

    told.tell(0, "produced", "new group")
    told.tell(10, "delivered", "new group", 1)
    told.tell(50, "delivered", "new group", 1)
    told.tell(60, "acked", "new group", 1)
    told.tell(70, "delivered", "new group", 1)

    # Of rows that are gone the columns of others tell.
    told.tell(44, "acked", "cut", 2, produced_at=_at(0), delivered_at=_at(40))
    told.tell(0, "produced", "no letter", topic="dlq.no letter")
    return told


@pytest.fixture(scope="module")
def of_story(spark: SparkSession) -> Tables:
    rows = story().rows
    random.Random(5).shuffle(rows)
    return _tables(journal_of(spark, rows))


def _tables(journal: DataFrame) -> Tables:
    found = deliveries(journal).cache()
    stepped = traced(steps(found)).cache()
    try:
        frames = (attempts(found), stepped, runs(stepped), critical_paths(stepped))
        return {n: told(f.collect(), n) for n, f in zip(KEYS, frames, strict=True)}
    finally:
        stepped.unpersist()
        found.unpersist()


def tried(tables: Tables, run: str) -> list[Row]:
    return sorted(
        (row for row in tables["attempts"].values() if row["run_id"] == run),
        key=lambda row: int(row["position"]),
    )


def lengths(row: Row) -> tuple[int, int, int]:
    return row["waiting_ms"], row["running_ms"], row["retry_ms"]


def test_two_tenants_with_the_same_names_are_told_apart(spark: SparkSession):
    """The same topic, partition, offset, group, run and step."""
    both = Story()
    acme: dict[str, Any] = {"tenant": "acme", "namespace": "prod"}
    both.tell(0, "produced", "run")
    both.tell(5, "produced", "run", **acme)
    both.tell(10, "delivered", "run", 1)
    both.tell(11, "delivered", "run", 1, **acme)
    both.tell(20, "nacked", "run", 1, reason="bad", retry_at=30, **acme)
    both.tell(25, "acked", "run", 1)
    journal = journal_of(spark, both.rows)
    found = deliveries(journal).cache()
    stepped = traced(steps(found)).cache()
    tries = {row.tenant: (row.outcome, row.waiting_ms) for row in attempts(found).collect()}
    assert tries == {None: ("acked", 10), "acme": ("nacked", 6)}
    of_steps = {(row.tenant, row.namespace): row.outcome for row in stepped.collect()}
    assert of_steps == {(None, None): "succeeded", ("acme", "prod"): "waiting"}
    of_runs = {row.tenant: (row.outcome, row.attempts) for row in runs(stepped).collect()}
    assert of_runs == {None: ("succeeded", 1), "acme": ("running", 1)}
    paths = {(row.tenant, row.path_position) for row in critical_paths(stepped).collect()}
    assert paths == {(None, 0), ("acme", 0)}
    shown = steps_table([row.asDict(recursive=True) for row in stepped.collect()])
    assert "acme/prod/run" in shown


def test_a_returned_delivery_is_no_attempt(of_story: Tables):
    (only,) = tried(of_story, "returned")
    assert (only["attempt"], only["delivered_at"], only["waiting_ms"]) == (1, _at(30), 30)
    assert only["available_at"] == _at(0)
    step = of_story["steps"]["returned", "s", "returned", "g"]
    assert (step["attempts"], step["retries"], lengths(step)) == (1, 0, (30, 5, 0))
    assert not tried(of_story, "only returned")
    assert of_story["steps"]["only returned", "s", "only returned", None]["outcome"] == "waiting"


def test_a_nack_after_the_lease_tells_why_it_ended(of_story: Tables):
    first, second = tried(of_story, "late nack")
    assert (first["outcome"], first["reason"], first["ended_at"]) == (
        "nacked", "out of memory", _at(120),
    )  # fmt: skip
    assert (second["outcome"], second["available_at"], second["waiting_ms"]) == (
        "running", _at(200), 5,
    )  # fmt: skip
    step = of_story["steps"]["late nack", "s", "late nack", "g"]
    assert (step["outcome"], step["reason"], lengths(step)) == (
        "running", "out of memory", (10, 0, 195),
    )  # fmt: skip


def test_an_ack_after_the_lease_is_a_success(of_story: Tables):
    (only,) = tried(of_story, "late ack")
    assert (only["outcome"], only["ended_at"], only["running_ms"]) == ("acked", _at(130), 120)
    step = of_story["steps"]["late ack", "s", "late ack", "g"]
    assert (step["outcome"], step["failures"], lengths(step)) == ("succeeded", 0, (10, 120, 0))


def test_times_that_would_be_negative_are_zero_and_flagged(of_story: Tables):
    (only,) = tried(of_story, "skew")
    assert (only["waiting_ms"], only["running_ms"], only["has_skew"]) == (0, 0, True)
    run = of_story["runs"]["skew",]
    assert (run["duration_ms"], run["path_ms"], run["has_skew"]) == (0, 0, True)
    flagged = {name for (name,), run in of_story["runs"].items() if run["has_skew"]}
    assert flagged == {"skew", "skewed end"}
    assert lengths(of_story["steps"]["skewed end", "s", "skewed end", "g"]) == (100, 0, 0)


def test_a_step_is_open_as_long_as_one_of_its_messages_is(of_story: Tables):
    step = of_story["steps"]["half", "s", "half", "g"]
    assert (step["outcome"], step["reason"]) == ("waiting", "not yet")
    assert (step["messages"], step["dead_letters"], step["finished_at"]) == (2, 1, None)
    assert lengths(step) == (10 + 29, 0, 10 + 10)
    run = of_story["runs"]["half",]
    assert (run["outcome"], run["finished_at"], run["duration_ms"]) == ("running", None, None)


def test_the_reason_is_that_of_the_failure_that_ended_last(of_story: Tables):
    assert of_story["steps"]["overlap", "s", "overlap", "g"]["reason"] == "late"


def test_of_messages_that_end_in_one_millisecond_the_later_in_the_journal_is_the_last(
    of_story: Tables,
):
    assert lengths(of_story["steps"]["at once", "s", "at once", "g"]["last_message"]) == (3, 6, 0)


def test_a_run_is_open_as_long_as_one_of_its_steps_is(of_story: Tables):
    steps = [step for step in of_story["steps"].values() if step["run_id"] == "skewed end"]
    assert sorted(step["outcome"] for step in steps) == ["dead_lettered", "waiting"]
    run = of_story["runs"]["skewed end",]
    assert (run["outcome"], run["dead_letters"], run["finished_at"]) == ("running", 1, None)


def test_a_message_that_is_skipped_has_waited_until_then(of_story: Tables):
    step = of_story["steps"]["skipped", "s", "skipped", "g"]
    assert (step["outcome"], step["attempts"], lengths(step)) == ("succeeded", 0, (50, 0, 0))


def test_a_topic_that_is_made_again_has_other_messages_at_the_same_offsets(of_story: Tables):
    old, new = tried(of_story, "new topic")
    assert (old["step_id"], old["outcome"], old["waiting_ms"]) == ("s", "nacked", 10)
    assert (new["step_id"], new["outcome"], new["waiting_ms"]) == ("t", "acked", 7)
    assert of_story["steps"]["new topic", "s", "new topic", "g"]["outcome"] == "waiting"
    assert of_story["steps"]["new topic", "t", "new topic", "g"]["outcome"] == "succeeded"


def test_a_group_that_is_made_again_has_what_it_finished_under_way(of_story: Tables):
    outcomes = [row["outcome"] for row in tried(of_story, "new group")]
    assert outcomes == ["unknown", "acked", "running"]
    assert of_story["steps"]["new group", "s", "new group", "g"]["outcome"] == "running"


def test_rows_that_are_gone_are_made_up_for_by_the_columns_of_others(of_story: Tables):
    (only,) = tried(of_story, "cut")
    assert (only["produced_at"], only["delivered_at"]) == (_at(0), _at(40))
    assert (only["available_at"], only["waiting_ms"], only["running_ms"]) == (None, None, 4)
    assert lengths(of_story["steps"]["cut", "s", "cut", "g"]) == (40, 4, 0)


def test_a_dead_letter_that_nobody_took_makes_no_step(of_story: Tables):
    assert "no letter" not in {key[0] for key in of_story["steps"]}
    assert ("no letter",) not in of_story["runs"]
