"""The command as a person runs it, against a broker in another process.

`run_penstock` is a process of its own. The fixture `penstock` calls the command in this process,
which takes a hundredth of the time: for what it prints and how it exits.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
from click.testing import CliRunner

from penstock.cli.commands import penstock as command
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


def call_penstock(*words: str, env: Mapping[str, str]) -> Ran:
    cleared = {name: None for name in os.environ if name.startswith("PENSTOCK_")}
    done = CliRunner().invoke(command, words, env=cleared | dict(env), prog_name="penstock")
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return Ran(done.exit_code, done.stdout, done.stderr)


@pytest.fixture(scope="package")
def broker() -> Iterator[BrokerProcess]:
    with BrokerProcess(None) as process:
        yield process


@pytest.fixture
def penstock(broker: BrokerProcess) -> Run:
    """Calls a command against the shared broker. With `stdin` it is a process of its own."""

    def run(*words: str, env: Mapping[str, str] | None = None, stdin: str | None = None) -> Ran:
        at = {"PENSTOCK_URL": broker.url} | dict(env or {})
        if stdin is None:
            return call_penstock(*words, env=at)
        return run_penstock(*words, env=at, stdin=stdin)

    return run
