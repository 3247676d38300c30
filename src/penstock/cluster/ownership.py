"""Decides when this broker tries to own a shard, and when it stops.

Invariant: the replica is promoted only under a lease of this broker, and each lease has an epoch
above all that this broker has read of. Two brokers may believe that they own the shard; the fence
in the stream lets only one of them store anything. `is_current` is stricter: while it is true, no
broker that follows the rules here can have taken over, unless its probe was wrong. Then the owner
is no longer current as soon as it hears of the other, or when its lease has run out. Must not know
the server, nor the log.

A broker takes a lease that was released, that has stood still for its whole time, that belonged to
an earlier life of itself, or whose owner's process is gone (probe.py); and the first one of a new
cluster. The brokers that could take it do so one after another, in an order that all of them know.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol

import msgspec

from penstock.api.outcomes import Done
from penstock.cluster.lease import HeldLease, Lease, encode_lease, lease_key, read_lease
from penstock.cluster.lease_reading import RETRY_MS, LeaseReader
from penstock.cluster.shared import Conflict, StoredKey, Unanswered
from penstock.cluster.succession import takers
from penstock.cluster.surroundings import Surroundings
from penstock.engine.scheduler import Cancellable
from penstock.model.errors import PenstockError

TURN_MS = 40
"""How much longer each broker waits for those that come before it."""
YIELD_MS = 2000
"""How long a drained broker waits until it takes a shard that no other has taken."""
RELEASE_MS = 2000
"""How long a broker that stops tries to release its lease. Then the lease runs out."""
DRAIN_MS = 5000
"""How long it waits before that until all that it accepted is answered."""

logger = logging.getLogger("penstock.cluster")


class ShardReplica(Protocol):
    """This broker's copy of the shard, as ownership uses it; see `Replica`."""

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
    """It still serves what it accepted, and lets another broker take over after that."""
    RELEASING = "releasing"
    STOPPED = "stopped"


HOLDING = (ShardRole.PROMOTING, ShardRole.OWNER, ShardRole.DRAINING)

