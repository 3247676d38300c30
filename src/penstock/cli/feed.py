"""What `penstock subscribe` and `penstock cache watch` share: how long to follow, and the form in
which bytes are printed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import click

from penstock.cli.connection import json_flag
from penstock.cli.terminal import hint
from penstock.client.sync_feeds import OpenStream

Command = Callable[..., None]
T = TypeVar("T")

_raw_flag = click.option(
    "--raw", is_flag=True, help="Print the bytes as they are; else what is no text is in base64."
)


def in_form(command: Command) -> Command:
    """Adds --raw and --json, which exclude each other."""
    return json_flag(_raw_flag(command))


def check_form(raw: bool, as_json: bool) -> None:
    if raw and as_json:
        raise click.UsageError("give --raw or --json, not both")


def with_end(command: Command) -> Command:
    """Adds --max and --timeout."""
    most = click.option(
        "--max", "most", type=click.IntRange(min=1), help="Stop after so many of them."
    )
    wait = click.option(
        "--timeout", "wait_s", type=click.FloatRange(min=0), metavar="SECONDS",
        help="Stop when nothing has come for so long.",
    )  # fmt: skip
    return most(wait(command))


def follow(
    feed: OpenStream[T], most: int | None, wait_s: float | None, each: Callable[[T], None]
) -> None:
    """Calls `each` with what comes, until the feed ends or the person ends it."""
    count = 0
    try:
        with feed:
            hint("listening: what comes from now on is printed; Ctrl-C ends it")
            for found in feed:
                each(found)
                count += 1
                if count == most:
                    feed.close()
    except KeyboardInterrupt:
        return
    if feed.timed_out and not count:
        hint(f"nothing came within {wait_s:g} s")
