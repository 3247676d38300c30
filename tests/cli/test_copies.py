"""A copy of the loaded command behaves as the command that Python starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

import pytest

from tests.penstock_template import SOURCE, CopiedProcess, python_settings, template

TIMEOUT_S = 30.0
ENVIRONMENT = {"PATH": os.environ["PATH"]} | python_settings([str(SOURCE)])


def started(*words: str, out: IO[bytes], **environment: str) -> CopiedProcess:
    return template().start(words, ENVIRONMENT | environment, out.fileno(), out.fileno())


@pytest.mark.parametrize(
    "words",
    [
        ("--version",),
        ("nonsense",),
        ("config", "--json"),
        ("topic", "list", "--url", "http://127.0.0.1:1"),
    ],
    ids=["version", "usage", "config", "failure"],
)
def test_it_prints_and_ends_as_a_command_of_its_own(words: tuple[str, ...], tmp_path: Path) -> None:
    environment = ENVIRONMENT | {"PENSTOCK_MAX_IN_FLIGHT": "8"}
    command = [sys.executable, "-m", "penstock", *words]
    real = subprocess.run(
        command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    with tempfile.TemporaryFile() as out:
        copy = template().start(words, environment, out.fileno(), out.fileno(), cwd=tmp_path)
        code = copy.wait(TIMEOUT_S)
        out.seek(0)
        assert (code, out.read()) == (real.returncode, real.stdout)
    assert real.stdout
    assert copy.poll() == code


def test_it_sees_only_the_variables_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_MAX_IN_FLIGHT", "7")
    for given, value in (({}, 256), ({"PENSTOCK_MAX_IN_FLIGHT": "8"}, 8), ({}, 256)):
        with tempfile.TemporaryFile() as out:
            assert started("config", "--json", out=out, **given).wait(TIMEOUT_S) == 0
            out.seek(0)
            assert json.load(out)["max_in_flight"]["value"] == value


def test_it_is_waited_for_and_killed_like_any_process() -> None:
    with tempfile.TemporaryFile() as out:
        one, two = (started("serve", "--memory", "--port", "0", out=out) for _ in range(2))
        try:
            assert (one.poll(), two.poll()) == (None, None)
            with pytest.raises(subprocess.TimeoutExpired):
                one.wait(0.01)
            one.kill()
            assert one.wait(TIMEOUT_S) == -signal.SIGKILL
            one.kill()
            assert two.poll() is None
        finally:
            two.kill()
        assert two.wait(TIMEOUT_S) == -signal.SIGKILL
    assert not Path(f"/proc/{one.pid}").exists()
