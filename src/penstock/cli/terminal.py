"""What a person or a program reads: tables, JSON lines and errors.

Invariant: what came from a message or a name cannot move the cursor or colour the screen; its
control characters are shown, not sent, unless bytes as they are were asked for. JSON output is
exactly one value a line.
"""

from __future__ import annotations

import base64
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import click
import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from penstock.model.limits import GIB, KIB, MIB

WIDE = 400
"""Nothing is cut off where no screen limits the line."""


class CommandFailed(click.ClickException):
    """One line for a person: the broker or the storage refused."""

    exit_code = 1

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class BadSettings(CommandFailed):
    """The same for settings that cannot be: as wrong as a command that cannot be."""

    exit_code = 2


def show(text: str) -> None:
    click.echo(text)


def hint(text: str) -> None:
    """Advice, for a person at a terminal only."""
    if sys.stderr.isatty():
        click.secho(text, err=True, dim=True)


def show_data(data: bytes) -> None:
    """Bytes as they are, for a file or a program."""
    click.echo(data, nl=False)


def show_json(value: Any) -> None:
    click.echo(msgspec.json.encode(value, enc_hook=str))


def show_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Columns of numbers are those whose name begins with a space."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
    for column in columns:
        is_number = column.startswith(" ")
        table.add_column(column.strip(), justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        table.add_row(*(printable(str(cell)) for cell in row))
    width = None if sys.stdout.isatty() else WIDE
    console = Console(width=width, markup=False, highlight=False, emoji=False)
    for line in _lines(console, table):
        click.echo(line)


def printable(text: str) -> str:
    """The text on one line, with control characters as escapes."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode()
        for char in text
    )


def data_text(data: bytes) -> str:
    """Bytes on one line: as text if they are that, else in base64, with a mark."""
    try:
        return printable(data.decode())
    except UnicodeDecodeError:
        return f"base64:{base64.b64encode(data).decode()}"


def size(number: int) -> str:
    """Bytes as people write them, without loss."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if number and number % unit == 0:
            return f"{number // unit} {name}"
    return f"{number:,} bytes"


def _lines(console: Console, table: Table) -> list[str]:
    with console.capture() as capture:
        console.print(table)
    return [line.rstrip() for line in capture.get().splitlines() if line.strip()]
