"""The Python of Spark's processes has PySpark compiled, and all else that it would have had."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest
from pyspark.sql import SparkSession

from penstock.spark.sessions import DAEMON, python_launcher

ZIPS = Path(os.path.realpath(pyspark.__file__)).parent / "python" / "lib"


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ([f"{ZIPS}/pyspark.zip", f"{ZIPS}/py4j-0.10-src.zip", "/mine", "/a b/*"], "/mine:/a b/*"),
        (["/other/python/lib/pyspark.zip", "/mine.zip"], "/other/python/lib/pyspark.zip:/mine.zip"),
        ([f"{ZIPS}/pyspark.zip"], ""),
        ([], ""),
    ],
)
def test_only_the_zips_of_this_pyspark_are_left_out(given: list[str], kept: str, tmp_path: Path):
    launcher = python_launcher({"XDG_CACHE_HOME": str(tmp_path / "a b")})
    show = "import os, sys; print(os.environ['PYTHONPATH'], sys.executable, *sys.argv[1:])"
    done = subprocess.run(
        [launcher, "-c", show, "one  word"],
        env=os.environ | {"PYTHONPATH": ":".join(given)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"{kept} {sys.executable} one  word\n"


@pytest.mark.parametrize(
    ("given", "started"),
    [
        (["-m", "pyspark.daemon", "pyspark.worker"], ["-P", "-m", DAEMON, "pyspark.worker"]),
        (["-m", "pyspark.daemonic", "a  b"], ["-m", "pyspark.daemonic", "a  b"]),
        (["-m", "mine", "-m", "pyspark.daemon"], ["-m", "mine", "-m", "pyspark.daemon"]),
    ],
)
def test_a_daemon_of_pyspark_is_started_as_ours(
    given: list[str], started: list[str], tmp_path: Path
):
    launcher = Path(python_launcher({"XDG_CACHE_HOME": str(tmp_path)}))
    text = launcher.read_text()
    launcher.write_text(text.replace(f"exec {sys.executable}", "exec printf '%s\\n'"))
    done = subprocess.run([launcher, *given], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == started


def test_a_launcher_that_is_there_is_used_again(tmp_path: Path):
    launcher = Path(python_launcher({"XDG_CACHE_HOME": str(tmp_path)}))
    made = launcher.stat()
    assert python_launcher({"XDG_CACHE_HOME": str(tmp_path)}) == str(launcher)
    assert launcher.stat() == made
    assert list(launcher.parent.iterdir()) == [launcher]


def test_where_none_can_be_written_it_is_python_itself():
    assert python_launcher({"XDG_CACHE_HOME": "/dev/null"}) == sys.executable


def test_workers_of_a_session_load_the_pyspark_that_is_installed(spark: SparkSession):
    rows = spark.sparkContext.parallelize([0], 1).map(lambda _: pyspark.__file__).collect()
    assert rows == [pyspark.__file__]
