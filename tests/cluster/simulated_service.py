"""A service that processes call over a network with faults: requests, answers, and feeds.

A request is answered once, or its caller is told that it was not answered. Faults are drawn by the
seed of the simulation, or planned by a test for the next request.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from penstock.cluster.shared import Unanswered
from penstock.engine.scheduler import Turn
from tests.cluster.simulation import SimulatedProcess, Simulation


class Fate(Enum):
    """Describes what becomes of one request."""

    ANSWERED = "answered"
    LOST_REQUEST = "the service never sees it"
    LOST_ANSWER = "the service does it, and nobody is told"
    DUPLICATED = "it arrives again, later; one of the two answers comes back"
    LATE = "it arrives when the caller has given up"


@dataclass
class Faults:
    """How likely each fault is for one request, and how long a message is on its way.

    Delays are drawn for each message, so requests and answers overtake each other as soon as
    `most_delay_ms` is above `least_delay_ms`.
    """

    least_delay_ms: int = 1
    most_delay_ms: int = 1
    timeout_ms: int = 1000
    lost_request: float = 0.0
    lost_answer: float = 0.0
    duplicated: float = 0.0
    late: float = 0.0
    stray: float = 0.0
    """How likely it is that somebody else's message is stored just before an append."""

    @staticmethod
    def drawn(draw: random.Random) -> Faults:
        """Returns faults as a seed draws them: some runs have many of one kind and none else."""

        def chance() -> float:
            return draw.choice((0.0, 0.0, 0.02, 0.1, 0.3))

        return Faults(
            most_delay_ms=draw.choice((1, 5, 50, 400)),
            lost_request=chance(),
            lost_answer=chance(),
            duplicated=chance(),
            late=chance(),
            stray=draw.choice((0.0, 0.0, 0.01, 0.05)),
        )


@dataclass
class _Plan:
    fate: Fate
    kind: str
    process: SimulatedProcess | None


Reply = Callable[[Any], None]


class Service:
    """The network's side of a service: takes requests, loses and repeats them, answers in time or
    not at all.

    `plan` decides the fate of the next request that matches; otherwise `faults` draws it.
    """

    def __init__(self, simulation: Simulation, faults: Faults | None = None) -> None:
        self.simulation = simulation
        self.faults = faults or Faults()
        self.is_away = False
        self.cut_off: set[SimulatedProcess] = set()
        """Processes that cannot reach the service, nor it them."""
        self.requests: dict[str, int] = {}
        """How many requests of each kind were sent."""
        self._plans: list[_Plan] = []

    def plan(self, fate: Fate, kind: str = "", process: SimulatedProcess | None = None) -> None:
        """Decides what becomes of the next request of this process, if it is named, and of a kind
        that begins so: "put" or "put shard.0"."""
        self._plans.append(_Plan(fate, kind, process))

    def leave(self) -> None:
        """The service goes away: it sees no request and sends nothing, until `come_back`."""
        self.is_away = True

    def come_back(self) -> None:
        self.is_away = False
        self.wake()

    def cut(self, process: SimulatedProcess) -> None:
        self.cut_off.add(process)

    def connect(self, process: SimulatedProcess) -> None:
        self.cut_off.discard(process)
        self.wake()

    def without_faults(self) -> None:
        """From now on every request is answered at once."""
        self.faults = replace(Faults(), timeout_ms=self.faults.timeout_ms)
        self._plans.clear()
        self.cut_off.clear()
        self.come_back()

    def wake(self) -> None:
        """Sends what tails and watches wait for."""
        raise NotImplementedError

    def reaches(self, process: SimulatedProcess) -> bool:
        return not self.is_away and process not in self.cut_off

    def delay_ms(self) -> int:
        return self.simulation.random.randint(self.faults.least_delay_ms, self.faults.most_delay_ms)

    def request(
        self, process: SimulatedProcess, kind: str, work: Callable[[Reply], None], done: Reply
    ) -> None:
        """Sends a request to the service, where `work` does it and gives the answer."""
        if process.is_dead:
            return
        self.requests[kind] = self.requests.get(kind, 0) + 1
        _Request(self, process, work, done).send(self._fate(kind, process))

    def _fate(self, kind: str, process: SimulatedProcess) -> Fate:
        for plan in self._plans:
            if kind.startswith(plan.kind) and plan.process in (None, process):
                self._plans.remove(plan)
                return plan.fate
        drawn = self.simulation.random.random()
        faults = self.faults
        for chance, fate in (
            (faults.lost_request, Fate.LOST_REQUEST),
            (faults.lost_answer, Fate.LOST_ANSWER),
            (faults.duplicated, Fate.DUPLICATED),
            (faults.late, Fate.LATE),
        ):
            if drawn < chance:
                return fate
            drawn -= chance
        return Fate.ANSWERED


