"""`penstock namespace`: create, list, describe, delete."""

from __future__ import annotations

import click

from penstock.cli.connection import confirm, json_flag, with_client, yes_flag
from penstock.cli.scope import cascade_flag, path_text, tenant_option
from penstock.cli.terminal import printable, show, show_json, show_names, show_result
from penstock.client.sync import Client


@click.group()
def namespace() -> None:
    """Create, show and delete the namespaces of a tenant."""


@namespace.command()
@click.argument("name")
@tenant_option
@json_flag
@with_client
def create(client: Client, name: str, tenant_id: str, as_json: bool) -> None:
    """Create the namespace NAME. One that exists is left as it is."""
    found = client.create_namespace(tenant_id, name)
    show_result(found, f"namespace {path_text(found.tenant_id, found.namespace)} is there", as_json)


@namespace.command("list")
@tenant_option
@json_flag
@with_client
def list_(client: Client, tenant_id: str, as_json: bool) -> None:
    """List the namespaces of a tenant."""
    found = client.list_namespaces(tenant_id)
    show_names("namespaces", found, (each.namespace for each in found), as_json)


@namespace.command()
@click.argument("name")
@tenant_option
@json_flag
@with_client
def describe(client: Client, name: str, tenant_id: str, as_json: bool) -> None:
    """Show the streams and caches of the namespace NAME."""
    streams = [each.name for each in client.list_streams(tenant_id, name)]
    caches = [each.name for each in client.list_caches(tenant_id, name)]
    if as_json:
        names = {"tenant_id": tenant_id, "namespace": name}
        show_json(names | {"streams": streams, "caches": caches})
        return
    show(f"namespace {path_text(tenant_id, name)}")
    for kind, found in (("stream", streams), ("cache", caches)):
        for each in found:
            show(f"  {kind} {printable(each)}")


@namespace.command()
@click.argument("name")
@tenant_option
@cascade_flag
@yes_flag
@with_client
def delete(client: Client, name: str, tenant_id: str, cascade: bool, yes: bool) -> None:
    """Delete the namespace NAME."""
    more = " with all its streams and caches" if cascade else ""
    confirm(f"Delete namespace {path_text(tenant_id, name)}{more}?", yes)
    client.delete_namespace(tenant_id, name, cascade=cascade)
    show(f"deleted namespace {path_text(tenant_id, name)}")
