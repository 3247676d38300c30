"""A broker as a member of its cluster: its replica, its part in ownership, and its map of owners.

Invariant: `ServingListener` hears of one engine at a time: `began`, then `ended`, in turns of the
loop. A node that cannot join (its name is taken, its settings differ) says so and serves nothing.
Must not know the server, nor which service the shared stream and keys are.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable
from typing import Protocol

from penstock.api.cluster import (
    FIRST_SHARD,
    BrokerReport,
    BrokerState,
    CopyFigures,
    OwnerReport,
)
from penstock.api.outcomes import Done
from penstock.cluster.agreement import Agreement
from penstock.cluster.availability import StoreAvailability
from penstock.cluster.lease import Identity, LeaseTimes
from penstock.cluster.lease_table import LeaseTable
from penstock.cluster.membership import Membership
from penstock.cluster.ownership import Ownership, ShardRole
from penstock.cluster.probe import Probe
from penstock.cluster.purging import ReplicaStanding, StreamPurge
from penstock.cluster.replica import Replica
from penstock.cluster.roster import Announcement, Standing
from penstock.cluster.shared import KeyStore
from penstock.cluster.surroundings import Surroundings, monotonic_ms
from penstock.engine.clock import Clock
from penstock.engine.embedded import EmbeddedEngine
from penstock.engine.scheduler import Scheduler
from penstock.model.errors import FailedPrecondition, PenstockError
from penstock.storage.vfs import Vfs

NODE_FILE = "NODE"

logger = logging.getLogger("penstock.cluster")


class ServingListener(Protocol):
    def began(self, engine: EmbeddedEngine) -> None: ...

    def ended(self, reason: PenstockError) -> None: ...

    def refused(self, reason: PenstockError) -> None:
        """This broker cannot be, or no longer be, a member of the cluster. It must stop."""
        ...


class ClusterNode:
    """See `OwnerMap` for what the server reads. `make_replica` gets the node as its listener."""

    def __init__(
        self,
        me: Identity,
        cluster: str,
        agreement: Agreement,
        keys: KeyStore,
        scheduler: Scheduler,
        clock: Clock,
        probe: Probe,
        times: LeaseTimes,
        make_replica: Callable[[ClusterNode], Replica],
        listener: ServingListener,
        monotonic_ms: Callable[[], int] = monotonic_ms,
        *,
        copies: int = 2,
    ) -> None:
        """`copies` is how many live brokers must have a message in synced files before it is
        purged."""
        self.name = me.name
        self.cluster = cluster
        self._listener = listener
        self._callbacks: list[Callable[[], None]] = []
        availability = StoreAvailability(times.ttl_ms // 2)
        self._membership = Membership(
            me,
            agreement,
            keys,
            scheduler,
            monotonic_ms,
            clock,
            availability,
            times,
            self._standings,
            listener.refused,
        )
        self._roster = self._membership.roster
        self.replica = make_replica(self)
        around = Surroundings(
            me, keys, scheduler, monotonic_ms, clock, availability, self._roster, probe, times
        )
        self.ownership = Ownership(FIRST_SHARD, around, self.replica, self._changed)
        self.replica.furthest = self._furthest_copy
        self._purge = StreamPurge(
            self.replica.stream,
            scheduler,
            copies,
            lambda: self.ownership.role is ShardRole.OWNER,
            self._replica_standings,
            self.replica.seal_soon,
        )
        self._table = LeaseTable(keys, self._changed)
        self._table.listen(FIRST_SHARD, self.ownership.observe)

    def start(self, joined: Done[None]) -> None:
        """Opens the local files and joins the cluster. Waits as long as the key store is away."""
        self.replica.open()

        def done(outcome: PenstockError | None) -> None:
            if outcome is None:
                self._table.open()
                self.ownership.start()
                self._purge.start()
            joined(outcome)

        self._membership.join(done)

    def hand_over(self, done: Callable[[], None]) -> None:
        """Answers what was accepted, and lets another broker take over the shard if this one owns
        it. The server must not serve any more."""
        self.ownership.stop(done)

    def check_successor(self, name: str) -> None:
        """Raises FailedPrecondition unless this broker owns the shard, and the other could take
        over at once."""
        if self.ownership.role is not ShardRole.OWNER:
            raise FailedPrecondition(f"{self.name} does not own the shard any more; ask again")
        if name == self.name:
            raise FailedPrecondition(f"{name} owns the shard already")
        if name not in self.successors():
            ready = ", ".join(self.successors()) or "none"
            raise FailedPrecondition(
                f"{name!r} is no standby that has caught up; there is: {ready}"
            )

    def successors(self) -> list[str]:
        """Returns the other brokers that have read the log to its end."""
        return [
            each.name
            for each in self._roster.live()
            if each.name != self.name
            and (standing := each.shards.get(FIRST_SHARD)) is not None
            and standing.is_caught_up
        ]

    def is_live(self, name: str) -> bool:
        return self._roster.find_live(name) is not None

    def move(self, successor: str, *, yields: bool) -> None:
        """Lets another broker take over the shard, and stands by. The server must not serve any
        more."""
        self.ownership.hand_over(successor, yields=yields)

    def remove(self, name: str, done: Done[None]) -> None:
        """Forgets a broker that is gone."""
        self._roster.remove(name, done)

    def leave(self, done: Callable[[], None]) -> None:
        """Tells the others that this broker stops, and closes the local files."""

        def left() -> None:
            self.replica.close()
            done()

        self._table.close()
        self._purge.close()
        self._membership.leave(left)

    def is_current(self) -> bool:
        return self.ownership.is_current()

    def copy_peers(self, first_seq: int) -> list[Announcement]:
        """Returns the live brokers whose sealed files reach message `first_seq`: standbys first, to
        spare the owner."""
        owner = self.owner_of(FIRST_SHARD)
        found: list[tuple[bool, int, str, Announcement]] = []
        for each in self._roster.live():
            standing = each.shards.get(FIRST_SHARD)
            if each.name == self.name or standing is None or standing.is_copying:
                continue
            if standing.sealed + 1 >= first_seq:
                is_owner = owner is not None and owner.owner == each.name
                found.append((is_owner, -standing.sealed, each.name, each))
        return [each for *_, each in sorted(found, key=lambda item: item[:3])]

    def copy_figures(self) -> CopyFigures:
        """Describes this broker's copy for metrics."""
        replica, progress = self.replica, self.replica.copy_progress()
        findings = replica.findings
        return CopyFigures(
            replica.position(),
            replica.sealed_seq(),
            self._purge.first_seq,
            findings.audits,
            findings.faults,
            findings.repaired,
            0 if progress is None else progress.done_bytes,
            0 if progress is None else progress.total_bytes,
        )

    # -- the replica's listener ------------------------------------------------------------------

    def engine_began(self, engine: EmbeddedEngine) -> None:
        self._listener.began(engine)

    def engine_ended(self, reason: PenstockError) -> None:
        self._listener.ended(reason)
        self.ownership.fenced(reason.message)

    # -- the map of owners -----------------------------------------------------------------------

    def owner_of(self, shard: int) -> OwnerReport | None:
        lease = self._table.lease(shard)
        if lease is None or lease.is_released:
            return None
        return OwnerReport(shard, lease.owner, lease.url, lease.epoch)

    def owners(self) -> list[OwnerReport]:
        owner = self.owner_of(FIRST_SHARD)
        return [] if owner is None else [owner]

    def brokers(self) -> list[BrokerReport]:
        owner, known = self.owner_of(FIRST_SHARD), self._roster.known()
        places = {each.announcement.name: _place(each.announcement) for each in known}
        end = 0 if owner is None else places.get(owner.owner, 0)
        return [
            BrokerReport(
                name=each.announcement.name,
                url=each.announcement.url,
                version=each.announcement.version,
                state=self._state_of(each.announcement) if each.is_live else "gone",
                position=places[each.announcement.name],
                lag=max(0, end - places[each.announcement.name]) if each.is_live else 0,
                age_ms=each.age_ms,
            )
            for each in known
        ]

    def when_changed(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    def _state_of(self, broker: Announcement) -> BrokerState:
        owner = self.owner_of(FIRST_SHARD)
        if owner is not None and owner.owner == broker.name:
            is_mine = broker.name == self.name
            if is_mine and self.ownership.role in (ShardRole.DRAINING, ShardRole.RELEASING):
                return "draining"
            return "owner"
        standing = broker.shards.get(FIRST_SHARD)
        if standing is not None and standing.is_copying:
            return "copying"
        return "standby" if standing is not None and standing.is_caught_up else "starting"

    def _changed(self) -> None:
        for callback in self._callbacks:
            callback()

    def _standings(self) -> dict[int, Standing]:
        replica = self.replica
        standing = Standing(
            replica.position(),
            replica.is_caught_up(),
            replica.sealed_seq(),
            replica.copy_progress() is not None,
            replica.identity,
        )
        return {FIRST_SHARD: standing}

    def _furthest_copy(self, identity: str) -> tuple[int, str]:
        """Returns how far any broker said that its copy goes, live or not, and its name."""
        found = [(0, "")]
        for each in self._roster.announcements():
            standing = each.shards.get(FIRST_SHARD)
            if standing is not None and standing.stream == identity and each.name != self.name:
                found.append((standing.position, each.name))
        return max(found)

    def _replica_standings(self) -> list[ReplicaStanding]:
        live = {each.name for each in self._roster.live()}
        found: list[ReplicaStanding] = []
        for each in self._roster.announcements():
            standing = each.shards.get(FIRST_SHARD)
            if standing is not None:
                # What is not a copy of this stream counts as none yet.
                is_whole = standing.stream == self.replica.identity and not standing.is_copying
                found.append(
                    ReplicaStanding(each.name, standing.sealed, each.name in live, not is_whole)
                )
        return found


def identity_of(vfs: Vfs, directory: str, name: str, url: str) -> Identity:
    """Returns who this broker is. Its data directory has an id that it keeps."""
    vfs.mkdir(directory)
    path = os.path.join(directory, NODE_FILE)
    if vfs.exists(path):
        node_id = vfs.read_file(path).decode("ascii", "replace").strip()
    else:
        node_id = secrets.token_hex(8)
        vfs.write_file_atomically(path, f"{node_id}\n".encode())
    return Identity(name, url, node_id, secrets.token_hex(8))


def _place(broker: Announcement) -> int:
    """Returns the last frame of the shard that a broker has."""
    standing = broker.shards.get(FIRST_SHARD)
    return 0 if standing is None else standing.position
