"""The flags that set the broker's settings, and `penstock config`, which shows them.

Invariant: a flag that was not given has no value, so that the file and the environment apply.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
import msgspec

from penstock.cli.connection import json_flag
from penstock.cli.terminal import BadSettings, setting_text, show_json, show_table
from penstock.model.errors import InvalidArgument
from penstock.server.logs import MASK
from penstock.server.settings import SECRET, Origins, Settings, load_settings

Command = Callable[..., None]

_FLAGS: dict[str, tuple[str, str | tuple[str, ...]]] = {
    "host": ("Address to listen on.", "HOST"),
    "port": ("Port to listen on; 0 picks a free one.", "PORT"),
    "data_dir": ("Directory of the log.", "DIR"),
    "memory": ("Keep everything in memory only: all is lost when the broker stops.", ""),
    "profile": ("Set of defaults: for work, or of the queue contract.", ("work", "contract")),
    "fsync": (
        "When writes are synced to disk: before each answer, at an interval, or never.",
        ("commit", "interval", "none"),
    ),
    "max_in_flight": ("Most unfinished deliveries per topic, group and partition.", "N"),
    "max_partition_msgs": ("Most unfinished messages in a partition; then 429.", "N"),
    "max_partition_bytes": ("Most unfinished bytes in a partition; then 429.", "SIZE"),
    "max_message_bytes": ("Largest message: key and value together.", "SIZE"),
    "router": ("Decides where each message goes: package.module:callable or http://…", "SPEC"),
    "router_timeout_ms": ("Longest wait for the router's decision.", "MS"),
    "idempotency_ttl_ms": ("How long the broker remembers an idempotency key.", "MS"),
    "token_file": ("File with the bearer token that every request must have.", "FILE"),
    "access_control": ("Ask every request for a credential, and who sends it.", ""),
    "jwt_keys": (
        "Accept JWTs signed by these keys: a JWKS file or URL, or a shared key.",
        "SOURCE",
    ),
    "jwt_issuer": ("Issuer that a JWT must name.", "TEXT"),
    "jwt_audience": ("Audience that a JWT must name.", "TEXT"),
    "tls_cert": ("Serve TLS with this certificate chain, a PEM file.", "FILE"),
    "tls_key": ("Private key of the certificate, a PEM file.", "FILE"),
    "tls_client_ca": (
        "Ask clients for a certificate that one of these authorities signed.",
        "FILE",
    ),
    "tls_client_auth": (
        "Whether every client needs a certificate, if tls_client_ca is set.",
        ("required", "optional"),
    ),
    "control_plane": ("Follow the registry of the broker at this address.", "URL"),
    "control_plane_token_file": ("File with the bearer token for the control plane.", "FILE"),
    "cluster": (
        "Be a broker of a cluster on these NATS servers: nats://host,host,host. Needs --name.",
        "URL",
    ),
    "cluster_name": ("Name of the cluster, if the NATS servers have several.", "TEXT"),
    "name": ("Name of this broker in its cluster; no other may have it.", "TEXT"),
    "advertise": (
        "Address at which the other brokers and clients reach this one.",
        "URL",
    ),
    "allow_insecure_bind": (
        "Allow other machines to connect although nobody is asked for a token.",
        "",
    ),
    "log_level": ("Lowest level that is logged to stderr.", ("debug", "info", "warning", "error")),
    "log_format": ("Log lines as text, or as JSON objects.", ("text", "json")),
}


def setting_flags(command: Command) -> Command:
    """Adds --config and a flag for each setting that has one."""
    default = Settings()
    for name, (text, kind) in reversed(_FLAGS.items()):
        option = "--" + name.replace("_", "-")
        shown = setting_text(name, getattr(default, name))
        text = f"{text}  [default: {shown}]" if kind and shown else text
        if kind == "":
            added = click.option(option, is_flag=True, default=None, help=text)
        elif isinstance(kind, tuple):
            added = click.option(option, type=click.Choice(kind), default=None, help=text)
        else:
            added = click.option(option, metavar=kind, default=None, help=text)
        command = added(command)
    file = click.option("--config", "file", metavar="FILE", help="TOML file with settings.")
    return file(command)


def settings_of(file: str | None, flags: dict[str, Any]) -> tuple[Settings, Origins]:
    """Returns the settings in force. Ends the command if one of them is wrong."""
    try:
        return load_settings(flags, file or "")
    except InvalidArgument as error:
        raise BadSettings(error.message) from error


@click.command()
@setting_flags
@json_flag
def config(file: str | None, as_json: bool, **flags: Any) -> None:
    """Show every setting, its value and where it came from.

    A later source wins over an earlier one: default, profile, file (--config, PENSTOCK_CONFIG),
    environment (PENSTOCK_<NAME>), flag. Takes the same flags as `penstock serve`.
    """
    settings, origins = settings_of(file, flags)
    values = msgspec.to_builtins(settings)
    for name in SECRET:
        values[name] = MASK if values[name] else ""
    if as_json:
        show_json({name: {"value": values[name], "origin": origins[name]} for name in values})
        return
    rows = [(name, setting_text(name, value), origins[name]) for name, value in values.items()]
    show_table(("setting", "value", "origin"), rows)
