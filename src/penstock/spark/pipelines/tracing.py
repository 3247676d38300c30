"""Traces the steps of runs, in Arrow batches.

Runs on Spark's executors, once for each partition. Invariant: the rows of a run are side by side,
in any number of batches, and are traced together. A run of more than MAX_STEPS is not traced and
gets nulls, which bounds the memory. Steps of dead-letter topics are not part of a run and are not
traced. Must not know Spark.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import pyarrow as pa
import pyarrow.compute as pc

from penstock.spark.pipelines.critical_path import PathStep, trace
from penstock.spark.pipelines.lineage_tables import is_dead_letter

MAX_STEPS = 20_000

Values = list[int | bool | None]

_ADDED = pa.schema(
    [
        ("path_position", pa.int32()),
        ("children", pa.int32()),
        ("missing_parents", pa.int32()),
        ("in_cycle", pa.bool_()),
    ]
)


def trace_runs(
    batches: Iterator[pa.RecordBatch], max_steps: int = MAX_STEPS
) -> Iterator[pa.RecordBatch]:
    held: pa.Table | None = None
    too_long: str | None = None
    for batch in batches:
        found = pa.Table.from_batches([batch])
        held = found if held is None else pa.concat_tables([held, found])
        if not held.num_rows:
            continue
        run_ids = held.column("run_id")
        last = run_ids[-1]
        begins = pc.index(run_ids, last).as_py()
        if held.num_rows - begins > max_steps:
            too_long, begins = last.as_py(), held.num_rows
        yield from _traced(held.slice(0, begins), max_steps, too_long)
        held = held.slice(begins)
    if held is not None:
        yield from _traced(held, max_steps, too_long)


def _traced(rows: pa.Table, max_steps: int, too_long: str | None) -> Iterator[pa.RecordBatch]:
    steps = _steps(rows)
    added: list[Values] = [[] for _ in _ADDED]
    first = 0
    for run_id, members in groupby(rows.column("run_id").to_pylist()):
        count = sum(1 for _ in members)
        if run_id == too_long or count > max_steps:
            columns: list[Values] = [[None] * count for _ in _ADDED]
        else:
            columns = _columns(steps[first : first + count])
        for column, values in zip(added, columns, strict=True):
            column += values
        first += count
    for field, values in zip(_ADDED, added, strict=True):
        rows = rows.append_column(field, pa.array(values, field.type))
    yield from rows.combine_chunks().to_batches()


def _columns(steps: list[PathStep]) -> list[Values]:
    count = len(steps)
    columns: list[Values] = [[None] * count, [0] * count, [0] * count, [False] * count]
    kept = [at for at, step in enumerate(steps) if not is_dead_letter(step.topic)]
    found = trace([steps[at] for at in kept])
    parts: list[Sequence[int | bool | None]] = [
        found.place, found.children, found.missing, found.in_cycle,
    ]  # fmt: skip
    for column, part in zip(columns, parts, strict=True):
        for at, value in zip(kept, part, strict=True):
            column[at] = value
    return columns


def _steps(rows: pa.Table) -> list[PathStep]:
    parents = [tuple(names or ()) for names in rows.column("parents").to_pylist()]
    plain = (rows.column(name).to_pylist() for name in ("step_id", "topic", "group"))
    ended_at = pc.struct_field(rows.column("last_message"), "ended_at")
    times = (rows.column("produced_at"), rows.column("delivered_at"), ended_at)
    step_ids, topics, groups = plain
    return [*map(PathStep, step_ids, topics, groups, parents, *map(_millis, times))]


def _millis(times: pa.ChunkedArray) -> list[int | None]:
    found: list[int | None] = pc.divide(times.cast(pa.int64()), 1000).to_pylist()
    return found
