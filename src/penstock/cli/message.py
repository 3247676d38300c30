"""`penstock produce` and `penstock consume`: messages by hand or through a pipe."""

from __future__ import annotations

import sys
from typing import Any

import click
from msgspec import UNSET

from penstock.cli.connection import (
    group_option,
    json_flag,
    owner_option,
    topic_argument,
    with_scoped_client,
)
from penstock.cli.feed import with_end
from penstock.cli.stdin import batches_of_lines, text_of
from penstock.cli.terminal import CommandFailed, hint, printable, show, show_json
from penstock.cli.units import MILLISECONDS
from penstock.client.deliveries import DEFAULT_LEASE_MS, Delivery
from penstock.client.requests import NewMessage
from penstock.client.results import Produced
from penstock.client.sync import Client
from penstock.model.envelope import Envelope, RetryPolicy, Routing
from penstock.model.errors import PenstockError
from penstock.model.item import Item


@click.command()
@topic_argument
@click.argument("value", required=False)
@click.option("--key", default="", help="Messages with the same key go to the same partition.")
@click.option("--run-id", default="", help="Workflow run that the message belongs to.")
@click.option("--step-id", default="", help="Step of the run.")
@click.option("--parent-step-id", default="", help="Step that caused this one.")
@click.option("--tenant-id", default="", help="Tenant. Each has its own idempotency keys.")
@click.option("--idempotency-key", default="", help="Store only the first message with this key.")
@click.option("--target-topic", default="", help="Store it in this topic instead.")
@click.option("--partition-override", type=int, default=None, help="Store it in this partition.")
@click.option("--deadline", default="", help="Refuse to store it after this RFC 3339 time.")
@click.option(
    "--retry-max-attempts", type=int, default=0, help="Attempts until it is dead-lettered."
)
@click.option(
    "--retry-backoff-ms", type=MILLISECONDS, metavar="DURATION", default=0,
    help="Wait before the first retry: 250ms, 1s, or a number of milliseconds.",
)  # fmt: skip
@click.option(
    "--retry-max-backoff-ms", type=MILLISECONDS, metavar="DURATION", default=0,
    help="Longest wait between retries.",
)  # fmt: skip
@json_flag
@with_scoped_client
def produce(
    client: Client, topic: str, value: str | None, key: str, as_json: bool, **fields: Any
) -> None:
    """Produce VALUE to TOPIC. If VALUE is - or missing, produce each line of stdin."""
    envelope = _envelope(fields)
    if value is not None and value != "-":
        outcomes = client.produce_batch([NewMessage(topic, value, key, envelope)])
        _show_produced(outcomes[0], as_json)
        return
    if value is None and sys.stdin.isatty():
        raise click.UsageError("give a VALUE, or - to read lines from stdin")
    _produce_lines(client, NewMessage(topic, "", key, envelope), as_json)


def _produce_lines(client: Client, like: NewMessage, as_json: bool) -> None:
    """Produces the lines of stdin, up to the first request with a refused line. Names the line."""
    stored = 0
    number = 0
    for lines in batches_of_lines():
        texts = enumerate(map(text_of, lines), start=number + 1)
        batch = [(place, line) for place, line in texts if line.strip()]
        number += len(lines)
        if not batch:
            continue
        messages = [NewMessage(like.topic, line, like.key, like.envelope) for _, line in batch]
        refused: list[str] = []
        for (place, _), outcome in zip(batch, client.produce_batch(messages), strict=True):
            if isinstance(outcome, PenstockError):
                refused.append(f"line {place}: {outcome.code}: {outcome.message}")
            else:
                stored += 1
                if as_json:
                    _show_produced(outcome, as_json)
        if refused:
            more = f" (and {len(refused) - 1} more lines)" if len(refused) > 1 else ""
            raise CommandFailed(f"{refused[0]}{more}; {stored} messages were produced")
    if not as_json:
        show(f"produced {stored} {'message' if stored == 1 else 'messages'}")


