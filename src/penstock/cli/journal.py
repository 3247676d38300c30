"""`penstock journal`: prints what happened to messages, one line per event."""

from __future__ import annotations

import time
from typing import Any

import click

from penstock.cli.connection import json_flag, with_scoped_client
from penstock.cli.terminal import printable, show, show_json
from penstock.cli.units import moment_ms
from penstock.client.ranges import Row
from penstock.client.sync import Client
from penstock.model.journal import KINDS, STREAM

FOLLOW_S = 1.0


@click.command()
@click.option("--topic", metavar="NAME", help="Only events of this topic.")
@click.option("--stream", metavar="NAME", help="Only events of this durable stream.")
@click.option("--group", metavar="NAME", help="Only events of this group or subscription.")
@click.option("--run", "run_id", metavar="ID", help="Only messages of this run.")
@click.option("--tenant-id", metavar="ID", help="Only messages whose envelope has this tenant_id.")
@click.option("--kind", type=click.Choice(KINDS), help="Only events of this kind.")
@click.option(
    "--since", metavar="TIME", help="Only since this time: RFC 3339, or an age: 90s, 15m, 2h."
)
@click.option("--follow", "-f", is_flag=True, help="Keep printing new events until Ctrl-C.")
@json_flag
@with_scoped_client
def journal(client: Client, since: str | None, follow: bool, as_json: bool, **only: Any) -> None:
    """Print what happened to messages.

    A line is an event: produced, delivered, acked, nacked and so on. Lines of durable streams have
    stream: before the name.
    """
    time_ms = None if since is None else moment_ms(since, "--since")
    found = client.journal_offsets(fresh=True, time_ms=time_ms)
    start = found.earliest if found.at_time is None else found.at_time
    try:
        while True:
            for row in client.journal(from_=start, to=found.next, **only):
                show_json(row) if as_json else show(_line(row))
            if not follow:
                return
            time.sleep(FOLLOW_S)
            start, found = found.next, client.journal_offsets(fresh=True)
    except KeyboardInterrupt:
        return


def _line(row: Row) -> str:
    """Formats a row: its time, what happened, to which message, and by whom."""
    # A broker of an earlier release does not send the kind of the resource.
    prefix = "stream:" if row.get("resource_kind") == STREAM else ""
    words = [row["timestamp"], f"{row['kind']:<13}", f"{prefix}{row['topic']}/{row['partition']}"]
    words.append(f"@{row['offset']}")
    names = ("group", "owner", "attempt", "reason", "retry_at", "run_id", "step_id", "tenant_id")
    if "tenant" in row:
        words.append(f"in={row['tenant']}/{row['namespace']}")
    words += [f"{name}={row[name]}" for name in names if name in row]
    return printable(" ".join(words))
