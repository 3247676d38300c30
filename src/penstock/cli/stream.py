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
from penstock.cli.terminal import show, show_names, show_result
from penstock.client.sync import Client

_DELIVERY = {
    "delivery": ("Delivery guarantee.", ("at_most_once", "at_least_once", "exactly_once")),
    "durable": ("Keep events on disk; at_least_once and exactly_once always do.", bool),
}
_SETTINGS: dict[str, tuple[str, Any]] = {
    "retention": ("How long a durable stream keeps events: 7d; 0: no limit.", str),
    "retention_bytes": ("How many bytes of events a durable stream keeps: 10GB.", str),
    "event_queue_depth": ("Most unread events of a subscriber; newer ones are dropped.", int),
    "event_queue_bytes": ("Most unread bytes of a subscriber: 64MB.", str),
    "pub_queue_depth": ("Most publishes that wait to be sent to the subscribers.", int),
    "publish_queue_wait_timeout_ms": ("Longest wait of a publish if the queue is full: 2s.", str),
    "lag_alert_events": ("Alert when a subscriber is this many events behind; 0: never.", int),
    "disconnect_slow_ms": ("Disconnect subscribers that are slow this long: 30s; 0: never.", str),
}


@click.group()
def stream() -> None:
    """Create, show, change and delete streams."""


@stream.command()
@click.argument("name")
@in_namespace
@with_settings(_DELIVERY | _SETTINGS)
@json_flag
@with_client
def create(
    client: Client, name: str, tenant_id: str, namespace: str, as_json: bool, **settings: Any
) -> None:
    """Create the stream NAME. One that exists with the same settings is left as it is."""
    found = client.create_stream(tenant_id, namespace, name, **settings)
    show_result(found, f"stream {path_text(tenant_id, namespace, found.name)} is there", as_json)


@stream.command("list")
@in_namespace
@json_flag
@with_client
def list_(client: Client, tenant_id: str, namespace: str, as_json: bool) -> None:
    """List the streams of a namespace."""
    found = client.list_streams(tenant_id, namespace)
    show_names("streams", found, (each.name for each in found), as_json)


@stream.command()
@click.argument("name")
@in_namespace
@json_flag
@with_client
def describe(client: Client, name: str, tenant_id: str, namespace: str, as_json: bool) -> None:
    """Show the settings of the stream NAME that are in force, and its number of subscribers."""
    found = client.describe_stream(tenant_id, namespace, name)
    show_settings(found, as_json, f"{found.subscribers} subscribers")


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
    show_settings(client.change_stream(tenant_id, namespace, name, **changes), as_json)


@stream.command()
@click.argument("name")
@in_namespace
@yes_flag
@with_client
def delete(client: Client, name: str, tenant_id: str, namespace: str, yes: bool) -> None:
    """Delete the stream NAME and end its subscriptions."""
    confirm(f"Delete stream {path_text(tenant_id, namespace, name)}?", yes)
    client.delete_stream(tenant_id, namespace, name)
    show(f"deleted stream {path_text(tenant_id, namespace, name)}")
