"""The options --tenant and --namespace, and those for the settings of streams and caches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click
import msgspec

from penstock.cli.terminal import printable, setting_text, show, show_json, show_table
from penstock.client.registry import Setting
from penstock.client.results import Cache, Stream

Command = Callable[..., None]

TENANT_DEFAULT = "[default: that of your credential, else default]"

tenant_option = click.option(
    "--tenant", "-t", "own_tenant", envvar="PENSTOCK_TENANT", default=None, show_envvar=True,
    metavar="NAME", help=f"Name of the tenant.  {TENANT_DEFAULT}",
)  # fmt: skip
"""`with_client` passes the command `tenant_id`: the option's value, else the credential's tenant,
else `default`; and `namespace` in the same way."""

namespace_option = click.option(
    "--namespace", "-n", "own_namespace", envvar="PENSTOCK_NAMESPACE", default=None,
    show_envvar=True, metavar="NAME", help=f"Namespace of the tenant.  {TENANT_DEFAULT}",
)  # fmt: skip

scope_options = (
    click.option(
        "--tenant", "-t", "scope_tenant", envvar="PENSTOCK_TENANT", default=None, show_envvar=True,
        metavar="NAME", help=f"Tenant of the topic.  {TENANT_DEFAULT}",
    ),
    click.option(
        "--namespace", "-n", "scope_namespace", envvar="PENSTOCK_NAMESPACE", default=None,
        show_envvar=True, metavar="NAME", help=f"Namespace of the tenant.  {TENANT_DEFAULT}",
    ),
)  # fmt: skip
"""--tenant and --namespace of the commands on topics. The client sends them only if they are
given: the journal then shows one tenant instead of all."""

cascade_flag = click.option("--cascade", is_flag=True, help="Also delete everything in it.")


def in_namespace(command: Command) -> Command:
    """Adds --tenant and --namespace."""
    return tenant_option(namespace_option(command))


FLAG = object()
"""The type of a setting that is off unless its option is given, without a value."""


def with_settings(options: dict[str, tuple[str, Any]]) -> Callable[[Command], Command]:
    """Adds an option for each setting. `options` has its help and its type, or FLAG, by
    its name in the API."""

    def add(command: Command) -> Command:
        for name, (text, kind) in reversed(options.items()):
            flag = "--" + name.replace("_", "-")
            if kind is FLAG:
                option = click.option(flag, is_flag=True, default=None, help=text)
            else:
                choice = click.Choice(kind) if isinstance(kind, tuple) else kind
                option = click.option(flag, type=choice, help=text)
            command = option(command)
        return command

    return add


def with_reset(options: dict[str, tuple[str, Any]]) -> Callable[[Command], Command]:
    """Adds --reset."""
    return click.option(
        "--reset", multiple=True, metavar="SETTING", type=click.Choice(list(options)),
        help="Restore the default of this setting. May be repeated.",
    )  # fmt: skip


def changes_of(settings: Mapping[str, Setting], reset: tuple[str, ...]) -> dict[str, Setting]:
    """Returns the settings to change: those that were given and, as None, those to reset."""
    given = {name: value for name, value in settings.items() if value is not None}
    if both := set(given) & set(reset):
        raise click.UsageError(f"set or reset {', '.join(sorted(both))}, not both")
    if not given and not reset:
        raise click.UsageError("give at least one setting, or --reset one")
    return given | dict.fromkeys(reset)


def path_text(*names: str) -> str:
    return printable("/".join(names))


def show_settings(found: Stream | Cache, as_json: bool, more: str = "") -> None:
    """Shows every setting in force and where it comes from, and `more` below them."""
    if as_json:
        show_json(found)
        return
    kind = type(found).__name__.lower()
    show(f"{kind} {path_text(found.tenant_id, found.namespace, found.name)}\n")
    rows = [
        (name, _value_text(name, value), _origin(name, value, found.origins.get(name, kind)))
        for name, value in msgspec.structs.asdict(found).items()
        if name not in _NOT_SETTINGS
    ]
    show_table(("setting", "value", "origin"), rows)
    if more:
        show(f"\n{more}")


def _value_text(name: str, value: Any) -> str:
    return "no limit" if _is_unlimited(name, value) else setting_text(name, value)


def _origin(name: str, value: Any, origin: str) -> str:
    """Returns where a value comes from; a limit that is not there is nobody's setting."""
    return "default" if _is_unlimited(name, value) else origin


def _is_unlimited(name: str, value: Any) -> bool:
    return name in ("retention", "retention_bytes") and not value


_NOT_SETTINGS = frozenset(
    {"name", "tenant_id", "namespace", "origins", "created_ms", "revision", "retention_ms"}
    | {"subscribers", "entries", "bytes"}
)
