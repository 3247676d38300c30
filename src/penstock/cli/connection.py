"""The broker that a command talks to: --url, --token and --token-file, or the environment.

Invariant: an option wins over the environment. In the environment the token file wins over the
token, as in the SDK.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

from penstock.cli.terminal import CommandFailed
from penstock.client.credentials import DEFAULT_URL, Credentials, Token, read_token_file
from penstock.client.sync import Client
from penstock.model.errors import Unauthenticated


def with_token(command: Callable[..., None]) -> Callable[..., None]:
    """Adds --token and --token-file, and passes the command `token`: the option's value, or None,
    with which a client reads the environment."""

    @click.option(
        "--token", default=None, help="The broker's bearer token.  [env var: PENSTOCK_TOKEN]"
    )
    @click.option(
        "--token-file", default=None, metavar="FILE",
        help="File that holds the token.  [env var: PENSTOCK_TOKEN_FILE, wins over PENSTOCK_TOKEN]",
    )  # fmt: skip
    @functools.wraps(command)
    def run(*args: Any, token: str | None, token_file: str | None, **arguments: Any) -> None:
        source: Token | None = token
        if token_file is not None:
            if token is not None:
                raise click.UsageError("give --token or --token-file, not both")
            source = functools.partial(read_token_file, token_file, "--token-file")
        command(*args, token=source, **arguments)

    return run


def with_client(command: Callable[..., None]) -> Callable[..., None]:
    """Passes the command a client as its first argument, and closes it afterwards."""

    @click.option(
        "--url", envvar="PENSTOCK_URL", default=DEFAULT_URL, show_default=True, show_envvar=True,
        help="Address of the broker.",
    )  # fmt: skip
    @with_token
    @functools.wraps(command)
    def run(url: str, token: Token | None, **arguments: Any) -> None:
        try:
            with Client(url, token=token) as client:
                command(client, **arguments)
        except Unauthenticated as error:
            is_given = Credentials(token).token != ""
            cure = "this token is not the broker's" if is_given else "the broker wants a token"
            raise CommandFailed(
                f"{error.code}: {cure}; give it with --token or --token-file, PENSTOCK_TOKEN or "
                "PENSTOCK_TOKEN_FILE"
            ) from error

    return run


json_flag = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")

topic_argument = click.argument("topic")

group_option = click.option("--group", required=True, metavar="NAME", help="The consumer group.")

owner_option = click.option(
    "--owner", default="cli", show_default=True, metavar="NAME",
    help="Name of the consumer. Use the same name to ack.",
)  # fmt: skip

yes_flag = click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation.")


def confirm(question: str, yes: bool) -> None:
    """Asks the question and ends the command unless the answer is yes."""
    if not yes:
        click.confirm(question, abort=True, err=True)
