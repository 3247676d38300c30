"""Reports a run of `metrics`: the newest window, how much is still open, and how much came too
late.

Reads the table, changes nothing. Must not know how the figures are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC
from typing import Any

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.streaming.query import StreamingQuery

from penstock.model.units import format_duration
from penstock.spark.lake.table import Table
from penstock.spark.running.run import Run
from penstock.spark.running.text_table import text_table

MAX_ROWS = 20

_KEYS = ("topic", "group", "tenant_id", "routing_label")
_COLUMNS = (
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
        """Call it in a batch: only then is it certain that the query exists."""
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
        """Returns the batches, the newest last. Progress without a batch has no state and is left
        out."""
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
            text_table(_COLUMNS, [_cells(row) for row in rows]),
        ]
    if still_open:
        lines.append(f"rows left for a later run, because their windows are not over: {still_open}")
    return "\n".join(lines)


def _busiest(written: DataFrame, start_us: int) -> list[Row]:
    busiest = F.desc(F.col("produced") + F.col("delivered"))
    rows = written.where(F.unix_micros("window_start") == start_us).orderBy(busiest, *_KEYS)
    return rows.limit(MAX_ROWS).collect()


def _cells(row: Row) -> tuple[str, ...]:
    return (
        *(row[name] or "" for name in _KEYS),
        f"{row['produced_per_s']:,.2f}",
        f"{row['acked_per_s']:,.2f}",
        f"{row['retries']:,}",
        "" if row["error_share"] is None else f"{row['error_share']:.1%}",
        *(
            "" if row[name] is None else f"{row[name]:,.0f} ms"
            for name in ("waiting_p95_ms", "running_p95_ms")
        ),
    )
