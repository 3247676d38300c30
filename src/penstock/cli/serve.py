"""`penstock serve`: runs a broker, and says what it is.

Invariant: stdout gets the address once the broker answers there, and what a success of it means
in words; stderr gets the log.
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
from penstock.cli.terminal import BadSettings, Failure, show, size
from penstock.model.errors import InvalidArgument
from penstock.server.logs import configure_logging
from penstock.server.settings import Settings, read_control_plane_token, read_token
from penstock.storage.errors import StorageError

if TYPE_CHECKING:
    from penstock.engine.protocol import Engine

ANYWHERE = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
"""Addresses to listen on, and where they are reached from this machine."""

_log = logging.getLogger("penstock.server")


@click.command()
@setting_flags
def serve(file: str | None, **flags: Any) -> None:
    """Run a broker until SIGTERM or Ctrl-C.

    Settings also come from a TOML file (--config) and the environment (PENSTOCK_<NAME>);
    `penstock config` shows which are in force. Sizes may be written as 64MiB.
    """
    settings, _ = settings_of(file, flags)
    try:
        token = read_token(settings)
        secrets = [token, read_control_plane_token(settings)]
        configure_logging(settings.log_level, settings.log_format, secrets=secrets)
        if settings.router:
            # A router beside the user's other files is found, as with `python -m`.
            sys.path.append(os.getcwd())
        # Only now: the other commands need none of it, and start sooner without.
        from penstock.server.serve import serve as run_broker

        run_broker(settings, functools.partial(_announce, settings, bool(token)))
    except InvalidArgument as error:
        raise BadSettings(error.message) from error
    except StorageError as error:
        raise Failure(str(error)) from error
    except OSError as error:
        _log.debug("the broker ended", exc_info=True)
        raise Failure(f"the broker cannot go on: {error}") from error
    _log.info("the broker has stopped")


def _announce(settings: Settings, has_token: bool, address: str, engine: Engine) -> None:
    capabilities = engine.capabilities
    local = address
    for anywhere, here in ANYWHERE.items():
        local = local.replace(f"//{anywhere}:", f"//{here}:")
    where = "none" if settings.memory else os.path.abspath(settings.data_dir)
    show(f"Penstock {__version__} listens on {address}")
    show(f"  durability  {capabilities.durability}")
    show(f"  data        {where}")
    show(f"  memory      at most {size(settings.memory_bytes)} for messages")
    if settings.control_plane:
        show(f"  registry    follows {settings.control_plane}")
    if not settings.memory:
        show(f"  fsync       {capabilities.fsync}")
    if not has_token and settings.allow_insecure_bind:
        show("  access      anyone who reaches this address; set --token-file to change that")
    show(f"  try it      {_curl(settings, has_token, local)}")
    show(f"  read on     {local}/docs")
    if settings.log_format == "json":
        # For programs that read the log only; a person has just read the same.
        _log.info(
            "the broker has started",
            extra={"address": address, "data_dir": where, "fsync": capabilities.fsync},
        )


def _curl(settings: Settings, has_token: bool, address: str) -> str:
    credentials = ""
    if has_token:
        source = "$PENSTOCK_TOKEN"
        if settings.token_file:
            source = f"$(cat {shlex.quote(os.path.abspath(settings.token_file))})"
        credentials = f'-H "Authorization: Bearer {source}" '
    return f"""curl -s {credentials}{address}/v1/topics -d '{{"name": "hello"}}'"""
