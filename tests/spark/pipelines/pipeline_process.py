"""`penstock pipeline run` in a process group of its own, which is killed with its Java.

Owns starting, killing and waiting, and the random instant of a kill: a while after something was
seen to happen. Most mistakes show right after a step, so half of the whiles are under 60 ms.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any

from tests.broker_process import SOURCE, BrokerProcess, eventually, wait_until

SHORTEST_S, LONGEST_S = 0.001, 3.0
PATIENCE_S = 180.0

QUICK_JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Of a Java that lives for seconds, less time goes into making it fast."""

Look = Callable[[], Hashable]


class PipelineProcess:
    """The same command on the same lake, any number of times. `state` is the home of its register
    of runs, and of what it says."""

    def __init__(self, broker: BrokerProcess, lake: Path, state: Path, *words: str) -> None:
        self._broker = broker
        self._lake = lake
        self._state = state
        self._words = words
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *options: str, **settings: Any) -> None:
        """`settings` are given with --set."""
        said = [f"{name}={value}" for name, value in settings.items()]
        command = [
            sys.executable, "-m", "penstock", "pipeline", "run", *self._words,
            "--lake", str(self._lake), "--url", self._broker.url, "--master", "local[4]",
            "--conf", "spark.sql.shuffle.partitions=2", *options,
            *(word for one in said for word in ("--set", one)),
        ]  # fmt: skip
        env = {name: text for name, text in os.environ.items() if not name.startswith("PENSTOCK_")}
        env |= {"PYTHONPATH": str(SOURCE), "XDG_STATE_HOME": str(self._state)}
        env |= {"JAVA_TOOL_OPTIONS": QUICK_JAVA}
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                command, env=env, start_new_session=True, stdout=output, stderr=subprocess.STDOUT
            )

    def kill_after(self, look: Look, changes: int, then_s: float) -> None:
        """SIGKILL to all of it, so long after so many changes of what `look` sees."""
        seen, left = look(), changes

        def is_time() -> bool:
            nonlocal seen, left
            now = look()
            if now != seen:
                seen, left = now, left - 1
            return left <= 0 or self._has_failed()

        eventually(is_time, timeout_s=PATIENCE_S)
        wait_until(time.monotonic() + then_s)
        has_failed = self._has_failed()
        self.kill()
        assert not has_failed, f"it failed before it was killed:\n{self.said()}"

    def kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(20)

    def said(self) -> str:
        """Since the last start."""
        return self._log.read_text()

    @property
    def _log(self) -> Path:
        return self._state / "output.txt"

    def _has_failed(self) -> bool:
        """It has ended by itself, or has said of a pipeline that it failed or was refused."""
        has_ended = self._process is None or self._process.poll() is not None
        return has_ended or "\npipeline " in self.said()


class Kills:
    """When to kill, drawn from a seed, and a record of it for whoever has to find out why."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._drawn = [f"KILL_LOOP_SEED={seed}"]

    def kill(self, process: PipelineProcess, looks: Mapping[str, Look]) -> None:
        name = self._rng.choice(list(looks))
        changes = self._rng.randint(1, 2)
        then_s = SHORTEST_S * (LONGEST_S / SHORTEST_S) ** self._rng.random()
        self._drawn.append(f"killed {then_s * 1000:.0f} ms after change {changes} of {name}")
        print(self)
        process.kill_after(looks[name], changes, then_s)

    def __str__(self) -> str:
        return "; ".join(self._drawn)
