"""A pipeline: a name, the options it takes, and how a run of it starts.

Invariant: options that are unknown, have wrong values or do not go together are refused by name
before Spark starts. Must not know what any pipeline does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.model.errors import InvalidArgument
from penstock.model.limits import MAX_OFFSET
from penstock.model.options import TRUE_OR_FALSE, Option, choice, unknown_name, whole_number

if TYPE_CHECKING:
    from penstock.spark.running.run import Run

BROKER_OR_LAKE = choice("broker", "lake")
"""The place that rows are read from: the broker, or the archive's copy in the lake."""


def max_rows_option(default: int) -> Option:
    kind = whole_number(1, MAX_OFFSET)
    return Option("max_rows", kind, "the most rows of one batch", str(default))


def data_loss_option(done: str) -> Option:
    """`done` is what the pipeline does with rows, as in "before they were archived"."""
    return Option(
        "fail_on_data_loss",
        TRUE_OR_FALSE,
        f"false continues without the rows that retention removed before they were {done}",
        "true",
    )


@dataclass(frozen=True)
class Pipeline:
    """`start` begins queries and jobs on its run, and returns without waiting for them. `check`
    raises InvalidArgument for values that do not go together."""

    name: str
    summary: str
    start: Callable[[Run], None]
    options: tuple[Option, ...] = ()
    check: Callable[[Mapping[str, Any]], None] = lambda _: None

    def settings(self, given: Mapping[str, str]) -> dict[str, Any]:
        """Returns a value for each option: None if it is not given and has no default."""
        known = {option.name: option for option in self.options}
        for name in given:
            if name not in known:
                raise InvalidArgument(f"pipeline {self.name}: {unknown_name(name, known)}")
        values = {name: self._value(option, given.get(name)) for name, option in known.items()}
        self.check(values)
        return values

    def _value(self, option: Option, text: str | None) -> Any:
        label = f"pipeline {self.name}, option {option.name}"
        if text is None:
            text = option.default
        if text is not None:
            return option.read(text, label)
        if option.is_required:
            raise option.missing(label)
        return None
