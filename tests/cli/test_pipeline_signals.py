"""`penstock pipeline run` and signals: none leaves Java behind, and a stop is a clean one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from penstock.spark.launching.register import Register, RunEntry
from tests.broker_process import SOURCE, BrokerProcess, eventually
from tests.quick_java import quick_java

if os.environ.get("CI") != "true":
    pytest.importorskip("pyspark")

WAIT_S = 600


class Running:
    """A run in a session of its own, so that everything it has started can be found."""

    def __init__(self, broker: BrokerProcess, path: Path) -> None:
        env = {k: v for k, v in os.environ.items() if not k.startswith("PENSTOCK_")}
        env |= {"PYTHONPATH": str(SOURCE), "XDG_STATE_HOME": str(path), **quick_java()}
        self._log = path / "output.txt"
        self._register = Register(path / "penstock" / "pipelines")
        with self._log.open("wb") as output:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "penstock", "pipeline", "run", "archive"),
                    *("--every", "500ms", "--url", broker.url, "--lake", str(path / "lake")),
                    *("--master", "local[2]", "--set", "journal=false"),
                ],
                env=env,
                start_new_session=True,
                stdout=output,
                stderr=subprocess.STDOUT,
                # A test's runner may ignore it, and who is started would as well.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            )

    def said(self) -> str:
        return self._log.read_text()

    def entry(self) -> RunEntry:
        (entry,) = self._register.entries()
        return entry

    def await_rows(self) -> None:
        eventually(
            lambda: sum(row.rows for run in self._register.entries() for row in run.activities),
            timeout_s=WAIT_S,
        )

    def left(self) -> dict[int, str]:
        """The processes of its session that still are, and what they run."""
        found: dict[int, str] = {}
        for each in Path("/proc").glob("[0-9]*"):
            try:
                name, _, rest = (each / "stat").read_text().partition("(")[2].rpartition(")")
                program = (each / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
            state, _, _, session = rest.split()[:4]
            if session == str(self.process.pid) and state != "Z":
                found[int(each.name)] = program or name
        return found

    def send_to_all(self, number: signal.Signals) -> None:
        """As systemd does, workers in groups of their own included; Spark's come and go."""
        for pid in self.left():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def java(self) -> int:
        (pid,) = [p for p, program in self.left().items() if "/bin/java " in program[:200]]
        return pid


@pytest.fixture
def running(broker: BrokerProcess, tmp_path: Path) -> Iterator[Running]:
    broker.put(broker.create_topic(f"signals-{tmp_path.name}"), "a row")
    made = Running(broker, tmp_path)
    try:
        yield made
    finally:
        made.send_to_all(signal.SIGKILL)
        made.process.wait(20)


pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at /proc")


def test_sigterm_to_all_of_it_is_a_clean_stop(running: Running) -> None:
    running.await_rows()
    status = Path(f"/proc/{running.java()}/status").read_text()
    (ignored,) = [int(x.split()[1], 16) for x in status.splitlines() if x.startswith("SigIgn")]
    assert ignored & 1 << (signal.SIGTERM - 1), "Java would end at once"
    running.send_to_all(signal.SIGTERM)
    assert running.process.wait(WAIT_S) == 0
    assert running.entry().state == "stopped"
    assert running.said().splitlines()[-1].split()[::6] == ["archive", "stopped"]
    assert "Spark was stopped" not in running.said()
    assert "Traceback" not in running.said()
    eventually(lambda: not running.left(), timeout_s=10)


def test_when_java_is_killed_one_line_says_so(running: Running) -> None:
    running.await_rows()
    os.kill(running.java(), signal.SIGKILL)
    assert running.process.wait(WAIT_S) == 1
    assert running.entry().state == "failed"
    assert "\nJava, in which Spark runs, has ended" in running.said()
    assert "Traceback" not in running.said()
    assert "ConnectionRefused" not in running.said()
    eventually(lambda: not running.left(), timeout_s=10)


@pytest.mark.parametrize(("number", "then_s"), [(signal.SIGTERM, 0.0), (signal.SIGINT, 1.0)])
def test_a_signal_while_spark_starts_ends_the_run_and_java(
    running: Running, number: signal.Signals, then_s: float
) -> None:
    eventually(lambda: "starting Spark" in running.said(), timeout_s=WAIT_S)
    time.sleep(then_s)
    os.killpg(running.process.pid, number)
    assert running.process.wait(20) == 0
    assert running.entry().state == "stopped"
    assert running.said().splitlines()[1:] == [
        "stopped while Spark was starting: no pipeline was started"
    ]
    eventually(lambda: not running.left(), timeout_s=60)
