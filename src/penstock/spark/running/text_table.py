"""Formats rows as a plain-text table: reports go wherever the output of a run goes."""

from __future__ import annotations

from collections.abc import Sequence


def text_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Aligns a column to the right if its name begins with a space."""
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
