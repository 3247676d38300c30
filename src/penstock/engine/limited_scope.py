"""A tenant or a namespace that has a quota: its limits, and what is kept to enforce them.

Invariant: a check costs the same however much there is. What is expensive to count is counted at
most once in RECOUNT_MS; in between, what was accepted since is added. What grows by itself, such as
dead letters, is noticed within REFRESH_MS. All of this is volatile. Must not know where the numbers
come from.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import NoReturn

import msgspec

from penstock.model.errors import ResourceExhausted
from penstock.model.quotas import Quota
from penstock.model.scopes import Scope

RECOUNT_MS = 100
"""How often use is counted anew while a limit is reached: often enough to let tenants go on soon,
and seldom enough that one at its limit costs the others nothing."""

REFRESH_MS = 1000
"""How often use is counted anew while there is room."""

BURST_S = 1
"""A rate may be used up for this long at once."""

SLOT_MS = 100
SLOTS = 10
"""The use of a rate is what was accepted in this many slots of time, the present one included."""

Count = Callable[[Scope], int]


class RateBucket:
    """A token bucket that may go into debt: a batch larger than the bucket is accepted when there
    is anything in it, and the next one waits until the debt is paid."""

    __slots__ = ("_rate", "_since_ms", "_tokens")

    def __init__(self, rate: int, now_ms: int) -> None:
        self._rate = rate
        self._tokens = float(rate * BURST_S)
        self._since_ms = now_ms

    def wait_ms(self, now_ms: int) -> int:
        """Returns 0 if something may be taken now, else how long until then."""
        passed_ms = max(0, now_ms - self._since_ms)
        self._since_ms = now_ms
        self._tokens = min(self._rate * BURST_S, self._tokens + self._rate * passed_ms / 1000)
        if self._tokens > 0:
            return 0
        return max(1, math.ceil((1 - self._tokens) * 1000 / self._rate))

    def take(self, number: int) -> None:
        self._tokens -= number


class RateMeter:
    """Counts what was accepted in the last second, in slots of time."""

    __slots__ = ("_counts", "_slot")

    def __init__(self) -> None:
        self._counts = [0] * SLOTS
        self._slot = 0

    def add(self, number: int, now_ms: int) -> None:
        self._turn(now_ms)
        self._counts[self._slot % SLOTS] += number

    def value(self, now_ms: int) -> int:
        self._turn(now_ms)
        return sum(self._counts)

    def _turn(self, now_ms: int) -> None:
        slot = now_ms // SLOT_MS
        for passed in range(max(self._slot + 1, slot - SLOTS + 1), slot + 1):
            self._counts[passed % SLOTS] = 0
        self._slot = max(slot, self._slot)


class UseMargin:
    """How much more may be used of something that is expensive to count."""

    __slots__ = ("_count", "_counted_ms", "_left", "_limit")

    def __init__(self, limit: int, count: Callable[[], int]) -> None:
        self._limit = limit
        self._count = count
        self._left = 0
        self._counted_ms = -REFRESH_MS

    def has_room(self, number: int, now_ms: int) -> bool:
        age_ms = now_ms - self._counted_ms
        if age_ms >= REFRESH_MS or (self._left < number and age_ms >= RECOUNT_MS):
            self._counted_ms = now_ms
            self._left = self._limit - self._count()
        return self._left >= number

    def take(self, number: int) -> None:
        self._left -= number


class Demand(msgspec.Struct, frozen=True, gc=False):
    """The demand of a command. `msgs` and `nbytes` count for the rates; the others are room, by the
    name of the quota, of which 0 is left out."""

    msgs: int
    nbytes: int
    room: Mapping[str, int]


class LimitedScope:
    """`refused` counts refusals by the name of the quota."""

    def __init__(self, scope: Scope, quota: Quota, sums: Mapping[str, Count], now_ms: int) -> None:
        self.scope = scope
        self.quota = quota
        self.refused: Counter[str] = Counter()
        self._meters = {"publish_rate_limit": RateMeter(), "publish_bytes_limit": RateMeter()}
        self._rates = {
            name: RateBucket(rate, now_ms)
            for name in self._meters
            if (rate := getattr(quota, name))
        }
        self._margins = {
            name: UseMargin(limit, partial(count, scope))
            for name, count in sums.items()
            if (limit := getattr(quota, name))
        }

    def inherit(self, before: LimitedScope) -> None:
        """Goes on counting where the same scope's quota was before a change of its limits."""
        self.refused, self._meters = before.refused, before._meters
        for name, bucket in before._rates.items():
            if getattr(self.quota, name) == getattr(before.quota, name):
                self._rates[name] = bucket

    # -- checks, which raise if there is too little -----------------------------------------------

    def check(self, demand: Demand, now_ms: int) -> None:
        if demand.msgs:
            self._check_rates(now_ms)
        for name, number in demand.room.items():
            self.check_room(name, number, now_ms)

    def check_room(self, name: str, number: int, now_ms: int) -> None:
        margin = self._margins.get(name)
        if margin is not None and not margin.has_room(number, now_ms):
            self.refuse(name, f"the limit of {getattr(self.quota, name)}")

    def check_count(self, name: str, used: int) -> None:
        limit = getattr(self.quota, name)
        if limit and used >= limit:
            self.refuse(name, f"the limit of {limit}")

    def _check_rates(self, now_ms: int) -> None:
        for name, bucket in self._rates.items():
            wait_ms = bucket.wait_ms(now_ms)
            if wait_ms:
                self.refuse(name, f"the rate of {getattr(self.quota, name)} per second", wait_ms)

    def refuse(self, name: str, limit: str, retry_after_ms: int = 1000) -> NoReturn:
        self.refused[name] += 1
        tenant, namespace = self.scope
        whose = (
            f"namespace {namespace!r} of tenant {tenant!r}" if namespace else f"tenant {tenant!r}"
        )
        raise ResourceExhausted(
            f"{whose} has reached {limit} of its quota {name}",
            limit=name,
            reason="quota",
            retry_after_ms=retry_after_ms,
        )

    # -- what was accepted ------------------------------------------------------------------------

    def take(self, demand: Demand, now_ms: int) -> None:
        if demand.msgs:
            for name, meter in self._meters.items():
                number = demand.msgs if name == "publish_rate_limit" else demand.nbytes
                meter.add(number, now_ms)
                if name in self._rates:
                    self._rates[name].take(number)
        for name, number in demand.room.items():
            self.take_room(name, number)

    def take_room(self, name: str, number: int) -> None:
        margin = self._margins.get(name)
        if margin is not None:
            margin.take(number)

    def accepted(self, now_ms: int) -> dict[str, int]:
        """Returns the use of the rates: messages and events of the last second, and their bytes."""
        return {name: meter.value(now_ms) for name, meter in self._meters.items()}
