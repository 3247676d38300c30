"""`penstock audit`: prints the audit log, one line per change or refused attempt."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import click

from penstock.cli.connection import json_flag, with_scoped_client
from penstock.cli.terminal import printable, show, show_json
from penstock.cli.units import moment_ms
from penstock.client.ranges import Row
from penstock.client.sync import Client
from penstock.model.access import matches
from penstock.model.audit import AUDIT_TOPIC
from penstock.model.errors import NotFound

FOLLOW_S = 1.0


@click.command()
@click.option("--principal", metavar="NAME", help="Only what this principal did.")
@click.option(
    "--action", metavar="ACTION", help="Only this action, as rule.grant; or its beginning: topic.*"
)
@click.option(
    "--since", metavar="TIME", help="Only since this time: RFC 3339, or an age: 90s, 15m, 2h."
)
@click.option("--until", metavar="TIME", help="Only before this time, given in the same way.")
@click.option("--follow", "-f", is_flag=True, help="Keep printing new rows until Ctrl-C.")
@json_flag
@with_scoped_client
def audit(
    client: Client,
    principal: str | None,
    action: str | None,
    since: str | None,
    until: str | None,
    follow: bool,
    as_json: bool,
) -> None:
    """Print who changed what, and who tried.

    Needs the permission audit, for a tenant or for the broker. With --tenant or --namespace only
    what happened there is shown.
    """
    from_ms = None if since is None else moment_ms(since, "--since")
    to_ms = None if until is None else moment_ms(until, "--until")
    only = {"principal": principal, "tenant_id": client.scope.tenant or None}
    only["namespace"] = client.scope.namespace or None
    start: int | None = None
    try:
        while True:
            for row in _rows(client, start, from_ms, to_ms):
                start = row["offset"] + 1
                if all(value in (None, row.get(name)) for name, value in only.items()) and (
                    action is None or matches(action, row["action"])
                ):
                    show_json(_without(row, "offset")) if as_json else show(_line(row))
            if not follow:
                return
            time.sleep(FOLLOW_S)
    except KeyboardInterrupt:
        return


def _rows(
    client: Client, start: int | None, from_ms: int | None, to_ms: int | None
) -> Iterator[Row]:
    """Yields the rows with their members beside the time and the offset."""
    try:
        with client.read_range(AUDIT_TOPIC, 0, start, from_ms=from_ms, to_ms=to_ms) as stored:
            for each in stored:
                yield {"time": each["timestamp"], "offset": each["offset"]} | _row_of(each["value"])
    except NotFound:
        # The topic of the audit log is created with its first row.
        return


def _row_of(value: str) -> dict[str, Any]:
    """Reads a row. Its detail is an object if the broker wrote one."""
    row: dict[str, Any] = json.loads(value)
    if row.get("detail", "").startswith("{"):
        row["detail"] = json.loads(row["detail"])
    return row


def _line(row: Row) -> str:
    """Formats a row: when, what, to which resource, and by whom."""
    outcome = row.get("outcome", "ok")
    words = [row["time"], f"{outcome:<9}", row["action"], row["resource"]]
    place = "/".join(filter(None, (row.get("tenant_id"), row.get("namespace"))))
    words += [f"in={place}"] if place else []
    words.append(f"by={row['principal']}")
    words += [f"from={row['address']}"] if row.get("address") else []
    detail = row.get("detail")
    if detail:
        words.append(detail if isinstance(detail, str) else json.dumps(detail))
    if row.get("unwritten"):
        words.append(f"({row['unwritten']} refused attempts before were not written)")
    return printable(" ".join(words))


def _without(row: Row, name: str) -> Row:
    return {key: value for key, value in row.items() if key != name}
