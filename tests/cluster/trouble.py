"""Faults over time, as a seed draws them: outages, splits, pauses, stalls."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tests.cluster.simulated_keys import SimulatedKeys
from tests.cluster.simulated_stream import SimulatedStream
from tests.cluster.simulation import SimulatedProcess, Simulation

Shared = SimulatedStream | SimulatedKeys


class Trouble:
    """Troubles services and processes, one fault after another, until `end`.

    A fault lasts up to `most_ms`, and some last longer than the next one takes to come. `names`
    says which kinds may be drawn; `happened` which were.
    """

    KINDS = ("away", "cut", "quorum", "isolate", "stall", "pause")

    def __init__(
        self,
        simulation: Simulation,
        services: Sequence[Shared],
        processes: Sequence[SimulatedProcess],
        *,
        kinds: Sequence[str] = KINDS,
        every_ms: int = 1000,
        most_ms: int = 8000,
    ) -> None:
        self.happened: list[tuple[int, str]] = []
        self._simulation = simulation
        self._services = list(services)
        self.processes = list(processes)
        """A test may replace processes, as brokers are started again."""
        self._kinds = list(kinds)
        self._every_ms = every_ms
        self._most_ms = most_ms
        self._is_over = False
        self._wait()

    def end(self) -> None:
        """Everything works again, and goes on working."""
        self._is_over = True
        for service in self._services:
            service.without_faults()
        for process in self.processes:
            process.resume()

    def _wait(self) -> None:
        wait_ms = self._simulation.random.randint(1, 2 * self._every_ms)
        self._simulation.scheduler.later(wait_ms, self._strike)

    def _strike(self) -> None:
        if self._is_over:
            return
        draw = self._simulation.random
        kind = draw.choice(self._kinds)
        process, service = draw.choice(self.processes), draw.choice(self._services)
        self.happened.append((self._simulation.now_ms, kind))
        mend = self._begin(kind, process, service)
        lasts_ms = draw.choice((draw.randint(1, 200), draw.randint(1, self._most_ms)))
        self._simulation.scheduler.later(lasts_ms, lambda: None if self._is_over else mend())
        self._wait()

    def _begin(self, kind: str, process: SimulatedProcess, service: Shared) -> Callable[[], None]:
        if kind == "away":
            service.leave()
            return service.come_back
        if kind == "cut":
            service.cut(process)
            return lambda: service.connect(process)
        if kind == "quorum":
            service.lose_quorum()
            return service.regain_quorum
        if kind == "isolate":
            service.isolate(process)
            return lambda: service.rejoin(process)
        if kind == "stall":
            service.stall(process)
            return lambda: service.release(process)
        process.pause()
        timers_first = self._simulation.random.random() < 0.5
        return lambda: process.resume(timers_first=timers_first)