class _Request:
    """One request. Its caller is told exactly one outcome, unless its process dies."""

    def __init__(
        self,
        service: Service,
        process: SimulatedProcess,
        work: Callable[[Reply], None],
        done: Reply,
    ) -> None:
        self._service = service
        self._process = process
        self._work = work
        self._done: Reply | None = done

    def send(self, fate: Fate) -> None:
        service = self._service
        scheduler = service.simulation.scheduler
        timeout_ms = service.faults.timeout_ms
        self._process.later(timeout_ms, lambda: self._end(Unanswered("no answer in time")))
        if fate is Fate.LOST_REQUEST:
            return
        delay_ms = service.delay_ms()
        answers_first = fate in (Fate.ANSWERED, Fate.LATE)
        if fate is Fate.DUPLICATED:
            answers_first = service.simulation.random.random() < 0.5
            later_ms = delay_ms + service.simulation.random.randint(1, 2 * timeout_ms)
            scheduler.later(later_ms, lambda: self._serve(not answers_first))
        elif fate is Fate.LATE:
            delay_ms += timeout_ms
        scheduler.later(delay_ms, lambda: self._serve(answers_first))

    def _serve(self, is_answered: bool) -> None:
        if self._service.reaches(self._process):
            self._work(self._answer if is_answered else _nobody)
        elif self._service.simulation.random.random() < 0.5:
            # Some requests fail at once when the service is away: there is no connection.
            self._process.arrive(0, lambda: self._end(Unanswered("the service is away")))

    def _answer(self, outcome: Any) -> None:
        if self._service.reaches(self._process):
            self._process.arrive(self._service.delay_ms(), lambda: self._end(outcome))

    def _end(self, outcome: Any) -> None:
        done, self._done = self._done, None
        if done is not None:
            done(outcome)


def _nobody(outcome: Any) -> None:
    """Nobody is told of this outcome."""


class Feed:
    """What one process is told over time by a service: a tail of a stream, or a watch of keys.

    Messages arrive in the order in which they were sent. A stalled feed sends nothing until it is
    released; what was sent before arrives.
    """

    def __init__(self, service: Service, process: SimulatedProcess) -> None:
        self.process = process
        self.is_closed = False
        self.is_stalled = False
        self._service = service
        self._last_ms = 0
        self._is_asked = False

    def close(self) -> None:
        self.is_closed = True

    def wake(self) -> None:
        """Sends what is there, in a later turn."""
        if not self._is_asked and not self.is_closed:
            self._is_asked = True
            self._service.simulation.scheduler.soon(self._turn)

    def _turn(self) -> None:
        self._is_asked = False
        is_open = not self.is_closed and not self.process.is_dead
        if is_open and not self.is_stalled and self._service.reaches(self.process):
            self.send()

    def send(self) -> None:
        """Sends everything that the process has not been told, with `arrive`."""
        raise NotImplementedError

    def arrive(self, turn: Turn) -> None:
        now_ms = self._service.simulation.now_ms
        self._last_ms = max(self._last_ms, now_ms + self._service.delay_ms())
        self.process.arrive(self._last_ms - now_ms, lambda: None if self.is_closed else turn())
