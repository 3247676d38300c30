"""Groups dead letters by topic, group and reason, with the varying parts of the reason removed.

Invariant: the table depends only on the dead letters that are kept, not on the order or the tasks
in which they are read: every list in it has a limit and a fixed order. Memory is bounded by the
number of groups, not of letters.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from pyspark.sql import Column, DataFrame, Row
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import ArrayType, DoubleType
from pyspark.sql.window import Window, WindowSpec

from penstock.model.names import DLQ_PREFIX
from penstock.model.options import MOMENT, Option, moment_at
from penstock.spark.lake.lake import Lake
from penstock.spark.lake.table import Table
from penstock.spark.pipelines.archive import archived, is_awaited, records_table
from penstock.spark.pipelines.reasons import normalised_column
from penstock.spark.running.pipeline import BROKER_OR_LAKE, Pipeline
from penstock.spark.running.run import Run
from penstock.spark.running.text_table import text_table
from penstock.spark.schemas import INTEGER, LONG, STRING, TIMESTAMP, struct

MAX_SAMPLES = 5
MAX_SAMPLE_CHARS = 200
MAX_LISTED = 20
"""The most ids of runs and of tenants in a row; their total is counted too."""

REPORTED_GROUPS = 10

KEYS = ("original_topic", "group", "reason")
NEWEST_FIRST = ("timestamp", "topic", "partition", "offset")
"""Time first. The other columns make the order total: no two letters are equal in all of them."""

SAMPLE = struct(
    {
        "topic": STRING,
        "partition": INTEGER,
        "offset": LONG,
        "timestamp": TIMESTAMP,
        "key": STRING,
        "value": STRING,
        "reason": STRING,
    }
)
SCHEMA = struct(
    {
        "original_topic": STRING,
        "group": STRING,
        "reason": STRING,
        "count": LONG,
        "share": DoubleType(),
        "first_seen": TIMESTAMP,
        "last_seen": TIMESTAMP,
        "attempts_min": LONG,
        "attempts_max": LONG,
        "affected_runs": LONG,
        "run_ids": ArrayType(STRING),
        "affected_tenants": LONG,
        "tenant_ids": ArrayType(STRING),
        "samples": ArrayType(SAMPLE),
    }
)


def groups(letters: DataFrame) -> DataFrame:
    """Returns a row for each group of `letters`, which are rows of dead-letter topics."""
    ranked = (
        letters.select(*_letter())
        .withColumn("run_place", _place_of("run_id"))
        .withColumn("tenant_place", _place_of("tenant_id"))
        .withColumn("place", F.row_number().over(_newest_first(*KEYS)))
        .withColumn("run_rank", _rank_of("run_place"))
        .withColumn("tenant_rank", _rank_of("tenant_place"))
    )
    grouped = ranked.groupBy(*KEYS).agg(
        F.count("*").alias("count"),
        F.min("timestamp").alias("first_seen"),
        F.max("timestamp").alias("last_seen"),
        F.min("dlq_attempts").alias("attempts_min"),
        F.max("dlq_attempts").alias("attempts_max"),
        F.count_if(F.col("run_place") == 1).alias("affected_runs"),
        _listed("run_id", "run").alias("run_ids"),
        F.count_if(F.col("tenant_place") == 1).alias("affected_tenants"),
        _listed("tenant_id", "tenant").alias("tenant_ids"),
        _first("place", F.col("place") <= MAX_SAMPLES, F.col("sample")).alias("samples"),
    )
    everything = Window.partitionBy(F.lit(0))
    shared = grouped.withColumn("share", F.col("count") / F.sum("count").over(everything))
    return shared.select(*SCHEMA.names)


def dead_letters_table(lake: Lake) -> Table:
    return lake.table("dead_letters", SCHEMA)


# -- how letters are put in order ------------------------------------------------------------------


def _letter() -> list[Column]:
    """Returns only the columns that are needed, shortened, because all of it is sorted."""
    # A letter produced by hand has no original topic: it is taken from the topic's name.
    named = F.substr("topic", F.lit(len(DLQ_PREFIX) + 1))
    values = {"value": F.substring("value", 1, MAX_SAMPLE_CHARS), "reason": F.col("dlq_last_error")}
    sample = F.struct(*(values.get(name, F.col(name)).alias(name) for name in SAMPLE.names))
    return [
        F.coalesce("dlq_original_topic", named).alias("original_topic"),
        F.col("dlq_group").alias("group"),
        normalised_column(F.col("dlq_last_error")).alias("reason"),
        *map(F.col, (*NEWEST_FIRST, "run_id", "tenant_id", "dlq_attempts")),
        sample.alias("sample"),
    ]


def _newest_first(*keys: str) -> WindowSpec:
    return Window.partitionBy(*keys).orderBy(*map(F.desc, NEWEST_FIRST))


def _place_of(name: str) -> Column:
    """Returns 1 for a group's newest letter of each run (or tenant); null for letters without."""
    return F.when(F.col(name).isNotNull(), F.row_number().over(_newest_first(*KEYS, name)))


