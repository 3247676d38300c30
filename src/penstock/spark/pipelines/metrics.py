"""Counts the journal in windows: rates, latencies, retries, errors by topic, group, tenant, label.

Invariant: a row of the journal about a topic is counted in one window of one key, or is late: it
came after its window had been written. A window is written once, as a whole, when the watermark has
passed its end. So the sums of the table and of the journal can be compared. Rows of durable streams
are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC
from typing import Any

from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import DataType, DateType, DoubleType
from pyspark.sql.window import Window

from penstock.model.journal import KINDS
from penstock.model.options import CACHE, Option, duration_ms
from penstock.model.scopes import SEPARATOR
from penstock.model.units import format_duration
from penstock.spark.lake.lake import Lake
from penstock.spark.lake.table import Table
from penstock.spark.pipelines.archive import utc_date
from penstock.spark.pipelines.attempts import of_topics
from penstock.spark.pipelines.lineage_tables import scoped
from penstock.spark.pipelines.targets import entry_refusals
from penstock.spark.running.pipeline import Pipeline, data_loss_option, max_rows_option
from penstock.spark.running.run import Run
from penstock.spark.running.text_table import text_table
from penstock.spark.schemas import LONG, STRING, TIMESTAMP, struct

KEYS = ("topic", "group", "tenant_id", "routing_label")
SCOPE = ("tenant", "namespace")
"""The place of a topic; null in the default namespace. Part of the key as well. In the state of the
query, whose columns cannot change, the topic is a full name."""
SPANS = ("waiting", "running", "end_to_end")
PERCENTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}

ACCURACY = 10_000
"""Accuracy of percentiles: exact up to 5,000 values in a window, otherwise wrong by at most a
ten-thousandth of the ranks. It bounds the memory of a window."""

MAX_ROWS = 1_000_000
SHOWN_ROWS = 20
MAX_WINDOW_MS = 31 * 86_400_000

COLUMNS = ",".join(
    ("timestamp", "kind", "attempt", "produced_at", "delivered_at", *KEYS, *SCOPE, "resource_kind")
)
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
    **dict.fromkeys(SCOPE, STRING),
}
SCHEMA = struct(_TYPES)


def windows(journal: DataFrame, window_ms: int = 60_000, watermark_ms: int = 60_000) -> DataFrame:
    """Returns a row for each window and key that has events, with the columns of `SCHEMA`. Rows of
    durable streams are not counted.

    For a stream: the windows whose end is `watermark_ms` or more before the newest event.
    """
    span = f"{window_ms} milliseconds"
    counted = (
        of_topics(journal)
        .withColumn("topic", F.concat_ws(SEPARATOR, *SCOPE, "topic"))
        .withWatermark("timestamp", f"{watermark_ms} milliseconds")
        .groupBy(F.window("timestamp", span).alias("window"), *KEYS)
        .agg(*_counts(), *_latencies())
    )
    return counted.select(*_columns(window_ms))


def latest(rows: DataFrame) -> DataFrame:
    """Returns the newest window of each key as an entry of a cache."""
    by_key = Window.partitionBy(*SCOPE, *KEYS).orderBy(F.desc("window_start"))
    entries = (
        rows.withColumn("rank", F.row_number().over(by_key))
        .where("rank = 1")
        .drop("rank", "date")
        .select(
            F.to_json(
                F.when(F.col("tenant").isNull(), F.array(*KEYS)).otherwise(F.array(*KEYS, *SCOPE))
            ).alias("key"),
            F.when(F.col("tenant").isNull(), _entry()).otherwise(_entry(*SCOPE)).alias("value"),
        )
    )
    # Ids may be long, or have control characters that JSON does not escape. A key that the
    # broker refuses would fail the pipeline.
    refusal = F.coalesce(*entry_refusals(F.col("key"), F.col("value"), None))
    return entries.where(refusal.isNull())


def _entry(*more: str) -> Column:
    names = [name for name in SCHEMA.names if name not in ("date", *SCOPE)]
    options = {"ignoreNullFields": "false", "timeZone": "UTC"}
    return F.to_json(F.struct(*names, *more), options)


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
    names = F.split("topic", SEPARATOR)
    is_scoped = F.size(names) == 3
    figures = {
        "topic": F.element_at(names, -1),
        **{
            name: F.when(is_scoped, F.try_element_at(names, F.lit(place)))
            for place, name in enumerate(SCOPE, 1)
        },
        "window_start": F.col("window.start"),
        "window_end": F.col("window.end"),
        "produced_per_s": F.col("produced") * 1000 / window_ms,
        "delivered_per_s": F.col("delivered") * 1000 / window_ms,
        "acked_per_s": F.col("acked") * 1000 / window_ms,
        "failed_per_s": failed * 1000 / window_ms,
        "error_share": F.when(ended > 0, failed / ended),
        "window_ms": F.lit(window_ms).cast("long"),
        "date": utc_date(F.col("window.start")),
    }
    for name in SPANS:
        for place, figure in enumerate(PERCENTILES):
            figures[f"{name}_{figure}_ms"] = F.col(f"{name}_percentiles")[place] / 1000
        figures[f"{name}_max_ms"] = F.col(f"{name}_max") / 1000
        figures[f"{name}_avg_ms"] = F.col(f"{name}_avg") / 1000
    return [figures.get(name, F.col(name)).alias(name) for name in SCHEMA.names]


# -- the report -----------------------------------------------------------------------------------

_SHOWN = (
    "topic",
    "group",
    "tenant",
    "label",
    " produced/s",
    " acked/s",
    " retries",
    " errors",
    " waiting p95",
    " running p95",
)


class WindowProgress:
    """Counts the open windows of a query, and the events that came too late, as Spark reports them
    while the query runs and after it has ended.

    Spark adds up the events of a task and key before it compares them with the watermark, and
    counts such sums: so the number of late events is a lower bound.
    """

    def __init__(self) -> None:
        self._query: StreamingQuery | None = None
        self._reported = -1

    def follow(self, spark: SparkSession, query_id: str) -> None:
        """Follows the query. Call it in a batch: only then is it certain that the query exists."""
        if self._query is None:
            self._query = spark.streams.get(query_id)

    def late(self) -> int:
        """Returns the late events in batches committed since the last call."""
        fresh = [one for one in self._batches() if one.batchId > self._reported]
        self._reported = max((one.batchId for one in fresh), default=self._reported)
        return sum(state.numRowsDroppedByWatermark for one in fresh for state in one.stateOperators)

    def open(self) -> int:
        """Returns the rows of windows that are not over."""
        batches = self._batches()
        return sum(state.numRowsTotal for state in batches[-1].stateOperators) if batches else 0

    def _batches(self) -> list[Any]:
        """Returns the batches, the newest last. Progress without a batch has no state."""
        progress = [] if self._query is None else self._query.recentProgress
        return [one for one in progress if one.stateOperators]


def report_late(run: Run, progress: WindowProgress) -> None:
    late = progress.late()
    if late:
        run.report(
            f"{late} or more events came after their window had been written, and are not counted; "
            "a longer watermark would wait for them"
        )


def report_all(run: Run, progress: WindowProgress, table: Table, window_ms: int) -> int:
    """Reports a run that has ended. Returns the number of rows shown."""
    report_late(run, progress)
    written = table.read().where(F.col("window_ms") == window_ms)
    newest = written.agg(F.unix_micros(F.max("window_start"))).collect()[0][0]
    rows = [] if newest is None else _busiest(written, newest)
    run.report(report(rows, progress.open()))
    return len(rows)


def report(rows: Sequence[Row], still_open: int) -> str:
    """Formats the rows of one window as a table of plain text."""
    lines = ["no window is over yet"]
    if rows:
        start = f"{rows[0]['window_start'].astimezone(UTC):%Y-%m-%d %H:%M:%S}Z"
        length = format_duration(rows[0]["window_ms"])
        lines = [
            f"the newest window, {length} from {start} on:",
            text_table(_SHOWN, [_cells(row) for row in rows]),
        ]
    if still_open:
        lines.append(f"rows left for a later run, because their windows are not over: {still_open}")
    return "\n".join(lines)


def _busiest(written: DataFrame, start_us: int) -> list[Row]:
    busiest = F.desc(F.col("produced") + F.col("delivered"))
    rows = written.where(F.unix_micros("window_start") == start_us).orderBy(busiest, *SCOPE, *KEYS)
    return rows.limit(SHOWN_ROWS).collect()


def _cells(row: Row) -> tuple[str, ...]:
    return (
        scoped(row, "topic"),
        *(row[name] or "" for name in KEYS[1:]),
        f"{row['produced_per_s']:,.2f}",
        f"{row['acked_per_s']:,.2f}",
        f"{row['retries']:,}",
        "" if row["error_share"] is None else f"{row['error_share']:.1%}",
        *(
            "" if row[name] is None else f"{row[name]:,.0f} ms"
            for name in ("waiting_p95_ms", "running_p95_ms")
        ),
    )


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
