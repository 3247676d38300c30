"""Decides when this broker tries to own a shard, and when it stops.

Invariant: the replica is promoted only under a lease of this broker, and each lease has an epoch
above all that this broker has read of. Two brokers may believe that they own the shard; the fence
in the stream lets only one of them store anything. `is_current` is stricter: while it is true, no
broker that follows the rules here can have taken over. Must not know the server, nor the log.

A broker takes a lease that was released, that has stood still for its whole time, that belonged to
an earlier life of itself, or whose owner's process is gone (probe.py); and the first one of a new
cluster. The brokers that could take it do so one after another, in an order that all of them know.
"""

from __future__ import annotations

import enum
import hashlib
import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol

import msgspec

from penstock.api.outcomes import Done
from penstock.cluster.availability import Standstill
from penstock.cluster.lease import HeldLease, Lease, encode_lease, lease_key, read_lease
from penstock.cluster.shared import Conflict, Entry, Tail, Unanswered
from penstock.cluster.surroundings import Surroundings
from penstock.engine.scheduler import Cancellable
from penstock.model.errors import PenstockError

RETRY_MS = 100
TURN_MS = 40
"""How much longer each broker waits for those that come before it."""
RELEASE_MS = 2000
"""How long a broker that stops tries to release its lease. Then the lease runs out."""
DRAIN_MS = 5000
"""How long it waits before that until all that it accepted is answered."""

logger = logging.getLogger("penstock.cluster")


class ShardReplica(Protocol):
    """What ownership asks of this broker's copy of the shard; see `Replica`."""

    serving_epoch: int

    def epoch(self) -> int: ...

    def is_caught_up(self) -> bool: ...

    def promote(self, epoch: int, done: Done[None]) -> None: ...

    def drop(self, reason: str) -> None: ...

    def drain(self, done: Callable[[], None]) -> None: ...


class ShardRole(enum.Enum):
    STANDBY = "standby"
    TAKING = "taking"
    """It asks for the lease."""
    PROMOTING = "promoting"
    """It has the lease, and makes its copy the log of an owner."""
    OWNER = "owner"
    DRAINING = "draining"
    """It still serves what it accepted, and stops after that."""
    RELEASING = "releasing"
    STOPPED = "stopped"


HOLDING = (ShardRole.PROMOTING, ShardRole.OWNER, ShardRole.DRAINING)


