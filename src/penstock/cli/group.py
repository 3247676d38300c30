"""`penstock group`: progress, delete. `penstock topic describe` shows a topic's groups."""

from __future__ import annotations

import click

from penstock.cli.connection import confirm, json_flag, topic_argument, with_client, yes_flag
from penstock.cli.terminal import printable, show, show_json, show_table
from penstock.client.sync import Client
from penstock.model.progress import Reached


@click.group()
def group() -> None:
    """Set a consumer group's progress, or delete it."""


@group.command()
@topic_argument
@click.argument("name")
@click.argument("nexts", metavar="PARTITION=OFFSET...", nargs=-1, required=True)
@json_flag
@with_client
def progress(client: Client, topic: str, name: str, nexts: tuple[str, ...], as_json: bool) -> None:
    """Everything in TOPIC below these offsets is done for the group NAME.

    It only goes forward. Deliveries under way below them are finished, and the group is made if it
    is not there.
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
@with_client
def delete(client: Client, topic: str, name: str, yes: bool) -> None:
    """Delete the progress of the group NAME in TOPIC.

    Consuming again as this group starts at the oldest message that is kept.
    """
    confirm(f"Delete group {printable(name)} of topic {printable(topic)}?", yes)
    client.delete_group(topic, name)
    show(f"deleted group {printable(name)} of topic {printable(topic)}")


def _next_of(text: str) -> tuple[int, int]:
    partition, _, offset = text.partition("=")
    try:
        return int(partition), int(offset)
    except ValueError:
        raise click.UsageError(f"{text!r} is no PARTITION=OFFSET, such as 0=12") from None
