"""A measured figure with one value per run, its target and whether it is met."""

from __future__ import annotations

from statistics import median

import msgspec


class BenchFailed(Exception):
    """A load did not do what it claims to measure, so there is no figure."""


class Target(msgspec.Struct, frozen=True):
    """A minimum or maximum for the median or, with `best`, for the best run."""

    limit: float
    at_most: bool = False
    best: bool = False

    def is_met(self, values: list[float]) -> bool:
        if self.at_most:
            return (min(values) if self.best else median(values)) <= self.limit
        return (max(values) if self.best else median(values)) >= self.limit


class Row(msgspec.Struct):
    """A row of the results. The unit "×" is a ratio within a run; `note` has details."""

    load: str
    what: str
    unit: str
    values: list[float]
    target: Target | None = None
    note: str = ""

    @property
    def median(self) -> float:
        return median(self.values)

    @property
    def verdict(self) -> str:
        if not self.values:
            return "not measured"
        if self.target is None:
            return ""
        return "met" if self.target.is_met(self.values) else "MISSED"

    def cells(self) -> list[str]:
        return [
            self.load,
            self.what,
            self._target(),
            *(self._spread() if self.values else ["–"] * 3),
            self.verdict,
            self.note,
        ]

    def _target(self) -> str:
        if self.target is None:
            return ""
        limit = f"{'≤' if self.target.at_most else '≥'} {self._show(self.target.limit)}"
        return f"{limit}, best" if self.target.best else limit

    def _spread(self) -> list[str]:
        return [self._show(v) for v in (min(self.values), self.median, max(self.values))]

    def _show(self, value: float) -> str:
        if self.unit == "×":
            return f"{value:.2f} ×"
        if value == 0 or abs(value) >= 100:
            digits = 0
        else:
            digits = 2 if abs(value) >= 0.1 else 3
        return f"{value:,.{digits}f} {self.unit}"


HEADINGS = ["load", "measured", "target", "min", "median", "max", "", "note"]
_NUMBERS = range(2, 6)


def text_table(rows: list[Row]) -> str:
    """Formats the rows for a terminal, with the long notes below their rows."""
    lines = [HEADINGS[:-1], *(row.cells()[:-1] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    text = [_line(lines[0], widths), "  ".join("-" * width for width in widths)]
    for row, cells in zip(rows, lines[1:], strict=True):
        text.append(_line(cells, widths))
        if row.note:
            text.append(f"{'':{widths[0]}}  · {row.note}")
    return "\n".join(text)


def markdown_table(rows: list[Row]) -> str:
    rule = ["--:" if column in _NUMBERS else "---" for column in range(len(HEADINGS))]
    lines = [HEADINGS, rule, *(row.cells() for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _line(cells: list[str], widths: list[int]) -> str:
    padded = [
        f"{cell:>{width}}" if column in _NUMBERS else f"{cell:<{width}}"
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join(padded).rstrip()