def _envelope(fields: dict[str, Any]) -> Envelope | None:
    policy = RetryPolicy(
        max_attempts=fields.pop("retry_max_attempts"),
        backoff_ms=fields.pop("retry_backoff_ms"),
        max_backoff_ms=fields.pop("retry_max_backoff_ms"),
    )
    envelope = Envelope(**fields, retry_policy=None if policy == RetryPolicy() else policy)
    return None if envelope == Envelope() else envelope


def _show_produced(outcome: Produced | PenstockError, as_json: bool) -> None:
    if isinstance(outcome, PenstockError):
        raise outcome
    if as_json:
        show_json(outcome)
    elif outcome.duplicate:
        show(f"{printable(outcome.topic)}: this idempotency key is known; nothing was stored again")
    else:
        show(
            f"produced to {printable(outcome.topic)}, "
            f"partition {outcome.partition}, offset {outcome.offset}"
        )


@click.command()
@topic_argument
@group_option
@owner_option
@click.option(
    "--lease-ms", type=MILLISECONDS, metavar="DURATION", default=DEFAULT_LEASE_MS,
    show_default=True,
    help="How long a message is reserved for you: 30s, 5m, or a number of milliseconds.",
)  # fmt: skip
@click.option("--ack", "acks", is_flag=True, help="Ack each message after printing it.")
@with_end
@json_flag
@with_scoped_client
def consume(
    client: Client,
    topic: str,
    group: str,
    owner: str,
    lease_ms: int,
    acks: bool,
    most: int | None,
    wait_s: float | None,
    as_json: bool,
) -> None:
    """Print the messages of TOPIC as they arrive, until Ctrl-C.

    Without --ack a message is delivered again when its lease ends. `penstock ack` acks it by hand.
    """
    # Takes only messages that will be printed: others may want the rest.
    prefetch = 1 if acks else most or 0
    stream = client.consume(
        topic, group, owner=owner, lease_ms=lease_ms, prefetch=prefetch, wait_s=wait_s
    )
    printed = 0
    try:
        with stream:
            for delivery in stream:
                _show_delivery(delivery, as_json)
                printed += 1
                if printed == most:
                    stream.close()
                if acks:
                    client.ack(delivery)
                elif printed == 1:
                    hint(_how_to_ack(delivery))
    except KeyboardInterrupt:
        return
    if stream.timed_out:
        if not printed:
            hint(f"nothing came within {wait_s:g} s")
    elif printed != most:
        raise CommandFailed("the broker ended the stream: it is stopping, or the topic was deleted")


def _show_delivery(delivery: Delivery, as_json: bool) -> None:
    if as_json:
        show_json(_item(delivery))
        return
    details = {"attempt": delivery.attempts if delivery.attempts > 1 else ""}
    details |= {"key": delivery.key, "last_error": delivery.last_error}
    details |= {"label": delivery.routing.label}
    for name in ("run_id", "step_id", "tenant_id", "idempotency_key"):
        details[name] = getattr(delivery.envelope, name)
    if delivery.envelope.dlq is not None:
        details["died_in"] = (
            f"{delivery.envelope.dlq.original_topic} ({delivery.envelope.dlq.group})"
        )
        details["last_error"] = delivery.envelope.dlq.last_error
    shown = "  ".join(f"{name}={printable(str(text))}" for name, text in details.items() if text)
    line = f"{delivery.partition}:{delivery.offset}  {printable(delivery.value)}"
    show(f"{line}   {click.style(shown, dim=True)}" if shown else line)


def _item(delivery: Delivery) -> Item:
    """Returns the delivery as the broker sent it."""
    return Item(
        delivery.partition,
        delivery.offset,
        delivery.attempts,
        delivery.key,
        delivery.value,
        delivery.last_error,
        UNSET if delivery.routing == Routing() else delivery.routing,
        UNSET if delivery.envelope == Envelope() else delivery.envelope,
        delivery.delivery_id,
    )


def _how_to_ack(delivery: Delivery) -> str:
    return (
        "not acked: it is delivered again when its lease ends. To ack it: penstock ack "
        f"{printable(delivery.topic)} --group {printable(delivery.group)} "
        f"--partition {delivery.partition} --offset {delivery.offset}"
        + (f" --owner {printable(delivery.owner)}" if delivery.owner != "cli" else "")
        + "; or consume with --ack"
    )
