"""`penstock cache`: create, list, describe, change, delete."""

from __future__ import annotations

from typing import Any

import click

from penstock.cli.connection import confirm, json_flag, with_client, yes_flag
from penstock.cli.scope import (
    changes_of,
    in_namespace,
    path_text,
    show_settings,
    with_reset,
    with_settings,
)
from penstock.cli.terminal import printable, show, show_json, size
from penstock.client.sync import Client

_SETTINGS: dict[str, tuple[str, Any]] = {
    "max_entries": ("Entries it may hold; others go for a new one.", int),
    "max_bytes": ("The same in bytes: 1GB.", str),
    "eviction_policy": ("Which entry goes.", ("best_effort", "lru")),
}


@click.group()
def cache() -> None:
    """Create, look at, change and delete caches."""


@cache.command()
@click.argument("name")
@in_namespace
@with_settings(_SETTINGS)
@click.option("--durable", is_flag=True, help="Keep what is in it across restarts.")
@json_flag
@with_client
def create(
    client: Client,
    name: str,
    tenant_id: str,
    namespace: str,
    durable: bool,
    as_json: bool,
    **settings: Any,
) -> None:
    """Create the cache NAME, unless it is there with the same settings."""
    found = client.create_cache(tenant_id, namespace, name, durable=durable, **settings)
    if as_json:
        show_json(found)
    else:
        show(f"cache {path_text(tenant_id, namespace, found.name)} is there")


@cache.command("list")
@in_namespace
@json_flag
@with_client
def list_(client: Client, tenant_id: str, namespace: str, as_json: bool) -> None:
    """List a namespace's caches."""
    found = client.list_caches(tenant_id, namespace)
    if as_json:
        show_json({"caches": found})
        return
    for each in found:
        show(printable(each.name))


@cache.command()
@click.argument("name")
@in_namespace
@json_flag
@with_client
def describe(client: Client, name: str, tenant_id: str, namespace: str, as_json: bool) -> None:
    """Show every setting of NAME that is in force, and what it holds."""
    found = client.describe_cache(tenant_id, namespace, name)
    if as_json:
        show_json(found)
        return
    show_settings(found)
    show(f"\n{found.entries} entries, {size(found.bytes or 0)}")


@cache.command()
@click.argument("name")
@in_namespace
@with_settings(_SETTINGS)
@with_reset(_SETTINGS)
@json_flag
@with_client
def change(
    client: Client,
    name: str,
    tenant_id: str,
    namespace: str,
    reset: tuple[str, ...],
    as_json: bool,
    **settings: Any,
) -> None:
    """Change settings of the cache NAME."""
    changes = changes_of(settings, reset)
    found = client.change_cache(tenant_id, namespace, name, **changes)
    if as_json:
        show_json(found)
    else:
        show_settings(found)


@cache.command()
@click.argument("name")
@in_namespace
@yes_flag
@with_client
def delete(client: Client, name: str, tenant_id: str, namespace: str, yes: bool) -> None:
    """Delete the cache NAME with all that it holds; its watches end."""
    confirm(f"Delete cache {path_text(tenant_id, namespace, name)} and what it holds?", yes)
    client.delete_cache(tenant_id, namespace, name)
    show(f"deleted cache {path_text(tenant_id, namespace, name)}")
