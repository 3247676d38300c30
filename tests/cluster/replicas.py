"""Brokers that share a simulated stream: each is a process, a disk in memory and a replica.

A `Node` may be killed, restarted and paused. Ownership is not here: a test promotes and drops.
Commands go to the engine of the node that owns the shard, and their outcomes are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.api.messages import Produce, Settle
from penstock.cluster.copying import Copier, FileGone, PeerFailed
from penstock.cluster.pieces import SharedPieceStore
from penstock.cluster.replica import FindPeers, Replica
from penstock.cluster.replica_directory import ReplicaDirectory
from penstock.core.comparison import comparable
from penstock.core.image import StateImage, take_image
from penstock.core.invariants import check
from penstock.core.state import BrokerState
from penstock.engine.consumers import OpenConsumer
from penstock.engine.embedded import EmbeddedEngine
from penstock.engine.scheduler import Cancellable, Scheduler, Turn
from penstock.model.errors import PenstockError
from penstock.model.limits import KIB, Limits
from penstock.model.records import Message
from penstock.storage.log import WalOptions
from penstock.storage.manifest import MANIFEST_NAME
from tests.cluster.relay import RelayedCalls, run_relayed
from tests.cluster.simulated_pieces import SimulatedPieces
from tests.cluster.simulated_service import Faults
from tests.cluster.simulated_stream import SimulatedStream
from tests.cluster.simulation import SimulatedProcess, Simulation
from tests.engine.harness import Reader
from tests.engine.inline_sealing import InlineSealer
from tests.storage.faulty_vfs import FaultyVfs

LEASE_MS = 1000
SMALL = WalOptions(segment_bytes=64 * KIB, reserve_bytes=0)


class LifeScheduler:
    """The scheduler of one life of a replica, on the process's own. Closed, it drops what comes."""

    def __init__(self, process: SimulatedProcess) -> None:
        self._process = process
        self._is_closed = False

    def soon(self, turn: Turn) -> None:
        self._process.soon(lambda: self._run(turn))

    def post(self, turn: Turn) -> None:
        self._process.post(lambda: self._run(turn))

    def later(self, delay_ms: int, turn: Turn) -> Cancellable:
        return self._process.later(delay_ms, lambda: self._run(turn))

    def in_thread(self, work: Turn) -> None:
        if not self._is_closed:
            work()

    def in_background(self, work: Turn) -> None:
        if not self._is_closed:
            run_relayed(work)

    def close(self) -> None:
        self._is_closed = True

    def _run(self, turn: Turn) -> None:
        if not self._is_closed:
            turn()


