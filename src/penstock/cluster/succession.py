"""The order in which brokers take over a shard.

Invariant: brokers that know the same lease and the same live brokers have the same order, so that
one takes over and the others see it. Must not know when a lease may be taken.
"""

from __future__ import annotations

import hashlib

from penstock.cluster.lease import Lease
from penstock.cluster.roster import Roster


def takers(shard: int, lease: Lease | None, me: str, roster: Roster) -> list[str]:
    """Returns the names of the brokers that could take over, the first to do so first: the one that
    the last owner chose, then the live ones whose copies are complete. `me` is one of them."""
    names = {me}
    for each in roster.live():
        standing = each.shards.get(shard)
        if standing is not None and standing.is_caught_up:
            names.add(each.name)
    if lease is not None and lease.owner != me:
        names.discard(lease.owner)
    successor = "" if lease is None else lease.successor
    return sorted(names, key=lambda name: (name != successor, _weight(shard, name)))


def _weight(shard: int, name: str) -> bytes:
    """Orders the brokers for one shard: each shard in another order, so that owners spread."""
    return hashlib.blake2b(f"{shard} {name}".encode(), digest_size=8).digest()
