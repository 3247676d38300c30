"""`penstock pipeline`: what it lists and refuses, and one run from its start to its stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.spark.launching.catalog import choose
from penstock.spark.launching.register import Register, RunEntry, born_of
from tests.broker_process import SOURCE, BrokerProcess, eventually
from tests.cli.conftest import Ran, run_penstock
from tests.quick_java import quick_java

if os.environ.get("CI") != "true":
    pytest.importorskip("pyspark")

FILE = """
from penstock.spark import pipeline

@pipeline(source="fruit", sink="table:fruit")
def kept(fruit):
    "Everything that grows."
    return fruit.select("offset", "value")

@pipeline(source="fruit", sink="table:spoilt")
def spoilt(fruit, *, least: int = 3):
    return fruit.selectExpr("assert_true(value <> 'worm', 'a worm') as ok", "value")
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return path


@pytest.fixture
def state(tmp_path: Path) -> dict[str, str]:
    """The register of this test alone."""
    return {"XDG_STATE_HOME": str(tmp_path / "state")}


def pipeline(*words: str, env: dict[str, str] | None = None, cwd: Path | None = None) -> Ran:
    return run_penstock("pipeline", *words, env=env, cwd=cwd)


def test_the_pipelines_there_are_and_those_of_a_file_are_listed(file: Path) -> None:
    told = pipeline("list", "--options").out
    for name in ("archive", "lineage", "metrics", "deadletters", "replay", "materialize", "route"):
        assert f"\n{name} " in f"\n{told}"
    assert "max_rows" in told
    found = [json.loads(line) for line in pipeline("list", "--json", str(file)).out.splitlines()]
    assert [each["name"] for each in found] == ["kept", "spoilt"]
    assert found[0]["summary"] == "Everything that grows."
    option = {"name": "least", "takes": "a whole number", "default": "3", "required": False}
    assert found[1]["options"] == [option]


def test_the_options_of_replay_say_what_they_take() -> None:
    listed = map(json.loads, pipeline("list", "--options", "--json").out.splitlines())
    options = next(each["options"] for each in listed if each["name"] == "replay")
    takes = {option["name"]: option["takes"] for option in options}
    assert "underscores" in takes["name"]
    assert "the oldest first; the next run goes on behind them" in takes["limit"]
    assert "topic, partition, offset, timestamp, key, value, run_id" in takes["where"]
    assert "dlq_last_error" in takes["where"]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["archiv"], 2, "there is no pipeline 'archiv'"),
        (["nowhere.py"], 2, "there is no file nowhere.py"),
        (["archive", "--master", "moon://x"], 2, "--master 'moon://x' is not a master of Spark"),
        (["archive", "--set", "topics"], 2, "--set 'topics' has no value"),
        (
            ["archive", "--set", "topcs=a"],
            2,
            "pipeline archive: unknown option topcs; did you mean topics?",
        ),
        (
            ["archive", "--every", "soon"],
            2,
            "--every: 'soon' is not allowed; it takes seconds, or a duration",
        ),
        (["materialize"], 2, "option topic is required"),
        (["archive", "--token-file", "nowhere"], 2, "--token-file: [Errno 2]"),
        (["archive", "--url", "http://127.0.0.1:9"], 1, "UNAVAILABLE: no broker answers at"),
    ],
)
def test_what_is_wrong_is_one_line_before_spark_is_started(
    words: list[str], code: int, said: str
) -> None:
    ran = pipeline("run", *words, "--once")
    assert ran.code == code
    assert said in ran.err
    assert ran.err.count("\n") == 1


def test_what_is_wrong_with_a_file_is_said_with_its_lines(tmp_path: Path, file: Path) -> None:
    ran = pipeline("run", f"{file}:nope", "--once")
    assert (ran.code, "has no pipeline nope; it has kept, spoilt" in ran.err) == (2, True)
    broken = tmp_path / "broken.py"
    broken.write_text("import nosuchmodule\n")
    ran = pipeline("run", str(broken), "--once")
    assert ran.code == 2
    assert ran.err.splitlines()[1:] == [
        f'  File "{broken}", line 1, in <module>',
        "    import nosuchmodule",
    ]
    broken.write_text("import sys\nsys.exit(3)\n")
    ran = pipeline("run", str(broken), "--once")
    assert ran == (2, "", f"Error: {broken}, line 2, calls sys.exit when it is loaded\n")


def test_a_java_that_does_not_start_is_one_line(
    broker: BrokerProcess, state: dict[str, str], tmp_path: Path
) -> None:
    java = tmp_path / "java" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text('#!/bin/sh\n[ "$1" = -version ] && echo \'version "17.0.1"\' || exit 1\n')
    java.chmod(0o700)
    env = state | {"JAVA_HOME": str(tmp_path / "java"), "PENSTOCK_URL": broker.url}
    ran = pipeline("run", "archive", "--once", env=env, cwd=tmp_path)
    assert ran.code == 1
    assert ran.err.splitlines()[-1].startswith(
        "Error: FAILED_PRECONDITION: Spark cannot be started: [JAVA_GATEWAY_EXITED]"
    )
    assert [run["state"] for run in runs(state, "--all")] == ["failed"]


