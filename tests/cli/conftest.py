"""The command as a person runs it: a process of its own, against a broker in another."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.broker_process import SOURCE, BrokerProcess

TIMEOUT_S = 30.0


class Ran(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Ran]


def run_penstock(
    *words: str, env: Mapping[str, str] | None = None, stdin: str = "", cwd: Path | None = None
) -> Ran:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PENSTOCK_")}
    done = subprocess.run(
        [sys.executable, "-m", "penstock", *words],
        env=inherited | {"PYTHONPATH": str(SOURCE)} | dict(env or {}),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        cwd=cwd,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return Ran(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="package")
def broker() -> Iterator[BrokerProcess]:
    process = BrokerProcess(None)
    try:
        yield process.start()
    finally:
        process.close()


@pytest.fixture
def penstock(broker: BrokerProcess) -> Run:
    """Runs a command against the shared broker."""

    def run(*words: str, env: Mapping[str, str] | None = None, stdin: str = "") -> Ran:
        return run_penstock(*words, env={"PENSTOCK_URL": broker.url} | dict(env or {}), stdin=stdin)

    return run