class Ownership:
    """`changed` is called when `role` has changed. Hand `observe` to the table of leases, and call
    `fenced` when the replica's engine has ended."""

    def __init__(
        self,
        shard: int,
        around: Surroundings,
        replica: ShardReplica,
        changed: Callable[[], None],
    ) -> None:
        self.role = ShardRole.STANDBY
        self._shard = shard
        self._key = lease_key(shard)
        self._around = around
        self._replica = replica
        self._changed = changed
        self._held = HeldLease(None, 0)
        """The newest lease that was read."""
        self._standstill = Standstill(around.availability, around.monotonic_ms)
        self._current_until_ms = 0
        self._is_gone = False
        """The probe has told that the owner's process is gone."""
        self._probe: Tail | None = None
        self._probed = ""
        self._poll: Cancellable | None = None
        self._turn: Cancellable | None = None
        self._renewal: Cancellable | None = None
        self._stopped: Callable[[], None] | None = None

    # -- called by the node ----------------------------------------------------------------------

    def start(self) -> None:
        self._read()

    def stop(self, done: Callable[[], None]) -> None:
        """Hands the shard over, if this broker owns it. Calls `done` in any case."""
        self._stopped = done
        if self.role is ShardRole.OWNER:
            self._become(ShardRole.DRAINING)
            self._around.scheduler.later(DRAIN_MS, self._drained)
            self._replica.drain(self._drained)
        elif self.role is ShardRole.PROMOTING:
            self._release()
            self._replica.drop("the broker is stopping")
        elif self.role is ShardRole.TAKING:
            # The lease is released when the answer comes.
            self._become(ShardRole.RELEASING)
            self._around.scheduler.later(RELEASE_MS, self._end)
        else:
            self._end()

    def is_current(self) -> bool:
        """Says whether no other broker can own the shard at this moment."""
        is_owner = self.role in (ShardRole.OWNER, ShardRole.DRAINING)
        return is_owner and self._around.monotonic_ms() < self._current_until_ms

    def fenced(self, reason: str) -> None:
        """The engine of this shard has ended. If nobody else has the lease, others may take it."""
        if self.role in HOLDING:
            logger.info("this broker gives up shard %d: %s", self._shard, reason)
            if self.role is ShardRole.DRAINING:
                self._release()
            else:
                self._step_down()
                self._put_released(lambda: None)

    def observe(self, held: HeldLease) -> None:
        """The store tells of a change of the lease."""
        if held.revision > self._held.revision:
            self._learn(held)

    # -- reading ---------------------------------------------------------------------------------

    def _read(self) -> None:
        self._poll = None
        if self.role is not ShardRole.STOPPED:
            self._around.keys.get(self._key, self._found)

    def _found(self, outcome: Entry | Unanswered | None) -> None:
        if self.role is ShardRole.STOPPED:
            return
        if isinstance(outcome, Unanswered):
            self._read_later(RETRY_MS)
            return
        self._around.availability.answered(self._around.monotonic_ms())
        held = read_lease(outcome)
        # A leader that was cut off may answer with an older value. A standby loses nothing by it,
        # and a store that was made anew begins with low revisions.
        if held.revision > self._held.revision or self.role is ShardRole.STANDBY:
            self._learn(held)
        self._read_later(self._around.times.renew_ms)

    def _read_later(self, delay_ms: int) -> None:
        if self._poll is None:
            self._poll = self._around.scheduler.later(delay_ms, self._read)

    def _read_within(self, delay_ms: int) -> None:
        if self._poll is not None:
            self._poll.cancel()
        self._poll = self._around.scheduler.later(delay_ms, self._read)

    def _learn(self, held: HeldLease) -> None:
        """Takes note of the lease as it is now."""
        if self.role in HOLDING and (held.lease is None or self._is_mine(held.lease)):
            # Somebody has removed or overwritten it, or a renewal is told of before its answer.
            self._held = HeldLease(held.lease or self._held.lease, held.revision)
            return
        if held.revision != self._held.revision:
            self._cancel_turn()
            if _life(held.lease) != _life(self._held.lease):
                self._is_gone = False
        self._held = held
        self._standstill.seen(held.revision)
        self._probe_owner()
        if self.role in HOLDING and held.lease is not None:
            self._lose(f"{held.lease.owner} has taken over")
        elif self.role is ShardRole.STANDBY:
            self._consider()

    def _is_mine(self, lease: Lease) -> bool:
        return lease.life_id == self._around.me.life_id

    # -- as a standby ----------------------------------------------------------------------------

    def _probe_owner(self) -> None:
        lease = self._held.lease
        wanted = ""
        if lease is not None and not lease.is_released and not self._is_mine(lease):
            wanted = lease.url
        if wanted == self._probed:
            return
        if self._probe is not None:
            self._probe.close()
        self._probed, self._probe = wanted, None
        if wanted:
            self._probe = self._around.probe.watch(wanted, self._owner_gone)

    def _owner_gone(self) -> None:
        """Reads the lease first: the process may have released it, or have another address now."""
        self._is_gone = True
        self._probed, self._probe = "", None
        if self.role is ShardRole.STANDBY:
            self._read_within(0)

    def _consider(self) -> None:
        """Takes the lease if it is free, when it is this broker's turn."""
        if self._turn is not None or self._stopped is not None or not self._may_be_taken():
            return
        if not self._replica.is_caught_up():
            self._read_within(RETRY_MS)
            return
        turn = self._order().index(self._around.me.name)
        revision = self._held.revision
        self._turn = self._around.scheduler.later(turn * TURN_MS, lambda: self._take(revision))

    def _may_be_taken(self) -> bool:
        lease, me = self._held.lease, self._around.me
        if lease is None:
            is_free = self._replica.epoch() == 0
        else:
            is_free = lease.is_released or lease.node_id == me.node_id or self._is_gone
        if is_free:
            return True
        return self._standstill.lasted_ms(self._held.revision) >= self._around.times.ttl_ms

    def _order(self) -> list[str]:
        """Returns the names of the brokers that could take over, the first to do so first."""
        lease, me = self._held.lease, self._around.me.name
        names = {me}
        for each in self._around.roster.live():
            standing = each.shards.get(self._shard)
            if standing is not None and standing.is_caught_up:
                names.add(each.name)
        successor = ""
        if lease is not None:
            successor = lease.successor
            if lease.owner != me:
                names.discard(lease.owner)
        return sorted(names, key=lambda name: (name != successor, _weight(self._shard, name)))

    def _cancel_turn(self) -> None:
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None

    def _take(self, revision: int) -> None:
        self._turn = None
        if self.role is not ShardRole.STANDBY or revision != self._held.revision:
            return
        self._become(ShardRole.TAKING)
        lease = self._held.lease
        epoch = max(self._replica.epoch(), 0 if lease is None else lease.epoch) + 1
        if lease is not None:
            # Versions of what is not durable begin with the time, and must not repeat.
            self._around.clock.start_at(lease.now_ms)
        self._put(self._lease(epoch), partial(self._taken, epoch))

    def _taken(self, epoch: int, sent_ms: int, outcome: int | Conflict | Unanswered) -> None:
        lease = self._held.lease
        is_ours = isinstance(outcome, int) and lease is not None and self._is_mine(lease)
        if self.role is ShardRole.RELEASING:
            self._put_released(self._end)
        elif self.role is not ShardRole.TAKING:
            return
        elif is_ours:
            self._current_until_ms = sent_ms + self._around.times.current_ms
            self._become(ShardRole.PROMOTING)
            self._renew_later()
            self._replica.promote(epoch, partial(self._promoted, epoch))
        else:
            # If the answer was lost, the lease is found to be of this very life.
            self._become(ShardRole.STANDBY)
            self._read_within(1 if isinstance(outcome, Conflict) else RETRY_MS)

    def _promoted(self, epoch: int, outcome: PenstockError | None) -> None:
        if self.role is not ShardRole.PROMOTING:
            if outcome is None and self.role is ShardRole.STANDBY:
                self._replica.drop("the lease was lost meanwhile")
            return
        if outcome is None:
            logger.info("this broker owns shard %d, epoch %d", self._shard, epoch)
            self._become(ShardRole.OWNER)
            return
        logger.warning("this broker could not take over shard %d: %s", self._shard, outcome.message)
        self._step_down()
        self._put_released(lambda: None)

    # -- as the owner ----------------------------------------------------------------------------

    def _renew_later(self, delay_ms: int | None = None) -> None:
        wait_ms = self._around.times.renew_ms if delay_ms is None else delay_ms
        self._renewal = self._around.scheduler.later(wait_ms, self._renew)

    def _renew(self) -> None:
        if self.role not in HOLDING or self._held.lease is None:
            return
        self._put(self._lease(self._held.lease.epoch), self._renewed)

    def _renewed(self, sent_ms: int, outcome: int | Conflict | Unanswered) -> None:
        if self.role not in HOLDING:
            return
        if isinstance(outcome, int):
            self._current_until_ms = sent_ms + self._around.times.current_ms
            self._renew_later()
        elif isinstance(outcome, Conflict):
            self._around.keys.get(self._key, self._look_who)
        else:
            self._renew_later(RETRY_MS)

    def _look_who(self, outcome: Entry | Unanswered | None) -> None:
        """The lease has changed: by a request whose answer was lost, by a person who removed it, or
        because another broker has taken over."""
        if self.role not in HOLDING:
            return
        if isinstance(outcome, Unanswered):
            self._renew_later(RETRY_MS)
            return
        held = read_lease(outcome)
        if held.lease is not None and not self._is_mine(held.lease):
            self._held = held
            self._lose(f"{held.lease.owner} has taken over")
            return
        mine = self._held.lease
        self._held = HeldLease(mine if held.lease is None else held.lease, held.revision)
        self._renew()

    def _lose(self, reason: str) -> None:
        """Another broker has the lease."""
        is_stopping = self.role is ShardRole.DRAINING
        self._step_down()
        self._replica.drop(reason)
        if is_stopping:
            self._end()

    def _step_down(self) -> None:
        self._current_until_ms = 0
        if self._renewal is not None:
            self._renewal.cancel()
        self._become(ShardRole.STANDBY)
        self._standstill.seen(self._held.revision)
        self._read_later(self._around.times.renew_ms)

    # -- the end ---------------------------------------------------------------------------------

    def _drained(self) -> None:
        if self.role is ShardRole.DRAINING:
            self._release()

    def _release(self) -> None:
        self._current_until_ms = 0
        self._become(ShardRole.RELEASING)
        self._around.scheduler.later(RELEASE_MS, self._end)
        self._put_released(self._end)

    def _put_released(self, done: Callable[[], None]) -> None:
        """Says in the store that the lease is free. If that fails, it runs out."""
        lease = self._held.lease
        if lease is None or not self._is_mine(lease):
            self._around.scheduler.soon(done)
            return
        others = [name for name in self._order() if name != self._around.me.name]
        released = msgspec.structs.replace(
            lease,
            now_ms=self._around.clock.now_ms(),
            is_released=True,
            successor=others[0] if others else "",
        )
        self._put(released, lambda sent_ms, outcome: done())

    def _end(self) -> None:
        if self.role is ShardRole.STOPPED:
            return
        self._become(ShardRole.STOPPED)
        for timer in (self._poll, self._turn, self._renewal):
            if timer is not None:
                timer.cancel()
        if self._probe is not None:
            self._probe.close()
        stopped, self._stopped = self._stopped, None
        if stopped is not None:
            stopped()

    # -- within ----------------------------------------------------------------------------------

    def _lease(self, epoch: int) -> Lease:
        me, before = self._around.me, self._held.lease
        is_renewal = before is not None and self._is_mine(before)
        return Lease(
            owner=me.name,
            url=me.url,
            node_id=me.node_id,
            life_id=me.life_id,
            epoch=epoch,
            now_ms=self._around.clock.now_ms(),
            renewals=before.renewals + 1 if is_renewal and before is not None else 0,
        )

    def _put(self, lease: Lease, done: Callable[[int, int | Conflict | Unanswered], None]) -> None:
        """Writes the lease if it is still what was read. Gives the time before it was sent."""
        sent_ms = self._around.monotonic_ms()
        revision = self._held.revision

        def answered(outcome: int | Conflict | Unanswered) -> None:
            if not isinstance(outcome, Unanswered):
                self._around.availability.answered(self._around.monotonic_ms())
            if isinstance(outcome, int) and outcome > self._held.revision:
                self._held = HeldLease(lease, outcome)
                self._standstill.seen(outcome)
                self._probe_owner()
            done(sent_ms, outcome)

        self._around.keys.put(self._key, encode_lease(lease), revision, answered)

    def _become(self, role: ShardRole) -> None:
        if role is not self.role:
            self.role = role
            self._changed()


def _life(lease: Lease | None) -> str:
    return "" if lease is None else lease.life_id


def _weight(shard: int, name: str) -> bytes:
    """Orders the brokers for one shard: each shard in another order, so that owners spread."""
    return hashlib.blake2b(f"{shard} {name}".encode(), digest_size=8).digest()