def _rank_of(place: str) -> Column:
    """Returns how many runs, or tenants, there are down to this letter, the newest first."""
    down_to_here = _newest_first(*KEYS).rowsBetween(Window.unboundedPreceding, 0)
    return F.count_if(F.col(place) == 1).over(down_to_here)


def _listed(name: str, what: str) -> Column:
    is_listed = (F.col(f"{what}_place") == 1) & (F.col(f"{what}_rank") <= MAX_LISTED)
    return _first(f"{what}_rank", is_listed, F.col(name))


def _first(order: str, condition: Column, value: Column) -> Column:
    """Returns the values for which the condition holds, in the given order."""
    chosen = F.when(condition, F.struct(F.col(order).alias("order"), value.alias("value")))
    return F.transform(F.array_sort(F.collect_list(chosen)), lambda one: one["value"])


# -- the pipeline ----------------------------------------------------------------------------------


def _make(run: Run) -> int:
    if run.settings["from"] == "lake" and is_awaited(run, records_table(run.lake)):
        return 0
    table = dead_letters_table(run.lake)
    rows = table.replace(groups(_letters(run)))
    largest = table.read().orderBy(F.desc("count"), *KEYS).limit(REPORTED_GROUPS).collect()
    run.report(report(largest, rows))
    return rows


def _letters(run: Run) -> DataFrame:
    since = moment_at(run.settings["since"], datetime.now(UTC))
    if run.settings["from"] == "lake":
        records = archived(run, records_table(run.lake))
        letters = records.where(F.startswith("topic", F.lit(DLQ_PREFIX)))
    else:
        starting = None if since is None else since.isoformat()
        letters = run.read(topic=f"{DLQ_PREFIX}*", startingTimestamp=starting)
    return letters if since is None else letters.where(F.col("timestamp") >= F.lit(since))


def report(largest: Sequence[Row], rows: int) -> str:
    """Formats the largest groups as plain text, which a log can keep too."""
    if not largest:
        return "no dead letters"
    # The reason comes last, because it may be long.
    columns = (" count", " share", " runs", "last seen", "topic", "group", "reason")
    cells = [
        (
            f"{row['count']:,}",
            f"{row['share']:.1%}",
            f"{row['affected_runs']:,}",
            f"{row['last_seen'].astimezone(UTC):%Y-%m-%d %H:%M:%S}Z",
            *(row[name] or "" for name in KEYS),
        )
        for row in largest
    ]
    lines = [text_table(columns, cells)]
    if rows > len(largest):
        lines.append(f"and {rows - len(largest)} more groups, in the table dead_letters")
    return "\n".join(lines)


PIPELINE = Pipeline(
    "deadletters",
    "Groups of similar failures among the dead letters, with counts, samples and runs",
    lambda run: run.repeat("groups", lambda: _make(run)),
    (
        Option("from", BROKER_OR_LAKE, "lake reads the archive's copy of them", "broker"),
        Option("since", MOMENT, "leave out older dead letters"),
    ),
)
