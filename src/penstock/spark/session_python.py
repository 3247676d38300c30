"""The Python command that Spark starts on this machine, several times in each run.

Spark puts a zip of PySpark before all installed packages, and a zip has no compiled modules. So
each process would compile PySpark again, which takes half a second. The launcher made here leaves
out the zips of the installed PySpark, which is compiled, and runs `worker_daemon` in the place of
PySpark's daemon. Invariant: the same modules are found without the zips, and everything else on the
path stays.
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
