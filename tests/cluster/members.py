"""A simulated cluster of whole members: replica, ownership and membership of each broker.

Nothing is promoted by hand here; the brokers choose. `ClusterWorld` checks all the time that at
most one of them is sure to own the shard.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from penstock.cluster.agreement import CLUSTER_FORMAT, Agreement
from penstock.cluster.lease import Lease, LeaseTimes, lease_key, read_lease
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
from tests.cluster.simulation import SimulatedProcess
from tests.engine.inline_sealing import InlineSealer

TTL_MS = 3000
RENEW_MS = LeaseTimes(TTL_MS).renew_ms
CURRENT_MS = LeaseTimes(TTL_MS).current_ms
AT_ONCE_MS = 200
"""Enough for a few requests and the turns of those that come first, and far less than a lease."""
PROBE_MS = 5
"""How soon a probe finds that a process is gone."""


class Member(Node):
    """A broker of the cluster, with one engine after another. It is the listener of its node."""

    world: ClusterWorld

    def __init__(
        self, *arguments: Any, settings: dict[str, Any], called: str = "", **process: Any
    ) -> None:
        """`called` is its name in the cluster, if two brokers have the same one."""
        self.settings = settings
        self.called = called
        self.url = ""
        self.refusals: list[PenstockError] = []
        self.joined: list[PenstockError | None] = []
        super().__init__(*arguments, **process)

    def start(self) -> None:
        world = self.world
        InlineSealer.disks[self.directory] = self.vfs
        self.process = world.simulation.process(self.name, **self._process_options)
        self.handle = world.stream.handle(self.process)
        self.url = f"http://{self.name}:80"
        self.joined = []
        me = identity_of(self.vfs, f"/node-{self.name}", self.called or self.name, self.url)
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

    @property
    def role(self) -> ShardRole:
        return self.node.ownership.role

    @property
    def is_running(self) -> bool:
        return not self.process.is_dead and not self.process.is_paused

    def is_sure(self) -> bool:
        """Says whether this broker would answer a read from memory."""
        return not self.process.is_dead and self.node.is_current()

    def _may_read_from_memory(self) -> bool:
        return self.node.is_current()

    # -- the listener ----------------------------------------------------------------------------

    def began(self, engine: EmbeddedEngine) -> None:
        self.engine_began(engine)

    def ended(self, reason: PenstockError) -> None:
        self.engine_ended(reason)

    def refused(self, reason: PenstockError) -> None:
        self.refusals.append(reason)

    # -- life ------------------------------------------------------------------------------------

    def kill(self) -> None:
        if not self.process.is_dead:
            super().kill()
            self.world.process_ended(self)

    def restart(self) -> None:
        """Starts again on the same directory, after a kill if it runs."""
        self.kill()
        self.start()

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
    """`probes_are_blind`: no probe tells anything, as if a firewall dropped its packets.

    `may_two_be_sure` is for tests of a probe that is wrong: then an owner that does not hear of the
    takeover believes in its lease until that has run out.
    """

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
        self.may_two_be_sure = False
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

    def ready(self, names: str, **process: Any) -> Member:
        """Starts brokers one after another and waits until all are caught up and known to all.
        Returns the owner, which is the first one. There is a topic `t`; no request is under way."""
        for name in names:
            self.start(name, **process)
            self.owner()
        self.must(self.owner().engine.create_topic, "t", 1)
        self.simulation.pass_ms(2 * TTL_MS + 300)
        return self.owner()

    def lease(self) -> Lease:
        lease = read_lease(self.keys.entries.get(lease_key(0))).lease
        assert lease is not None
        return lease

    def cut(self, member: Member) -> None:
        """Takes the stream and the keys from a broker."""
        self.stream.cut(member.process)
        self.keys.cut(member.process)

    def connect(self, member: Member) -> None:
        self.stream.connect(member.process)
        self.keys.connect(member.process)

    def owner(self, most_ms: int = 60_000) -> Member:
        """Waits until a broker owns the shard, and returns it."""
        self.simulation.wait_until(lambda: self._serving() is not None, most_ms)
        owner = self._serving()
        assert owner is not None
        return owner

    def standbys(self) -> list[Member]:
        return [each for each in self.nodes.values() if each.role is ShardRole.STANDBY]

    def next_owner(self) -> Member:
        """Returns the standby that is the first to take over."""
        return self[self.standbys()[0].node.ownership._takers()[0]]

    def _serving(self) -> Member | None:
        for member in self.nodes.values():
            if member.is_running and member.role is ShardRole.OWNER:
                return member
        return None

    def process_ended(self, member: Member) -> None:
        if not self.probes_are_blind:
            for watch in list(self.watches):
                watch.lose(member.process)

    def mislead_probes(self, url: str) -> None:
        """Probes tell that the process at `url` is gone, although it runs."""
        for watch in list(self.watches):
            if watch.url == url:
                watch.tell()

    def listening_at(self, url: str) -> SimulatedProcess | None:
        for member in self.nodes.values():
            if member.url == url and not member.process.is_dead:
                return member.process
        return None

    def _check_owners(self) -> None:
        sure = [member for member in self.nodes.values() if member.is_sure()]
        if self.may_two_be_sure:
            return
        assert len(sure) < 2, f"{[each.name for each in sure]} are both sure to own the shard"
        newest = max((epoch for epoch, _ in self.epochs), default=0)
        for member in sure:
            serving = member.replica.serving_epoch
            assert serving in (0, newest), f"{member.name} reads from memory after a takeover"


class _SimulatedProbe:
    def __init__(self, member: Member) -> None:
        self._member = member

    def watch(self, url: str, gone: Callable[[], None], *, was_reached: bool) -> _ProbeWatch:
        watch = _ProbeWatch(self._member, url, gone)
        self._member.world.watches.append(watch)
        if was_reached and not self._member.world.probes_are_blind:
            watch.connect_later()
        return watch


class _ProbeWatch:
    """A connection to the process that listens at `url` when the watch begins. When that process
    ends and none listens there a moment later, the probe tells."""

    def __init__(self, member: Member, url: str, gone: Callable[[], None]) -> None:
        self.url = url
        self._world = member.world
        self._watcher = member.process
        self._gone: Callable[[], None] | None = gone
        self._process = member.world.listening_at(url)

    def lose(self, process: SimulatedProcess) -> None:
        """The process has ended: tries to connect again."""
        if process is self._process:
            self.connect_later()

    def connect_later(self) -> None:
        self._world.simulation.scheduler.later(PROBE_MS, self._connect)

    def _connect(self) -> None:
        self._process = self._world.listening_at(self.url)
        if self._process is None:
            self.tell()

    def tell(self) -> None:
        self._watcher.arrive(0, partial(self._end, tells=True))

    def close(self) -> None:
        self._end(tells=False)

    def _end(self, *, tells: bool) -> None:
        gone, self._gone = self._gone, None
        if gone is not None:
            self._world.watches.remove(self)
            if tells:
                gone()
