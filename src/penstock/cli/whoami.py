"""`penstock whoami`: shows who the broker takes you for."""

from __future__ import annotations

from datetime import UTC, datetime

import click

from penstock.cli.connection import json_flag, with_client
from penstock.cli.scope import path_text
from penstock.cli.terminal import printable, show, show_json
from penstock.client.results import SenderInfo
from penstock.client.sync import Client


@click.command()
@json_flag
@with_client
def whoami(client: Client, as_json: bool) -> None:
    """Show the principal of your token or certificate, its roles, and where its names are.

    Commands without --tenant and --namespace work in the tenant and namespace that are shown.
    """
    found = client.who_am_i()
    if as_json:
        show_json(found)
        return
    for line in _lines(found):
        show(line)


def _lines(found: SenderInfo) -> list[str]:
    where = path_text(found.tenant_id, found.namespace)
    if not found.access_control:
        return [
            "the broker has no access control: everybody may do everything",
            f"works in  {where}",
        ]
    roles = ["admin"] * found.admin + found.roles
    lines = [
        printable(found.principal),
        f"roles     {printable(', '.join(roles)) or 'none'}",
        f"works in  {where}{', and in no other tenant' if found.is_bound else ''}",
    ]
    if found.expires_ms:
        moment = datetime.fromtimestamp(found.expires_ms / 1000, UTC)
        lines.append(f"until     {moment.isoformat(timespec='seconds').replace('+00:00', 'Z')}")
    return lines
