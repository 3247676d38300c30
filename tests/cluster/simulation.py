"""A simulated cluster on a manual clock: time, and processes that stop and go on.

One `Simulation` has one scheduler, one seed and all processes. The same seed gives the same run. A
`SimulatedProcess` is the scheduler and the clock of one broker: hand it to whatever takes a
`Scheduler`. `simulated_service.py` has the network with its faults; `simulated_stream.py` and
`simulated_keys.py` have the two services that brokers call over it.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from penstock.engine.clock import ManualClock
from penstock.engine.scheduler import Cancellable, Turn
from tests.engine.harness import Turns


class Simulation:
    """One world. A test moves its time with `pass_ms`.

    `settled` has conditions that also must hold before time goes on, for brokers whose logs write
    in threads. `observers` are called whenever there is nothing more to do at one time.
    """

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.scheduler = Turns()
        self.processes: list[SimulatedProcess] = []
        self.settled: list[Callable[[], bool]] = []
        self.observers: list[Callable[[], None]] = []

    @property
    def now_ms(self) -> int:
        return self.scheduler._now_ms

    def process(
        self, name: str, *, speed: float = 1.0, ahead_ms: int = 0, started_ms: int = 0
    ) -> SimulatedProcess:
        process = SimulatedProcess(self, name, speed, ahead_ms, started_ms)
        self.processes.append(process)
        return process

    def settle(self) -> None:
        """Runs until there is nothing to do at this time."""
        if self.settled:
            self.scheduler.run_until(lambda: all(is_settled() for is_settled in self.settled))
        else:
            self.scheduler.run()
        for observe in self.observers:
            observe()

    def pass_ms(self, ms: int) -> None:
        """Time goes by, stopping wherever a timer is due."""
        self.settle()
        while ms > 0:
            timers = self.scheduler._timers
            wait = timers[0][0] - self.now_ms if timers else ms
            step = max(1, min(ms, wait))
            for process in self.processes:
                process.pass_ms(step)
            self.scheduler.advance(step)
            self.settle()
            ms -= step

    def wait_until(self, is_true: Callable[[], bool], most_ms: int = 60_000) -> int:
        """Lets time go by until `is_true`. Returns how many ms that took."""
        began = self.now_ms
        self.settle()
        while not is_true():
            assert self.now_ms - began < most_ms, "it did not happen in time"
            self.pass_ms(1)
        return self.now_ms - began


class SimulatedProcess:
    """The scheduler and the clocks of one broker, which can be paused, resumed and killed.

    While it is paused nothing runs and nothing arrives; then everything does, what came over the
    network first or the timers first. Its time goes on meanwhile. A killed process never runs
    again, but what it had sent still arrives. `speed` is the rate of its clocks; `ahead_ms` is how
    far its wall clock is off; `started_ms` is its monotonic time at the start.
    """

    def __init__(
        self, simulation: Simulation, name: str, speed: float, ahead_ms: int, started_ms: int
    ) -> None:
        self.name = name
        self.clock = ManualClock()
        self.clock.advance(ahead_ms)
        self.is_paused = False
        self.is_dead = False
        self._simulation = simulation
        self._speed = speed
        self._elapsed_ms = float(started_ms)
        self._arrived: list[Turn] = []
        self._due: list[Turn] = []

    def __repr__(self) -> str:
        return f"<{self.name}>"

    # -- clocks -------------------------------------------------------------------------------

    def monotonic_ms(self) -> int:
        return int(self._elapsed_ms)

    def pass_ms(self, ms: int) -> None:
        before = int(self._elapsed_ms)
        self._elapsed_ms += ms * self._speed
        self.clock.advance(int(self._elapsed_ms) - before)

    # -- the scheduler ------------------------------------------------------------------------

    def soon(self, turn: Turn) -> None:
        if not self.is_dead:
            self._simulation.scheduler.soon(lambda: self._run(turn, self._due))

    def post(self, turn: Turn) -> None:
        if not self.is_dead:
            self._simulation.scheduler.post(lambda: self._run(turn, self._due))

    def later(self, delay_ms: int, turn: Turn) -> Cancellable:
        timer = _Alarm(turn)
        delay = -int(-delay_ms // self._speed)
        self._simulation.scheduler.later(delay, lambda: self._run(timer.ring, self._due))
        return timer

    def in_thread(self, work: Turn) -> None:
        if not self.is_dead:
            self._simulation.scheduler.in_thread(work)

    def in_background(self, work: Turn) -> None:
        self.in_thread(work)

    def close(self) -> None:
        self.kill()

    # -- faults -------------------------------------------------------------------------------

    def arrive(self, delay_ms: int, turn: Turn) -> None:
        """Runs `turn` here when something from outside arrives, after `delay_ms`."""
        self._simulation.scheduler.later(delay_ms, lambda: self._run(turn, self._arrived))

    def pause(self) -> None:
        self.is_paused = True

    def resume(self, *, timers_first: bool = False) -> None:
        if not self.is_paused:
            return
        self.is_paused = False
        arrived, self._arrived = self._arrived, []
        due, self._due = self._due, []
        for turn in [*due, *arrived] if timers_first else [*arrived, *due]:
            self.soon(turn)

    def kill(self) -> None:
        self.is_dead = True
        self._arrived.clear()
        self._due.clear()

    def _run(self, turn: Turn, held: list[Turn]) -> None:
        if self.is_paused:
            held.append(turn)
        elif not self.is_dead:
            turn()


class _Alarm:
    """A timer that can be cancelled even between its time and the end of a pause."""

    def __init__(self, turn: Turn) -> None:
        self._turn: Turn | None = turn

    def cancel(self) -> None:
        self._turn = None

    def ring(self) -> None:
        if self._turn is not None:
            self._turn()
