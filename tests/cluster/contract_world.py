"""The shared services as the tests of their contract see them: simulated, or real.

`SimulatedWorld` passes simulated time; `JetStreamWorld` waits for real servers. Both have brokers
with a stream and keys, and lose requests and answers on demand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from penstock.cluster.shared import KeyStore, SharedStream
from tests.cluster.service_world import World
from tests.cluster.simulated_service import Fate
from tests.cluster.simulation import SimulatedProcess


class ContractBroker(Protocol):
    @property
    def stream(self) -> SharedStream: ...

    @property
    def keys(self) -> KeyStore: ...


class ContractWorld(Protocol):
    def broker(self) -> Any:
        """One more broker on the same stream and keys, as a ContractBroker."""
        ...

    def call(self, command: Callable[..., None], *arguments: Any) -> Any: ...

    def until(self, is_true: Callable[[], bool]) -> float: ...

    def quiet(self) -> None: ...

    def away(self, broker: Any) -> None: ...

    def back(self, broker: Any) -> None: ...

    def call_losing_answer(
        self, broker: Any, command: Callable[..., None], *arguments: Any
    ) -> Any: ...

    def call_losing_request(
        self, broker: Any, command: Callable[..., None], *arguments: Any
    ) -> Any: ...


class SimulatedBroker:
    def __init__(self, process: SimulatedProcess, stream: SharedStream, keys: KeyStore) -> None:
        self.process = process
        self.stream = stream
        self.keys = keys


class SimulatedWorld:
    """A `World` with the interface of `ContractWorld`."""

    def __init__(self) -> None:
        self.world = World()
        self.simulation = self.world.simulation

    def broker(self) -> SimulatedBroker:
        return SimulatedBroker(*self.world.broker(f"b{len(self.simulation.processes)}"))

    def call(self, command: Callable[..., None], *arguments: Any) -> Any:
        return self.world.call(command, *arguments)

    def until(self, is_true: Callable[[], bool]) -> float:
        return self.simulation.wait_until(is_true) / 1000

    def quiet(self) -> None:
        self.simulation.pass_ms(100)

    def away(self, broker: SimulatedBroker) -> None:
        self.world.stream.cut(broker.process)
        self.world.keys.cut(broker.process)

    def back(self, broker: SimulatedBroker) -> None:
        self.world.stream.connect(broker.process)
        self.world.keys.connect(broker.process)

    def call_losing_answer(
        self, broker: SimulatedBroker, command: Callable[..., None], *arguments: Any
    ) -> Any:
        return self._call_with(Fate.LOST_ANSWER, broker, command, *arguments)

    def call_losing_request(
        self, broker: SimulatedBroker, command: Callable[..., None], *arguments: Any
    ) -> Any:
        return self._call_with(Fate.LOST_REQUEST, broker, command, *arguments)

    def _call_with(
        self, fate: Fate, broker: SimulatedBroker, command: Callable[..., None], *arguments: Any
    ) -> Any:
        for service in (self.world.stream, self.world.keys):
            service.plan(fate, command.__name__, broker.process)
        outcome = self.call(command, *arguments)
        for service in (self.world.stream, self.world.keys):
            service._plans.clear()
        return outcome

    def close(self) -> None:
        """Nothing to close."""
