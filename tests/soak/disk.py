"""The disk as the soak spoils it, in the broker's process and in its sealing process.

It fails in `Vfs`, the one class through which storage reaches the operating system, so an error
looks as the kernel's would. A full disk refuses what would make a file longer and takes what is
overwritten, as a real one does.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from penstock.storage import vfs
from tests.soak.control import DISK_HAS_ROOM, DISK_IS_FULL, DISK_IS_SHORT, Control

CONTROL_VARIABLE = "SOAK_CONTROL"
"""Names the control file, for the two modules of tests/soak that are processes."""

SHORT_BYTES = 1024
Buffers = Sequence[bytes | memoryview]


def control() -> Control:
    return Control(Path(os.environ[CONTROL_VARIABLE]))


def spoil(numbers: Control, eio_in: str) -> None:
    real_write, real_free = vfs.Vfs._pwritev, vfs.Vfs.free_bytes

    def write(self: vfs.Vfs, fd: int, buffers: Buffers, offset: int, flags: int) -> int:
        left = numbers[eio_in]
        if left:
            numbers[eio_in] = left - 1
            if left == 1:
                # As when a sync fails: the bytes may be there, and nobody may count on it.
                real_write(self, fd, buffers, offset, flags)
                numbers.count("failed writes")
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        if numbers["disk"] == DISK_IS_FULL:
            end = offset + sum(map(len, buffers))
            if end > os.fstat(fd).st_size:
                numbers.count("writes without room")
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real_write(self, fd, buffers, offset, flags)

    def free(self: vfs.Vfs, directory: str) -> int:
        by_disk = {DISK_IS_SHORT: SHORT_BYTES, DISK_IS_FULL: 0}
        disk = numbers["disk"]
        return real_free(self, directory) if disk == DISK_HAS_ROOM else by_disk[disk]

    vfs.Vfs._pwritev = write  # type: ignore[method-assign]
    vfs.Vfs.free_bytes = free  # type: ignore[method-assign]


def count_calls(
    owner: Any, name: str, count: Callable[..., None], failed: Callable[[], None] | None = None
) -> None:
    """`count` gets what each call returned, and its arguments."""
    real = getattr(owner, name)

    def counted(*arguments: Any, **named: Any) -> Any:
        try:
            outcome = real(*arguments, **named)
        except Exception:
            if failed is not None:
                failed()
            raise
        count(outcome, *arguments)
        return outcome

    setattr(owner, name, counted)
