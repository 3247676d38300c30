"""What options of several pipelines take, read from text; ValueError for what does not fit."""

from __future__ import annotations

from collections.abc import Callable


def one_of(*names: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        chosen = text.strip().lower()
        if chosen not in names:
            raise ValueError(text)
        return chosen

    return read


def switch(text: str) -> bool:
    return one_of("true", "false")(text) == "true"


origin = one_of("broker", "lake")
"""Where rows are read: as the broker keeps them, or as the archive does."""