class Node:
    """The `ReplicaListener` of its replica. `epochs` are those in which it served."""

    def __init__(
        self, world: ReplicaWorld, name: str, options: WalOptions, limits: Limits, **process: Any
    ) -> None:
        self.world = world
        self.name = name
        self.vfs = FaultyVfs()
        self.directory = f"/{name}"
        self.is_current = True
        self.endings: list[PenstockError] = []
        self._options = options
        self._limits = limits
        self._process_options = process
        self.start()

    def start(self) -> None:
        InlineSealer.disks[self.directory] = self.vfs
        simulation = self.world.simulation
        self.process = simulation.process(self.name, **self._process_options)
        self.handle = self.world.stream.handle(self.process)
        self.replica = Replica(
            self.name,
            self.handle,
            self._limits,
            self.process.clock,
            self.process,
            lambda: LifeScheduler(self.process),
            self._open,
            self,
            copier=self.make_copier(),
            find_peers=self.world.peers_of(self),
        )
        self.replica.open()
        simulation.settled.append(self._is_settled)

    def make_copier(self) -> Copier:
        options = self._options
        return Copier(self.vfs, self.directory, options.segment_bytes, options.reserve_bytes)

    def _open(
        self, scheduler: Scheduler, ended: Callable[[BaseException], None]
    ) -> ReplicaDirectory:
        return ReplicaDirectory(
            self.vfs,
            self.directory,
            self._options,
            self.handle,
            SharedPieceStore(
                self.world.pieces.handle(self.process), scheduler, RelayedCalls(scheduler)
            ),
            scheduler,
            "simulated",
            is_current=self._may_read_from_memory,
            on_ended=ended,
        )

    def _may_read_from_memory(self) -> bool:
        return self.is_current

    def _is_settled(self) -> bool:
        """Says whether the threads of its log have nothing to do."""
        log = self.replica._log
        if self.process.is_paused or self.process.is_dead or log is None or log._is_closed:
            return True
        if log.failed is not None:
            return True
        supply = log.files.supply
        return log._local_seq == log.durable_seq and not supply.preparing and not supply._measuring

    # -- the listener ----------------------------------------------------------------------------

    def engine_began(self, engine: EmbeddedEngine) -> None:
        self.world.epochs.append((self.replica.serving_epoch, self.name))

    def engine_ended(self, reason: PenstockError) -> None:
        self.endings.append(reason)

    # -- life ------------------------------------------------------------------------------------

    def kill(self) -> None:
        """SIGKILL: the process is gone, the page cache stays."""
        self.process.kill()
        survivor = self.vfs.restarted()
        self._abandon()
        self.vfs = survivor

    def crash(self, flavour: str, seed: int) -> None:
        """The machine stops: what was not synced may be gone."""
        self.process.kill()
        survivor = self.vfs.crash(flavour, seed)
        self._abandon()
        self.vfs = survivor

    def restart(self) -> None:
        self.kill()
        self.start()

    def _abandon(self) -> None:
        if self._is_settled in self.world.simulation.settled:
            self.world.simulation.settled.remove(self._is_settled)
        if self.replica._log is not None:
            self.replica._log.close()

    def close(self) -> None:
        if self._is_settled in self.world.simulation.settled:
            self.world.simulation.settled.remove(self._is_settled)
        self.replica.close()

    # -- looking inside --------------------------------------------------------------------------

    @property
    def engine(self) -> EmbeddedEngine:
        engine = self.replica.engine
        assert engine is not None, f"{self.name} does not own the shard"
        return engine

    @property
    def state(self) -> BrokerState:
        if self.replica.engine is not None:
            return self.replica.engine.parts.state
        assert self.replica.standby is not None
        return self.replica.standby.state

    def image(self) -> StateImage:
        """The state without what has expired, after checking its invariants."""
        check(self.state)
        return comparable(take_image(self.state), self.state.last_ts)


