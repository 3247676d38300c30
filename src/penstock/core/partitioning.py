"""Which partition a key belongs to. Clients rely on this: FNV-1a, 32 bit, over UTF-8, modulo N."""

from __future__ import annotations

from fnv_hash_fast import fnv1a_32


def partition_of_key(key: str, partitions: int) -> int:
    """The same key and count give the same partition, for ever; an empty key goes to 0."""
    if partitions == 1 or not key:
        return 0
    return fnv1a_32(key.encode()) % partitions
