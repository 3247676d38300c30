"""Counts the journal in windows of time: rates, latencies, retries and errors by topic, group,
tenant and label.

Invariant: a row of the journal is counted in one window of one key, or is late: it came after its
window had been written. A window is written once, as a whole, when the watermark has passed its
end. So the sums of the table and of the journal can be compared.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import (
    DataType,
    DateType,
    DoubleType,
)
from pyspark.sql.window import Window

from penstock.model.options import CACHE, Option, duration_ms
from penstock.model.units import format_duration
from penstock.spark.lake.lake import Lake
from penstock.spark.lake.table import Table
from penstock.spark.pipelines.metrics_report import WindowProgress, report_all, report_late
from penstock.spark.pipelines.targets import entry_refusals
from penstock.spark.running.pipeline import Pipeline, data_loss_option, max_rows_option
from penstock.spark.running.run import Run
from penstock.spark.schemas import LONG, STRING, TIMESTAMP, struct

KEYS = ("topic", "group", "tenant_id", "routing_label")
KINDS = (
    "produced",
    "delivered",
    "returned",
    "acked",
    "nacked",
    "timed_out",
    "dead_lettered",
    "skipped",
)
SPANS = ("waiting", "running", "end_to_end")
PERCENTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}

ACCURACY = 10_000
"""Accuracy of percentiles: exact up to 5,000 values in a window, otherwise wrong by at most a
ten-thousandth of the ranks. It bounds the memory of a window."""

MAX_ROWS = 1_000_000
MAX_WINDOW_MS = 31 * 86_400_000

COLUMNS = ",".join(("timestamp", "kind", "attempt", "produced_at", "delivered_at", *KEYS))
"""The columns that are read of the journal."""

_DOUBLE = DoubleType()
_TYPES: dict[str, DataType] = {
    "window_start": TIMESTAMP,
    "window_end": TIMESTAMP,
    **dict.fromkeys(KEYS, STRING),
    **dict.fromkeys((*KINDS, "retries"), LONG),
    **dict.fromkeys(("produced_per_s", "delivered_per_s", "acked_per_s", "failed_per_s"), _DOUBLE),
    "error_share": _DOUBLE,
    **{f"{span}_{figure}_ms": _DOUBLE for span in SPANS for figure in (*PERCENTILES, "max", "avg")},
    "window_ms": LONG,
    "date": DateType(),
}
SCHEMA = struct(_TYPES)


def windows(journal: DataFrame, window_ms: int = 60_000, watermark_ms: int = 60_000) -> DataFrame:
    """Returns a row for each window and key that has events, with the columns of `SCHEMA`.

    For a stream: the windows whose end is `watermark_ms` or more before the newest event.
    """
    span = f"{window_ms} milliseconds"
    counted = (
        journal.withWatermark("timestamp", f"{watermark_ms} milliseconds")
        .groupBy(F.window("timestamp", span).alias("window"), *KEYS)
        .agg(*_counts(), *_latencies())
    )
    return counted.select(*_columns(window_ms))


def latest(rows: DataFrame) -> DataFrame:
    """Returns the newest window of each key as an entry of a cache."""
    by_key = Window.partitionBy(*KEYS).orderBy(F.desc("window_start"))
    entries = (
        rows.withColumn("rank", F.row_number().over(by_key))
        .where("rank = 1")
        .drop("rank", "date")
        .select(
            F.to_json(F.array(*KEYS)).alias("key"),
            F.to_json(
                F.struct(*(name for name in SCHEMA.names if name != "date")),
                {"ignoreNullFields": "false", "timeZone": "UTC"},
            ).alias("value"),
        )
    )
    # Ids may be long, or have control characters that JSON does not escape. A key that the
    # broker refuses would fail the pipeline.
    refusal = F.coalesce(*entry_refusals(F.col("key"), F.col("value"), None))
    return entries.where(refusal.isNull())


def metrics_table(lake: Lake) -> Table:
    return lake.table("metrics", SCHEMA, ("date",))


# -- the figures of a window -----------------------------------------------------------------------


def _counts() -> list[Column]:
    is_retry = (F.col("kind") == "delivered") & (F.col("attempt") > 1)
    return [
        *(F.count_if(F.col("kind") == kind).alias(kind) for kind in KINDS),
        F.count_if(is_retry).alias("retries"),
    ]


def _latencies() -> list[Column]:
    """Counts in whole microseconds, whose sum is the same in any order."""
    is_first = (F.col("kind") == "delivered") & (F.col("attempt") == 1)
    is_acked = F.col("kind") == "acked"
    spans = {
        "waiting": F.when(is_first, _between("produced_at", "delivered_at")),
        "running": F.when(is_acked, _between("delivered_at", "timestamp")),
        "end_to_end": F.when(is_acked, _between("produced_at", "timestamp")),
    }
    shares = F.array(*map(F.lit, PERCENTILES.values()))
    figures = []
    for name, span in spans.items():
        figures += [
            F.percentile_approx(span, shares, F.lit(ACCURACY)).alias(f"{name}_percentiles"),
            F.max(span).alias(f"{name}_max"),
            F.avg(span).alias(f"{name}_avg"),
        ]
    return figures


def _between(begin: str, end: str) -> Column:
    return F.unix_micros(end) - F.unix_micros(begin)


def _columns(window_ms: int) -> list[Column]:
    failed = F.col("nacked") + F.col("timed_out")
    ended = F.col("acked") + failed
    figures = {
        "window_start": F.col("window.start"),
        "window_end": F.col("window.end"),
        "produced_per_s": F.col("produced") * 1000 / window_ms,
        "delivered_per_s": F.col("delivered") * 1000 / window_ms,
        "acked_per_s": F.col("acked") * 1000 / window_ms,
        "failed_per_s": failed * 1000 / window_ms,
        "error_share": F.when(ended > 0, failed / ended),
        "window_ms": F.lit(window_ms).cast("long"),
        "date": _utc_date(F.col("window.start")),
    }
    for name in SPANS:
        for place, figure in enumerate(PERCENTILES):
            figures[f"{name}_{figure}_ms"] = F.col(f"{name}_percentiles")[place] / 1000
        figures[f"{name}_max_ms"] = F.col(f"{name}_max") / 1000
        figures[f"{name}_avg_ms"] = F.col(f"{name}_avg") / 1000
    return [figures.get(name, F.col(name)).alias(name) for name in SCHEMA.names]


def _utc_date(moment: Column) -> Column:
    """Returns the day in UTC, whatever the session's zone is: a row must not change its partition
    with it."""
    return F.date_from_unix_date(F.floor(F.unix_seconds(moment) / 86_400).cast("int"))


# -- the pipeline ----------------------------------------------------------------------------------


def _start(run: Run) -> None:
    window_ms, cache = run.settings["window"], run.settings["cache"]
    journal = run.stream(
        log="journal",
        columns=COLUMNS,
        maxRowsPerTrigger=run.settings["max_rows"],
        failOnDataLoss=run.settings["fail_on_data_loss"],
    )
    rows = windows(journal, window_ms, run.settings["watermark"])
    # Windows of another length are another query, because they have other state.
    query = f"windows-{format_duration(window_ms)}"
    table = metrics_table(run.lake)
    progress = WindowProgress()

    def write(frame: DataFrame, batch: int) -> None:
        progress.follow(run.spark, run.query_id())
        report_late(run, progress)
        # The frame is used several times: without persist, the journal would be read each time.
        made = frame.persist()
        try:
            # Always counted, which makes Spark update its state: `append` does not compute a batch
            # that is in the table already, and Spark could then not end it.
            if made.count() > 0:
                table.append(made, f"{run.name}/{query}", batch)
                if cache:
                    # Batches come in the order of their windows, so the last put is the newest.
                    run.write(latest(made), f"{run.name}-{query}", txnBatch=batch, cache=cache)
        finally:
            made.unpersist()

    run.start(query, rows, write)
    if run.once:
        run.repeat("report", lambda: report_all(run, progress, table, window_ms))


PIPELINE = Pipeline(
    "metrics",
    "Rates, latencies, retries and error share in windows, from the journal to the lake",
    _start,
    (
        Option("window", duration_ms(1, MAX_WINDOW_MS), "the length of a window", "1m"),
        Option(
            "watermark",
            duration_ms(0, MAX_WINDOW_MS),
            "how long to wait for late rows of the journal",
            "1m",
        ),
        Option("cache", CACHE, "put the newest window of each key there"),
        max_rows_option(MAX_ROWS),
        data_loss_option("counted"),
    ),
)
