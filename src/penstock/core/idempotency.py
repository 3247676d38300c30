"""Producer-side idempotency: which (tenant, final topic, key) was stored within the TTL.

Invariant: `_expires` and `_order` hold the same keys; `_order` is in the order of expiry, since
every key lives equally long. Each operation is O(1) amortised. A key is remembered from the
record of its message, so it is exactly as durable as the message.
"""

from __future__ import annotations

from collections import deque


def produce_identity(tenant_id: str, topic_id: int, key: str) -> str:
    """No two identities share a text: neither the id nor the length can hold the separator."""
    return f"{topic_id}/{len(tenant_id)}/{tenant_id}{key}"


class ProducedKeys:
    __slots__ = ("_expires", "_order")

    def __init__(self) -> None:
        self._expires: dict[str, int] = {}
        self._order: deque[str] = deque()

    def __len__(self) -> int:
        return len(self._expires)

    def is_committed(self, identity: str, now_ms: int) -> bool:
        expires = self._expires.get(identity)
        return expires is not None and expires > now_ms

    def remember(self, identity: str, expires_ms: int, now_ms: int) -> None:
        self.forget_expired(now_ms)
        self._expires[identity] = expires_ms
        self._order.append(identity)

    def forget_expired(self, now_ms: int) -> None:
        order, expires = self._order, self._expires
        while order and expires[order[0]] <= now_ms:
            del expires[order.popleft()]

    def items(self) -> list[tuple[str, int]]:
        return [(identity, self._expires[identity]) for identity in self._order]

    def restore(self, items: list[tuple[str, int]]) -> None:
        self._expires = dict(items)
        self._order = deque(identity for identity, _ in items)