def entered(state: dict[str, str], name: str, lake: str = "/lake", **changed: Any) -> RunEntry:
    """A run of this process."""
    register = Register(Path(state["XDG_STATE_HOME"]) / "penstock" / "pipelines")
    entry = register.enter(name, [name], lake, "local[*]", "http://b:1", once=False)
    for field, value in changed.items():
        setattr(entry, field, value)
    register.keep(entry)
    return entry


def test_a_run_that_died_is_shown_until_it_is_started_again(state: dict[str, str]) -> None:
    entered(state, "archive", born="long ago", started_s=1.0, seen_s=time.time())
    entered(state, "metrics", born="long ago", started_s=2.0, seen_s=time.time())
    assert [(run["name"], run["state"]) for run in runs(state)] == [
        ("archive", "died"),
        ("metrics", "died"),
    ]
    entered(state, "archive")
    entered(state, "metrics", lake="/another")
    assert [(run["name"], run["state"]) for run in runs(state)] == [
        ("metrics", "died"),
        ("archive", "running"),
        ("metrics", "running"),
    ]


def test_a_run_that_ends_without_a_word_was_killed(state: dict[str, str]) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        entered(state, "archive", pid=process.pid, born=born_of(process.pid))
        threading.Thread(target=process.wait).start()
        ran = pipeline("stop", "archive", env=state)
    assert ran.out == f"stopped archive (process {process.pid}, killed)\n"


def test_the_same_pipeline_on_the_same_lake_is_refused_before_spark_starts(
    broker: BrokerProcess, state: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "lake").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "lake")
    (chosen,) = choose(["archive"], [])
    entered(state, "archive", lake=str(tmp_path / "lake"), digests={"archive": chosen.digest})
    env = state | {"PENSTOCK_URL": broker.url}
    for lake in ("lake", "link", f"file://{tmp_path}/link"):
        ran = pipeline("run", "archive", "--once", "--lake", lake, env=env, cwd=tmp_path)
        assert ran.code == 1
        assert ran.err.count("\n") == 1
        assert f"already, in process {os.getpid()}" in ran.err


def test_without_spark_it_says_what_to_install(tmp_path: Path, file: Path) -> None:
    (tmp_path / "pyspark.py").write_text("raise ModuleNotFoundError(name='pyspark')\n")
    env = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{SOURCE}"}
    ran = pipeline("run", str(file), env=env)
    assert (ran.code, ran.err.count("\n")) == (1, 1)
    assert "pip install 'penstock[spark]'" in ran.err
    assert pipeline("--help", env=env).code == 0


def test_status_and_stop_report_that_nothing_runs(state: dict[str, str]) -> None:
    assert "nothing runs" in pipeline("status", env=state).out
    assert "nothing runs" in pipeline("stop", "--all", env=state).out
    ran = pipeline("stop", "archive", env=state)
    assert (ran.code, "is called archive" in ran.err) == (1, True)
    assert pipeline("stop", env=state).code == 2


def runs(state: dict[str, str], *words: str) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for line in pipeline("status", "--json", *words, env=state).out.splitlines()
    ]


def test_a_run_is_seen_in_the_status_and_ends_when_it_is_stopped(
    broker: BrokerProcess, file: Path, state: dict[str, str], tmp_path: Path
) -> None:
    broker.create_topic("fruit")
    for value in ("fig", "nut"):
        broker.put("fruit", value)
    register = Register(Path(state["XDG_STATE_HOME"]) / "penstock" / "pipelines")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PENSTOCK_")}
    running = subprocess.Popen(
        [
            *(sys.executable, "-m", "penstock", "pipeline", "run", "mine.py"),
            *("--every", "1s", "--name", "mine", "--master", "local[2]"),
            *("--conf", "spark.sql.shuffle.partitions=2"),
        ],
        env=inherited
        | state
        | {"PYTHONPATH": str(SOURCE), "PENSTOCK_URL": broker.url}
        | quick_java(),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        eventually(
            lambda: [each.rows for run in register.entries() for each in run.activities],
            lambda rows: rows == [2, 2],
            timeout_s=120,
        )
        broker.put("fruit", "worm")
        eventually(
            lambda: [each.state for run in register.entries() for each in run.activities],
            lambda states: states == ["running", "failed"],
            timeout_s=60,
        )
        (line,) = [x for x in pipeline("status", env=state).out.splitlines() if "kept" in x]
        assert line.split()[:3] == ["mine", str(running.pid), "running"]

        stopped = pipeline("stop", "mine", env=state)
        out, err = running.communicate(timeout=60)
    finally:
        if running.poll() is None:
            running.send_signal(signal.SIGKILL)
            running.wait()
    assert running.returncode == 1
    assert f"stopped mine (process {running.pid}, exit code 1)" in stopped.out
    assert [line.split()[::6] for line in out.splitlines()[2:]] == [
        ["kept", "stopped"],
        ["spoilt", "failed"],
    ]
    (told,) = [line for line in err.splitlines() if "a worm" in line]
    assert told.startswith("pipeline spoilt, query rows, batch ")
    assert "Traceback" not in err
    assert "at org.apache" not in err
    assert runs(state) == []
    assert [run["exit_code"] for run in runs(state, "--all")] == [1]
    written = sorted(path.name for path in (tmp_path / "lake").iterdir())
    assert written == ["_checkpoints", "fruit", "spoilt"]
