"""`penstock group`: progress, delete. `penstock topic describe` shows the groups of a topic."""

from __future__ import annotations

import click

from penstock.cli.connection import confirm, json_flag, topic_argument, with_scoped_client, yes_flag
from penstock.cli.terminal import printable, show, show_json, show_table
from penstock.client.sync import Client
from penstock.model.progress import Reached


@click.group()
def group() -> None:
    """Set the progress of a consumer group, or delete the group."""


@group.command()
@topic_argument
@click.argument("name")
@click.argument("nexts", metavar="PARTITION=OFFSET...", nargs=-1, required=True)
@json_flag
@with_scoped_client
def progress(client: Client, topic: str, name: str, nexts: tuple[str, ...], as_json: bool) -> None:
    """Mark everything in TOPIC below these offsets as finished for the group NAME.

    Progress never goes back. Deliveries in flight below the offsets count as finished. A group that
    does not exist is created.
    """
    reached = client.set_progress(topic, name, dict(map(_next_of, nexts)))
    if as_json:
        show_json({"partitions": [Reached(*each) for each in reached.items()]})
    else:
        show_table(("partition", " next"), reached.items())


@group.command()
@topic_argument
@click.argument("name")
@yes_flag
@with_scoped_client
def delete(client: Client, topic: str, name: str, yes: bool) -> None:
    """Delete the group NAME of TOPIC and its progress.

    If it consumes again, it starts at the oldest message that is kept.
    """
    confirm(f"Delete group {printable(name)} of topic {printable(topic)}?", yes)
    client.delete_group(topic, name)
    show(f"deleted group {printable(name)} of topic {printable(topic)}")


def _next_of(text: str) -> tuple[int, int]:
    partition, _, offset = text.partition("=")
    try:
        return int(partition), int(offset)
    except ValueError:
        raise click.UsageError(f"{text!r} is not PARTITION=OFFSET, such as 0=12") from None
