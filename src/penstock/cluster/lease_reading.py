"""Reads the lease of one shard: what it says, how long it has stood still, whether its owner is
gone.

Invariant: what was concluded from a lease ends with its renewal: a lease that was renewed has not
run out, and its owner is not gone. Must not know roles, nor when a lease is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from penstock.cluster.availability import Standstill
from penstock.cluster.lease import HeldLease, Lease, lease_key, read_lease
from penstock.cluster.shared import StoredKey, Tail, Unanswered
from penstock.cluster.surroundings import Surroundings
from penstock.engine.scheduler import Cancellable

RETRY_MS = 100


class LeaseReader:
    """`told` gets every lease that was read (`is_read`), and newer ones that the store tells of.
    It says with `hold` which one is in force. A leader of the store that was cut off may answer
    with an older one."""

    def __init__(
        self, shard: int, around: Surroundings, told: Callable[[HeldLease, bool], None]
    ) -> None:
        self.held = HeldLease(None, 0)
        """The newest lease that was read, or written."""
        self._key = lease_key(shard)
        self._around = around
        self._told = told
        self._standstill = Standstill(around.availability)
        self._timer: Cancellable | None = None
        self._probe: Tail | None = None
        self._probed: Lease | None = None
        """The lease whose owner is probed: its first one that was seen."""
        self._gone_life: str | None = None
        """The process that is gone as its probe says; the lease was not read since."""
        self._gone_revision = 0
        """Its last lease, as it was read after the probe had told."""
        self._is_closed = False

    def start(self) -> None:
        self._read()

    def close(self) -> None:
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._probe is not None:
            self._probe.close()

    def observe(self, held: HeldLease) -> None:
        """The store tells of a change of the lease."""
        if held.revision > self.held.revision and not self._is_closed:
            self._told(held, False)

    def read_within(self, delay_ms: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._around.scheduler.later(delay_ms, self._read)

    def hold(self, held: HeldLease) -> None:
        """Takes note of the lease that is in force."""
        is_refuted = self._gone_revision != 0 and held.revision != self._gone_revision
        self.held = held
        self._standstill.seen(held.revision, self._around.monotonic_ms())
        self._probe_owner(again=is_refuted)

    def wait_again(self) -> None:
        """The store cannot be written, so the owner could not renew the lease either: begins again
        to measure how long it stands still."""
        self._standstill.begin_again(self.held.revision, self._around.monotonic_ms())

    @property
    def has_run_out(self) -> bool:
        """Nobody has changed the lease for its whole time."""
        return self._standstill.lasted_ms(self.held.revision) >= self._around.times.ttl_ms

    @property
    def is_owner_gone(self) -> bool:
        """The process that wrote this lease is gone, as its probe says."""
        return self._gone_revision != 0 and self._gone_revision == self.held.revision

    # -- reading ---------------------------------------------------------------------------------

    def _read(self) -> None:
        self._timer = None
        self._around.keys.get(self._key, self._found)

    def _found(self, outcome: StoredKey | Unanswered | None) -> None:
        if self._is_closed:
            return
        if self._timer is None:
            is_answered = not isinstance(outcome, Unanswered)
            self.read_within(self._around.times.renew_ms if is_answered else RETRY_MS)
        if isinstance(outcome, Unanswered):
            return
        self._around.availability.answered(self._around.monotonic_ms())
        held = read_lease(outcome)
        if held.lease is not None and held.lease.life_id == self._gone_life:
            self._gone_life = None
            self._gone_revision = held.revision
        self._told(held, True)

    # -- the owner's process ---------------------------------------------------------------------

    def _probe_owner(self, *, again: bool) -> None:
        """`again`: the lease was renewed after the probe had told that the process is gone. It was
        wrong, or the renewal was the last one."""
        lease, before = self.held.lease, self._probed
        is_mine = lease is not None and lease.life_id == self._around.me.life_id
        if lease is None or lease.is_released or is_mine or self._is_closed:
            self._stop_probing()
        elif before is None or _process(lease) != _process(before):
            self._probe_process(lease, was_reached=False)
        elif again:
            self._probe_process(lease, was_reached=True)

    def _probe_process(self, lease: Lease, *, was_reached: bool) -> None:
        self._stop_probing()
        self._probed = lease
        gone = partial(self._owner_gone, lease.life_id)
        self._probe = self._around.probe.watch(lease.url, gone, was_reached=was_reached)

    def _stop_probing(self) -> None:
        self._gone_life = None
        self._gone_revision = 0
        self._probed = None
        if self._probe is not None:
            self._probe.close()
            self._probe = None

    def _owner_gone(self, life_id: str) -> None:
        """Reads the lease before anybody acts on it: the process may have released it, or renewed
        it since."""
        self._probe = None
        self._gone_life = life_id
        self.read_within(0)


def _process(lease: Lease) -> tuple[str, str]:
    return lease.life_id, lease.url
