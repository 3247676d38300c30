"""The commands on one delivery: `penstock ack`, `nack`, `release` and `extend`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

from penstock.cli.connection import group_option, owner_option, topic_argument, with_scoped_client
from penstock.cli.terminal import printable, show
from penstock.cli.units import MILLISECONDS
from penstock.client.deliveries import DEFAULT_LEASE_MS, DeliveryRef
from penstock.client.sync import Client
from penstock.model.names import dead_letter_topic


def _of_delivery(command: Callable[..., None]) -> Callable[..., None]:
    """Passes the command the client and the delivery that its options name."""

    @topic_argument
    @group_option
    @click.option("--offset", type=int, required=True, help="Offset that `consume` printed.")
    @click.option(
        "--partition", type=int, default=0, show_default=True, help="Partition of the message."
    )
    @owner_option
    @click.option("--delivery-id", default="", help="Only this delivery, not a later one.")
    @with_scoped_client
    @functools.wraps(command)
    def run(client: Client, **arguments: Any) -> None:
        names = {name: arguments.pop(name) for name in DeliveryRef.__struct_fields__}
        command(client, DeliveryRef(**names), **arguments)

    return run


@click.command()
@_of_delivery
def ack(client: Client, delivery: DeliveryRef) -> None:
    """Ack a message of TOPIC: the group has finished it."""
    client.ack(delivery)
    show(f"acked {_place(delivery)}")


@click.command()
@click.option("--reason", default="", help="Why it failed. The next delivery shows it.")
@click.option(
    "--delay-ms", type=MILLISECONDS, metavar="DURATION",
    help="Time until the next delivery: 2s, 5m, or a number of milliseconds. 0: at once.",
)  # fmt: skip
@click.option("--dead", is_flag=True, help="Move the message to the dead letters instead.")
@_of_delivery
def nack(
    client: Client, delivery: DeliveryRef, reason: str, delay_ms: int | None, dead: bool
) -> None:
    """Report that handling a message of TOPIC failed.

    The message is delivered again, or moved to the dead letters, as its retry policy says.
    """
    client.nack(delivery, reason, delay_ms=delay_ms, dead=dead)
    moved = f"; it goes to {printable(dead_letter_topic(delivery.topic))}" if dead else ""
    show(f"nacked {_place(delivery)}{moved}")


@click.command()
@_of_delivery
def release(client: Client, delivery: DeliveryRef) -> None:
    """Give back a message of TOPIC that you did not begin to handle.

    It is delivered again at once, and the attempt does not count.
    """
    client.release(delivery)
    show(f"released {_place(delivery)}")


@click.command()
@click.option(
    "--lease-ms", type=MILLISECONDS, metavar="DURATION", default=DEFAULT_LEASE_MS,
    show_default=True, help="Lease from now on: 30s, 5m, or a number of milliseconds.",
)  # fmt: skip
@_of_delivery
def extend(client: Client, delivery: DeliveryRef, lease_ms: int) -> None:
    """Extend the lease on a message of TOPIC."""
    client.extend(delivery, lease_ms)
    show(f"extended {_place(delivery)}: the lease ends {lease_ms} ms from now")


def _place(delivery: DeliveryRef) -> str:
    topic, group = printable(delivery.topic), printable(delivery.group)
    return f"{topic} {delivery.partition}:{delivery.offset} for group {group}"
