"""What can be wrong with a data directory. These are for the operator, never for a client.

StorageError
├── CorruptLog        the start is refused; nothing was changed or deleted
├── DirectoryInUse    another process has the directory
└── SegmentGone       a position was read whose segment has been dropped (sealed or expired)
"""

from __future__ import annotations


class StorageError(Exception):
    """The root of the tree; never raised itself."""


class CorruptLog(StorageError):
    """Bytes that were once durable are damaged. Run `penstock wal verify` to see the extent."""

    def __init__(self, path: str, position: int, detail: str) -> None:
        super().__init__(
            f"{path} is damaged at byte {position}: {detail}. Nothing was changed. "
            "Run `penstock wal verify` to see what can still be read, and restore the file from "
            "a copy or set the damaged part aside with `penstock wal repair`"
        )
        self.path = path
        self.position = position
        self.detail = detail


class DirectoryInUse(StorageError):
    """Two brokers on one directory would destroy each other's log."""

    def __init__(self, directory: str, pid: int | None) -> None:
        holder = f"process {pid}" if pid is not None else "another process"
        super().__init__(
            f"the data directory {directory} is in use by {holder}; "
            "stop it first, or give this one a directory of its own"
        )
        self.directory = directory
        self.pid = pid


class SegmentGone(StorageError):
    """The log no longer holds this position; what it held is in the history files, or expired."""

    def __init__(self, position: int) -> None:
        super().__init__(f"the log no longer holds position {position}")
        self.position = position
