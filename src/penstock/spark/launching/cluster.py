"""spark-submit for a master that is not this machine, and the process that waits for it.

The driver runs here, as a child of spark-submit, which passes no signal on: so a stop is sent to
the driver itself, which has written down who it is. Invariant: the token and where the driver
writes that are in the environment, never among the arguments.
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

_LOOK_S = 0.2


def command(launch: Launch, environ: Mapping[str, str]) -> list[str]:
    """The command line, for the Spark of SPARK_HOME or the one that is installed with us."""
    settings = settings_for(launch.master, dict(launch.conf), quiet=not launch.verbose)
    master = settings.pop("spark.master")
    said = [str(spark_home(environ) / "bin" / "spark-submit"), "--master", master]
    said += ["--name", f"penstock {launch.name or '+'.join(launch.words)}"]
    for name, value in settings.items():
        said += ["--conf", f"{name}={value}"]
    return [*said, str(Path(__file__).with_name("driver.py")), *launch.arguments()]


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
    """Waits for the run. SIGTERM and SIGINT stop it as they would one of this process."""
    run_id = uuid.uuid4().hex
    said = command(launch, os.environ)
    try:
        # In a session of its own: Ctrl-C would end its Java before the batch.
        process = subprocess.Popen(
            said, env=environment(os.environ, token, run_id), start_new_session=True
        )
    except OSError as error:
        raise FailedPrecondition(f"{said[0]} cannot be started: {error.strerror}") from error
    asked = SignalForwarder(run_id, process)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, asked)
    while True:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(_LOOK_S)


class SignalForwarder:
    """Passes a signal on: to the driver, or as long as there is none, to spark-submit."""

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
