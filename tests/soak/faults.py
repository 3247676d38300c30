"""What goes wrong while clients work: pauses, jumps of the clock, a disk without room, failing
writes. How a life of the broker ends is chosen here too."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

from tests.soak.control import DISK_HAS_ROOM, DISK_IS_FULL, DISK_IS_SHORT
from tests.soak.process import SoakBroker

KILL, STOP, FAILING_WRITE, REST = "kill", "stop", "failing write", "rest"
"""How a round ends: SIGKILL; SIGTERM; SIGKILL after a write of the log has failed; or the broker
goes on and the clients leave."""

MAX_SHIFT_MS = 240_000
PAUSE, CLOCK, SHORT, FULL, CHILD = (
    "pauses",
    "clock jumps",
    "disks nearly full",
    "disks full",
    "failing writes of the sealing process",
)


class Faults:
    def __init__(self, broker: SoakBroker, rng: random.Random) -> None:
        self._broker = broker
        self._rng = rng
        self.counts: Counter[str] = Counter()
        self.story: list[str] = []
        """Of this round, for the history."""

    def choose_end(self) -> str:
        self.story = []
        return self._rng.choices((KILL, STOP, FAILING_WRITE, REST), (5, 2, 2, 2))[0]

    async def disturb(self, seconds: float) -> None:
        """Some faults, one after the other, within about so many seconds."""
        ends = asyncio.get_running_loop().time() + seconds
        while asyncio.get_running_loop().time() < ends:
            await asyncio.sleep(self._rng.uniform(0.1, 0.8))
            kind = self._rng.choices((PAUSE, CLOCK, SHORT, FULL, CHILD, ""), (2, 3, 1, 2, 2, 3))[0]
            if kind:
                self._note(kind)
                await self._make(kind)

    async def _make(self, kind: str) -> None:
        control, rng = self._broker.control, self._rng
        if kind == PAUSE:
            self._broker.pause()
            try:
                await asyncio.sleep(rng.uniform(0.05, 0.8))
            finally:
                self._broker.go_on()
        elif kind == CLOCK:
            control["clock_shift_ms"] = rng.randrange(0, MAX_SHIFT_MS)
        elif kind == CHILD:
            control["child_eio_in"] = rng.randint(1, 12)
        else:
            control["disk"] = DISK_IS_SHORT if kind == SHORT else DISK_IS_FULL
            try:
                await asyncio.sleep(rng.uniform(0.2, 1.0))
            finally:
                control["disk"] = DISK_HAS_ROOM

    def let_a_write_fail(self) -> None:
        self._note(FAILING_WRITE)
        self._broker.control["broker_eio_in"] = self._rng.randint(1, 60)

    def mend(self) -> None:
        """The disk is as it should be; the clock stays as it is."""
        control = self._broker.control
        control["disk"] = DISK_HAS_ROOM
        control["broker_eio_in"] = control["child_eio_in"] = 0
        self._broker.go_on()

    def _note(self, kind: str) -> None:
        self.counts[kind] += 1
        self.story.append(kind)
