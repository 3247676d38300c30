"""Spark in a process beside the broker, on both cores; it gets one job at a time."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from bench.cores import Cores
from bench.processes import ROOT
from bench.rows import BenchFailed


class Done(msgspec.Struct):
    seconds: float
    rows: int


class SparkProcess:
    """Use it in a `with`. `nice`: it yields the cores to everybody else. `java_options` are those
    of the driver's Java."""

    def __init__(
        self, cores: Cores, directory: Path, *, nice: int = 0, java_options: str = ""
    ) -> None:
        self._cores = cores
        self._directory = directory
        self._nice = nice
        self._java_options = java_options
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> SparkProcess:
        self._directory.mkdir(parents=True, exist_ok=True)
        with open(self._directory / "spark.txt", "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "bench.spark_jobs", self._java_options],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                preexec_fn=self._settle,
            )
        self._line()
        return self

    def __exit__(self, *error: object) -> None:
        if self._process is not None:
            self._process.communicate()  # the end of its jobs is the end of it

    def run(self, job: str, **arguments: Any) -> Done:
        self.begin(job, **arguments)
        return self.end()

    def begin(self, job: str, **arguments: Any) -> None:
        process = self._started()
        if process.stdin is not None:
            process.stdin.write(msgspec.json.encode({"job": job, **arguments}) + b"\n")
            process.stdin.flush()

    def end(self) -> Done:
        return msgspec.json.decode(self._line(), type=Done)

    def memory_bytes(self) -> int:
        """Returns the memory of the driver, its Java and the Python workers together."""
        return sum(memory_bytes(pid) for pid in _family(self._started().pid))

    def _settle(self) -> None:
        os.nice(self._nice)
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {self._cores.server, self._cores.load})

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise BenchFailed("Spark was not started")
        return self._process

    def _line(self) -> bytes:
        output = self._started().stdout
        line = output.readline() if output is not None else b""
        if not line:
            said = (self._directory / "spark.txt").read_text(encoding="utf-8", errors="replace")
            raise BenchFailed(f"Spark ended:\n{said[-3000:]}")
        return line


def expect_rows(count: int, found: int) -> None:
    if found != count:
        raise BenchFailed(f"{found:,} rows instead of {count:,}")


def _family(pid: int) -> list[int]:
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text(encoding="ascii").split():
            found += _family(int(child))
    return found


def memory_bytes(pid: int) -> int:
    """Returns the memory without mapped files, since the system can reclaim those pages."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    except OSError:
        return 0  # it has ended meanwhile
    found = re.search(r"^RssAnon:\s+(\d+) kB", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0
