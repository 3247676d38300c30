"""Consumer-side idempotency: whether the side effect of (tenant, topic, group, key) has happened.

An effect is PENDING under an owner's lease, COMMITTED with a result, or FAILED with a reason. It
lives until its message is done for the group, plus the TTL. An effect whose message was never
delivered lives for the TTL after its last change. There is one registry per topic. Must not know
who may change an effect (effect_rules.py).
"""

from __future__ import annotations

import heapq

import msgspec


def effect_key(tenant_id: str, key: str) -> str:
    """Joins tenant and key into one text. Empty if there is no key: then nothing is recorded."""
    return f"{len(tenant_id)}/{tenant_id}{key}" if key else ""


class Effect(msgspec.Struct, gc=False):
    """`text` is the result of a committed effect, else the reason of the last failure, if any."""

    status: int
    owner: str
    lease_until: int
    text: str
    expires: int


class EffectTotals:
    """The totals over all topics, which share one memory limit."""

    __slots__ = ("entries", "text_bytes")

    def __init__(self) -> None:
        self.entries = 0
        self.text_bytes = 0


MOST_STALE = 1000
"""Outdated times that the queue may hold, even if there are few entries."""


class Effects:
    """The effects of one topic. Invariant: every entry that no unfinished message keeps alive is in
    the heap `_order` with the time it ends, so that a long lease delays no other entry's end."""

    __slots__ = ("_groups", "_order", "_order_limit", "_totals", "text_bytes")

    def __init__(self, totals: EffectTotals) -> None:
        self._totals = totals
        self._groups: dict[str, dict[str, Effect]] = {}
        self._order: list[tuple[int, str, str]] = []
        self._order_limit = MOST_STALE
        self.text_bytes = 0

    def __len__(self) -> int:
        return sum(map(len, self._groups.values()))

    def get(self, group: str, key: str) -> Effect | None:
        entries = self._groups.get(group)
        return entries.get(key) if entries is not None else None

    def put(self, group: str, key: str, effect: Effect) -> None:
        self._drop(group, key)
        self._groups.setdefault(group, {})[key] = effect
        self.text_bytes += len(effect.text)
        self._totals.entries += 1
        self._totals.text_bytes += len(effect.text)
        self._queue(effect.expires, group, key)

    def keep_until(self, group: str, key: str, expires: int) -> None:
        """Sets when the entry ends, once its message is done, but not before its lease ends."""
        effect = self.get(group, key)
        if effect is not None:
            effect.expires = max(expires, effect.lease_until)
            self._queue(effect.expires, group, key)

    def expired(self, now_ms: int) -> list[tuple[str, str]]:
        """Takes expired entries off the queue and returns them. Skips those that were prolonged."""
        found: list[tuple[str, str]] = []
        order = self._order
        while order and order[0][0] <= now_ms:
            expires, group, key = heapq.heappop(order)
            effect = self.get(group, key)
            if effect is not None and effect.expires == expires:
                found.append((group, key))
        return found

    def forget(self, group: str, key: str) -> None:
        self._drop(group, key)

    def forget_all(self) -> None:
        for group in list(self._groups):
            self.forget_group(group)
        self._order.clear()

    def forget_group(self, group: str) -> None:
        for key in list(self._groups.get(group, ())):
            self._drop(group, key)

    def items(self) -> list[tuple[str, str, Effect]]:
        return [
            (group, key, effect)
            for group, entries in self._groups.items()
            for key, effect in entries.items()
        ]

    def restore(self, items: list[tuple[str, str, Effect]]) -> None:
        for group, key, effect in sorted(items, key=lambda item: item[2].expires):
            self.put(group, key, effect)

    def _queue(self, expires: int, group: str, key: str) -> None:
        heapq.heappush(self._order, (expires, group, key))
        if len(self._order) > self._order_limit:
            self._order = [(effect.expires, group, key) for group, key, effect in self.items()]
            heapq.heapify(self._order)
            self._order_limit = 2 * len(self._order) + MOST_STALE

    def _drop(self, group: str, key: str) -> None:
        entries = self._groups.get(group)
        effect = entries.pop(key, None) if entries is not None else None
        if not entries:
            self._groups.pop(group, None)
        if effect is not None:
            self.text_bytes -= len(effect.text)
            self._totals.entries -= 1
            self._totals.text_bytes -= len(effect.text)
