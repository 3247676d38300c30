"""`penstock stream`: create, list, describe, change, delete."""

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
from penstock.cli.terminal import printable, show, show_json
from penstock.client.sync import Client

_DELIVERY = {
    "delivery": ("How events are delivered.", ("at_most_once", "at_least_once", "exactly_once")),
}
_SETTINGS: dict[str, tuple[str, Any]] = {
    "retention": ("How long events are kept; refused until streams are durable.", str),
    "event_queue_depth": ("Events a subscriber may be behind before it loses the newest.", int),
    "event_queue_bytes": ("The same in bytes: 64MB.", str),
    "pub_queue_depth": ("Publishes that wait to be fanned out.", int),
    "publish_queue_wait_timeout_ms": ("How long a publish waits for its place: 2s.", str),
    "lag_alert_events": ("Raise a subscriber's alert beyond so many; 0 is never.", int),
    "disconnect_slow_ms": ("End who is too slow for so long: 30s; 0 is never.", str),
}


@click.group()
def stream() -> None:
    """Create, look at, change and delete streams."""


@stream.command()
@click.argument("name")
@in_namespace
@with_settings(_DELIVERY | _SETTINGS)
@json_flag
@with_client
def create(
    client: Client, name: str, tenant_id: str, namespace: str, as_json: bool, **settings: Any
) -> None:
    """Create the stream NAME, unless it is there with the same settings."""
    found = client.create_stream(tenant_id, namespace, name, **settings)
    if as_json:
        show_json(found)
    else:
        show(f"stream {path_text(tenant_id, namespace, found.name)} is there")


@stream.command("list")
@in_namespace
@json_flag
@with_client
def list_(client: Client, tenant_id: str, namespace: str, as_json: bool) -> None:
    """List a namespace's streams."""
    found = client.list_streams(tenant_id, namespace)
    if as_json:
        show_json({"streams": found})
        return
    for each in found:
        show(printable(each.name))


@stream.command()
@click.argument("name")
@in_namespace
@json_flag
@with_client
def describe(client: Client, name: str, tenant_id: str, namespace: str, as_json: bool) -> None:
    """Show every setting of NAME that is in force, and how many subscribe."""
    found = client.describe_stream(tenant_id, namespace, name)
    if as_json:
        show_json(found)
        return
    show_settings(found)
    show(f"\n{found.subscribers} subscribers")


@stream.command()
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
    """Change settings of the stream NAME."""
    changes = changes_of(settings, reset)
    found = client.change_stream(tenant_id, namespace, name, **changes)
    if as_json:
        show_json(found)
    else:
        show_settings(found)


@stream.command()
@click.argument("name")
@in_namespace
@yes_flag
@with_client
def delete(client: Client, name: str, tenant_id: str, namespace: str, yes: bool) -> None:
    """Delete the stream NAME; its subscriptions end."""
    confirm(f"Delete stream {path_text(tenant_id, namespace, name)}?", yes)
    client.delete_stream(tenant_id, namespace, name)
    show(f"deleted stream {path_text(tenant_id, namespace, name)}")
