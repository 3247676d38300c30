"""The settings: the flags that set them, and `penstock config`, which shows them.

Invariant: a flag that was not given says nothing, so that the file and the environment count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
import msgspec

from penstock.cli.connection import json_flag
from penstock.cli.terminal import BadSettings, show_json, show_table, size
from penstock.model.errors import InvalidArgument
from penstock.server.logs import MASK
from penstock.server.settings import SECRET, Origins, Settings, load_settings

Command = Callable[..., None]

_FLAGS: dict[str, tuple[str, str | tuple[str, ...]]] = {
    "host": ("Address to listen on.", "HOST"),
    "port": ("Port to listen on; 0 takes a free one.", "PORT"),
    "data_dir": ("Where the log is kept.", "DIR"),
    "memory": ("Keep nothing on disk: all is lost when the broker stops.", ""),
    "profile": ("Defaults for work, or those of the queue contract.", ("work", "contract")),
    "fsync": (
        "When an answer is given: once synced, synced at an interval, or never synced by us.",
        ("commit", "interval", "none"),
    ),
    "max_in_flight": ("Unfinished deliveries per topic, group and partition.", "N"),
    "max_partition_msgs": ("Unfinished messages a partition takes before 429.", "N"),
    "max_partition_bytes": ("Unfinished bytes a partition takes before 429.", "SIZE"),
    "max_message_bytes": ("Key and value of one message.", "SIZE"),
    "router": ("Asked where each message goes: package.module:callable or http://…", "SPEC"),
    "router_timeout_ms": ("How long a message waits for the router.", "MS"),
    "idempotency_ttl_ms": ("How long an idempotency key is remembered.", "MS"),
    "token_file": ("File with the bearer token that every request must bring.", "FILE"),
    "control_plane": ("Follow the registry of the broker at this address.", "URL"),
    "control_plane_token_file": ("File with the bearer token that it wants.", "FILE"),
    "allow_insecure_bind": ("Listen beyond this machine without a token.", ""),
    "log_level": ("What is logged, on stderr.", ("debug", "info", "warning", "error")),
    "log_format": ("Lines for people, or a JSON object a line.", ("text", "json")),
}


def _shown(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(value)
    if name.endswith("_bytes"):
        return size(value)
    return str(value)


def setting_flags(command: Command) -> Command:
    """Adds every flag that sets something, and --config."""
    default = Settings()
    for name, (text, kind) in reversed(_FLAGS.items()):
        option = "--" + name.replace("_", "-")
        shown = _shown(name, getattr(default, name))
        text = f"{text}  [default: {shown}]" if kind and shown else text
        if kind == "":
            added = click.option(option, is_flag=True, default=None, help=text)
        elif isinstance(kind, tuple):
            added = click.option(option, type=click.Choice(kind), default=None, help=text)
        else:
            added = click.option(option, metavar=kind, default=None, help=text)
        command = added(command)
    file = click.option("--config", "file", metavar="FILE", help="Settings as TOML.")
    return file(command)


def settings_of(file: str | None, flags: dict[str, Any]) -> tuple[Settings, Origins]:
    """The settings in force; what is wrong with them ends the command."""
    try:
        return load_settings(flags, file or "")
    except InvalidArgument as error:
        raise BadSettings(error.message) from error


@click.command()
@setting_flags
@json_flag
def config(file: str | None, as_json: bool, **flags: Any) -> None:
    """Show every setting, its value and where it came from.

    In rising order: default, profile, file (--config, PENSTOCK_CONFIG), environment
    (PENSTOCK_<NAME>), flag. Takes the flags of `penstock serve`.
    """
    settings, origins = settings_of(file, flags)
    values = msgspec.to_builtins(settings)
    for name in SECRET:
        values[name] = MASK if values[name] else ""
    if as_json:
        show_json({name: {"value": values[name], "origin": origins[name]} for name in values})
        return
    rows = [(name, _shown(name, value), origins[name]) for name, value in values.items()]
    show_table(("setting", "value", "origin"), rows)
