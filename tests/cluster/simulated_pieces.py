"""Staged pieces in memory, with the faults of a replicated service.

`SimulatedPieces` is the store at the service. `handle(process)` gives what one broker uses.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.cluster.shared import Found, Full, PartOutcome, PartsOutcome, Stored, Unanswered
from tests.cluster.simulated_service import Faults, Reply, Service
from tests.cluster.simulation import SimulatedProcess, Simulation


class SimulatedPieces(Service):
    """`stored` has the parts, by the numbers of piece and part."""

    def __init__(
        self, simulation: Simulation, faults: Faults | None = None, max_message_bytes: int = 1024
    ) -> None:
        super().__init__(simulation, faults)
        self.max_message_bytes = max_message_bytes
        self.stored: dict[tuple[int, int], bytes] = {}
        self.max_bytes = 1 << 40

    def handle(self, process: SimulatedProcess) -> PiecesHandle:
        return PiecesHandle(self, process)

    def wake(self) -> None:
        """Nothing waits: there are no tails."""

    def numbers(self) -> set[int]:
        return {number for number, _ in self.stored}

    def put(self, number: int, part: int, data: bytes, reply: Reply) -> None:
        if sum(map(len, self.stored.values())) + len(data) > self.max_bytes:
            reply(Full())
            return
        self.stored[number, part] = data
        reply(Stored())

    def get(self, number: int, part: int, reply: Reply) -> None:
        data = self.stored.get((number, part))
        reply(None if data is None else Found(data))

    def parts(self, reply: Reply) -> None:
        found: dict[int, set[int]] = {}
        for number, part in self.stored:
            found.setdefault(number, set()).add(part)
        reply(found)

    def remove(self, number: int, reply: Reply) -> None:
        for key in [key for key in self.stored if key[0] == number]:
            del self.stored[key]
        reply(None)


class PiecesHandle:
    """The `SharedPieces` of one broker."""

    def __init__(self, pieces: SimulatedPieces, process: SimulatedProcess) -> None:
        self.pieces = pieces
        self.process = process
        self.max_message_bytes = pieces.max_message_bytes

    def put(
        self,
        number: int,
        part: int,
        data: bytes,
        done: Callable[[Stored | Full | Unanswered], None],
    ) -> None:
        assert len(data) <= self.max_message_bytes
        self._request("put", lambda reply: self.pieces.put(number, part, data, reply), done)

    def get(self, number: int, part: int, done: Callable[[PartOutcome], None]) -> None:
        self._request("get", lambda reply: self.pieces.get(number, part, reply), done)

    def parts(self, done: Callable[[PartsOutcome], None]) -> None:
        self._request("parts", self.pieces.parts, done)

    def remove(self, number: int, done: Callable[[Unanswered | None], None]) -> None:
        self._request("remove", lambda reply: self.pieces.remove(number, reply), done)

    def _request(self, kind: str, work: Callable[[Reply], None], done: Reply) -> None:
        self.pieces.request(self.process, kind, work, done)
