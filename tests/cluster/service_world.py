"""A simulated stream, simulated keys and brokers that call them one request at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.cluster.shared import StoredKey
from tests.cluster.simulated_keys import KeysHandle, SimulatedKeys
from tests.cluster.simulated_service import Faults
from tests.cluster.simulated_stream import SimulatedStream, StreamHandle
from tests.cluster.simulation import SimulatedProcess, Simulation


class Heard:
    """A listener that keeps what it was told."""

    def __init__(self) -> None:
        self.messages: list[tuple[int, bytes]] = []
        self.purges: list[int] = []

    def received(self, seq: int, data: bytes) -> None:
        self.messages.append((seq, data))

    def purged(self, first_seq: int) -> None:
        self.purges.append(first_seq)


class World:
    def __init__(self, seed: int = 0, faults: Faults | None = None) -> None:
        self.simulation = Simulation(seed)
        self.stream = SimulatedStream(self.simulation, faults)
        self.keys = SimulatedKeys(self.simulation, faults)

    def broker(self, name: str = "b1") -> tuple[SimulatedProcess, StreamHandle, KeysHandle]:
        process = self.simulation.process(name)
        return process, self.stream.handle(process), self.keys.handle(process)

    def call(self, command: Callable[..., None], *arguments: Any) -> Any:
        """The outcome, which must be the only one."""
        outcomes: list[Any] = []
        command(*arguments, outcomes.append)
        assert outcomes == [], "called back within the call"
        self.simulation.wait_until(lambda: bool(outcomes))
        self.simulation.pass_ms(5000)
        assert len(outcomes) == 1
        return outcomes[0]


class HeardKeys:
    """What a watch told, as (key, value or None)."""

    def __init__(self) -> None:
        self.changes: list[tuple[str, bytes | None]] = []

    def changed(self, key: str, entry: StoredKey | None) -> None:
        self.changes.append((key, None if entry is None else entry.value))

    def values(self) -> list[bytes | None]:
        return [value for _, value in self.changes]
