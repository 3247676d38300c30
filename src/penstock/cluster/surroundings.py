"""The parts of a broker that the ownership of every shard uses: identity, keys, clocks, roster."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from penstock.cluster.availability import StoreAvailability
from penstock.cluster.lease import Identity, LeaseTimes
from penstock.cluster.probe import Probe
from penstock.cluster.roster import Roster
from penstock.cluster.shared import KeyStore
from penstock.engine.clock import Clock
from penstock.engine.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Surroundings:
    me: Identity
    keys: KeyStore
    scheduler: Scheduler
    monotonic_ms: Callable[[], int]
    clock: Clock
    availability: StoreAvailability
    roster: Roster
    probe: Probe
    times: LeaseTimes


def monotonic_ms() -> int:
    """Milliseconds that pass evenly, those of a suspended machine included where the system counts
    them: a broker that slept must not believe in its old lease."""
    return int(time.clock_gettime(_STEADY) * 1000)


_STEADY = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
