"""`penstock serve`: runs a broker and prints its address.

Invariant: stdout gets the address once the broker answers there, and what its durability means;
stderr gets the log. With --log-format json both get only JSON objects, one per line.
"""

from __future__ import annotations

import functools
import logging
import os
import shlex
import sys
from typing import TYPE_CHECKING, Any

import click

from penstock import __version__
from penstock.cli.config import setting_flags, settings_of
from penstock.cli.terminal import BadSettings, CommandFailed, show, show_json, size
from penstock.model.errors import InvalidArgument, PenstockError
from penstock.server.logs import configure_logging, hide_secret
from penstock.server.settings import Settings, read_control_plane_token, read_token
from penstock.storage.errors import StorageError

if TYPE_CHECKING:
    from penstock.api.durability import Capabilities

ANYWHERE = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
"""Addresses that mean every interface, and how this machine reaches them."""

STARTED = "the broker has started"

_log = logging.getLogger("penstock.server")


@click.command()
@setting_flags
@click.option(
    "--apply", "apply_changes", is_flag=True,
    help="Change resources that differ from their declaration in the TOML file.",
)  # fmt: skip
def serve(file: str | None, apply_changes: bool, **flags: Any) -> None:
    """Run a broker until SIGTERM or Ctrl-C.

    Settings also come from a TOML file (--config) and the environment (PENSTOCK_<NAME>).
    `penstock config` shows the settings in force. Sizes may have a unit: 64MiB.

    The file may also declare [[tenants]], [[quotas]], [[streams]], [[caches]] and [[topics]].
    Missing ones are created. Differences are logged, and changed only with --apply; see
    `penstock apply`.
    """
    settings, _ = settings_of(file, flags)
    configure_logging(settings.log_level, settings.log_format)
    try:
        _serve(settings, file or "", apply_changes)
    except (CommandFailed, click.Abort, KeyboardInterrupt) as error:
        if settings.log_format != "json":
            raise
        _log.error(error.message if isinstance(error, CommandFailed) else "interrupted")
        raise click.exceptions.Exit(getattr(error, "exit_code", 1)) from error


def _serve(settings: Settings, file: str, apply_changes: bool) -> None:
    try:
        token = read_token(settings)
        for secret in (token, read_control_plane_token(settings)):
            hide_secret(secret)
        if settings.router:
            # Lets the router be a module in the current directory, as with `python -m`.
            sys.path.append(os.getcwd())
        # Imported here because the other commands do not need it and start faster without it.
        from penstock.server.declarations import read_resources
        from penstock.server.serve import serve as run_broker

        resources = read_resources(file)
        announce = functools.partial(_announce, settings, bool(token))
        run_broker(settings, announce, resources, apply_changes=apply_changes)
    except InvalidArgument as error:
        raise BadSettings(error.message) from error
    except PenstockError as error:
        raise CommandFailed(f"{error.code}: {error.message}") from error
    except StorageError as error:
        raise CommandFailed(str(error)) from error
    except OSError as error:
        _log.debug("the broker ended", exc_info=True)
        raise CommandFailed(f"the broker cannot go on: {error}") from error
    _log.info("the broker has stopped")


def _announce(
    settings: Settings, has_token: bool, address: str, capabilities: Capabilities, first_token: str
) -> None:
    where = "none" if settings.memory else os.path.abspath(settings.data_dir)
    if settings.log_format == "json":
        _announce_as_json(settings, address, where, capabilities, first_token)
        return
    local = address
    for anywhere, here in ANYWHERE.items():
        local = local.replace(f"//{anywhere}:", f"//{here}:")
    show(f"Penstock {__version__} listens on {address}")
    show(f"  durability  {capabilities.durability}")
    show(f"  data        {where}")
    show(f"  memory      at most {size(settings.memory_bytes)} for messages")
    if settings.cluster:
        show(f"  cluster     {settings.cluster_name}, as {settings.name}")
    if settings.control_plane:
        show(f"  registry    follows {settings.control_plane}")
    if not settings.memory and not settings.cluster:
        show(f"  fsync       {capabilities.fsync}")
    if settings.access_control:
        show("  access      every request needs a token")
    elif not has_token and settings.allow_insecure_bind:
        show("  access      anyone who reaches this address; set --token-file to change that")
    show(f"  try it      {_curl(settings, has_token, local)}")
    if first_token:
        show(f"  first token {first_token}")
        show("              of an admin, shown only now: keep it, and use it as PENSTOCK_TOKEN")
    show(f"  read on     {local}/docs")


def _announce_as_json(
    settings: Settings, address: str, where: str, capabilities: Capabilities, first_token: str
) -> None:
    """Prints the facts on stdout, for a program that waits for the address, and logs them on
    stderr. The first admin token is on stdout only."""
    facts = {
        "address": address,
        "data_dir": where,
        "durability": capabilities.durability,
        "fsync": capabilities.fsync,
        "version": __version__,
    }
    if settings.cluster:
        facts |= {"cluster": settings.cluster_name, "name": settings.name}
    if settings.control_plane:
        facts["control_plane"] = settings.control_plane
    secret = {"first_token": first_token} if first_token else {}
    show_json({"message": STARTED} | facts | secret)
    _log.info(STARTED, extra=facts)


def _curl(settings: Settings, has_token: bool, address: str) -> str:
    credentials = ""
    if has_token or settings.access_control:
        source = "$PENSTOCK_TOKEN"
        if settings.token_file:
            source = f"$(cat {shlex.quote(os.path.abspath(settings.token_file))})"
        credentials = f'-H "Authorization: Bearer {source}" '
    return f"""curl -s {credentials}{address}/v1/topics -d '{{"name": "hello"}}'"""
