"""`penstock cache`: create, list, describe, change, delete; get, put, incr, list and watch
entries."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from penstock.cli.connection import confirm, json_flag, with_client, yes_flag
from penstock.cli.entry_commands import EntryKind, add_entry_commands
from penstock.cli.feed import check_form, follow, in_form, with_end
from penstock.cli.scope import (
    FLAG,
    in_namespace,
    path_text,
    show_settings,
)
from penstock.cli.terminal import (
    CommandFailed,
    data_text,
    printable,
    show,
    show_data,
    show_json,
    show_result,
    size,
)
from penstock.cli.units import Duration
from penstock.client.sync import Client
from penstock.client.sync_handles import CacheHandle
from penstock.model.caching import WatchEvent

_LASTING = {"durable": ("Keep the entries when the broker restarts.", FLAG)}
_SETTINGS: dict[str, tuple[str, Any]] = {
    "max_entries": ("Most entries it holds; beyond that, a new entry evicts another.", int),
    "max_bytes": ("Most bytes it holds: 1GB.", str),
    "eviction_policy": ("Which entry is evicted.", ("best_effort", "lru")),
}

_cache_argument = click.argument("cache")
_key_argument = click.argument("key")
_if_version_option = click.option(
    "--if-version", type=click.IntRange(min=0), metavar="N",
    help="Only if the key still has this version. 0: only if it has no value.",
)  # fmt: skip


@click.group()
def cache() -> None:
    """Create, show, change and delete caches; use their entries."""


add_entry_commands(
    cache,
    EntryKind(
        "cache",
        _LASTING,
        _SETTINGS,
        Client.create_cache,
        Client.list_caches,
        Client.change_cache,
    ),
)


@cache.command()
@click.argument("name")
@in_namespace
@json_flag
@with_client
def describe(client: Client, name: str, tenant_id: str, namespace: str, as_json: bool) -> None:
    """Show the settings of the cache NAME that are in force, and how much it holds."""
    found = client.describe_cache(tenant_id, namespace, name)
    show_settings(found, as_json, f"{found.entries} entries, {size(found.bytes or 0)}")


@cache.command()
@click.argument("name")
@click.argument("key", required=False)
@in_namespace
@_if_version_option
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
        handle = client.cache(name, tenant_id=tenant_id, namespace=namespace)
        deleted = handle.delete(key, if_version=if_version)
        place = _place(handle, key)
        show(f"deleted {place}" if deleted else f"{place} was not there")
        return
    if if_version is not None:
        raise click.UsageError("--if-version needs a KEY")
    confirm(f"Delete cache {path_text(tenant_id, namespace, name)} and what it holds?", yes)
    client.delete_cache(tenant_id, namespace, name)
    show(f"deleted cache {path_text(tenant_id, namespace, name)}")


# -- entries ---------------------------------------------------------------------------------------


@cache.command()
@_cache_argument
@_key_argument
@in_namespace
@in_form
@with_client
def get(
    client: Client, cache: str, key: str, tenant_id: str, namespace: str, raw: bool, as_json: bool
) -> None:
    """Print the value of KEY in CACHE. Fails if there is none."""
    check_form(raw, as_json)
    handle = client.cache(cache, tenant_id=tenant_id, namespace=namespace)
    found = handle.get(key)
    if found is None:
        raise CommandFailed(f"there is nothing under {_place(handle, key)}")
    if as_json:
        members = {"key": key, "value": found.value, "version": found.version}
        show_json(members | {"ttl_ms": found.ttl_ms})
    elif raw:
        show_data(found.value)
    else:
        show(data_text(found.value))


@cache.command()
@_cache_argument
@_key_argument
@click.argument("value", required=False)
@in_namespace
@click.option("--ttl", "ttl_ms", type=Duration(), help="Expires after this time: 60s.")
@click.option("--if-not-exists", is_flag=True, help="Only if KEY has no value yet.")
@_if_version_option
@json_flag
@with_client
def put(
    client: Client,
    cache: str,
    key: str,
    value: str | None,
    tenant_id: str,
    namespace: str,
    as_json: bool,
    **conditions: Any,
) -> None:
    """Store VALUE under KEY in CACHE. If VALUE is - or missing, store all of stdin."""
    if value is None and sys.stdin.isatty():
        raise click.UsageError("give a VALUE, or - to read it from stdin")
    data = sys.stdin.buffer.read() if value in (None, "-") else os.fsencode(value)
    handle = client.cache(cache, tenant_id=tenant_id, namespace=namespace)
    version = handle.put(key, data, **conditions)
    show_result({"version": version}, f"put {_place(handle, key)}, version {version}", as_json)


@cache.command()
@_cache_argument
@_key_argument
@in_namespace
@click.option("--delta", type=int, default=1, show_default=True, help="Number to add.")
@click.option("--ttl", "ttl_ms", type=Duration(), help="Time until a new counter expires: 60s.")
@json_flag
@with_client
def incr(
    client: Client,
    cache: str,
    key: str,
    tenant_id: str,
    namespace: str,
    delta: int,
    ttl_ms: int | None,
    as_json: bool,
) -> None:
    """Add to the counter KEY in CACHE, and print its new value."""
    handle = client.cache(cache, tenant_id=tenant_id, namespace=namespace)
    number = handle.incr(key, delta, ttl_ms=ttl_ms)
    show_result({"number": number}, str(number), as_json)


@cache.command()
@_cache_argument
@in_namespace
@json_flag
@with_client
def entries(client: Client, cache: str, tenant_id: str, namespace: str, as_json: bool) -> None:
    """Print all entries of CACHE as of one moment, in no order.

    A line shows the version, the key and the value.
    """
    handle = client.cache(cache, tenant_id=tenant_id, namespace=namespace)
    with handle.entries() as found:
        for entry in found:
            if as_json:
                show_json(entry)
            else:
                show(f"{entry.version}  {printable(entry.key)}  {data_text(entry.value)}")


@cache.command()
@_cache_argument
@click.argument("key", required=False)
@in_namespace
@click.option("--prefix", help="Watch all keys that begin with this.")
@click.option(
    "--include", multiple=True, type=click.Choice(["expire", "evict"]),
    help="Also show entries that expire or are evicted. May be repeated.",
)  # fmt: skip
@click.option(
    "--since-version", type=click.IntRange(min=0), metavar="N",
    help="First show whether the cache has changed since this version.",
)  # fmt: skip
@with_end
@json_flag
@with_client
def watch(
    client: Client,
    cache: str,
    key: str | None,
    tenant_id: str,
    namespace: str,
    prefix: str | None,
    most: int | None,
    wait_s: float | None,
    as_json: bool,
    **more: Any,
) -> None:
    """Print each change of KEY in CACHE, or of every key, until Ctrl-C.

    A line shows the version, the kind of change, the key and the value.
    """
    if key is not None and prefix is not None:
        raise click.UsageError("give a KEY or --prefix, not both")
    if key is None and prefix is None:
        prefix = ""
    handle = client.cache(cache, tenant_id=tenant_id, namespace=namespace)
    feed = handle.watch(key=key, prefix=prefix, wait_s=wait_s, **more)
    follow(feed, most, wait_s, _show_json_change if as_json else _show_change)


def _show_change(event: WatchEvent) -> None:
    if event.event == "gap":
        show(f"{event.version}  gap  changes after version {event.from_version} may be missing")
        return
    value = "" if event.value is None else f"  {data_text(event.value)}"
    show(f"{event.version}  {event.event}  {printable(event.key)}{value}")


def _show_json_change(event: WatchEvent) -> None:
    members = {"event": event.event, "version": event.version}
    if event.event == "gap":
        show_json(members | {"from_version": event.from_version})
    else:
        show_json(members | {"key": event.key, "value": event.value})


def _place(handle: CacheHandle, key: str) -> str:
    return f"{printable(key)} in cache {path_text(*handle.path)}"
