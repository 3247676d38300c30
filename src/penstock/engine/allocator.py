"""The allocators of the C library and of Arrow: their free memory can go back to the system.

What waits for its sealing is small and lies between what stays; when it goes, glibc keeps the pages
for later. After a burst of millions of messages that is tens of MiB. Must not know who freed it.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress

import pyarrow as pa


def give_back() -> None:
    """Takes a millisecond or so for each ten MiB, in which other threads may have to wait for
    memory. The C library does so only where it is glibc."""
    pa.default_memory_pool().release_unused()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
