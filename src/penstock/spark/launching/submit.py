"""Starts a run: checks everything first, the cheapest check first, and then starts Spark.

This module is also the program of a driver: `python -m penstock.spark.launching.submit archive
--once`, or what spark-submit runs for a master that is not this machine. Invariant: the token is in
the environment, never on a command line. Nothing starts on a read-only lake.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from py4j.protocol import Py4JNetworkError  # type: ignore[import-untyped]
from pyspark.sql import SparkSession

from penstock.model.errors import (
    FailedPrecondition,
    InvalidArgument,
    PenstockError,
    Unauthenticated,
    Unavailable,
)
from penstock.model.options import Option, duration_ms
from penstock.spark.broker import BrokerConnection
from penstock.spark.lake.files import Files
from penstock.spark.lake.lake import Lake
from penstock.spark.launching.catalog import Chosen, choose
from penstock.spark.launching.register import Figures, Register, RunEntry
from penstock.spark.launching.screen import Screen
from penstock.spark.launching.signals import (
    Stop,
    children_ignore_term,
    exit_on_signals,
    stop_on_signals,
)
from penstock.spark.launching.supervisor import Supervisor, quieten
from penstock.spark.options import BrokerSettings
from penstock.spark.pipelines.user_file import NeedsSpark
from penstock.spark.running.failure import advice_for_commands, describe_error
from penstock.spark.sessions import session

DEFAULT_LAKE = "lake"
DEFAULT_EVERY_S = 10.0
MASTERS = ("local", "spark://", "yarn", "k8s://")
FIRST_TRY_S = 3.0
"""Seconds to wait for the broker before anything has started."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A request to run pipelines: which, and where. The token is not in it."""

    words: tuple[str, ...]
    lake: str = DEFAULT_LAKE
    master: str | None = None
    url: str | None = None
    tenant: str | None = None
    namespace: str | None = None
    once: bool = False
    every_s: float = DEFAULT_EVERY_S
    name: str = ""
    options: tuple[tuple[str, str], ...] = ()
    conf: tuple[tuple[str, str], ...] = ()
    verbose: bool = False

    def __post_init__(self) -> None:
        if self.master is not None and not self.master.startswith(MASTERS):
            raise InvalidArgument(
                f"--master {self.master!r} is not a master of Spark; use local[*], local[4], "
                "spark://host:7077, yarn or k8s://…"
            )

    @property
    def is_local(self) -> bool:
        return self.master is None or self.master.startswith("local")

    def arguments(self) -> list[str]:
        """Returns the arguments from which `launch_of` makes the same launch. The master is an
        argument of spark-submit instead."""
        words = [*self.words, "--lake", self.lake, "--every", f"{round(self.every_s * 1000)}ms"]
        for flag in ("url", "tenant", "namespace"):
            if getattr(self, flag) is not None:
                words += [f"--{flag}", getattr(self, flag)]
        if self.name:
            words += ["--name", self.name]
        for name, value in self.options:
            words += ["--set", f"{name}={value}"]
        words += ["--once"] if self.once else []
        return words + (["--verbose"] if self.verbose else [])


def launch_of(arguments: Sequence[str]) -> Launch:
    parser = argparse.ArgumentParser(
        prog="python -m penstock.spark.launching.submit",
        description="Runs pipelines in this process; `penstock pipeline run` says more.",
    )
    parser.add_argument("words", nargs="+", metavar="NAME|FILE")
    parser.add_argument("--lake", default=os.environ.get("PENSTOCK_LAKE", DEFAULT_LAKE))
    parser.add_argument("--master")
    parser.add_argument("--url")
    parser.add_argument("--tenant")
    parser.add_argument("--namespace")
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--every", default="10s", type=seconds, dest="every_s")
    parser.add_argument("--name", default="")
    parser.add_argument("--set", action="append", default=[], metavar="OPTION=VALUE")
    parser.add_argument("--conf", action="append", default=[], metavar="SPARK.X=Y")
    parser.add_argument("--verbose", action="store_true")
    given = vars(parser.parse_args(arguments))
    given["words"] = tuple(given["words"])
    given["options"] = pairs(given.pop("set"), "--set")
    given["conf"] = pairs(given["conf"], "--conf")
    return Launch(**given)


def pairs(texts: Sequence[str], flag: str) -> tuple[tuple[str, str], ...]:
    found = tuple((name.strip(), value) for name, _, value in (t.partition("=") for t in texts))
    for text, (name, _) in zip(texts, found, strict=True):
        if not name or "=" not in text:
            raise InvalidArgument(f"{flag} {text!r} has no value: it takes name=value")
    return found


_EVERY = Option("every", duration_ms().described("seconds, or a duration such as 500ms, 10s or 5m"))


def seconds(text: str) -> float:
    """Parses a duration; a number without a unit is seconds."""
    given = f"{text.strip()}s" if text.strip().isdigit() else text
    return int(_EVERY.read(given, "--every")) / 1000


