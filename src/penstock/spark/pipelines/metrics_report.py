"""What a run of `metrics` tells: the newest window, what is still open, what came too late.

Reads the table, changes nothing. Must not know how the figures are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC

from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F  # noqa: N812

from penstock.model.units import format_duration
from penstock.spark.lake.table import Table
from penstock.spark.pipelines.window_progress import WindowProgress
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


def tell_late(run: Run, progress: WindowProgress) -> None:
    late = progress.late()
    if late:
        run.report(
            f"{late} or more events came when their window had been written, and are not counted; "
            "a longer watermark would have waited for them"
        )


def tell_all(run: Run, progress: WindowProgress, table: Table, window_ms: int) -> int:
    """After a run that ends. The rows that are shown."""
    tell_late(run, progress)
    written = table.read().where(F.col("window_ms") == window_ms)
    newest = written.agg(F.unix_micros(F.max("window_start"))).collect()[0][0]
    rows = [] if newest is None else _busiest(written, newest)
    run.report(report(rows, progress.open()))
    return len(rows)


def report(rows: Sequence[Row], still_open: int) -> str:
    """The rows of one window as a table of plain text."""
    lines = ["no window is over yet"]
    if rows:
        start = f"{rows[0]['window_start'].astimezone(UTC):%Y-%m-%d %H:%M:%S}Z"
        length = format_duration(rows[0]["window_ms"])
        lines = [
            f"the newest window, {length} from {start} on:",
            text_table(_COLUMNS, [_cells(row) for row in rows]),
        ]
    if still_open:
        lines.append(f"rows left to a later run, for their windows are not over: {still_open}")
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
