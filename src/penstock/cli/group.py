"""`penstock group`: delete. Consuming makes a group; `penstock topic describe` shows it."""

from __future__ import annotations

import click

from penstock.cli.connection import confirm, topic_argument, with_client, yes_flag
from penstock.cli.terminal import printable, show
from penstock.client.sync import Client


@click.group()
def group() -> None:
    """Delete a consumer group."""


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
