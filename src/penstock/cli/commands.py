"""The tree of commands, and how errors are shown.

Invariant: an error is one line on stderr that says what is wrong, never a stack trace. The exit
code is 1 if the broker or the storage refused, and 2 if the command or its settings are wrong.
"""

from __future__ import annotations

from typing import Any

import click

from penstock import __version__
from penstock.cli.access import access
from penstock.cli.apply import apply
from penstock.cli.audit import audit
from penstock.cli.cache import cache
from penstock.cli.cluster import cluster
from penstock.cli.config import config
from penstock.cli.delivery import ack, extend, nack, release
from penstock.cli.effect import effect
from penstock.cli.event import publish, subscribe
from penstock.cli.group import group
from penstock.cli.journal import journal
from penstock.cli.message import consume, produce
from penstock.cli.namespace import namespace
from penstock.cli.pipeline import pipeline
from penstock.cli.quota import quota
from penstock.cli.serve import serve
from penstock.cli.stream import stream
from penstock.cli.tenant import tenant
from penstock.cli.terminal import CommandFailed
from penstock.cli.token import token
from penstock.cli.topic import topic
from penstock.cli.version import version
from penstock.cli.wal import wal
from penstock.cli.whoami import whoami
from penstock.model.errors import PenstockError
from penstock.storage.errors import StorageError

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


class CommandTree(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except PenstockError as error:
            raise CommandFailed(f"{error.code}: {error.message}") from error
        except StorageError as error:
            raise CommandFailed(str(error)) from error

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Returns the commands in the order in which a newcomer needs them."""
        return list(self.commands)


@click.group(cls=CommandTree, context_settings=CONTEXT)
@click.version_option(__version__, message="penstock %(version)s")
def penstock() -> None:
    """A durable message broker for agent and data workflows.

    Start a broker with `penstock serve`. Then, in another terminal:

    \b
      penstock topic create hello
      penstock produce hello "my first message"
      penstock consume hello --group readers --ack --timeout 2
    """


for command in (
    serve, topic, produce, consume, ack, nack, release, extend, effect, group, journal, pipeline,
    stream, publish, subscribe, cache, namespace, tenant, quota, access, audit, token, whoami,
    cluster, apply, config, wal, version,
):  # fmt: skip
    penstock.add_command(command)
