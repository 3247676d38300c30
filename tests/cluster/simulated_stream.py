"""A `SharedStream` in memory, with the faults of a replicated stream.

`SimulatedStream` is the stream at the service. `handle(process)` gives what one broker uses.
Besides the faults of every request (`Faults`) it has: stray messages, a leader without quorum, an
old leader that some brokers talk to, tails that stall, purges, a lost end.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.cluster.shared import (
    AppendOutcome,
    Bounds,
    BoundsOutcome,
    Found,
    LookUpOutcome,
    Missing,
    Refused,
    Stored,
    TailListener,
    Unanswered,
)
from tests.cluster.simulated_service import Faults, Feed, Reply, Service
from tests.cluster.simulation import SimulatedProcess, Simulation

MIB = 1024 * 1024


class SimulatedStream(Service):
    """The messages `first_seq` to `last_seq` are in `messages`; `history` has purged ones too.

    A stream that lost its end has another history from there on: `history` has the last message of
    each sequence.
    """

    def __init__(
        self, simulation: Simulation, faults: Faults | None = None, max_message_bytes: int = MIB
    ) -> None:
        super().__init__(simulation, faults)
        self.max_message_bytes = max_message_bytes
        self.messages: dict[int, bytes] = {}
        self.history: dict[int, bytes] = {}
        self.first_seq = 1
        self.last_seq = 0
        self.is_full = False
        """A full stream stores nothing, and the caller is not told why in a form it knows."""
        self.max_bytes = 1 << 40
        self.identity = "simulated"
        self.strays = 0
        self._leader = _Leader(self)
        self._old_leaders: dict[SimulatedProcess, _Leader] = {}
        self._tails: list[_Tail] = []

    def handle(self, process: SimulatedProcess) -> StreamHandle:
        return StreamHandle(self, process)

    # -- what a test does to the stream ---------------------------------------------------------

    def store(self, data: bytes) -> int:
        """Stores a message of nobody in particular, at once. Returns its sequence."""
        self.last_seq += 1
        self.messages[self.last_seq] = self.history[self.last_seq] = data
        self.wake()
        return self.last_seq

    def store_stray(self) -> int:
        """Stores somebody else's message: nonsense, or an earlier message once more."""
        self.strays += 1
        draw = self.simulation.random
        stray = b"stray %d" % self.strays
        return self.store(draw.choice([stray, *list(self.messages.values())[-3:]]))

    def lose_quorum(self) -> None:
        """Appends are proposed from now on, and are neither committed nor answered. The leader
        counts them in refusals and cannot show them."""
        self._leader.has_quorum = False

    def regain_quorum(self, committed: int | None = None) -> None:
        """Commits the first `committed` of the proposed messages; the others never were. None: as
        the seed draws it."""
        proposed, self._leader.proposed = self._leader.proposed, []
        self._leader.has_quorum = True
        if committed is None:
            committed = self.simulation.random.randint(0, len(proposed))
        for data, reply in proposed[:committed]:
            self.store(data)
            reply(Stored())

    @property
    def proposed(self) -> int:
        """How many messages wait for a quorum."""
        return len(self._leader.proposed)

    def isolate(self, process: SimulatedProcess) -> None:
        """From now on this process talks to an old leader, which has no quorum, still answers
        reads, and sees nothing new."""
        leader = self._old_leaders[process] = _Leader(self)
        leader.has_quorum = False
        leader.seen_seq = self.last_seq

    def rejoin(self, process: SimulatedProcess) -> None:
        """Back to the leader. What the old one had proposed is gone."""
        if self._old_leaders.pop(process, None) is not None:
            self.wake()

    def stall(self, process: SimulatedProcess) -> None:
        """The tails of this process are told nothing more, until `release`."""
        for tail in self._tails:
            if tail.process is process:
                tail.is_stalled = True

    def release(self, process: SimulatedProcess) -> None:
        for tail in self._tails:
            if tail.process is process:
                tail.is_stalled = False
        self.wake()

    def drop_before(self, first_seq: int) -> None:
        """Purges what is older than `first_seq`."""
        for seq in range(self.first_seq, min(first_seq, self.last_seq + 1)):
            del self.messages[seq]
        self.first_seq = max(self.first_seq, min(first_seq, self.last_seq + 1))
        self.wake()

    def lose_tail(self, last_seq: int) -> None:
        """The stream forgets every message after `last_seq`, as it must never do."""
        for seq in range(last_seq + 1, self.last_seq + 1):
            self.messages.pop(seq, None)
        self.last_seq = last_seq
        self.first_seq = min(self.first_seq, last_seq + 1)

    def without_faults(self) -> None:
        self.is_full = False
        for process in list(self._old_leaders):
            self.rejoin(process)
        if not self._leader.has_quorum:
            self.regain_quorum()
        for tail in self._tails:
            tail.is_stalled = False
        super().without_faults()

    def wake(self) -> None:
        self._tails = [tail for tail in self._tails if not tail.is_closed]
        for tail in self._tails:
            tail.wake()

    # -- what handles and tails use -------------------------------------------------------------

    def leader(self, process: SimulatedProcess) -> _Leader:
        return self._old_leaders.get(process, self._leader)

    def open_tail(self, process: SimulatedProcess, seq: int, listener: TailListener) -> _Tail:
        tail = _Tail(self, process, seq, listener)
        self._tails.append(tail)
        tail.wake()
        return tail


