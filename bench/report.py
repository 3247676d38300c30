"""RESULTS.md: the last figures that were taken with care, in a layout that diffs well."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from bench.rows import Row, markdown_table

_INTRODUCTION = """\
# Results

Written by `{command}` on {date}: {runs} runs. A ratio is of two figures of the same run, taken \
in turn; the spread is over the runs, and a target is met by the median. Only successes count, \
and each load checks what the broker stored or delivered. How each is measured stands at the head \
of its module in `bench/loads`.
"""


def write_results(
    path: Path, command: str, machine: dict[str, str], rows: list[Row], runs: int
) -> None:
    date = datetime.now(UTC).date().isoformat()
    parts = [
        _INTRODUCTION.format(command=command, date=date, runs=runs),
        "| machine | |\n| --- | --- |\n"
        + "\n".join(f"| {name} | {value} |" for name, value in machine.items()),
        "",
        markdown_table(rows),
    ]
    path.write_text("\n".join(parts) + "\n", encoding="utf-8")
