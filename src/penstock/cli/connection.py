"""The broker a command speaks to: --url and --token, or their environment variables."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

from penstock.cli.terminal import Failure
from penstock.client.connection import DEFAULT_URL
from penstock.client.sync import Client
from penstock.model.errors import Unauthenticated


def with_client(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command its client as the first argument, and closes it afterwards."""

    @click.option(
        "--url", envvar="PENSTOCK_URL", default=DEFAULT_URL, show_default=True, show_envvar=True,
        help="Where the broker listens.",
    )  # fmt: skip
    @click.option(
        "--token", envvar="PENSTOCK_TOKEN", default="", show_envvar=True,
        help="The broker's bearer token, if it has one.",
    )  # fmt: skip
    @functools.wraps(command)
    def run(url: str, token: str, **arguments: Any) -> None:
        try:
            with Client(url, token=token) as client:
                command(client, **arguments)
        except Unauthenticated as error:
            cure = "this token is not the broker's" if token else "the broker wants a token"
            raise Failure(
                f"{error.code}: {cure}; give it with --token or PENSTOCK_TOKEN"
            ) from error

    return run


json_flag = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")

topic_argument = click.argument("topic")

group_option = click.option("--group", required=True, metavar="NAME", help="The consumer group.")

owner_option = click.option(
    "--owner", default="cli", show_default=True, metavar="NAME",
    help="Who consumes; the same name acks what it was given.",
)  # fmt: skip

yes_flag = click.option("--yes", "-y", is_flag=True, help="Do not ask.")


def confirm(question: str, yes: bool) -> None:
    """Ends the command unless the person agrees."""
    if not yes:
        click.confirm(question, abort=True, err=True)
