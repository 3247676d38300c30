"""Runs spark-submit for a master that is not this machine, and waits for it.

The driver runs here, as a child of spark-submit, which does not pass signals on. So a stop is sent
to the driver itself, whose process id is in the register of runs. Invariant: the token and the
run's id are in the environment, never among the arguments.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType

from penstock.model.errors import FailedPrecondition
from penstock.spark.java import find_java_home
from penstock.spark.launching.register import RUN_ID, Register
from penstock.spark.launching.submit import Launch
from penstock.spark.sessions import settings_for

_POLL_S = 0.2


def command(launch: Launch, environ: Mapping[str, str]) -> list[str]:
    """Returns the command line, for the Spark of SPARK_HOME or the installed PySpark."""
    settings = settings_for(launch.master, dict(launch.conf), quiet=not launch.verbose)
    master = settings.pop("spark.master")
    words = [str(spark_home(environ) / "bin" / "spark-submit"), "--master", master]
    words += ["--name", f"penstock {launch.name or '+'.join(launch.words)}"]
    for name, value in settings.items():
        words += ["--conf", f"{name}={value}"]
    return [*words, str(Path(__file__).with_name("driver.py")), *launch.arguments()]


def spark_home(environ: Mapping[str, str]) -> Path:
    if environ.get("SPARK_HOME"):
        return Path(environ["SPARK_HOME"])
    import pyspark

    return Path(pyspark.__file__).parent


def environment(environ: Mapping[str, str], token: str | None, run_id: str) -> dict[str, str]:
    made = {"PYSPARK_PYTHON": sys.executable} | dict(environ)
    made |= {"PYSPARK_DRIVER_PYTHON": sys.executable, RUN_ID: run_id}
    java_home = find_java_home(environ, quiet=True)
    if java_home is not None:
        made["JAVA_HOME"] = str(java_home)
    if token is not None:
        made["PENSTOCK_TOKEN"] = token
    return made


def submit(launch: Launch, token: str | None = None) -> int:
    """Waits for the run. SIGTERM and SIGINT stop it, as they stop a run in this process."""
    run_id = uuid.uuid4().hex
    words = command(launch, os.environ)
    try:
        # In its own session: otherwise Ctrl-C would end its Java in the middle of a batch.
        process = subprocess.Popen(
            words, env=environment(os.environ, token, run_id), start_new_session=True
        )
    except OSError as error:
        raise FailedPrecondition(f"{words[0]} cannot be started: {error.strerror}") from error
    forward = SignalForwarder(run_id, process)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, forward)
    while True:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(_POLL_S)


class SignalForwarder:
    """Passes a signal on to the driver or, before that has started, to spark-submit."""

    def __init__(self, run_id: str, process: subprocess.Popen[bytes]) -> None:
        self._run_id = run_id
        self._process = process

    def __call__(self, number: int, frame: FrameType | None) -> None:
        entry = Register().find(self._run_id)
        if entry is not None and entry.is_running:
            with suppress(ProcessLookupError):
                os.kill(entry.pid, signal.SIGTERM)
        else:
            self._process.terminate()
