"""Pins the server to one core and the load to another, and measures how busy they were.

On a machine with a single core, or without pinning, nothing is pinned and the results say so.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

QUIET_PERCENT = 10


class Cores(msgspec.Struct, frozen=True):
    server: int
    load: int

    @property
    def is_pinned(self) -> bool:
        return self.server != self.load


def choose_cores() -> Cores:
    """Chooses the first two cores, and pins this process and its later children to the second."""
    if not hasattr(os, "sched_setaffinity"):
        return Cores(0, 0)
    usable = sorted(os.sched_getaffinity(0))
    cores = Cores(usable[0], usable[1] if len(usable) > 1 else usable[0])
    os.sched_setaffinity(0, {cores.load})
    return cores


@contextmanager
def on_server_core(cores: Cores) -> Iterator[None]:
    """Runs processes that are started inside on the server's core."""
    if not cores.is_pinned:
        yield
        return
    os.sched_setaffinity(0, {cores.server})
    try:
        yield
    finally:
        os.sched_setaffinity(0, {cores.load})


class BusyCores:
    """Measures how busy both cores were inside a `with`, in percent, whatever used them."""

    def __init__(self, cores: Cores) -> None:
        self._cores = cores
        self._before: dict[int, tuple[int, int]] = {}
        self.server = 0
        self.load = 0

    def __enter__(self) -> BusyCores:
        self._before = _ticks()
        return self

    def __exit__(self, *_: object) -> None:
        after = _ticks()
        self.server = self._percent(self._cores.server, after)
        self.load = self._percent(self._cores.load, after)

    def __str__(self) -> str:
        return f"server core {self.server} % busy, load core {self.load} %"

    def _percent(self, core: int, after: dict[int, tuple[int, int]]) -> int:
        if core not in after or core not in self._before:
            return 0
        idle = after[core][0] - self._before[core][0]
        total = after[core][1] - self._before[core][1]
        return round(100 * (1 - idle / total)) if total else 0


def look_around(cores: Cores, seconds: float = 2.0) -> str:
    """Returns how busy the machine is before the benchmark starts."""
    with BusyCores(cores) as busy:
        time.sleep(seconds)
    if max(busy.server, busy.load) > QUIET_PERCENT:
        return f"{busy}: there is other work on this machine, and the figures mean little"
    return str(busy)


def _ticks() -> dict[int, tuple[int, int]]:
    """Returns the idle ticks and all ticks of each core since the machine started."""
    ticks: dict[int, tuple[int, int]] = {}
    try:
        lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return ticks
    for line in lines:
        name, *numbers = line.split()
        if name.startswith("cpu") and name != "cpu":
            counts = [int(number) for number in numbers[:8]]
            # Waiting for the disk is idle time.
            ticks[int(name[3:])] = (counts[3] + counts[4], sum(counts))
    return ticks
