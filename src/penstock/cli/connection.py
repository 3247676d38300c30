"""The broker that a command talks to: its address, and what shows who we are.

--url, --token, --token-file, --client-cert and --client-key, or the environment.

Invariant: an option wins over the environment. In the environment the token file wins over the
token, as in the SDK.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

from penstock.cli.scope import scope_options
from penstock.cli.terminal import CommandFailed
from penstock.client.credentials import DEFAULT_URL, Credentials, Token, read_token_file
from penstock.client.sync import Client
from penstock.model.errors import NotFound, Unauthenticated
from penstock.model.tenancy import DEFAULT


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


def with_scoped_client(command: Callable[..., None]) -> Callable[..., None]:
    """Does the same as `with_client`, for commands on topics: adds --tenant and --namespace, which
    the client sends with every request."""
    found = with_client(command)
    for option in reversed(scope_options):
        found = option(found)
    return found


def with_client(command: Callable[..., None]) -> Callable[..., None]:
    """Passes the command a client as its first argument, and closes it afterwards."""

    @click.option(
        "--url", envvar="PENSTOCK_URL", default=DEFAULT_URL, show_default=True, show_envvar=True,
        help="Address of the broker.",
    )  # fmt: skip
    @click.option(
        "--client-cert",
        envvar="PENSTOCK_CLIENT_CERT",
        default=None,
        metavar="FILE",
        help="Certificate to show to a broker that asks for one.",
        show_envvar=True,
    )
    @click.option(
        "--client-key", envvar="PENSTOCK_CLIENT_KEY", default=None, metavar="FILE",
        help="Private key of --client-cert.", show_envvar=True,
    )  # fmt: skip
    @with_token
    @functools.wraps(command)
    def run(
        url: str,
        token: Token | None,
        client_cert: str | None,
        client_key: str | None,
        scope_tenant: str | None = None,
        scope_namespace: str | None = None,
        **arguments: Any,
    ) -> None:
        # Commands on streams and caches name their tenant and namespace in the path.
        tenant, namespace = scope_tenant or "", scope_namespace or ""
        try:
            with Client(
                url,
                token=token,
                tenant=tenant,
                namespace=namespace,
                client_cert=client_cert,
                client_key=client_key,
            ) as client:
                if "own_tenant" in arguments or "own_namespace" in arguments:
                    _add_scope(client, arguments, is_known=_is_known(token, client_cert))
                command(client, **arguments)
        except Unauthenticated as error:
            is_given = Credentials(token).token != ""
            cure = error.message if is_given else "the broker wants a token"
            raise CommandFailed(
                f"{error.code}: {cure}; give it with --token or --token-file, PENSTOCK_TOKEN or "
                "PENSTOCK_TOKEN_FILE"
            ) from error

    return run


def _is_known(token: Token | None, client_cert: str | None) -> bool:
    """Returns whether the command shows the broker who sends it."""
    return bool(client_cert) or Credentials(token).token != ""


def _add_scope(client: Client, arguments: dict[str, Any], *, is_known: bool) -> None:
    """Replaces the options --tenant and --namespace with what the command takes. Without them a
    command is about the tenant and namespace of the credential, as requests on topics are."""
    wanted = {"own_tenant": "tenant_id", "own_namespace": "namespace"}
    given = {name: arguments.pop(name) for name in wanted if name in arguments}
    own = {"own_tenant": DEFAULT, "own_namespace": DEFAULT}
    if is_known and None in given.values():
        try:
            found = client.who_am_i()
            own = {"own_tenant": found.tenant_id, "own_namespace": found.namespace}
        except NotFound:
            pass  # An older broker does not say.
    for name, value in given.items():
        arguments[wanted[name]] = own[name] if value is None else value


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
