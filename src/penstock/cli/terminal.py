"""The output of commands: tables, JSON lines and errors.

Invariant: text from a message or a name cannot move the cursor or colour the screen. Its control
characters are printed as escapes, except by `show_data`. JSON output is exactly one value per line.
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
"""The width of tables that are not printed to a terminal: wide enough to cut nothing off."""


class CommandFailed(click.ClickException):
    """Ends the command with one line that says why: the broker or the storage refused."""

    exit_code = 1

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class BadSettings(CommandFailed):
    """Ends the command because a setting is wrong."""

    exit_code = 2


def show(text: str) -> None:
    click.echo(text)


def hint(text: str) -> None:
    """Prints advice, only if stderr is a terminal."""
    if sys.stderr.isatty():
        click.secho(text, err=True, dim=True)


def show_data(data: bytes) -> None:
    """Prints bytes unchanged, for a file or a program."""
    click.echo(data, nl=False)


def show_json(value: Any) -> None:
    click.echo(msgspec.json.encode(value, enc_hook=str))


def show_result(value: Any, text: str, as_json: bool) -> None:
    """Prints the value as JSON, or the text."""
    if as_json:
        show_json(value)
    else:
        show(text)


def show_names(kind: str, found: Sequence[Any], names: Iterable[str], as_json: bool) -> None:
    """Prints what was found as one JSON object, or its names, one on a line."""
    if as_json:
        show_json({kind: found})
        return
    for name in names:
        show(printable(name))


def show_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Prints a table. A column whose name begins with a space holds numbers, aligned right."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
    for column in columns:
        is_number = column.startswith(" ")
        table.add_column(column.strip(), justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        table.add_row(*(printable(str(cell)) for cell in row))
    width = None if sys.stdout.isatty() else WIDE
    console = Console(width=width, markup=False, highlight=False, emoji=False)
    with console.capture() as capture:
        console.print(table)
    for line in capture.get().splitlines():
        if line.strip():
            click.echo(line.rstrip())


def printable(text: str) -> str:
    """Returns the text on one line, with control characters as escapes."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode()
        for char in text
    )


def data_text(data: bytes) -> str:
    """Returns bytes on one line: as text if they are UTF-8, else in base64 after `base64:`."""
    try:
        return printable(data.decode())
    except UnicodeDecodeError:
        return f"base64:{base64.b64encode(data).decode()}"


def size(number: int) -> str:
    """Formats a number of bytes with the largest unit that divides it."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if number and number % unit == 0:
            return f"{number // unit} {name}"
    return f"{number:,} bytes"


def setting_text(name: str, value: Any) -> str:
    """Formats the value of a setting."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "none"
    if isinstance(value, list | tuple):
        return ", ".join(value)
    return size(value) if name.endswith("_bytes") else str(value)
