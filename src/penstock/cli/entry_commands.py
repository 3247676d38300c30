"""The commands that streams and caches have in common: create, list and change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import click

from penstock.cli.connection import json_flag, with_client
from penstock.cli.scope import (
    changes_of,
    in_namespace,
    path_text,
    show_settings,
    with_reset,
    with_settings,
)
from penstock.cli.terminal import show_names, show_result
from penstock.client.results import Cache, Stream
from penstock.client.sync import Client

Settings = dict[str, tuple[str, Any]]
"""See `with_settings`."""


@dataclass(frozen=True)
class EntryKind:
    """Streams or caches: their settings, and the methods of the client. `lasting` are the settings
    that only a new one can have."""

    name: str
    lasting: Settings
    settings: Settings
    create: Callable[..., Stream | Cache]
    list_all: Callable[[Client, str, str], Sequence[Stream | Cache]]
    change: Callable[..., Stream | Cache]


def add_entry_commands(group: click.Group, kind: EntryKind) -> None:
    what = kind.name

    @group.command(
        help=f"Create the {what} NAME. One that exists with the same settings is left as it is."
    )
    @click.argument("name")
    @in_namespace
    @with_settings(kind.lasting | kind.settings)
    @json_flag
    @with_client
    def create(
        client: Client, name: str, tenant_id: str, namespace: str, as_json: bool, **settings: Any
    ) -> None:
        found = kind.create(client, tenant_id, namespace, name, **settings)
        text = f"{what} {path_text(tenant_id, namespace, found.name)} is there"
        show_result(found, text, as_json)

    @group.command("list", help=f"List the {what}s of a namespace.")
    @in_namespace
    @json_flag
    @with_client
    def list_(client: Client, tenant_id: str, namespace: str, as_json: bool) -> None:
        found = kind.list_all(client, tenant_id, namespace)
        show_names(f"{what}s", found, (each.name for each in found), as_json)

    @group.command(help=f"Change settings of the {what} NAME.")
    @click.argument("name")
    @in_namespace
    @with_settings(kind.settings)
    @with_reset(kind.settings)
    @json_flag
    @with_client
    def change(
        client: Client,
        name: str,
        tenant_id: str,
        namespace: str,
        reset: tuple[str, ...],
        as_json: bool,
        **settings: Any,
    ) -> None:
        changes = changes_of(settings, reset)
        show_settings(kind.change(client, tenant_id, namespace, name, **changes), as_json)
