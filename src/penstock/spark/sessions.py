"""A Spark session that has format("penstock"), on a laptop without a setting made.

Invariant: what the caller configures wins over the defaults here, and where Spark runs already, in
a notebook's session or under spark-submit, nothing of it is changed but what the connector needs.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyspark import SparkContext
from pyspark.sql import SparkSession
from pyspark.sql.utils import is_remote

from penstock.spark.datasource import PenstockDataSource
from penstock.spark.java import find_java_home
from penstock.spark.progress import follow
from penstock.spark.session_python import python_launcher

_PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
_JAVA_OPTIONS = "spark.driver.extraJavaOptions"
_QUIET_LOG = Path(__file__).with_name("log4j2.properties")
_FAST_ARROW = "-Darrow.enable_unsafe_memory_access=true -Darrow.enable_null_check_for_get=false"
"""Spark asks of every value whether it is null before it reads it; Arrow need not ask again."""

_DEFAULTS = {
    _PUSHDOWN: "true",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.session.timeZone": "UTC",
    "spark.ui.showConsoleProgress": "false",
}
_LOCAL_DEFAULTS = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    # 200 are for a cluster: here each costs more than it works.
    "spark.sql.shuffle.partitions": str(min(os.cpu_count() or 1, 8)),
    # By TCP, each short exchange of Java and Python waits 40 ms for an acknowledgement.
    "spark.python.unix.domain.socket.enabled": "true" if hasattr(socket, "AF_UNIX") else "false",
}


def session(
    app_name: str = "penstock",
    master: str | None = None,
    config: Mapping[str, Any] | None = None,
    *,
    ui: bool = False,
    quiet: bool = True,
) -> SparkSession:
    """The session there is, or a new one; either way with format("penstock").

    `master` is local[*] unless it is said here, in `config` or in Spark's own configuration. A new
    session brings Java along if there is none, has no web page unless `ui`, and with `quiet` shows
    errors only. `config` are Spark's own settings.
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
    """Is there a Spark, or somebody who has started its Java already?"""
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
    """Spark's settings of a session that is yet to be started, by us or by spark-submit."""
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
    """May Spark's own configuration say where it runs?"""
    return any(
        name in os.environ for name in ("SPARK_HOME", "SPARK_CONF_DIR", "PYSPARK_SUBMIT_ARGS")
    )


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
