"""Gives free memory of the C library and of Arrow back to the system.

Messages that wait to be sealed are small and lie between others that stay. When they are dropped,
glibc keeps the pages for later: tens of MiB after a burst of millions of messages. Must not know
who freed the memory.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress

import pyarrow as pa


def trim_memory() -> None:
    """Takes about a millisecond for each ten MiB, in which other threads may wait for memory. Only
    glibc gives anything back."""
    pa.default_memory_pool().release_unused()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
