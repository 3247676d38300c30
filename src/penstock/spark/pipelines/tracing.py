"""Traces the steps of runs, in Arrow batches: each step's parents, children, and the critical path.

Runs on Spark's executors, once for each partition. Invariant: the rows of a run are side by side,
in any number of batches, and are traced together. A run of more than MAX_STEPS is not traced and
gets nulls, which bounds the memory. Steps of dead-letter topics are not traced either.

The critical path is the chain of steps that a run had to wait for. It is found from its end: from
the step that ended last to one of its parents, and so on to a step without a parent in the run. It
ends even if steps are each other's parents. Must not know Spark.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from penstock.model.names import is_dead_letter_topic
from penstock.model.scopes import SEPARATOR
from penstock.spark.pipelines.lineage_tables import RUN

MAX_STEPS = 20_000

Moment = int
"""Milliseconds since 1970."""

Values = list[int | bool | None]

_ADDED = pa.schema(
    [
        ("path_position", pa.int32()),
        ("children", pa.int32()),
        ("missing_parents", pa.int32()),
        ("in_cycle", pa.bool_()),
    ]
)


class PathStep(NamedTuple):
    """A step of a run, for one group of one topic. `started`: when its first message was produced;
    `begun`: when it was first delivered; `ended`: the last known time."""

    step_id: str | None
    topic: str
    group: str | None
    parents: tuple[str, ...]
    started: Moment | None
    begun: Moment | None
    ended: Moment | None


@dataclass(frozen=True)
class Trace:
    """The result for the steps of a run; all lists are parallel to the steps. `place` is the
    position on the path, None outside of it; `children` counts the steps that name this one as a
    parent; `missing` counts the parents that are not steps of the run; `in_cycle` is true for steps
    in a cycle of parents, and between two cycles."""

    place: list[int | None]
    children: list[int]
    missing: list[int]
    in_cycle: list[bool]


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
        run_ids = _run_keys(held)
        last = run_ids[-1]
        begins = pc.index(run_ids, last).as_py()
        if held.num_rows - begins > max_steps:
            too_long, begins = last.as_py(), held.num_rows
        yield from _traced(held.slice(0, begins), max_steps, too_long)
        held = held.slice(begins)
    if held is not None:
        yield from _traced(held, max_steps, too_long)


def _run_keys(rows: pa.Table) -> pa.ChunkedArray:
    """Returns a text for each row that is the same for the steps of one run only."""
    parts = [pc.fill_null(rows.column(name), "") for name in RUN]
    return pc.binary_join_element_wise(*parts, SEPARATOR)


def _traced(rows: pa.Table, max_steps: int, too_long: str | None) -> Iterator[pa.RecordBatch]:
    steps = _steps(rows)
    added: list[Values] = [[] for _ in _ADDED]
    first = 0
    for run_id, members in groupby(_run_keys(rows).to_pylist()):
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
    kept = [at for at, step in enumerate(steps) if not is_dead_letter_topic(step.topic)]
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


# -- one run ---------------------------------------------------------------------------------------


def trace(steps: Sequence[PathStep]) -> Trace:
    by_id: dict[str, list[int]] = defaultdict(list)
    parents: dict[str, set[str]] = defaultdict(set)
    children: dict[str, set[object]] = defaultdict(set)
    for index, step in enumerate(steps):
        if step.step_id is not None:
            by_id[step.step_id].append(index)
            parents[step.step_id].update(step.parents)
        for parent in step.parents:
            # Steps without an id count as one child for each topic and group.
            children[parent].add(step.step_id or (step.topic, step.group))
    place: list[int | None] = [None] * len(steps)
    for number, index in enumerate(_path(steps, by_id)):
        place[index] = number
    cyclic = _in_cycles({name: parents[name] & by_id.keys() for name in by_id})
    return Trace(
        place=place,
        children=[0 if s.step_id is None else len(children[s.step_id]) for s in steps],
        missing=[sum(1 for parent in step.parents if parent not in by_id) for step in steps],
        in_cycle=[step.step_id in cyclic for step in steps],
    )


def _path(steps: Sequence[PathStep], by_id: dict[str, list[int]]) -> list[int]:
    """Returns the indices of the steps on the path, from the beginning to the end."""
    current = _latest(steps, range(len(steps)))
    path: list[int] = []
    seen: set[str] = set()
    while current is not None:
        path.append(current)
        step = steps[current]
        if step.step_id is not None:
            seen.add(step.step_id)
        found = [i for parent in step.parents if parent not in seen for i in by_id.get(parent, ())]
        current = _latest(steps, [i for i in found if _led_to(steps[i], step)] or found)
    return path[::-1]


def _led_to(parent: PathStep, child: PathStep) -> bool:
    """Returns whether the parent may have caused the child: it must have begun before it."""
    return parent.begun is not None and child.started is not None and parent.begun <= child.started


def _latest(steps: Sequence[PathStep], among: Iterable[int]) -> int | None:
    """Returns the step that ended last; of several, the first by name, always the same."""
    return min(
        among,
        key=lambda i: (
            -(steps[i].ended or 0),
            steps[i].step_id or "",
            steps[i].topic,
            steps[i].group or "",
        ),
        default=None,
    )


def _in_cycles(parents: dict[str, set[str]]) -> set[str]:
    """Returns the steps in cycles of parents, and between two cycles: removes steps without parents
    again and again, and then those without children. Most runs have none left."""
    upwards = _without_roots(parents)
    downwards: dict[str, set[str]] = {name: set() for name in upwards}
    for name, known in upwards.items():
        for parent in known:
            downwards[parent].add(name)
    return _without_roots(downwards).keys() & upwards.keys()


def _without_roots(parents: dict[str, set[str]]) -> dict[str, set[str]]:
    """Removes steps without parents until each step that is left has a parent that is left."""
    waiting = {name: len(known) for name, known in parents.items()}
    children: dict[str, list[str]] = defaultdict(list)
    for name, known in parents.items():
        for parent in known:
            children[parent].append(name)
    free = [name for name, count in waiting.items() if not count]
    while free:
        name = free.pop()
        del waiting[name]
        for child in children[name]:
            waiting[child] -= 1
            if not waiting[child]:
                free.append(child)
    return {name: parents[name] & waiting.keys() for name in waiting}
