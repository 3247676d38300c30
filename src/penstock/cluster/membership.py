"""This broker as a member of the cluster: it agrees with the others, and announces itself.

Invariant: of two live brokers with one name, the one that joined later in another data directory is
refused, or the earlier one leaves. A member writes the agreement again if somebody has changed it;
a broker that replaced one joins only after it has stood for so long that every member would have
seen it. Must not know who owns a shard.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from penstock import __version__
from penstock.api.outcomes import Done
from penstock.cluster.agreement import (
    AGREEMENT_KEY,
    Agreement,
    decode_agreement,
    encode_agreement,
)
from penstock.cluster.availability import StoreAvailability
from penstock.cluster.lease import Identity, LeaseTimes
from penstock.cluster.roster import (
    PREFIX,
    Announcement,
    Roster,
    Standing,
    decode_announcement,
)
from penstock.cluster.shared import Conflict, KeyStore, StoredKey, Unanswered
from penstock.engine.clock import Clock
from penstock.engine.scheduler import Cancellable, Scheduler
from penstock.model.errors import FailedPrecondition, InvalidArgument, PenstockError

RETRY_MS = 200
LEAVE_MS = 1000
"""How long a broker that leaves waits until it could say so."""
MOST_RESTORES = 3
"""So often in turn a member writes the agreement again. Then another member insists on its own."""

logger = logging.getLogger("penstock.cluster")


class Membership:
    """`refused` is called once if this broker cannot stay a member."""

    def __init__(
        self,
        me: Identity,
        agreement: Agreement,
        keys: KeyStore,
        scheduler: Scheduler,
        monotonic_ms: Callable[[], int],
        clock: Clock,
        availability: StoreAvailability,
        times: LeaseTimes,
        standings: Callable[[], dict[int, Standing]],
        refused: Callable[[PenstockError], None],
    ) -> None:
        self.roster = Roster(keys, monotonic_ms, clock.wall_ms, times.ttl_ms)
        self._me = me
        self._key = PREFIX + me.name
        self._agreement = agreement
        self._keys = keys
        self._scheduler = scheduler
        self._monotonic_ms = monotonic_ms
        self._clock = clock
        self._availability = availability
        self._times = times
        self._standings = standings
        self._refused = refused
        self._joined: Done[None] | None = None
        self._began_ms = 0
        self._beaten_ms = 0
        self._revision = 0
        self._agreement_revision = -1
        self._has_replaced_agreement = False
        self._restores = 0
        self._beats = 0
        self._timer: Cancellable | None = None
        self._is_over = False

    def join(self, joined: Done[None]) -> None:
        """Waits as long as the key store is away. Gives FailedPrecondition if the name is taken,
        InvalidArgument if the settings differ from those of live brokers."""
        self._joined = joined
        self._began_ms = self._monotonic_ms()
        self.roster.open()
        self._read_agreement()

    def leave(self, left: Callable[[], None]) -> None:
        """Tells the others that this broker stops."""
        self._stop()
        ends = _Once(left)
        self._scheduler.later(LEAVE_MS, ends)
        if self._revision:
            goodbye = self._announcement(has_left=True)
            self._keys.put(self._key, goodbye, self._revision, lambda outcome: ends())
        else:
            self._scheduler.soon(ends)

    # -- agreeing --------------------------------------------------------------------------------

    def _read_agreement(self) -> None:
        self._keys.get(AGREEMENT_KEY, self._compare)

    def _compare(self, outcome: StoredKey | Unanswered | None) -> None:
        if self._is_over:
            return
        if isinstance(outcome, Unanswered):
            self._again(self._read_agreement)
            return
        revision = 0 if outcome is None else outcome.revision
        if revision != self._agreement_revision:
            self._agreement_revision = revision
            self._began_ms = self._monotonic_ms()
        found = None if outcome is None else decode_agreement(outcome.value)
        if found == self._agreement:
            if self._has_replaced_agreement and not self._has_waited():
                self._again(self._read_agreement)
            else:
                self._read_name()
        else:
            self._disagree(found, revision)

    def _disagree(self, found: Agreement | None, revision: int) -> None:
        others = [each.name for each in self.roster.live() if not self._is_mine(each)]
        fresh = [name for name in others if self.roster.has_changed(name)]
        # Without an agreement the cluster is new, or its members are about to write it again.
        # Replacing one takes longer than joining with one: of two that would, one joins first.
        replace_ms = self._times.ttl_ms + self._times.renew_ms
        has_waited = self._has_waited(RETRY_MS if found is None else replace_ms)
        if fresh and found is not None:
            self._refuse(_disagreement(self._agreement, found, fresh))
        elif has_waited and not others:
            logger.info("no other broker is live: the cluster's settings are now this broker's")
            self._agree(found, revision)
        else:
            self._again(self._read_agreement)

    def _agree(self, found: Agreement | None, revision: int) -> None:
        def done(outcome: int | Conflict | Unanswered) -> None:
            if not self._is_over:
                self._has_replaced_agreement = found is not None
                self._again(self._read_agreement)

        self._keys.put(AGREEMENT_KEY, encode_agreement(self._agreement), revision, done)

    def _check_agreement(self, outcome: StoredKey | Unanswered | None) -> None:
        """As a member: a person may have removed the agreement, or another broker replaced it that
        does not see this one."""
        if self._is_over:
            return
        self._timer = self._scheduler.later(self._times.renew_ms, self._beat)
        if isinstance(outcome, Unanswered):
            return
        found = None if outcome is None else decode_agreement(outcome.value)
        if found == self._agreement:
            self._restores = 0
        elif self._restores < MOST_RESTORES or found is None:
            self._restores += 1
            logger.warning("the cluster's settings were changed in the key store; changed back")
            revision = 0 if outcome is None else outcome.revision
            agreement = encode_agreement(self._agreement)
            self._keys.put(AGREEMENT_KEY, agreement, revision, lambda outcome: None)
        else:
            self._refuse(_disagreement(self._agreement, found, ["another broker"]))

    # -- taking the name -------------------------------------------------------------------------

    def _read_name(self) -> None:
        self._keys.get(self._key, self._take_name)

    def _take_name(self, outcome: StoredKey | Unanswered | None) -> None:
        if self._is_over:
            return
        if isinstance(outcome, Unanswered):
            self._again(self._read_name)
            return
        found = None if outcome is None else decode_announcement(outcome.value)
        is_free = found is None or found.has_left or found.node_id == self._me.node_id
        if not is_free and self.roster.has_changed(self._me.name):
            self._refuse(_name_taken(self._me.name, found.url if found else ""))
        elif is_free or (self._has_waited() and self.roster.find_live(self._me.name) is None):
            self._put_name(0 if outcome is None else outcome.revision)
        else:
            self._again(self._read_name)

    def _put_name(self, revision: int) -> None:
        def done(outcome: int | Conflict | Unanswered) -> None:
            if self._is_over:
                return
            if not isinstance(outcome, int):
                self._again(self._read_name)
                return
            self._revision = outcome
            self._has_replaced_agreement = False
            self._answered()
            self._timer = self._scheduler.later(self._times.renew_ms, self._beat)
            self._tell_joined(None)

        self._keys.put(self._key, self._announcement(), revision, done)

    # -- staying ---------------------------------------------------------------------------------

    def _beat(self) -> None:
        now_ms = self._monotonic_ms()
        if now_ms - self._beaten_ms > self._times.ttl_ms:
            # Meanwhile others may have counted this broker as gone, and agreed on other settings.
            self._began_ms = now_ms
            self._read_agreement()
            return
        self._keys.put(self._key, self._announcement(), self._revision, self._beaten)

    def _beaten(self, outcome: int | Conflict | Unanswered) -> None:
        if self._is_over:
            return
        if isinstance(outcome, Conflict):
            self._keys.get(self._key, self._look_who)
            return
        if isinstance(outcome, int):
            self._revision = outcome
            self._answered()
            self._keys.get(AGREEMENT_KEY, self._check_agreement)
        else:
            self._timer = self._scheduler.later(RETRY_MS, self._beat)

    def _look_who(self, outcome: StoredKey | Unanswered | None) -> None:
        """Somebody has changed our announcement: this broker, by a request whose answer was lost,
        a person who removed it, or another broker of this name."""
        if self._is_over:
            return
        found = decode_announcement(outcome.value) if isinstance(outcome, StoredKey) else None
        if found is not None and not found.is_of(self._me):
            self._refuse(_name_taken(self._me.name, found.url))
            return
        if not isinstance(outcome, Unanswered):
            self._revision = 0 if outcome is None else outcome.revision
        self._timer = self._scheduler.later(RETRY_MS, self._beat)

    # -- within ----------------------------------------------------------------------------------

    def _announcement(self, *, has_left: bool = False) -> bytes:
        self._beats += 1
        me = self._me
        return msgspec.json.encode(
            Announcement(
                name=me.name,
                url=me.url,
                node_id=me.node_id,
                life_id=me.life_id,
                version=__version__,
                now_ms=self._clock.wall_ms(),
                beats=self._beats,
                shards=self._standings(),
                has_left=has_left,
            )
        )

    def _is_mine(self, announcement: Announcement) -> bool:
        return announcement.node_id == self._me.node_id

    def _has_waited(self, wait_ms: int | None = None) -> bool:
        """Says whether every live broker has announced itself since this one watches, and since the
        agreement changed."""
        least_ms = self._times.ttl_ms if wait_ms is None else wait_ms
        return self._monotonic_ms() - self._began_ms >= least_ms

    def _answered(self) -> None:
        self._beaten_ms = self._monotonic_ms()
        self._availability.answered(self._beaten_ms)

    def _again(self, step: Callable[[], None]) -> None:
        self._timer = self._scheduler.later(RETRY_MS, step)

    def _refuse(self, error: PenstockError) -> None:
        self._stop()
        if self._joined is not None:
            self._tell_joined(error)
        else:
            self._refused(error)

    def _tell_joined(self, outcome: PenstockError | None) -> None:
        joined, self._joined = self._joined, None
        if joined is not None:
            joined(outcome)

    def _stop(self) -> None:
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
        self.roster.close()


class _Once:
    """Calls `then` the first time only."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then: Callable[[], None] | None = then

    def __call__(self) -> None:
        then, self._then = self._then, None
        if then is not None:
            then()


def _disagreement(mine: Agreement, found: Agreement, live: list[str]) -> InvalidArgument:
    differences = "; ".join(found.differences(mine))
    return InvalidArgument(
        f"this broker's settings are not those of the cluster ({differences}); all brokers need "
        f"the same while any other is live: {', '.join(live[:10])}"
    )


def _name_taken(name: str, url: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"another broker of this cluster has the name {name} and runs at {url} with another data "
        "directory; give each broker a name of its own"
    )
