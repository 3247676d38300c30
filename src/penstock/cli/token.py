"""`penstock token`: create, list, rotate, revoke.

Invariant: the text of a token is printed when it is made, alone on stdout, and never again.
"""

from __future__ import annotations

from datetime import UTC, datetime

import click

from penstock.cli.connection import confirm, json_flag, with_client, yes_flag
from penstock.cli.terminal import printable, show, show_json, show_table
from penstock.cli.units import Duration
from penstock.client.results import BearerToken, NewBearerToken
from penstock.client.sync import Client


@click.group()
def token() -> None:
    """Create, show, rotate and revoke bearer tokens. Needs an admin's token, or the
    permission access in the whole tenant."""


@token.command()
@click.argument("principal")
@click.option(
    "--tenant", "tenant_id", metavar="NAME", help="The only tenant that the token may use."
)
@click.option("--namespace", metavar="NAME", help="The only namespace of the tenant.")
@click.option("--role", "roles", multiple=True, metavar="NAME", help="A role; may be repeated.")
@click.option("--admin", is_flag=True, help="It may do everything in its tenant and namespace.")
@click.option(
    "--expires-in", "expires_in_ms", type=Duration(), default=0, metavar="DURATION",
    help="How long it is valid, such as 90d.  [default: until it is revoked]",
)  # fmt: skip
@json_flag
@with_client
def create(
    client: Client,
    principal: str,
    tenant_id: str | None,
    namespace: str | None,
    roles: tuple[str, ...],
    admin: bool,
    expires_in_ms: int,
    as_json: bool,
) -> None:
    """Create a token for PRINCIPAL and print it. It is not shown again."""
    made = client.create_token(
        principal,
        tenant_id=tenant_id,
        namespace=namespace,
        roles=roles,
        admin=admin,
        expires_in_ms=expires_in_ms,
    )
    _show_new(made, as_json)


@token.command("list")
@json_flag
@with_client
def list_(client: Client, as_json: bool) -> None:
    """List the tokens, without their secrets."""
    found = client.list_tokens()
    if as_json:
        show_json({"tokens": found})
        return
    names = ("id", "principal", "tenant", "namespace", "roles", "created", "expires")
    show_table(names, [_row(each) for each in found])


@token.command()
@click.argument("token_id", metavar="ID")
@click.option(
    "--grace", "grace_ms", type=Duration(), default=0, metavar="DURATION",
    help="How long the old secret stays valid, such as 1h.  [default: no longer]",
)  # fmt: skip
@json_flag
@with_client
def rotate(client: Client, token_id: str, grace_ms: int, as_json: bool) -> None:
    """Give the token ID another secret and print it."""
    _show_new(client.rotate_token(token_id, grace_ms=grace_ms), as_json)


@token.command()
@click.argument("token_id", metavar="ID")
@yes_flag
@with_client
def revoke(client: Client, token_id: str, yes: bool) -> None:
    """End the token ID at once, and close the connections that use it."""
    confirm(f"Revoke token {printable(token_id)}?", yes)
    client.revoke_token(token_id)
    show(f"revoked token {printable(token_id)}")


def _show_new(made: NewBearerToken, as_json: bool) -> None:
    if as_json:
        show_json(made)
        return
    click.echo(f"token {made.id} for {printable(made.principal)}, shown only now:", err=True)
    show(made.token)


def _row(found: BearerToken) -> tuple[str, ...]:
    return (
        found.id,
        printable(found.principal),
        printable(found.tenant_id or "all"),
        printable(found.namespace or "all"),
        printable(", ".join(["admin"] * found.admin + list(found.roles))),
        _time(found.created_ms),
        _time(found.expires_ms) if found.expires_ms else "never",
    )


def _time(ms: int) -> str:
    moment = datetime.fromtimestamp(ms / 1000, UTC)
    return moment.isoformat(timespec="seconds").replace("+00:00", "Z")
