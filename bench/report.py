"""RESULTS.md: the last figures that were taken with care, in a layout that diffs well."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from bench.rows import Row, markdown_table

_INTRODUCTION = """\
# Results

Written by `{command}` on {date}: {runs} runs. A ratio is of two figures of the same run, taken \
in turn; the spread is over the runs, and a target is met by the median, or by the best run where \
it says so. Only successes count, and each load checks what the broker stored or delivered. How \
each is measured stands at the head of its module in `bench/loads`.
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
    """Puts the rows in the place of those that their loads have there, and says so at the end."""
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
    """Of a line of the table of figures; of others nothing."""
    cells = line.split(" | ")
    return cells[0].removeprefix("| ") if len(cells) > 2 else ""