PutOutcome = int | Conflict | Unanswered


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
        self._reader = LeaseReader(shard, around, self._told)
        self._current_until_ms = 0
        self._turn: Cancellable | None = None
        self._renewal: Cancellable | None = None
        self._deadline: Cancellable | None = None
        self._stopped: Callable[[], None] | None = None
        self._successor = ""
        """The broker that this one would like to take over next."""
        self._yields = False
        """This broker was drained: it takes the shard only if no other does."""

    # -- called by the node ----------------------------------------------------------------------

    def start(self) -> None:
        if self.role is not ShardRole.STOPPED:
            self._reader.start()

    def stop(self, done: Callable[[], None]) -> None:
        """Hands the shard over, if this broker owns it. Calls `done` in any case. Called once."""
        self._stopped = done
        if self.role is ShardRole.OWNER:
            self._drain()
        elif self.role in (ShardRole.DRAINING, ShardRole.RELEASING):
            # The shard is being handed over already. `_released` stops this broker after that.
            return
        elif self.role is ShardRole.PROMOTING:
            self._release()
            self._replica.drop("the broker is stopping")
        elif self.role is ShardRole.TAKING:
            # The lease is released when the answer comes.
            self._become(ShardRole.RELEASING)
            self._deadline = self._around.scheduler.later(RELEASE_MS, self._end)
        else:
            self._end()

    def hand_over(self, successor: str, *, yields: bool) -> None:
        """Lets another broker own the shard, best `successor`, and stands by. With `yields` this
        one takes it again only if no other does. The server must not serve any more."""
        if self.role is ShardRole.OWNER:
            self._successor, self._yields = successor, yields
            self._drain()

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
                self._put_released()

    def observe(self, held: HeldLease) -> None:
        """The store tells of a change of the lease."""
        self._reader.observe(held)

    # -- what the store says ---------------------------------------------------------------------

    def _told(self, held: HeldLease, is_read: bool) -> None:
        """The lease was read, or has changed. A standby believes older values too: it loses nothing
        by one, and a store that was made anew begins with low revisions."""
        is_newer = held.revision > self._reader.held.revision
        if self.role in HOLDING:
            if is_newer:
                self._compare(held)
        elif is_newer or (is_read and self.role is ShardRole.STANDBY):
            if held.revision != self._reader.held.revision:
                self._cancel_turn()
            self._reader.hold(held)
            if self.role is ShardRole.STANDBY:
                self._consider()

    def _compare(self, held: HeldLease) -> bool:
        """Steps down if another broker has the lease. Returns whether this one still has it."""
        lease, mine = held.lease, self._reader.held.lease
        if lease is None or (mine is not None and lease.epoch < mine.epoch):
            # Somebody has removed or overwritten it, or put back an old one; or a leader of the
            # store that was cut off shows an old one. This broker writes its own again.
            lease = mine
        elif not self._is_mine(lease):
            self._reader.hold(held)
            self._lose(f"{lease.owner} has taken over")
            return False
        self._reader.hold(HeldLease(lease, held.revision))
        return True

    def _is_mine(self, lease: Lease) -> bool:
        return lease.life_id == self._around.me.life_id

    # -- as a standby ----------------------------------------------------------------------------

    def _consider(self) -> None:
        """Takes the lease if it is free, when it is this broker's turn."""
        if self._turn is not None or not self._may_be_taken():
            return
        if not self._replica.is_caught_up():
            self._reader.read_within(RETRY_MS)
            return
        lease, me = self._reader.held.lease, self._around.me.name
        if lease is not None and lease.successor == me:
            self._yields = False
        wait_ms = YIELD_MS if self._yields else self._takers().index(me) * TURN_MS
        take = partial(self._take, self._reader.held.revision)
        self._turn = self._around.scheduler.later(wait_ms, take)

    def _may_be_taken(self) -> bool:
        lease, me = self._reader.held.lease, self._around.me
        if lease is None:
            is_free = self._replica.epoch() == 0
        else:
            # A copy of a data directory has the same node_id.
            is_own = lease.node_id == me.node_id and lease.owner == me.name
            is_free = lease.is_released or is_own or self._reader.is_owner_gone
        return is_free or self._reader.has_run_out

    def _takers(self) -> list[str]:
        lease, me = self._reader.held.lease, self._around.me.name
        return takers(self._shard, lease, me, self._around.roster)

    def _cancel_turn(self) -> None:
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None

    def _take(self, revision: int) -> None:
        self._turn = None
        if self.role is not ShardRole.STANDBY or revision != self._reader.held.revision:
            return
        self._become(ShardRole.TAKING)
        lease = self._reader.held.lease
        epoch = max(self._replica.epoch(), 0 if lease is None else lease.epoch) + 1
        if lease is not None:
            # Versions of what is not durable begin with the time, and must not repeat.
            self._around.clock.start_at(lease.now_ms)
        self._put(self._lease(epoch), partial(self._taken, epoch))

    def _taken(self, epoch: int, sent_ms: int, outcome: PutOutcome) -> None:
        lease = self._reader.held.lease
        is_ours = isinstance(outcome, int) and lease is not None and self._is_mine(lease)
        if self.role is ShardRole.RELEASING:
            self._around.keys.get(self._key, self._look_whether_released)
        elif self.role is not ShardRole.TAKING:
            return
        elif is_ours:
            self._current_until_ms = sent_ms + self._around.times.current_ms
            self._become(ShardRole.PROMOTING)
            self._renew_later(self._around.times.renew_ms)
            self._replica.promote(epoch, partial(self._promoted, epoch))
        else:
            # If the answer was lost, the lease is found to be of this very life.
            self._become(ShardRole.STANDBY)
            if isinstance(outcome, Conflict):
                self._reader.wait_again()
            self._reader.read_within(RETRY_MS)

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
        self._put_released()

    # -- as the owner ----------------------------------------------------------------------------

    def _renew_later(self, delay_ms: int) -> None:
        """Renews once: the answer to a renewal of an earlier lease may come in between."""
        if self._renewal is not None:
            self._renewal.cancel()
        self._renewal = self._around.scheduler.later(delay_ms, self._renew)

    def _renew(self) -> None:
        lease = self._reader.held.lease
        if self.role in HOLDING and lease is not None:
            renewed = partial(self._renewed, self._reader.held.revision)
            self._put(self._lease(lease.epoch), renewed)

    def _renewed(self, revision: int, sent_ms: int, outcome: PutOutcome) -> None:
        if self.role not in HOLDING:
            return
        if isinstance(outcome, int):
            self._current_until_ms = sent_ms + self._around.times.current_ms
            self._renew_later(self._around.times.renew_ms)
        elif isinstance(outcome, Conflict):
            self._around.keys.get(self._key, partial(self._look_who, revision))
        else:
            self._renew_later(RETRY_MS)

    def _look_who(self, revision: int, outcome: StoredKey | Unanswered | None) -> None:
        """The lease has changed: by a request whose answer was lost, by a person who removed it, or
        because another broker has taken over. Or a leader without a quorum refuses in vain."""
        if self.role not in HOLDING:
            return
        if isinstance(outcome, Unanswered):
            self._renew_later(RETRY_MS)
            return
        held = read_lease(outcome)
        if self._compare(held):
            self._renew_later(RETRY_MS if held.revision == revision else 0)

    def _lose(self, reason: str) -> None:
        """Another broker has the lease."""
        is_stopping = self.role is ShardRole.DRAINING and self._stopped is not None
        self._step_down()
        self._replica.drop(reason)
        if is_stopping:
            self._end()

    def _step_down(self) -> None:
        self._current_until_ms = 0
        if self._renewal is not None:
            self._renewal.cancel()
        self._become(ShardRole.STANDBY)

    # -- the end ---------------------------------------------------------------------------------

    def _drain(self) -> None:
        self._become(ShardRole.DRAINING)
        self._within(DRAIN_MS, self._drained)
        self._replica.drain(self._drained)

    def _drained(self) -> None:
        if self.role is ShardRole.DRAINING:
            self._release()

    def _release(self) -> None:
        self._current_until_ms = 0
        self._become(ShardRole.RELEASING)
        self._within(RELEASE_MS, self._released)
        self._put_released()

    def _within(self, delay_ms: int, then: Callable[[], None]) -> None:
        """Calls `then` after the delay at the latest."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self._around.scheduler.later(delay_ms, then)

    def _put_released(self) -> None:
        """Says in the store that the lease is free, until that is known or another has it."""
        lease = self._reader.held.lease
        if self.role not in (ShardRole.RELEASING, ShardRole.STANDBY):
            return
        if lease is None or not self._is_mine(lease) or lease.is_released:
            self._released()
            return
        others = [name for name in self._takers() if name != self._around.me.name]
        released = msgspec.structs.replace(
            lease,
            now_ms=self._around.clock.now_ms(),
            is_released=True,
            successor=self._successor or (others[0] if others else ""),
        )
        self._put(released, self._release_answered)

    def _release_answered(self, sent_ms: int, outcome: PutOutcome) -> None:
        """A renewal, or the taking itself, may have come in between."""
        if isinstance(outcome, int):
            self._released()
        else:
            self._around.keys.get(self._key, self._look_whether_released)

    def _look_whether_released(self, outcome: StoredKey | Unanswered | None) -> None:
        if self.role not in (ShardRole.RELEASING, ShardRole.STANDBY):
            return
        before = self._reader.held.revision
        if not isinstance(outcome, Unanswered):
            self._reader.hold(read_lease(outcome))
        pause_ms = 0 if self._reader.held.revision != before else RETRY_MS
        self._around.scheduler.later(pause_ms, self._put_released)

    def _released(self) -> None:
        if self.role is ShardRole.RELEASING and self._stopped is not None:
            self._end()
            return
        if self.role is ShardRole.RELEASING:
            self._step_down()
            self._replica.drop("another broker is to own it")
        if self.role is ShardRole.STANDBY:
            self._successor = ""
            # If nobody else takes it, this broker does, once its copy is open again.
            self._reader.read_within(RETRY_MS)

    def _end(self) -> None:
        if self.role is ShardRole.STOPPED:
            return
        self._become(ShardRole.STOPPED)
        self._reader.close()
        for timer in (self._turn, self._renewal, self._deadline):
            if timer is not None:
                timer.cancel()
        stopped, self._stopped = self._stopped, None
        if stopped is not None:
            stopped()

    # -- within ----------------------------------------------------------------------------------

    def _lease(self, epoch: int) -> Lease:
        me, before = self._around.me, self._reader.held.lease
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

    def _put(self, lease: Lease, done: Callable[[int, PutOutcome], None]) -> None:
        """Writes the lease if it is still what was read. Gives the time before it was sent."""
        sent_ms = self._around.monotonic_ms()

        def answered(outcome: PutOutcome) -> None:
            if not isinstance(outcome, Unanswered):
                self._around.availability.answered(self._around.monotonic_ms())
            if isinstance(outcome, int) and outcome > self._reader.held.revision:
                self._reader.hold(HeldLease(lease, outcome))
            done(sent_ms, outcome)

        self._around.keys.put(self._key, encode_lease(lease), self._reader.held.revision, answered)

    def _become(self, role: ShardRole) -> None:
        if role is not self.role:
            self.role = role
            self._changed()
