"""Lineage: shows where runs spend their time, from the journal.

Replaces four tables of the lake: attempts, steps, runs and critical_path. Invariant: the journal is
read and sorted once; each table is replaced as a whole or not at all; runs and critical paths are
made of the steps in the lake. With the option `run` no table is touched: the steps of that run are
shown, and its timeline is drawn. Must not know how a row is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from pyspark import StorageLevel
from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F  # noqa: N812 - its name everywhere

from penstock.model.errors import InvalidArgument, NotFound
from penstock.model.options import MOMENT, TEXT, Option, moment_at
from penstock.spark.lake.files import Files
from penstock.spark.pipelines.archive import archived, is_awaited, journal_table
from penstock.spark.pipelines.attempts import attempts, deliveries
from penstock.spark.pipelines.lineage_tables import (
    ATTEMPTS,
    CRITICAL_PATH,
    FAILED,
    RUN,
    RUNNING,
    RUNS,
    STEPS,
    SUCCEEDED,
    scoped,
)
from penstock.spark.pipelines.names import path_name
from penstock.spark.pipelines.steps import critical_paths, runs, steps, traced
from penstock.spark.running.pipeline import BROKER_OR_LAKE, Pipeline
from penstock.spark.running.run import Run
from penstock.spark.running.text_table import text_table

MAX_SHOWN_STEPS = 2_000
MAX_DRAWN_ATTEMPTS = 20_000
SLOWEST_RUNS = 5


def make_tables(run: Run) -> int:
    """Returns the number of rows of all four tables."""
    lake = run.lake
    if run.settings["from"] == "lake" and is_awaited(run, journal_table(lake)):
        return 0
    found = deliveries(_journal(run)).persist(StorageLevel.DISK_ONLY)
    try:
        rows = lake.table("attempts", ATTEMPTS).replace(attempts(found))
        rows += lake.table("steps", STEPS).replace(traced(steps(found)))
    finally:
        found.unpersist()
    made = lake.table("steps", STEPS).read()
    rows += lake.table("runs", RUNS).replace(runs(made))
    rows += lake.table("critical_path", CRITICAL_PATH).replace(critical_paths(made))
    run.report(summary(lake.table("runs", RUNS).read()))
    return rows


def show_run(run: Run) -> int:
    run_id: str = run.settings["run"]
    found = deliveries(_journal(run).where(F.col("run_id") == run_id)).persist(
        StorageLevel.DISK_ONLY
    )
    try:
        of_run = traced(steps(found)).cache()
        count = of_run.count()
        if not count:
            raise NotFound(f"the journal has nothing of a run {run_id!r}")
        shown = [row.asDict(recursive=True) for row in _important(of_run).collect()]
        attempts_shown = attempts(found).orderBy("position").limit(MAX_DRAWN_ATTEMPTS).collect()
        of_run.unpersist()
    finally:
        found.unpersist()
    run.report(steps_table(shown))
    run.report(f"timeline: {_plotted(run, run_id, shown, attempts_shown, count - len(shown))}")
    return count


def summary(of_lake: DataFrame) -> str:
    counted = {row["outcome"]: row["count"] for row in of_lake.groupBy("outcome").count().collect()}
    outcomes = ", ".join(f"{counted.get(word, 0)} {word}" for word in (SUCCEEDED, FAILED, RUNNING))
    slowest = of_lake.orderBy(F.desc_nulls_last("duration_ms"), *RUN).limit(SLOWEST_RUNS)
    header = ("slowest runs", "outcome", " took", " waiting", " running", " retries", " steps")
    lengths = ("duration_ms", "waiting_ms", "running_ms", "retry_ms")
    rows = [
        (
            _word(scoped(row, "run_id")),
            row["outcome"],
            *(_length(row[n]) for n in lengths),
            row["steps"],
        )
        for row in slowest.collect()
    ]
    counts = f"{sum(counted.values())} runs: {outcomes}"
    return f"{counts}\n{text_table(header, rows)}" if rows else counts


def steps_table(rows: Sequence[Any]) -> str:
    header = (
        "step", "topic", "group", "outcome", " attempts", " waiting", " running", " retries",
        " path", "reason",
    )  # fmt: skip
    ordered = sorted(
        rows, key=lambda row: (row["produced_at"] or row["delivered_at"], row["topic"])
    )
    return text_table(
        header,
        [
            (
                _word(row["step_id"]),
                scoped(row, "topic"),
                _word(row["group"]),
                row["outcome"],
                row["attempts"],
                *(_length(row[name]) for name in ("waiting_ms", "running_ms", "retry_ms")),
                "" if row["path_position"] is None else row["path_position"] + 1,
                _word(row["reason"], ""),
            )
            for row in ordered
        ],
    )


def _journal(run: Run) -> DataFrame:
    since = moment_at(run.settings["since"], datetime.now(UTC))
    if run.settings["from"] == "lake":
        rows = archived(run, journal_table(run.lake))
        return rows if since is None else rows.where(F.col("timestamp") >= F.lit(since))
    start = None if since is None else since.isoformat()
    only = "true" if run.settings["run"] is not None else None
    return run.read(log="journal", startingTimestamp=start, pushdown=only)


def _important(of_run: DataFrame) -> DataFrame:
    """Chooses the most important steps of a run with very many: the picture chooses from these."""
    return of_run.orderBy(
        F.desc("dead_letters"), F.asc_nulls_last("path_position"), F.desc("failures")
    ).limit(MAX_SHOWN_STEPS)


def _plotted(
    run: Run, run_id: str, shown: Sequence[Any], attempts_shown: Sequence[Row], left_out: int
) -> str:
    from penstock.spark.pipelines.timeline import draw  # takes half a second, and few runs need it

    picture = draw(run_id, shown, [row.asDict() for row in attempts_shown], left_out)
    path: str = (
        run.settings["plot"]
        or f"{run.lake.path}/timelines/{path_name(run_id, 'A-Za-z0-9._-', '.')}.png"
    )
    folder, _, name = path.rpartition("/")
    files = Files(run.spark, folder or ".")
    files.make_dirs("")
    files.put(name, picture)
    return path


def _word(text: str | None, instead: str = "-") -> str:
    """Puts a text on one line, and shortens it for a table."""
    shown = instead if text is None else " ".join(text.split())
    return shown if len(shown) <= 60 else f"{shown[:59]}…"


def _length(ms: int | None) -> str:
    if ms is None:
        return "-"
    return f"{ms:,} ms" if ms < 10_000 else f"{ms / 1000:,.1f} s"


def _check(settings: Mapping[str, Any]) -> None:
    if settings["plot"] is not None and settings["run"] is None:
        raise InvalidArgument("pipeline lineage: option plot is for one run; give run too")


def _start(run: Run) -> None:
    if run.settings["run"] is not None:
        run.repeat("show", lambda: show_run(run))
    else:
        run.repeat("tables", lambda: make_tables(run))


PIPELINE = Pipeline(
    "lineage",
    "Where runs spend their time: attempts, steps, runs and critical paths from the journal",
    _start,
    (
        Option("from", BROKER_OR_LAKE, "lake reads the archive's copy of the journal", "broker"),
        Option("since", MOMENT, "leave out older rows of the journal"),
        Option("run", TEXT.described("the id of a run"), "show its steps and draw its timeline"),
        Option(
            "plot",
            TEXT.described("a path"),
            "with run: where to write the PNG; else timelines/<run>.png in the lake",
        ),
    ),
    _check,
)
