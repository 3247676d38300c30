"""`penstock tenant`: create, list, describe, delete."""

from __future__ import annotations

import click

from penstock.cli.connection import confirm, json_flag, with_client, yes_flag
from penstock.cli.scope import cascade_flag
from penstock.cli.terminal import printable, show, show_json, show_names, show_result
from penstock.client.sync import Client


@click.group()
def tenant() -> None:
    """Create, show and delete tenants."""


@tenant.command()
@click.argument("name")
@json_flag
@with_client
def create(client: Client, name: str, as_json: bool) -> None:
    """Create the tenant NAME. One that exists is left as it is."""
    found = client.create_tenant(name)
    show_result(found, f"tenant {printable(found.tenant_id)} is there", as_json)


@tenant.command("list")
@json_flag
@with_client
def list_(client: Client, as_json: bool) -> None:
    """List all tenants."""
    found = client.list_tenants()
    show_names("tenants", found, (each.tenant_id for each in found), as_json)


@tenant.command()
@click.argument("name")
@json_flag
@with_client
def describe(client: Client, name: str, as_json: bool) -> None:
    """Show the namespaces of the tenant NAME."""
    namespaces = client.list_namespaces(name)
    if as_json:
        show_json({"tenant_id": name, "namespaces": namespaces})
        return
    show(f"tenant {printable(name)}")
    for each in namespaces:
        show(f"  namespace {printable(each.namespace)}")


@tenant.command()
@click.argument("name")
@cascade_flag
@yes_flag
@with_client
def delete(client: Client, name: str, cascade: bool, yes: bool) -> None:
    """Delete the tenant NAME."""
    more = " with all its streams and caches" if cascade else ""
    confirm(f"Delete tenant {printable(name)}{more}?", yes)
    client.delete_tenant(name, cascade=cascade)
    show(f"deleted tenant {printable(name)}")
