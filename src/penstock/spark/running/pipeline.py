"""What a pipeline is: a name, the options it takes, and how a run of it starts.

Invariant: options that are not known, do not fit or do not go together are refused by name before
Spark starts. Must
not know what any pipeline does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.model.errors import InvalidArgument

if TYPE_CHECKING:
    from penstock.spark.running.run import Run


@dataclass(frozen=True)
class Option:
    """`takes` says in words what `read` makes a value of; `read` raises ValueError for others."""

    name: str
    takes: str
    default: str | None = None
    read: Callable[[str], Any] = str
    is_required: bool = False


@dataclass(frozen=True)
class Pipeline:
    """`start` begins queries and jobs on its run, and returns; it waits for nothing. `check` raises
    InvalidArgument for values that do not go together."""

    name: str
    summary: str
    start: Callable[[Run], None]
    options: tuple[Option, ...] = ()
    check: Callable[[Mapping[str, Any]], None] = lambda _: None

    def settings(self, given: Mapping[str, str]) -> dict[str, Any]:
        """A value for each option, None for one that is not given and has no default."""
        known = {option.name: option for option in self.options}
        for name in given:
            if name not in known:
                raise InvalidArgument(
                    f"pipeline {self.name} has no option {name}; it has "
                    f"{', '.join(known) or 'none'}"
                )
        found = {name: self._value(option, given.get(name)) for name, option in known.items()}
        self.check(found)
        return found

    def _value(self, option: Option, text: str | None) -> Any:
        if text is None:
            text = option.default
        if text is None:
            if option.is_required:
                raise InvalidArgument(
                    f"pipeline {self.name} needs option {option.name}; it takes {option.takes}"
                )
            return None
        try:
            return option.read(text)
        except ValueError as error:
            raise InvalidArgument(
                f"pipeline {self.name}, option {option.name}: {text!r} does not fit; it takes "
                f"{option.takes}"
            ) from error
