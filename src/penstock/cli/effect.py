"""`penstock effect`: shows an idempotency entry of a consumer."""

from __future__ import annotations

import click

from penstock.cli.connection import group_option, json_flag, topic_argument, with_scoped_client
from penstock.cli.terminal import printable, show_result
from penstock.client.requests import EffectRef
from penstock.client.sync import Client


@click.command()
@topic_argument
@group_option
@click.option("--key", required=True, help="Idempotency key of the effect.")
@click.option("--tenant-id", default="", help="Tenant that the key belongs to.")
@json_flag
@with_scoped_client
def effect(client: Client, topic: str, group: str, key: str, tenant_id: str, as_json: bool) -> None:
    """Show an effect of TOPIC: status, owner, result, last error."""
    found = client.look_up_effect(EffectRef(topic=topic, group=group, key=key, tenant_id=tenant_id))
    line = f"{found.status} by {printable(found.owner)}"
    if found.status == "PENDING":
        line += f", {found.lease_ms} ms of its lease left"
    if found.result:
        line += f"; result: {printable(found.result)}"
    if found.last_error:
        line += f"; last error: {printable(found.last_error)}"
    show_result(found, line, as_json)