class ReplicaWorld:
    """A simulated stream and the nodes on it."""

    def __init__(
        self,
        seed: int = 0,
        faults: Faults | None = None,
        *,
        names: str = "ab",
        options: WalOptions = SMALL,
        limits: Limits | None = None,
        are_copied: bool = True,
    ) -> None:
        """`are_copied` False: a node that was left behind finds nobody to copy from."""
        self.are_copied = are_copied
        self.before_read: Callable[[Node, str], None] = lambda node, name: None
        """Called before a node's file is read by another node."""
        self.files_of: Callable[[Node], dict[str, bytes]] = files_of
        """What other nodes find on a node's disk."""
        self.simulation = Simulation(seed)
        self.stream = SimulatedStream(self.simulation, faults)
        self.pieces = SimulatedPieces(self.simulation, faults)
        self.epochs: list[tuple[int, str]] = []
        self.epoch = 0
        limits = limits or Limits(lease_ms=LEASE_MS)
        self.nodes = {name: Node(self, name, options, limits) for name in names}

    def peers_of(self, node: Node) -> FindPeers | None:
        """Whom a node copies from. None: nobody."""
        if not self.are_copied:
            return None
        return lambda first_seq: [
            SimulatedPeer(self, other)
            for other in self.nodes.values()
            if other is not node and not other.process.is_dead and not other.process.is_paused
        ]

    def close(self) -> None:
        for node in self.nodes.values():
            node.close()

    def __getitem__(self, name: str) -> Node:
        return self.nodes[name]

    # -- ownership -------------------------------------------------------------------------------

    def promote(self, name: str, epoch: int | None = None) -> list[Any]:
        """Starts a promotion. Its outcome will be in the list."""
        self.epoch = epoch if epoch is not None else self.epoch + 1
        outcomes: list[Any] = []
        self.nodes[name].replica.promote(self.epoch, outcomes.append)
        return outcomes

    def must_promote(self, name: str) -> Node:
        outcomes = self.promote(name)
        self.simulation.wait_until(lambda: bool(outcomes))
        assert outcomes == [None]
        return self.nodes[name]

    # -- commands --------------------------------------------------------------------------------

    def submit(self, command: Callable[..., None], *arguments: Any) -> list[Any]:
        outcomes: list[Any] = []
        command(*arguments, outcomes.append)
        return outcomes

    def call(self, command: Callable[..., None], *arguments: Any) -> Any:
        outcomes = self.submit(command, *arguments)
        self.simulation.wait_until(lambda: bool(outcomes))
        assert len(outcomes) == 1
        return outcomes[0]

    def must(self, command: Callable[..., None], *arguments: Any) -> Any:
        outcome = self.call(command, *arguments)
        if isinstance(outcome, PenstockError):
            raise outcome
        return outcome

    def produce(self, node: Node, value: str, topic: str = "t") -> int:
        message = self.must(node.engine.produce, Produce(topic, "", value, None))
        assert isinstance(message, Message)
        return message.offset

    def consume(self, node: Node, owner: str = "o", topic: str = "t", lease_ms: int = 0) -> Reader:
        reader = Reader(topic, "g", owner)
        opened = self.must(node.engine.open_consumer, topic, "g", owner, lease_ms, 0, reader)
        assert isinstance(opened, OpenConsumer)
        reader.consumer = opened
        self.simulation.pass_ms(10)
        return reader

    def ack(self, node: Node, reader: Reader, offset: int) -> PenstockError | None:
        settle = Settle(reader.topic, reader.group, 0, offset, reader.owner, "")
        outcome: PenstockError | None = self.call(node.engine.ack, settle)
        return outcome

    def values(self, node: Node, topic: str = "t") -> list[str]:
        """The messages that a topic of one partition holds, in order, as a group reads them."""
        parts = node.engine.parts
        held = node.state.topics[topic].partitions[0]
        log = parts.window.log(node.state.topics[topic].id, 0)
        found: list[str] = []
        cursor = held.first_offset
        while cursor < held.end_offset:
            page = parts.pages.page(log, cursor)
            if page is None:
                parts.pages.load(log, cursor, lambda *_: None)
                self.simulation.settle()
                page = parts.pages.page(log, cursor)
            new = [message for message in page or [] if message.offset >= cursor]
            assert new, f"nothing to read at {cursor} of {held.end_offset}"
            found += [str(message.value) for message in new]
            cursor = new[-1].offset + 1
        return found


class SimulatedPeer:
    """The `PeerFiles` of another node. It answers at once."""

    def __init__(self, world: ReplicaWorld, node: Node) -> None:
        self.name = node.name
        self._world = world
        self._node = node
        self.reads = 0

    def manifest(self) -> bytes:
        return self._read(MANIFEST_NAME, 0, 1 << 40)

    def read(self, name: str, offset: int, length: int) -> bytes:
        return self._read(name, offset, length)

    def _read(self, name: str, offset: int, length: int) -> bytes:
        node = self._node
        self._world.before_read(node, name)
        if node.process.is_dead:
            raise PeerFailed("no connection")
        data = self._world.files_of(node).get(f"{node.directory}/{name}")
        if data is None:
            raise FileGone(name)
        return data[offset : offset + length]


def files_of(node: Node) -> dict[str, bytes]:
    return {path: node.vfs.content(path) for path in node.vfs.paths()}
