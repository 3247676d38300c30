"""`penstock quota`: show and change the quotas of tenants and namespaces."""

from __future__ import annotations

from typing import Any

import click

from penstock.cli.connection import json_flag, with_client
from penstock.cli.scope import changes_of, path_text, with_reset, with_settings
from penstock.cli.terminal import setting_text, show, show_json, show_table
from penstock.cli.units import ByteRate, Duration
from penstock.client.results import TenantQuota
from penstock.client.sync import Client

_LIMITS: dict[str, tuple[str, Any]] = {
    "publish_rate_limit": ("Most messages and events per second: 10000/s.", str),
    "publish_bytes_limit": ("Most bytes of them per second: 10MB/s.", ByteRate()),
    "subscribe_connections": ("Most open subscriptions, consumers and watches.", int),
    "topics": ("Most topics.", int),
    "cache_memory": ("Most bytes in caches: 10GB.", str),
    "backlog_msgs": ("Most messages that some group has not finished.", int),
    "backlog_bytes": ("Most bytes of them: 10GB.", str),
    "disk_bytes": ("Most bytes of messages, durable caches and staged rows: 100GB.", str),
    "stream_retention": ("Longest retention of topics and streams: 7d, 12h.", Duration()),
    "connections": ("Most open connections, WebSockets included.", int),
    "idempotency_keys": ("Most idempotency keys that are remembered.", int),
    "groups": ("Most groups and named subscriptions, together.", int),
    "streams": ("Most streams.", int),
    "caches": ("Most caches.", int),
}

_namespace = click.option(
    "--namespace", "-n", metavar="NAME", help="A namespace of the tenant; without it, the tenant."
)


@click.group()
def quota() -> None:
    """Show and change quotas."""


@quota.command("show")
@click.argument("tenant")
@_namespace
@json_flag
@with_client
def show_(client: Client, tenant: str, namespace: str | None, as_json: bool) -> None:
    """Show the limits of TENANT, how much it uses, and how often it was refused."""
    _print(client.describe_quota(tenant, namespace), as_json)


@quota.command("set")
@click.argument("tenant")
@_namespace
@with_settings(_LIMITS)
@with_reset(_LIMITS)
@json_flag
@with_client
def set_(
    client: Client,
    tenant: str,
    namespace: str | None,
    reset: tuple[str, ...],
    as_json: bool,
    **limits: Any,
) -> None:
    """Change limits of TENANT. A limit that is reset does not exist any more."""
    changed = changes_of({name: _number(value) for name, value in limits.items()}, reset)
    _print(client.change_quota(tenant, namespace, **changed), as_json)


def _number(value: Any) -> Any:
    """Returns a plain number as one: the API takes numbers, or texts with a unit."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def _print(found: TenantQuota, as_json: bool) -> None:
    if as_json:
        show_json(found)
        return
    names = [found.tenant_id, *([found.namespace] if found.namespace else [])]
    show(f"quota of {path_text(*names)}\n")
    rows = [
        (name, setting_text(name, limit), found.used.get(name, ""), found.refused.get(name, 0))
        for name, limit in found.limits.items()
    ]
    show_table(("quota", "limit", " used", " refused"), rows)