def execute(launch: Launch, token: str | None = None) -> int:
    """Runs the launch in this process. Returns 0, or 1 if a pipeline has failed."""
    broker = BrokerSettings.of(launch.url, token, tenant=launch.tenant, namespace=launch.namespace)
    try:
        chosen = _chosen(launch)
        check_broker(broker)
        if chosen is None:
            start_spark(launch)
            chosen = choose(launch.words, launch.options)
        names = [each.name for each in chosen]
        register, digests = Register(), {each.name: each.digest for each in chosen}
        register.check_free(_placed(launch), digests)
        entry = register.enter(
            launch.name or "+".join(names),
            names,
            _placed(launch),
            launch.master or "local[*]",
            broker.url,
            once=launch.once,
            digests=digests,
        )
        try:
            entry.exit_code = _supervise(launch, chosen, broker, register, entry)
        finally:
            register.end(entry, 1 if entry.exit_code is None else entry.exit_code)
        return entry.exit_code
    finally:
        stop_spark()


def _chosen(launch: Launch) -> list[Chosen] | None:
    """Returns None if a user's file can only be loaded with Spark running."""
    try:
        return choose(launch.words, launch.options)
    except NeedsSpark:
        return None


def start_spark(launch: Launch, on_exit: Callable[[], None] = lambda: None) -> SparkSession:
    """Returns the session, a new one if there is none. `on_exit` is called if a signal ends it."""
    name = f"penstock {launch.name or '+'.join(launch.words)}"

    def leave() -> int:
        on_exit()
        Screen().warn("stopped while Spark was starting: no pipeline was started")
        return 0

    try:
        with exit_on_signals(leave), children_ignore_term():
            spark = session(name, launch.master, dict(launch.conf), quiet=not launch.verbose)
    except PenstockError:
        raise
    except Exception as error:
        why = describe_error(error).splitlines()[0]
        raise FailedPrecondition(f"Spark cannot be started: {why}") from error
    if not launch.verbose:
        quieten(spark)
    return spark


def is_submitted() -> bool:
    """Returns whether spark-submit has started Java already."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def stop_spark() -> None:
    with suppress(Py4JNetworkError, ConnectionError):  # Java has ended before
        spark = SparkSession.getActiveSession()
        if spark is not None:
            spark.stop()


def _supervise(
    launch: Launch,
    chosen: Sequence[Chosen],
    broker: BrokerSettings,
    register: Register,
    entry: RunEntry,
) -> int:
    screen = Screen()
    if SparkSession.getActiveSession() is None and not is_submitted():
        screen.warn(f"starting Spark on {entry.master}")
    stop = Stop()
    with stop_on_signals(stop):
        spark = start_spark(launch, lambda: register.end(entry, 0, was_stopped=True))
        entry.master = str(spark.sparkContext.master)
        lake = Lake(spark, entry.lake)
        check_lake(lake)
        supervisor = Supervisor(
            spark,
            broker,
            lake,
            once=launch.once,
            every_s=launch.every_s,
            stop=stop,
            screen=screen,
            keep=lambda figures: _keep(register, entry, figures),
            claim=lambda pipeline, name: register.claim(entry, pipeline, name),
        )
        how = "once" if launch.once else "until it is stopped (Ctrl-C)"
        names = ", ".join(entry.pipelines)
        screen.warn(f"running {names} {how}: {entry.url} → {lake.path}, on {entry.master}")
        has_none_failed = supervisor.run(chosen)
    entry.was_stopped = stop.requested.is_set()
    return 0 if has_none_failed else 1


def check_broker(settings: BrokerSettings) -> None:
    """Checks, before Spark starts, that the broker answers and accepts the token."""
    with BrokerConnection(replace(settings, retry_s=FIRST_TRY_S)) as broker:
        try:
            broker.call("GET", "/v1/topics")
        except Unauthenticated as error:
            raise Unauthenticated(advice_for_commands(error.message)) from error
        except Unavailable as error:
            # Without the advice about the option retrySeconds.
            raise error.__cause__ or error from None


def check_lake(lake: Lake) -> None:
    files = Files(lake.spark, lake.path)
    files.put("_writable", "")
    files.delete("_writable")


def _placed(launch: Launch) -> str:
    """Returns the lake's path; on this machine it is relative to the current directory."""
    if launch.is_local and ":" not in launch.lake:
        return os.path.abspath(launch.lake)
    return launch.lake


def _keep(register: Register, entry: RunEntry, figures: list[Figures]) -> None:
    entry.activities, entry.seen_s = figures, time.time()
    register.keep(entry)


def main() -> int:
    try:
        return execute(launch_of(sys.argv[1:]))
    except PenstockError as error:
        print(f"Error: {error.code}: {error.message}", file=sys.stderr)
        return 2 if isinstance(error, InvalidArgument) else 1


if __name__ == "__main__":
    sys.exit(main())
