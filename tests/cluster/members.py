"""A simulated cluster of whole members: replica, ownership and membership of each broker.

Nothing is promoted by hand here; the brokers choose. `ClusterWorld` checks all the time that at
most one of them is sure to be the owner.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from penstock.cluster.agreement import CLUSTER_FORMAT, Agreement
from penstock.cluster.lease import LeaseTimes
from penstock.cluster.node import ClusterNode, identity_of
from penstock.cluster.ownership import ShardRole
from penstock.cluster.replica import Replica
from penstock.engine.embedded import EmbeddedEngine
from penstock.model.errors import PenstockError
from penstock.model.limits import Limits
from penstock.storage.log import WalOptions
from tests.cluster.replicas import (
    LEASE_MS,
    SMALL,
    LifeScheduler,
    Node,
    ReplicaWorld,
    SimulatedPeer,
)
from tests.cluster.simulated_keys import SimulatedKeys
from tests.cluster.simulated_service import Faults
from tests.engine.inline_sealing import InlineSealer

TTL_MS = 3000
PROBE_MS = 5
"""How soon a probe tells that a process is gone."""


class Member(Node):
    """A broker of the cluster, with one engine after another. It is the listener of its node."""

    world: ClusterWorld

    def __init__(self, *arguments: Any, settings: dict[str, Any], **process: Any) -> None:
        self.settings = settings
        self.url = ""
        self.refusals: list[PenstockError] = []
        self.joined: list[PenstockError | None] = []
        super().__init__(*arguments, **process)

    def start(self) -> None:
        world = self.world
        InlineSealer.disks[self.directory] = self.vfs
        self.process = world.simulation.process(self.name, **self._process_options)
        self.handle = world.stream.handle(self.process)
        self.url = f"http://{self.name}:{len(world.simulation.processes)}"
        self.joined = []
        me = identity_of(self.vfs, f"/node-{self.name}", self.name, self.url)
        self.node = ClusterNode(
            me,
            "test",
            Agreement(CLUSTER_FORMAT, self.settings),
            world.keys.handle(self.process),
            self.process,
            self.process.clock,
            _SimulatedProbe(self),
            LeaseTimes(TTL_MS),
            self._make_replica,
            self,
            self.process.monotonic_ms,
        )
        self.replica = self.node.replica
        self.node.start(self.joined.append)
        world.simulation.settled.append(self._is_settled)

    def _make_replica(self, node: ClusterNode) -> Replica:
        return Replica(
            self.name,
            self.handle,
            self._limits,
            self.process.clock,
            self.process,
            lambda: LifeScheduler(self.process),
            self._open,
            node,
            copier=self.make_copier(),
            find_peers=lambda first_seq: [
                SimulatedPeer(self.world, self.world[each.name])
                for each in node.copy_peers(first_seq)
            ],
        )

    def is_sure(self) -> bool:
        """Says whether this broker would answer a read from memory."""
        return not self.process.is_dead and self.node.is_current()

    # -- the listener ----------------------------------------------------------------------------

    def began(self, engine: EmbeddedEngine) -> None:
        self.engine_began(engine)

    def ended(self, reason: PenstockError) -> None:
        self.engine_ended(reason)

    def refused(self, reason: PenstockError) -> None:
        self.refusals.append(reason)

    # -- life ------------------------------------------------------------------------------------

    def kill(self) -> None:
        super().kill()
        self.world.process_ended(self)

    def stop(self) -> list[str]:
        """Stops in order, as at SIGTERM. The list has "left" when it is done."""
        steps: list[str] = []

        def handed_over() -> None:
            steps.append("handed over")
            self.node.leave(left)

        def left() -> None:
            steps.append("left")
            self.world.simulation.settled.remove(self._is_settled)
            self.process.kill()
            self.world.process_ended(self)

        self.node.hand_over(handed_over)
        return steps


class ClusterWorld(ReplicaWorld):
    """`probes_are_blind`: no probe tells anything, as if a firewall dropped its packets."""

    nodes: dict[str, Member]  # type: ignore[assignment]

    def __init__(
        self,
        seed: int = 0,
        faults: Faults | None = None,
        *,
        options: WalOptions = SMALL,
        limits: Limits | None = None,
    ) -> None:
        super().__init__(seed, faults, names="", options=options, limits=limits)
        self.keys = SimulatedKeys(self.simulation, faults)
        self.probes_are_blind = False
        self.watches: list[_ProbeWatch] = []
        self._options = options
        self._limits = limits or Limits(lease_ms=LEASE_MS)
        self.simulation.observers.append(self._check_owners)

    def __getitem__(self, name: str) -> Member:
        return self.nodes[name]

    def start(
        self, names: str, settings: dict[str, Any] | None = None, **process: Any
    ) -> list[Member]:
        for name in names:
            self.nodes[name] = Member(
                self, name, self._options, self._limits, settings=settings or {}, **process
            )
        return [self.nodes[name] for name in names]

    def owner(self, most_ms: int = 60_000) -> Member:
        """Waits until a broker owns the shard, and returns it."""
        self.simulation.wait_until(lambda: self._serving() is not None, most_ms)
        owner = self._serving()
        assert owner is not None
        return owner

    def _serving(self) -> Member | None:
        for member in self.nodes.values():
            is_running = not member.process.is_dead and not member.process.is_paused
            if is_running and member.node.ownership.role is ShardRole.OWNER:
                return member
        return None

    def process_ended(self, member: Member) -> None:
        for watch in list(self.watches):
            if watch.url == member.url and not self.probes_are_blind:
                watch.tell()

    def _check_owners(self) -> None:
        sure = [member for member in self.nodes.values() if member.is_sure()]
        assert len(sure) < 2, f"{[each.name for each in sure]} are both sure to own the shard"
        newest = max((epoch for epoch, _ in self.epochs), default=0)
        for member in sure:
            serving = member.replica.serving_epoch
            assert serving in (0, newest), f"{member.name} reads from memory after a takeover"


class _SimulatedProbe:
    def __init__(self, member: Member) -> None:
        self._member = member

    def watch(self, url: str, gone: Callable[[], None]) -> _ProbeWatch:
        watch = _ProbeWatch(self._member, url, gone)
        self._member.world.watches.append(watch)
        return watch


class _ProbeWatch:
    def __init__(self, member: Member, url: str, gone: Callable[[], None]) -> None:
        self.url = url
        self._member = member
        self._gone: Callable[[], None] | None = gone
        others = member.world.nodes.values()
        self._was_reached = any(each.url == url and not each.process.is_dead for each in others)

    def tell(self) -> None:
        if self._was_reached:
            self._member.process.arrive(PROBE_MS, partial(self._end, tells=True))

    def close(self) -> None:
        self._end(tells=False)

    def _end(self, *, tells: bool) -> None:
        gone, self._gone = self._gone, None
        if gone is not None:
            self._member.world.watches.remove(self)
            if tells:
                gone()
