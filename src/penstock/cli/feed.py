"""The options of commands that print items as they arrive: when to stop, and how to print bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import click

from penstock.cli.connection import json_flag
from penstock.cli.terminal import hint
from penstock.client.sync_feeds import LineStream

Command = Callable[..., None]
T = TypeVar("T")

_raw_flag = click.option(
    "--raw", is_flag=True, help="Print bytes unchanged; otherwise binary data is in base64."
)


def in_form(command: Command) -> Command:
    """Adds --raw and --json, which exclude each other."""
    return json_flag(_raw_flag(command))


def check_form(raw: bool, as_json: bool) -> None:
    if raw and as_json:
        raise click.UsageError("give --raw or --json, not both")


def with_end(command: Command) -> Command:
    """Adds --max and --timeout."""
    most = click.option("--max", "most", type=click.IntRange(min=1), help="Stop after this many.")
    wait = click.option(
        "--timeout", "wait_s", type=click.FloatRange(min=0), metavar="SECONDS",
        help="Stop when nothing has arrived for this long.",
    )  # fmt: skip
    return most(wait(command))


def follow(
    feed: LineStream[T], most: int | None, wait_s: float | None, each: Callable[[T], None]
) -> None:
    """Calls `each` with every item, until the stream ends or the user presses Ctrl-C."""
    count = 0
    try:
        with feed:
            hint("listening for new items; Ctrl-C ends it")
            for found in feed:
                each(found)
                count += 1
                if count == most:
                    feed.close()
    except KeyboardInterrupt:
        return
    if feed.timed_out and not count:
        hint(f"nothing came within {wait_s:g} s")