class _Leader:
    """Decides appends, and answers reads. Knows the messages up to `seen_seq`; None: all."""

    def __init__(self, stream: SimulatedStream) -> None:
        self.has_quorum = True
        self.seen_seq: int | None = None
        self.proposed: list[tuple[bytes, Reply]] = []
        self._stream = stream

    @property
    def last_seq(self) -> int:
        seen = self.seen_seq
        return self._stream.last_seq if seen is None else min(seen, self._stream.last_seq)

    def append(self, seq: int, data: bytes, reply: Reply) -> None:
        stream = self._stream
        draw = stream.simulation.random
        if self.has_quorum and stream.faults.stray and draw.random() < stream.faults.stray:
            stream.store_stray()
        if stream.is_full:
            reply(Unanswered("maximum bytes exceeded"))
            return
        last_seq = self.last_seq + len(self.proposed)
        if seq != last_seq + 1:
            reply(Refused(last_seq))
        elif self.has_quorum:
            stream.store(data)
            reply(Stored())
        else:
            self.proposed.append((data, reply))

    def look_up(self, seq: int, reply: Reply) -> None:
        found = self._stream.messages.get(seq) if seq <= self.last_seq else None
        bounds = self._bounds()
        reply(Missing(bounds.first_seq, bounds.last_seq) if found is None else Found(found))

    def bounds(self, reply: Reply) -> None:
        reply(self._bounds())

    def purge(self, up_to_seq: int, reply: Reply) -> None:
        if self.has_quorum:
            self._stream.drop_before(up_to_seq + 1)
            reply(None)

    def _bounds(self) -> Bounds:
        first_seq = min(self._stream.first_seq, self.last_seq + 1)
        stream = self._stream
        used = sum(map(len, stream.messages.values())) if stream.max_bytes < 1 << 40 else 0
        room = max(0, stream.max_bytes - used)
        return Bounds(first_seq, self.last_seq, room, stream.identity, used)


class StreamHandle:
    """The `SharedStream` of one broker."""

    def __init__(self, stream: SimulatedStream, process: SimulatedProcess) -> None:
        self.stream = stream
        self.process = process
        self.max_message_bytes = stream.max_message_bytes

    def append(self, seq: int, data: bytes, done: Callable[[AppendOutcome], None]) -> None:
        if len(data) > self.max_message_bytes:
            raise AssertionError(f"{len(data)} bytes, more than {self.max_message_bytes}")
        self._request("append", lambda leader, reply: leader.append(seq, data, reply), done)

    def look_up(self, seq: int, done: Callable[[LookUpOutcome], None]) -> None:
        self._request("look_up", lambda leader, reply: leader.look_up(seq, reply), done)

    def bounds(self, done: Callable[[BoundsOutcome], None]) -> None:
        self._request("bounds", lambda leader, reply: leader.bounds(reply), done)

    def follow(self, seq: int, listener: TailListener) -> _Tail:
        return self.stream.open_tail(self.process, seq, listener)

    def purge(self, up_to_seq: int, done: Callable[[Unanswered | None], None]) -> None:
        self._request("purge", lambda leader, reply: leader.purge(up_to_seq, reply), done)

    def _request(self, kind: str, work: Callable[[_Leader, Reply], None], done: Reply) -> None:
        stream, process = self.stream, self.process
        stream.request(process, kind, lambda reply: work(stream.leader(process), reply), done)


class _Tail(Feed):
    """Tells one listener of all messages from `seq` on."""

    def __init__(
        self, stream: SimulatedStream, process: SimulatedProcess, seq: int, listener: TailListener
    ) -> None:
        super().__init__(stream, process)
        self._stream = stream
        self._next_seq = seq
        self._listener = listener
        self._has_ended = False

    def send(self) -> None:
        if self._has_ended:
            return
        first_seq = self._stream.first_seq
        if self._next_seq < first_seq:
            self._has_ended = True
            self.arrive(lambda: self._purged(first_seq))
            return
        last_seq = self._stream.leader(self.process).last_seq
        batch = [(seq, self._stream.messages[seq]) for seq in range(self._next_seq, last_seq + 1)]
        if batch:
            self._next_seq = last_seq + 1
            self.arrive(lambda: self._received(batch))

    def _received(self, batch: list[tuple[int, bytes]]) -> None:
        for seq, data in batch:
            if not self.is_closed:
                self._listener.received(seq, data)

    def _purged(self, first_seq: int) -> None:
        self.close()
        self._listener.purged(first_seq)
