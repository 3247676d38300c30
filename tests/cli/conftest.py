"""The command as a person runs it, against a broker in another process.

`run_penstock` is a process of its own, mostly one that had loaded the command before. The fixture
`penstock` calls the command in this process, which takes less time still: for what it prints and
how it exits.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

import pytest
from click.testing import CliRunner

from penstock.cli.commands import penstock as command
from tests.broker_process import SOURCE, BrokerProcess
from tests.penstock_template import is_plain, template

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
    given = {"PYTHONPATH": str(SOURCE)} | dict(env or {})
    run = _run_copy if is_plain(env or {}) else _run_fresh
    ran = run(words, inherited | given, stdin, cwd)
    assert "Traceback" not in ran.err, ran.err
    return ran


def _run_copy(
    words: Sequence[str], environment: Mapping[str, str], stdin: str, cwd: Path | None
) -> Ran:
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        read, write = os.pipe()
        files = out.fileno(), err.fileno(), read
        process = template().start(words, environment, *files, cwd)
        os.close(read)
        try:
            # The command may end before it has read all of it.
            with suppress(BrokenPipeError), open(write, "w") as given:
                given.write(stdin)
            code = process.wait(TIMEOUT_S)
        finally:
            process.kill()
        return Ran(code, *(_contents(each) for each in (out, err)))


def _contents(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _run_fresh(
    words: Sequence[str], environment: Mapping[str, str], stdin: str, cwd: Path | None
) -> Ran:
    done = subprocess.run(
        [sys.executable, "-m", "penstock", *words],
        env=environment,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        cwd=cwd,
        check=False,
    )
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
