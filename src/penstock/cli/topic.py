"""`penstock topic`: create, list, describe, offsets, configure, delete."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from penstock.cli.connection import confirm, json_flag, with_scoped_client, yes_flag
from penstock.cli.terminal import (
    printable,
    show,
    show_json,
    show_names,
    show_result,
    show_table,
    size,
)
from penstock.cli.units import MILLISECONDS, Size
from penstock.client.results import Topic
from penstock.client.sync import Client
from penstock.model.names import is_dead_letter_topic
from penstock.model.units import format_duration


@click.group()
def topic() -> None:
    """Create, show, configure and delete topics."""


_after_archive_flag = click.option(
    "--after-archive/--no-after-archive",
    default=None,
    help="Keep every message until the group `archive` has finished it.",
)


def _retry_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options for messages without a retry policy of their own."""
    for name, kind, text in (
        (
            "--retry-max-backoff-ms",
            MILLISECONDS,
            "Longest wait after a nack: 30s. 0: the broker's default.",
        ),
        (
            "--retry-backoff-ms",
            MILLISECONDS,
            "First wait after a nack, without a retry policy. 0: the broker's default.",
        ),
        ("--max-attempts", click.INT, "Attempts if a message sets no max_attempts. 0: no limit."),
    ):
        metavar = "DURATION" if kind is MILLISECONDS else None
        command = click.option(name, type=kind, metavar=metavar, help=text)(command)
    return command


@topic.command()
@click.argument("name")
@click.option(
    "--partitions", "-p", default=1, show_default=True, help="Partitions; each keeps its order."
)
@_after_archive_flag
@_retry_options
@json_flag
@with_scoped_client
def create(client: Client, name: str, partitions: int, as_json: bool, **settings: Any) -> None:
    """Create the topic NAME."""
    created = client.create_topic(name, partitions, **settings)
    what = "created" if created.status == "created" else "exists already:"
    text = f"{what} topic {printable(created.name)}, {_count(created.partitions, 'partition')}"
    show_result(created, text, as_json)


@topic.command("list")
@json_flag
@with_scoped_client
def list_(client: Client, as_json: bool) -> None:
    """List all topics."""
    names = client.list_topics()
    show_names("topics", names, names, as_json)


@topic.command()
@click.argument("name")
@json_flag
@with_scoped_client
def describe(client: Client, name: str, as_json: bool) -> None:
    """Show the partitions of the topic NAME, its groups and their progress."""
    found = client.describe_topic(name)
    if as_json:
        show_json(found)
        return
    show(f"topic {printable(found.name)}, {_retention(found)}{_retries(found)}\n")
    show_table(
        ("partition", " first", " next", " messages", " bytes", " unfinished"),
        [
            (
                each.partition,
                each.first_offset,
                each.next_offset,
                each.retained_msgs,
                each.retained_bytes,
                each.buffered_msgs,
            )
            for each in found.partitions
        ],
    )
    if not found.groups:
        show("\nno group has consumed from it yet")
        return
    show("")
    show_table(
        ("group", " consumers", " partition", " last acked", " in flight", " lag"),
        [
            (group.name, group.consumers, each.partition, last, each.in_flight, each.lag)
            for group in found.groups
            for each in group.partitions
            for last in ["-" if each.last_acked < 0 else each.last_acked]
        ],
    )


@topic.command()
@click.argument("name")
@click.option(
    "--time-ms", type=int, help="Also show the first offset of this time (ms since 1970)."
)
@json_flag
@with_scoped_client
def offsets(client: Client, name: str, time_ms: int | None, as_json: bool) -> None:
    """Show the first and the next offset of each partition of the topic NAME."""
    found = client.offsets(name, time_ms)
    if as_json:
        show_json({"partitions": found})
        return
    columns = ("partition", " earliest", " next", " at time")[: 3 if time_ms is None else 4]
    show_table(
        columns,
        [
            (each.partition, each.earliest, each.next, each.at_time)[: len(columns)]
            for each in found
        ],
    )


@topic.command()
@click.argument("name")
@click.option(
    "--retention-ms", type=MILLISECONDS, metavar="DURATION",
    help="How long to keep finished messages: 7d, 36h, or a number of milliseconds. 0: for ever.",
)  # fmt: skip
@click.option(
    "--retention-bytes", type=Size(), metavar="SIZE",
    help="How many bytes to keep: 1GB, 64MiB, or a number of bytes. 0: no limit.",
)  # fmt: skip
@_after_archive_flag
@_retry_options
@with_scoped_client
def configure(client: Client, name: str, **settings: Any) -> None:
    """Change how long the topic NAME keeps finished messages, and how it retries.

    A message is finished when every group has finished it.
    """
    if all(value is None for value in settings.values()):
        raise click.UsageError("give at least one setting, such as --retention-ms; see --help")
    client.configure_topic(name, **settings)
    found = client.describe_topic(name)
    show(f"topic {printable(name)}, {_retention(found)}{_retries(found)}")


@topic.command()
@click.argument("name")
@yes_flag
@with_scoped_client
def delete(client: Client, name: str, yes: bool) -> None:
    """Delete the topic NAME with its messages and groups."""
    confirm(f"Delete topic {printable(name)} with all its messages and groups?", yes)
    client.delete_topic(name)
    show(f"deleted topic {printable(name)}")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _retention(found: Topic) -> str:
    limits = []
    if found.retention_ms:
        limits.append(f"for {format_duration(found.retention_ms)}")
    if found.retention_bytes:
        limits.append(f"up to {size(found.retention_bytes)}")
    kept = "keeps finished messages " + " and ".join(limits)
    if not limits:
        kept = "keeps messages for ever"
    return f"{kept}; nothing goes before it is archived" if found.after_archive else kept


def _retries(found: Topic) -> str:
    """Describes how the topic retries messages without a retry policy; empty if it sets nothing."""
    text = ""
    if found.max_attempts:
        limit = f"gives up after {_count(found.max_attempts, 'attempt')}"
        is_dead = is_dead_letter_topic(found.name)
        text += "; ignores max_attempts, as dead-letter topics do" if is_dead else f"; {limit}"
    if found.retry_backoff_ms:
        text += f"; retries after {format_duration(found.retry_backoff_ms)}"
    if found.retry_max_backoff_ms:
        # The longest wait is never shorter than the first.
        longest_ms = max(found.retry_max_backoff_ms, found.retry_backoff_ms)
        text += f"; waits at most {format_duration(longest_ms)}"
        if not found.retry_backoff_ms:
            text += ", or the broker's first wait if that is longer"
    return text
