"""What the tables `metrics` and `dead_letters` must hold, computed from rows in plain Python.

Written from the documentation of the tables, not from the pipelines: the longest way that is
plainly right. Rows are dicts with every column; times are aware.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

from penstock.spark.pipelines.reasons import normalised

Row = dict[str, Any]
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
KINDS = (
    "produced", "delivered", "returned", "acked", "nacked", "timed_out", "dead_lettered", "skipped",
)  # fmt: skip


def window_start(moment: datetime, window_ms: int) -> datetime:
    window = timedelta(milliseconds=window_ms)
    return EPOCH + (moment - EPOCH) // window * window


def metrics(journal: Iterable[Row], window_ms: int) -> list[Row]:
    """Every window, in the order of `by_key`."""
    cells: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in journal:
        keys = (row["topic"], row["group"], row["tenant_id"], row["routing_label"])
        cells[window_start(row["timestamp"], window_ms), *keys].append(row)
    found = [_cell(cell, rows, window_ms) for cell, rows in cells.items()]
    return sorted(found, key=by_key)


def closed(windows: Iterable[Row], journal: Iterable[Row], watermark_ms: int) -> list[Row]:
    """Those whose end is not after the newest row's time, less the watermark."""
    newest = max(row["timestamp"] for row in journal)
    limit = newest - timedelta(milliseconds=watermark_ms)
    return [window for window in windows if window["window_end"] <= limit]


def by_key(window: Row) -> list[str]:
    names = ("window_start", "topic", "group", "tenant_id", "routing_label")
    return [str(window[name]) for name in names]


def _cell(cell: tuple[Any, ...], rows: list[Row], window_ms: int) -> Row:
    start, topic, group, tenant_id, routing_label = cell
    count = {kind: sum(row["kind"] == kind for row in rows) for kind in KINDS}
    failed = count["nacked"] + count["timed_out"]
    ended = failed + count["acked"]
    seconds = window_ms / 1000
    acked = [row for row in rows if row["kind"] == "acked"]
    delivered = [row for row in rows if row["kind"] == "delivered"]
    first = [row for row in delivered if row["attempt"] == 1]
    return {
        "window_start": start,
        "window_end": start + timedelta(milliseconds=window_ms),
        "topic": topic,
        "group": group,
        "tenant_id": tenant_id,
        "routing_label": routing_label,
        "tenant": None,
        "namespace": None,
        **count,
        "retries": len([row for row in delivered if row["attempt"] > 1]),
        "produced_per_s": count["produced"] / seconds,
        "delivered_per_s": count["delivered"] / seconds,
        "acked_per_s": count["acked"] / seconds,
        "failed_per_s": failed / seconds,
        "error_share": failed / ended if ended else None,
        **_latency("waiting", [_ms(row, "produced_at", "delivered_at") for row in first]),
        **_latency("running", [_ms(row, "delivered_at", "timestamp") for row in acked]),
        **_latency("end_to_end", [_ms(row, "produced_at", "timestamp") for row in acked]),
        "window_ms": window_ms,
        "date": start.date(),
    }


def _ms(row: Row, begin: str, end: str) -> float | None:
    if row[begin] is None or row[end] is None:
        return None
    span: timedelta = row[end] - row[begin]
    return span / timedelta(milliseconds=1)


def _latency(name: str, spans: list[float | None]) -> Row:
    known = sorted(span for span in spans if span is not None)
    figures = {
        f"p{share}": known[math.ceil(share / 100 * len(known)) - 1] if known else None
        for share in (50, 95, 99)
    }
    figures["max"] = known[-1] if known else None
    figures["avg"] = sum(known) / len(known) if known else None
    return {f"{name}_{figure}_ms": value for figure, value in figures.items()}


# -- dead letters ----------------------------------------------------------------------------------


def dead_letters(letters: Iterable[Row]) -> list[Row]:
    """Every group, in the order of `by_group`."""
    found: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    newest = ("timestamp", "topic", "partition", "offset")
    for row in sorted(letters, key=lambda row: [row[name] for name in newest], reverse=True):
        topic = row["dlq_original_topic"] or row["topic"].removeprefix("dlq.")
        found[topic, row["dlq_group"], normalised(row["dlq_last_error"])].append(row)
    total = sum(map(len, found.values()))
    return sorted((_group(key, rows, total) for key, rows in found.items()), key=by_group)


def by_group(group: Row) -> list[str]:
    return [str(group[name]) for name in ("original_topic", "group", "reason")]


def _group(key: tuple[Any, ...], rows: list[Row], total: int) -> Row:
    """`rows` has the newest first."""
    times = [row["timestamp"] for row in rows]
    attempts = [row["dlq_attempts"] for row in rows if row["dlq_attempts"] is not None]
    runs = list(dict.fromkeys(row["run_id"] for row in rows if row["run_id"] is not None))
    tenants = list(dict.fromkeys(row["tenant_id"] for row in rows if row["tenant_id"] is not None))
    return {
        "original_topic": key[0],
        "group": key[1],
        "reason": key[2],
        "count": len(rows),
        "share": len(rows) / total,
        "first_seen": min(times),
        "last_seen": max(times),
        "attempts_min": min(attempts, default=None),
        "attempts_max": max(attempts, default=None),
        "affected_runs": len(runs),
        "run_ids": runs[:20],
        "affected_tenants": len(tenants),
        "tenant_ids": tenants[:20],
        "samples": [_sample(row) for row in rows[:5]],
    }


def _sample(row: Row) -> Row:
    kept = ("topic", "partition", "offset", "timestamp", "key")
    cut = row["value"][:200]
    return {name: row[name] for name in kept} | {"value": cut, "reason": row["dlq_last_error"]}
