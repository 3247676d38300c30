"""Finds the critical path of a run: the chain of steps that it had to wait for.

The path is found from its end: from the step that ended last to one of its parents, and so on to a
step without a parent in the run. Invariant: it ends even if steps are each other's parents, and
takes time and memory in proportion to the steps. Must not know Spark, or where steps come from.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Moment = int
"""Milliseconds since 1970."""


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
    """Returns whether the parent may have caused the child: a group that began after the child was
    there did not."""
    return parent.begun is not None and child.started is not None and parent.begun <= child.started


def _latest(steps: Sequence[PathStep], among: Iterable[int]) -> int | None:
    """Returns the step that ended last; of several, the first by name, so that a path is always the
    same."""
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
    """Removes steps without parents again and again, until each step that is left has a parent that
    is left."""
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
