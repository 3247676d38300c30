"""Rows as a person reads them, in plain text: reports go wherever the output of a run goes."""

from __future__ import annotations

from collections.abc import Sequence


def text_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns of numbers are those whose name begins with a space: they end where they begin."""
    cells = [[column.strip() for column in columns], *([str(cell) for cell in r] for r in rows)]
    widths = [max(len(row[at]) for row in cells) for at in range(len(columns))]
    lines = [
        "  ".join(
            cell.rjust(width) if column.startswith(" ") else cell.ljust(width)
            for cell, width, column in zip(row, widths, columns, strict=True)
        ).rstrip()
        for row in cells
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])
