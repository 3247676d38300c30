"""Producer-side idempotency: which (tenant, final topic, key) was stored within the TTL.

Invariant: every key of `_expires` is in `_order` with its expiry, which is the order of storing,
and of expiry too while the TTL stays the same; `_counts` counts them by the id of the topic. Each
operation is O(1) amortised. A key is remembered from the record of its message, so it is exactly as
durable as the message. When expired keys are dropped does not matter, since `is_committed` compares
the time.
"""

from __future__ import annotations

from collections import Counter, deque


def produce_identity(tenant_id: str, topic_id: int, key: str) -> str:
    """Returns one text for the three. No two identities share a text: neither the id nor the
    length can hold the separator."""
    return f"{topic_id}/{len(tenant_id)}/{tenant_id}{key}"


class ProducedKeys:
    __slots__ = ("_counts", "_expires", "_order")

    def __init__(self) -> None:
        self._expires: dict[str, int] = {}
        self._counts: Counter[str] = Counter()
        self._order: deque[tuple[int, str]] = deque()

    def __len__(self) -> int:
        return len(self._expires)

    def of_topic(self, topic_id: int) -> int:
        """Returns how many keys of the topic are remembered, though it may be deleted."""
        return self._counts.get(str(topic_id), 0)

    def is_committed(self, identity: str, now_ms: int) -> bool:
        expires = self._expires.get(identity)
        return expires is not None and expires > now_ms

    def remember(self, identity: str, expires_ms: int, now_ms: int) -> None:
        self.forget_expired(now_ms)
        if identity not in self._expires:
            self._counts[_topic_of(identity)] += 1
        self._expires[identity] = expires_ms
        self._order.append((expires_ms, identity))

    def forget_expired(self, now_ms: int) -> None:
        order, expires = self._order, self._expires
        while order and order[0][0] <= now_ms:
            expired_ms, identity = order.popleft()
            # Stored again under another TTL or clock: a later entry of the order counts.
            if expires.get(identity) == expired_ms:
                del expires[identity]
                topic = _topic_of(identity)
                self._counts[topic] -= 1
                if not self._counts[topic]:
                    del self._counts[topic]

    def items(self) -> list[tuple[str, int]]:
        return [
            (identity, expires)
            for expires, identity in self._order
            if self._expires.get(identity) == expires
        ]

    def restore(self, items: list[tuple[str, int]]) -> None:
        self._expires = dict(items)
        self._counts = Counter(map(_topic_of, self._expires))
        self._order = deque((expires, identity) for identity, expires in items)


def _topic_of(identity: str) -> str:
    return identity.partition("/")[0]
