"""`penstock version`: the version of this command or of a broker."""

from __future__ import annotations

import platform

import click

from penstock import __version__
from penstock.cli.connection import json_flag, with_client
from penstock.cli.terminal import printable, show_result
from penstock.client.sync import Client


@click.command()
@click.option("--broker", is_flag=True, help="Show the broker's version and durability.")
@json_flag
@with_client
def version(client: Client, broker: bool, as_json: bool) -> None:
    """Show the version of this command, or of a running broker."""
    if not broker:
        mine = {"version": __version__, "python": platform.python_version()}
        show_result(mine, f"penstock {__version__} on Python {mine['python']}", as_json)
        return
    found = client.version()
    name = printable(f"penstock {found.version} ({found.commit}) at {client.url}")
    show_result(found, f"{name}\n{printable(f'durability: {found.durability}')}", as_json)
