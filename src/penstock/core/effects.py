"""Consumer-side idempotency: did the side effect of (tenant, topic, group, key) happen?

An entry is PENDING under an owner's lease, COMMITTED with a result, or FAILED with a reason. It
lives until its message is done for the group, plus the TTL; an entry whose message was never
delivered lives for the TTL after its last change. One registry per topic.
"""

from __future__ import annotations

from collections import deque

import msgspec


def effect_key(tenant_id: str, key: str) -> str:
    """One text for (tenant, key); empty when there is no key, which means no idempotency."""
    return f"{len(tenant_id)}/{tenant_id}{key}" if key else ""


class Effect(msgspec.Struct, gc=False):
    status: int
    owner: str
    lease_until: int
    text: str
    expires: int


class EffectTotals:
    """What all topics' registries hold together: their memory is one."""

    __slots__ = ("entries", "text_bytes")

    def __init__(self) -> None:
        self.entries = 0
        self.text_bytes = 0


class Effects:
    __slots__ = ("_entries", "_order", "_totals", "text_bytes")

    def __init__(self, totals: EffectTotals) -> None:
        self._totals = totals
        self._entries: dict[tuple[str, str], Effect] = {}
        self._order: deque[tuple[int, str, str]] = deque()
        self.text_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, group: str, key: str) -> Effect | None:
        return self._entries.get((group, key))

    def put(self, group: str, key: str, effect: Effect) -> None:
        self._drop(group, key)
        self._entries[group, key] = effect
        self.text_bytes += len(effect.text)
        self._totals.entries += 1
        self._totals.text_bytes += len(effect.text)
        self._order.append((effect.expires, group, key))

    def keep_until(self, group: str, key: str, expires: int) -> None:
        """The entry's message is done: its last TTL begins."""
        effect = self._entries.get((group, key))
        if effect is not None:
            effect.expires = expires
            self._order.append((expires, group, key))

    def expired(self, now_ms: int) -> list[tuple[str, str]]:
        """Takes the entries off the queue whose time has come and that were not prolonged."""
        found: list[tuple[str, str]] = []
        order = self._order
        while order and order[0][0] <= now_ms:
            expires, group, key = order.popleft()
            effect = self._entries.get((group, key))
            if effect is not None and effect.expires == expires:
                found.append((group, key))
        return found

    def forget(self, group: str, key: str) -> None:
        self._drop(group, key)

    def forget_all(self) -> None:
        for group, key in list(self._entries):
            self._drop(group, key)
        self._order.clear()

    def forget_group(self, group: str) -> None:
        for name, key in [entry for entry in self._entries if entry[0] == group]:
            self._drop(name, key)

    def items(self) -> list[tuple[str, str, Effect]]:
        return [(group, key, effect) for (group, key), effect in self._entries.items()]

    def restore(self, items: list[tuple[str, str, Effect]]) -> None:
        for group, key, effect in sorted(items, key=lambda item: item[2].expires):
            self.put(group, key, effect)

    def _drop(self, group: str, key: str) -> None:
        effect = self._entries.pop((group, key), None)
        if effect is not None:
            self.text_bytes -= len(effect.text)
            self._totals.entries -= 1
            self._totals.text_bytes -= len(effect.text)
