"""Writes RESULTS.md, the last careful measurements, in a layout that gives small diffs."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from bench.rows import Row, markdown_table

_INTRODUCTION = """\
# Results

Written by `{command}` on {date}: {runs} runs. A ratio compares two figures of the same run, \
measured in turn. Minimum and maximum are over the runs. A target is met by the median, or by the \
best run where the table says so. Only successes count, and each load checks what the broker \
stored or delivered. The docstring of each module in `bench/loads` says how it measures.
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


def write_again(path: Path, command: str, machine: dict[str, str], rows: list[Row]) -> None:
    """Replaces the rows of the measured loads, and adds a note at the end."""
    loads = list(dict.fromkeys(row.load for row in rows))
    kept = path.read_text(encoding="utf-8").splitlines()
    found = markdown_table(rows).splitlines()[2:]
    at = next((n for n, line in enumerate(kept) if _load_of(line) in loads), len(kept))
    before = [line for line in kept[:at] if _load_of(line) not in loads]
    behind = [line for line in kept[at:] if _load_of(line) not in loads]
    date = datetime.now(UTC).date().isoformat()
    said = f"Measured again by `{command}` on {date}, {machine['before the start']}."
    notes = [line for line in behind if line.startswith("Measured again") and command not in line]
    table = [line for line in behind if line.startswith("|")]
    lines = [*before, *found, *table, "", *notes, said]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _load_of(line: str) -> str:
    """Returns the load of a table row, or an empty text for other lines."""
    cells = line.split(" | ")
    return cells[0].removeprefix("| ") if len(cells) > 2 else ""
