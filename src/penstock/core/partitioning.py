"""The partition of a key: FNV-1a, 32 bit, over UTF-8, modulo the number of partitions.

Clients rely on this function; it must never change.
"""

from __future__ import annotations

from fnv_hash_fast import fnv1a_32


def partition_of_key(key: str, partitions: int) -> int:
    """Returns the key's partition. An empty key goes to partition 0."""
    if partitions == 1 or not key:
        return 0
    return fnv1a_32(key.encode()) % partitions
