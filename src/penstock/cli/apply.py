"""`penstock apply`: create and change the resources that a TOML file declares."""

from __future__ import annotations

from collections import Counter
from typing import Any

import click

from penstock.cli.connection import confirm, json_flag, with_client, yes_flag
from penstock.cli.terminal import BadSettings, CommandFailed, printable, show, show_json
from penstock.client.results import AppliedStep
from penstock.client.sync import Client
from penstock.model.errors import InvalidArgument
from penstock.model.options import unknown_name
from penstock.model.units import format_duration
from penstock.server.declarations import resources_of
from penstock.server.settings import RESOURCE_TABLES, Settings, read_file

SIGNS = {"create": "+", "change": "~", "keep": "=", "conflict": "!"}


@click.command()
@click.argument("file")
@click.option("--dry-run", is_flag=True, help="Only show the plan.")
@yes_flag
@json_flag
@with_client
def apply(client: Client, file: str, dry_run: bool, yes: bool, as_json: bool) -> None:
    """Create and change the resources that the TOML FILE declares.

    The file has tables [[tenants]], [[quotas]], [[streams]], [[caches]] and [[topics]]. Their
    members are those of the HTTP API; streams, caches and topics may have tenant_id and namespace,
    which are default if left out. Settings that the file does not name stay as they are, and
    nothing is deleted. The plan is shown first:

    \b
      + will be created
      ~ will be changed
      = is as declared
      ! cannot be created or changed; then nothing is done
    """
    resources = _read(file)
    plan = client.apply(resources, dry_run=True)
    found: Counter[str] = Counter(step.action for step in plan.steps)
    if not as_json:
        for step in plan.steps:
            _show(step)
    if found["conflict"] and not dry_run:
        raise CommandFailed(f"{_count(found['conflict'], 'conflict')}; nothing was changed")
    todo = [_count(found[action], what) for action, what in _TODO.items() if found[action]]
    if todo and not dry_run:
        confirm(f"Apply {' and '.join(todo)}?", yes)
        plan = client.apply(resources, changes=True)
    if as_json:
        show_json(plan)
    elif not todo:
        show("nothing to do")
    elif not dry_run:
        show("applied")


_TODO = {"create": "creation", "change": "change"}


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _show(step: AppliedStep) -> None:
    show(f"{SIGNS[step.action]} {step.kind} {printable(step.name)}")
    for change in step.changes:
        before, after = (_text(step, change.setting, at) for at in (change.before, change.after))
        is_new = step.action == "create"
        show(f"    {change.setting}: {after if is_new else f'{before} -> {after}'}")
    if step.reason:
        show(f"    {printable(step.reason)}")


def _text(step: AppliedStep, setting: str, value: Any) -> str:
    if value is None:
        return "none" if step.kind == "quota" else "default"
    if setting == "retention_ms" and isinstance(value, int):
        return format_duration(value) if value else "0"
    return printable(str(value).lower() if isinstance(value, bool) else str(value))


def _read(file: str) -> dict[str, Any]:
    """Returns the tables of the file that declare resources. Settings of a broker may be in it
    too. Wrong tables and keys are refused here, in the words of the file."""
    try:
        found = read_file(file)
        known = (*RESOURCE_TABLES, *Settings.__struct_fields__)
        for name in found:
            if name not in known:
                raise InvalidArgument(f"{file}: {unknown_name(name, known, 'table')}")
        tables = {name: found[name] for name in RESOURCE_TABLES if name in found}
        resources_of(tables, file)
    except InvalidArgument as error:
        raise BadSettings(error.message) from error
    return tables
