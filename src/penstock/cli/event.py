"""`penstock publish` and `penstock subscribe`: events by hand or through a pipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import click

from penstock.cli.connection import json_flag, with_client
from penstock.cli.feed import check_form, follow, in_form, with_end
from penstock.cli.scope import in_namespace, path_text
from penstock.cli.stdin import batches_of_lines
from penstock.cli.terminal import CommandFailed, data_text, show, show_data, show_json, show_result
from penstock.cli.units import MILLISECONDS
from penstock.client.deliveries import DEFAULT_LEASE_MS
from penstock.client.sync import Client
from penstock.client.sync_events import StreamEvent
from penstock.model.errors import PenstockError
from penstock.model.limits import MAX_BATCH_ITEMS


@click.command()
@click.argument("stream")
@click.argument("payloads", metavar="[PAYLOAD]...", nargs=-1)
@in_namespace
@click.option("--batch", is_flag=True, help="Publish all payloads in one step, or none of them.")
@click.option(
    "--invalidate", multiple=True, metavar="cache:CACHE:KEY",
    help="Also remove this key from its cache, in the same step. May be repeated.",
)  # fmt: skip
@click.option(
    "--producer-id", metavar="NAME",
    help="Name of this producer, which numbers its publishes. exactly_once streams need it.",
)  # fmt: skip
@click.option(
    "--sequence", type=click.IntRange(min=0),
    help="Number of the first publish; 0 for a new producer. Each next one has one more.",
)  # fmt: skip
@json_flag
@with_client
def publish(
    client: Client,
    stream: str,
    payloads: tuple[str, ...],
    tenant_id: str,
    namespace: str,
    batch: bool,
    invalidate: tuple[str, ...],
    producer_id: str | None,
    sequence: int | None,
    as_json: bool,
) -> None:
    """Publish each PAYLOAD to STREAM. If it is - or missing, publish each line of stdin.

    Only those who subscribe at that moment get the event, unless the stream is durable.
    """
    if not payloads and sys.stdin.isatty():
        raise click.UsageError("give a PAYLOAD, or - to read lines from stdin")
    handle = client.stream(stream, tenant_id=tenant_id, namespace=namespace)
    count = 0
    numbers: dict[str, Any] = {"producer_id": producer_id, "sequence": sequence}
    for events in _steps(payloads, batch):
        try:
            handle.publish_batch(events, invalidate=invalidate, **numbers)
        except PenstockError as error:
            if not count:
                raise
            text = f"{error.code}: {error.message}; {_events(count)} published before"
            raise CommandFailed(text) from error
        count += len(events)
        if sequence is not None:
            numbers["sequence"] += 1
    show_result(
        {"count": count},
        f"published {_events(count)} to {path_text(tenant_id, namespace, stream)}",
        as_json,
    )


def _steps(payloads: tuple[str, ...], batch: bool) -> Iterator[list[bytes]]:
    """Yields the events that are published together."""
    steps: Iterator[list[bytes]]
    if payloads in ((), ("-",)):
        steps = ([line for line in lines if line.strip()] for lines in batches_of_lines())
    else:
        steps = ([os.fsencode(payload)] for payload in payloads)
    if batch:
        steps = iter([_joined(steps)])
    return (step for step in steps if step)


def _joined(steps: Iterator[list[bytes]]) -> list[bytes]:
    events: list[bytes] = []
    for step in steps:
        events += step
        if len(events) > MAX_BATCH_ITEMS:
            raise click.UsageError(f"a batch has at most {MAX_BATCH_ITEMS} events")
    return events


def _events(count: int) -> str:
    return f"{count} {'event' if count == 1 else 'events'}"


@click.command()
@click.argument("stream")
@in_namespace
@click.option(
    "--name", metavar="NAME",
    help="Join the subscription NAME of a durable stream. Each event is acked when it is printed.",
)  # fmt: skip
@click.option(
    "--start", metavar="WHERE",
    help="Begin here in a durable stream: latest, earliest, an offset or a time.",
)  # fmt: skip
@click.option(
    "--stream-id", type=click.IntRange(min=0),
    help="With --start or --name: fail if STREAM has another id, because it was created again. "
    "--json and `stream describe` show the id.",
)  # fmt: skip
@click.option("--no-ack", is_flag=True, help="Do not ack; `penstock stream ack` does it by hand.")
@click.option(
    "--owner", metavar="NAME",
    help="Name of the subscriber, which acks by hand need. It needs --name.  [default with "
    "--no-ack: cli]",
)  # fmt: skip
@click.option(
    "--lease-ms", type=MILLISECONDS, metavar="DURATION", default=DEFAULT_LEASE_MS,
    show_default=True,
    help="How long an event is reserved for you: 30s, 5m, or a number of milliseconds.",
)  # fmt: skip
@with_end
@in_form
@with_client
def subscribe(
    client: Client,
    stream: str,
    tenant_id: str,
    namespace: str,
    name: str | None,
    start: str | None,
    stream_id: int | None,
    no_ack: bool,
    owner: str | None,
    lease_ms: int,
    most: int | None,
    wait_s: float | None,
    raw: bool,
    as_json: bool,
) -> None:
    """Print each new event of STREAM on a line, until Ctrl-C.

    If the connection is lost, the command ends with an error. Events that are published until you
    start it again are not shown, unless the stream is durable and you give --name or --start.
    """
    check_form(raw, as_json)
    if name is None and (no_ack or owner or lease_ms != DEFAULT_LEASE_MS):
        raise click.UsageError("--no-ack, --owner and --lease-ms need --name: its events are acked")
    handle = client.stream(stream, tenant_id=tenant_id, namespace=namespace)

    def show_payload(payload: bytes, **more: Any) -> None:
        if as_json:
            show_json(more | {"payload": payload})
        elif raw:
            show_data(payload + b"\n")
        else:
            show(data_text(payload))

    if name is None and start is None:
        if stream_id is not None:
            raise click.UsageError("--stream-id needs --start or --name")
        plain = handle.subscribe(wait_s=wait_s)

        def show_event(payload: bytes) -> None:
            show_payload(payload, subscription_id=plain.subscription_id)

        follow(plain, most, wait_s, show_event)
        return
    events = handle.events(
        name=name,
        start=start,
        owner=owner or ("cli" if no_ack else None),
        lease_ms=lease_ms,
        # Takes only events that will be printed: others may want the rest.
        prefetch=(most or 0) if no_ack else 0,
        wait_s=wait_s,
        stream_id=stream_id,
    )

    def show_and_ack(event: StreamEvent) -> None:
        if no_ack:
            _show_delivery(event, raw, as_json)
            return
        show_payload(event.payload, offset=event.offset, stream_id=events.stream_id)
        if name is not None:
            event.ack()

    follow(events, most, wait_s, show_and_ack)


def _show_delivery(event: StreamEvent, raw: bool, as_json: bool) -> None:
    """Shows an event with what an ack by hand needs."""
    ref = event.ref
    if as_json:
        numbers = {"offset": event.offset, "attempt": event.attempt}
        show_json(
            numbers
            | {"owner": ref.owner, "delivery_id": ref.delivery_id}
            | {"last_error": event.last_error, "payload": event.payload}
        )
    elif raw:
        show_data(event.payload + b"\n")
    else:
        show(f"{event.offset}  {data_text(event.payload)}")
