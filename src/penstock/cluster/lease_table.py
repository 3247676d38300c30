"""The leases of all shards, as the key store last told of them.

May be out of date: use it to find an owner, never to decide that there is none. Must not know who
this broker is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from penstock.cluster.lease import HeldLease, Lease, read_lease, shard_of_key
from penstock.cluster.shared import KeyStore, StoredKey, Tail

logger = logging.getLogger("penstock.cluster")


class LeaseTable:
    """`changed` is called when a shard has another owner, or none; not at every renewal."""

    def __init__(self, keys: KeyStore, changed: Callable[[], None]) -> None:
        self._keys = keys
        self._changed = changed
        self._held: dict[int, HeldLease] = {}
        self._listeners: dict[int, Callable[[HeldLease], None]] = {}
        self._watch: Tail | None = None

    def listen(self, shard: int, listener: Callable[[HeldLease], None]) -> None:
        """Tells `listener` of every change of this shard's lease."""
        self._listeners[shard] = listener

    def open(self) -> None:
        self._watch = self._keys.watch("shard.", self._told)

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()

    def lease(self, shard: int) -> Lease | None:
        held = self._held.get(shard)
        return None if held is None else held.lease

    def _told(self, key: str, entry: StoredKey | None) -> None:
        shard = shard_of_key(key)
        if shard is None:
            return
        held = read_lease(entry)
        if entry is not None and held.lease is None:
            logger.warning("the value of the key %r is no lease; somebody has overwritten it", key)
        before = self.lease(shard)
        self._held[shard] = held
        if _facts(before) != _facts(held.lease):
            self._changed()
        if shard in self._listeners:
            self._listeners[shard](held)


def _facts(lease: Lease | None) -> tuple[str, str, int, bool] | None:
    return None if lease is None else (lease.owner, lease.url, lease.epoch, lease.is_released)
