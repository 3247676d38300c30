"""The C library's allocator: memory that is free in it can go back to the system.

What waits for its sealing is small and lies between what stays; when it goes, glibc keeps the pages
for later. After a burst of millions of messages that is tens of MiB. Must not know who freed it.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress


def give_back() -> None:
    """Takes a millisecond or so for each ten MiB, in which other threads may have to wait for
    memory. Elsewhere than in glibc nothing happens."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
