"""`penstock stream`: create, list, describe, offsets, change, delete; its subscriptions."""

from __future__ import annotations

from typing import Any

import click

from penstock.cli.connection import confirm, json_flag, with_client, yes_flag
from penstock.cli.entry_commands import EntryKind, add_entry_commands
from penstock.cli.scope import (
    FLAG,
    in_namespace,
    path_text,
    show_settings,
)
from penstock.cli.stream_delivery import ack, extend, nack, release
from penstock.cli.terminal import (
    printable,
    show,
    show_json,
    show_table,
)
from penstock.cli.units import MILLISECONDS, Duration
from penstock.client.results import StreamSubscriptions
from penstock.client.sync import Client

_DELIVERY = {
    "delivery": ("Delivery guarantee.", ("at_most_once", "at_least_once", "exactly_once")),
    "durable": ("Keep events on disk; at_least_once and exactly_once always do.", FLAG),
}
_SETTINGS: dict[str, tuple[str, Any]] = {
    "retention": ("How long a durable stream keeps events: 7d, 12h; 0: no limit.", Duration()),
    "retention_bytes": ("How many bytes of events a durable stream keeps: 10GB.", str),
    "event_queue_depth": ("Most unread events of a subscriber; newer ones are dropped.", int),
    "event_queue_bytes": ("Most unread bytes of a subscriber: 64MB.", str),
    "pub_queue_depth": ("Most publishes that wait to be sent to the subscribers.", int),
    "publish_queue_wait_timeout_ms": (
        "Longest wait of a publish if the queue is full: 2s, or a number of milliseconds.",
        MILLISECONDS,
    ),
    "lag_alert_events": ("Alert when a subscriber is this many events behind; 0: never.", int),
    "disconnect_slow_ms": (
        "Disconnect subscribers that are slow this long: 30s, or milliseconds; 0: never.",
        MILLISECONDS,
    ),
}


@click.group()
def stream() -> None:
    """Create, show, change and delete streams."""


add_entry_commands(
    stream,
    EntryKind(
        "stream",
        _DELIVERY,
        _SETTINGS,
        Client.create_stream,
        Client.list_streams,
        Client.change_stream,
    ),
)


@stream.command()
@click.argument("name")
@in_namespace
@json_flag
@with_client
def describe(client: Client, name: str, tenant_id: str, namespace: str, as_json: bool) -> None:
    """Show the settings of the stream NAME that are in force, its subscribers and its offsets."""
    found = client.describe_stream(tenant_id, namespace, name)
    more = f"{found.subscribers} subscribers without a name"
    if found.durable and not as_json:
        handle = client.stream(name, tenant_id=tenant_id, namespace=namespace)
        more = f"id {handle.offsets().stream_id}, {_progress(more, handle.subscriptions())}"
    show_settings(found, as_json, more)


def _progress(live: str, found: StreamSubscriptions) -> str:
    """Returns what a durable stream keeps, and how far its named subscriptions are behind."""
    lines = [
        f"keeps offsets {found.first_offset} to before {found.next_offset}",
        f"{live}, {len(found.named)} named subscriptions",
    ]
    lines += [
        f"{printable(each.name)}: {each.messages_behind} behind, {each.unacked} unacked, "
        f"{each.subscribers} subscribers, next offset {each.next_offset}"
        for each in found.named
    ]
    return "\n".join(lines)


@stream.command()
@click.argument("name")
@in_namespace
@click.option(
    "--time-ms", type=int, help="Also show the first offset of this time (ms since 1970)."
)
@json_flag
@with_client
def offsets(
    client: Client,
    name: str,
    tenant_id: str,
    namespace: str,
    time_ms: int | None,
    as_json: bool,
) -> None:
    """Show the first and the next offset of the durable stream NAME."""
    found = client.stream(name, tenant_id=tenant_id, namespace=namespace).offsets(time_ms)
    if as_json:
        show_json(found)
        return
    columns = (" earliest", " next", " at time")[: 2 if time_ms is None else 3]
    show_table(columns, [(found.earliest, found.next, found.at_time)[: len(columns)]])


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


@stream.command("subscriptions")
@click.argument("name")
@in_namespace
@json_flag
@with_client
def subscriptions(client: Client, name: str, tenant_id: str, namespace: str, as_json: bool) -> None:
    """List the subscriptions of the stream NAME, and how many events each is behind.

    One without a name has no position of its own: it lasts as long as its connection.
    """
    found = client.stream(name, tenant_id=tenant_id, namespace=namespace).subscriptions()
    if as_json:
        show_json(found)
        return
    rows: list[tuple[object, ...]] = [
        (each.name, each.subscribers, each.next_offset, each.unacked, each.messages_behind)
        for each in found.named
    ]
    rows += [(f"({each.subscription_id})", 1, "", "", each.messages_behind) for each in found]
    show_table(("subscription", " subscribers", " next", " unacked", " behind"), rows)


@stream.command()
@click.argument("name")
@click.argument("subscription")
@in_namespace
@yes_flag
@with_client
def unsubscribe(
    client: Client, name: str, subscription: str, tenant_id: str, namespace: str, yes: bool
) -> None:
    """Delete the named SUBSCRIPTION of the stream NAME, and its position.

    Do this with one that nobody uses any more: retention waits for it. Who joins it again begins at
    the newest event.
    """
    place = f"{printable(subscription)} of stream {path_text(tenant_id, namespace, name)}"
    confirm(f"Delete subscription {place}?", yes)
    handle = client.stream(name, tenant_id=tenant_id, namespace=namespace)
    handle.delete_subscription(subscription)
    show(f"deleted subscription {place}")


for command in (ack, nack, release, extend):
    stream.add_command(command)
