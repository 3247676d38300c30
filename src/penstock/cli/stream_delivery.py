"""The commands on one event of a named subscription: `penstock stream ack`, `nack`, `release` and
`extend`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

from penstock.cli.connection import owner_option, with_client
from penstock.cli.scope import in_namespace, path_text
from penstock.cli.terminal import printable, show
from penstock.cli.units import MILLISECONDS
from penstock.client import streams
from penstock.client.deliveries import DEFAULT_LEASE_MS
from penstock.client.feeds import EventRef
from penstock.client.sync import Client


def _of_event(command: Callable[..., None]) -> Callable[..., None]:
    """Passes the command the client and the event that its options name."""

    @click.argument("stream")
    @click.argument("subscription")
    @click.option(
        "--offset", type=int, required=True, help="Offset that `penstock subscribe` printed."
    )
    @owner_option
    @click.option("--delivery-id", default="", help="Only this delivery, not a later one.")
    @in_namespace
    @with_client
    @functools.wraps(command)
    def run(
        client: Client,
        stream: str,
        subscription: str,
        offset: int,
        owner: str,
        delivery_id: str,
        tenant_id: str,
        namespace: str,
        **arguments: Any,
    ) -> None:
        ref = EventRef(
            stream=(tenant_id, namespace, stream),
            offset=offset,
            name=subscription,
            owner=owner,
            delivery_id=delivery_id,
        )
        command(client, ref, **arguments)

    return run


@click.command()
@_of_event
def ack(client: Client, event: EventRef) -> None:
    """Ack an event of STREAM: the named SUBSCRIPTION has finished it."""
    client.send(streams.ack_event(event))
    show(f"acked {_place(event)}")


@click.command()
@click.option("--reason", default="", help="Why it failed. The next delivery shows it.")
@click.option(
    "--delay-ms", type=MILLISECONDS, metavar="DURATION",
    help="Time until the next delivery: 2s, 5m, or a number of milliseconds. 0: at once.",
)  # fmt: skip
@_of_event
def nack(client: Client, event: EventRef, reason: str, delay_ms: int | None) -> None:
    """Report that handling an event of STREAM failed. It is delivered again."""
    client.send(streams.nack_event(event, reason, delay_ms=delay_ms))
    show(f"nacked {_place(event)}")


@click.command()
@_of_event
def release(client: Client, event: EventRef) -> None:
    """Give back an event of STREAM that you did not begin to handle.

    It is delivered again at once, and the attempt does not count.
    """
    client.send(streams.release_event(event))
    show(f"released {_place(event)}")


@click.command()
@click.option(
    "--lease-ms", type=MILLISECONDS, metavar="DURATION", default=DEFAULT_LEASE_MS,
    show_default=True, help="Lease from now on: 30s, 5m, or a number of milliseconds.",
)  # fmt: skip
@_of_event
def extend(client: Client, event: EventRef, lease_ms: int) -> None:
    """Extend the lease on an event of STREAM."""
    client.send(streams.extend_event(event, lease_ms))
    show(f"extended {_place(event)}: the lease ends {lease_ms} ms from now")


def _place(event: EventRef) -> str:
    return f"offset {event.offset} of {path_text(*event.stream)} for {printable(event.name)}"
