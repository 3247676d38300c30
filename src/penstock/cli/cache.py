"""`penstock cache`: create, list, describe, change, delete. Commands on entries are in `entry`."""

from __future__ import annotations

from typing import Any

import click

from penstock.cli.connection import confirm, json_flag, with_client, yes_flag
from penstock.cli.entry import delete_key, get, if_version_option, incr, put, watch
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
    "max_entries": ("Most entries it holds; beyond that, a new entry evicts another.", int),
    "max_bytes": ("Most bytes it holds: 1GB.", str),
    "eviction_policy": ("Which entry is evicted.", ("best_effort", "lru")),
}


@click.group()
def cache() -> None:
    """Create, show, change and delete caches; use their entries."""


@cache.command()
@click.argument("name")
@in_namespace
@with_settings(_SETTINGS)
@click.option("--durable", is_flag=True, help="Keep the entries when the broker restarts.")
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
    """Create the cache NAME. One that exists with the same settings is left as it is."""
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
    """List the caches of a namespace."""
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
    """Show the settings of the cache NAME that are in force, and how much it holds."""
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
@click.argument("key", required=False)
@in_namespace
@if_version_option
@yes_flag
@with_client
def delete(
    client: Client,
    name: str,
    key: str | None,
    tenant_id: str,
    namespace: str,
    if_version: int | None,
    yes: bool,
) -> None:
    """Delete KEY from the cache NAME or, without a KEY, the whole cache.

    Only deleting a whole cache asks for confirmation, so that a script with an empty KEY variable
    deletes nothing.
    """
    if key is not None:
        if yes:
            raise click.UsageError("--yes is for a whole cache; deleting a KEY does not ask")
        delete_key(client.cache(name, tenant_id=tenant_id, namespace=namespace), key, if_version)
        return
    if if_version is not None:
        raise click.UsageError("--if-version needs a KEY")
    confirm(f"Delete cache {path_text(tenant_id, namespace, name)} and what it holds?", yes)
    client.delete_cache(tenant_id, namespace, name)
    show(f"deleted cache {path_text(tenant_id, namespace, name)}")


for command in (get, put, incr, watch):
    cache.add_command(command)
