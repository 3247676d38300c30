"""The Python that Spark starts on this machine, several times in each run.

Spark puts a zip of PySpark before all that is installed, and no zip has compiled modules: each of
these processes would compile PySpark anew, half a second of work. So there is a launcher that
leaves out the zips of this very PySpark, which is installed and compiled, and has PySpark's daemon
run by `worker_daemon`. Invariant: without the zips the same modules are found; whatever else Spark
or the user has put on the path stays.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import pyspark

from penstock.spark.launchers import cache_dir, make_launcher, name_for

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


def python_launcher(environ: Mapping[str, str]) -> str:
    """A path to start; that of Python itself where a launcher cannot be made."""
    if sys.platform == "win32":
        return sys.executable
    zips = Path(os.path.realpath(pyspark.__file__)).parent / "python" / "lib"
    text = _LAUNCHER.format(
        zips=shlex.quote(str(zips)), python=shlex.quote(sys.executable), daemon=DAEMON
    )
    # No home to write to, as in many containers.
    with suppress(OSError, RuntimeError):
        return str(make_launcher(cache_dir(environ) / name_for("python", text), text))
    return sys.executable
