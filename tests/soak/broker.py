"""`python -m tests.soak.broker`: the `penstock` command with the soak's faults and thresholds.

Small thresholds, a clock that can be set, a disk that can fail, counters, and a sealing process
with the same. Everything else is the broker as it is shipped, and it is loaded only once the clock
is shifted, since it may keep a reference to `time.time`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.soak.control import Control
from tests.soak.disk import control, count_calls, spoil
from tests.thresholds import ENGINE, SERVER, STORAGE_OF_PROCESSES, lower

ROOT = Path(__file__).resolve().parents[2]


def shift_clock(numbers: Control) -> None:
    """The machine's clock is off by as much as the soak says; that of elapsed time is right."""
    real = time.time
    time.time = lambda: real() + numbers["clock_shift_ms"] / 1000


def prepare(numbers: Control) -> None:
    from penstock.engine import pages, window
    from penstock.server import serve, settings
    from penstock.storage import sealer

    if not callable(serve.serve):
        raise RuntimeError("the server is loaded first, with all that imports a threshold")
    lower((*STORAGE_OF_PROCESSES, *ENGINE, *SERVER))
    settings.MINIMUM |= {"segment_bytes": 16 * 1024, "memory_bytes": 4096}
    spoil(numbers, "broker_eio_in")
    count_calls(window.Chunk, "evict", lambda *_: numbers.count("evictions"))
    count_calls(window.Window, "trim", lambda *_: numbers.count("trims"))
    count_calls(window.Window, "drop_topic", lambda *_: numbers.count("topics deleted"))
    count_calls(pages.Pages, "load", lambda *_: numbers.count("pages read"))
    replaced: Any = sealer
    replaced.subprocess = SealingSubprocess()


class SealingProcess(subprocess.Popen[bytes]):
    """Starts tests.soak.sealing in place of the broker's sealing process."""

    def __init__(self, command: list[str], *, env: dict[str, str], **named: Any) -> None:
        if not any("penstock.storage.seal" in part for part in command):
            raise RuntimeError(f"an unknown child process: {command}")
        path = os.pathsep.join([str(ROOT), str(ROOT / "src"), env.get("PYTHONPATH", "")])
        ours = [sys.executable, "-m", "tests.soak.sealing"]
        super().__init__(ours, env=env | {"PYTHONPATH": path}, **named)


class SealingSubprocess:
    """The module `subprocess` as the broker's sealer sees it."""

    Popen = SealingProcess

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)


def run() -> None:
    numbers = control()
    shift_clock(numbers)
    prepare(numbers)
    from penstock.cli.main import main

    main()


if __name__ == "__main__":
    run()
