"""What can be wrong with a data directory. These are for the operator, never for a client.

StorageError
├── CorruptLog             a segment of the log is damaged
│   ├── CorruptManifest    the same of the MANIFEST,
│   ├── CorruptSnapshot    of a snapshot,
│   ├── CorruptHistory     of a history or journal file,
│   ├── CorruptStopped     of the STOPPED file
│   ├── CorruptIndex       batches of history overlap, or rows are missing between them
│   └── CorruptStaged      of a staged piece
├── DirectoryInUse         another process has the directory
├── SealingInUse           another process has the lock of sealing
├── DirectoryReplaced      another directory is at the path of the one that was opened
├── FailedWriteRemains     a write failed, and what it left on disk could not be erased
├── NotYetInLog            a position was read whose frame is not closed
└── SegmentGone            a position was read whose segment has been dropped (sealed or expired)

Whoever raises a CorruptLog has changed and deleted nothing. Each says what helps against it.
"""

from __future__ import annotations

from typing import ClassVar


class StorageError(Exception):
    """The root of the tree; never raised itself."""


class CorruptLog(StorageError):
    """Bytes that were once durable are damaged. A start that finds them so is refused."""

    advice: ClassVar[str] = (
        "Restore the file from a copy. Without one, `penstock wal repair --set-damage-aside` can "
        "end the log before the damage; `penstock wal verify` says what can still be read. Both "
        "are for a stopped broker"
    )

    def __init__(self, path: str, position: int, detail: str) -> None:
        super().__init__(
            f"{path} is damaged at byte {position}: {detail}. Nothing was changed. {self.advice}"
        )
        self.path = path
        self.position = position
        self.detail = detail


class CorruptManifest(CorruptLog):
    """Without it nothing says which files are the store: the start is refused."""

    advice = (
        "Restore the whole data directory from a copy: a manifest of another time names other "
        "files. `penstock wal repair` cannot mend it, since what it says is nowhere else"
    )


class CorruptSnapshot(CorruptLog):
    """The state it holds is nowhere else once its segments are dropped: the start is refused."""

    advice = (
        "Restore this file from a copy that has it (under one name it never changes), or else the "
        "whole data directory. `penstock wal repair` cannot mend it, since the state in it is "
        "nowhere else"
    )


class CorruptHistory(CorruptLog):
    """A start is refused only if the file is missing or has another length; a damaged batch is
    found when it is read, and stops the groups that need it."""

    advice = (
        "Restore this file from a copy that has it: under one name it never changes. Damage "
        "within it stops only the groups that need these messages; if it is missing or has "
        "another length, the broker does not start before it is restored or `penstock wal repair "
        "--set-damage-aside` has given up its messages"
    )


class CorruptIndex(CorruptLog):
    """The batches that the manifest names overlap, or do not hold every row: readers would pass
    over messages. A start is refused; a sealing run that would write such a manifest fails, and
    the log stays."""

    advice = (
        "`penstock wal verify` lists the messages that cannot be reached; `penstock wal repair` "
        "puts those that are on disk back in order and loses none. Both are for a stopped broker"
    )


class CorruptStaged(CorruptLog):
    """No start is refused for it. Before its commit a piece that is damaged is not staged; after
    it, the batch cannot be stored any further."""

    advice = (
        "Restore this file from a copy that has it: under one name it never changes. Until then "
        "the batch it belongs to is not stored any further; all else goes on"
    )


class CorruptStopped(CorruptLog):
    """Nothing says where the log ended at the last stop: the start is refused."""

    advice = (
        "Restore this file from a copy made since the broker stopped. Without one, `penstock wal "
        "repair --set-damage-aside` sets it aside: the log is then judged as after a kill, and a "
        "log that was cut short is not noticed"
    )


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


class SealingInUse(StorageError):
    """Two processes that seal one directory would destroy each other's files."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f"another process holds {path}; nothing is sealed until it ends. If it is no sealing "
            "process of this broker, find it with `fuser` or `lsof` and end it"
        )
        self.path = path


class DirectoryReplaced(StorageError):
    """Files made by name would go into a directory that is not this broker's."""

    def __init__(self, directory: str) -> None:
        super().__init__(
            f"the data directory {directory} was moved, removed or replaced while the broker used "
            "it; nothing is written any more. Put the directory back and restart the broker"
        )
        self.directory = directory


class SegmentGone(StorageError):
    """The log no longer holds this position; what it held is in the history files, or expired."""

    def __init__(self, position: int) -> None:
        super().__init__(f"the log no longer holds position {position}")
        self.position = position


class FailedWriteRemains(StorageError):
    """Requests that were refused for the failed write may take effect at the next start."""

    def __init__(self, write: BaseException, erasing: BaseException) -> None:
        super().__init__(
            f"{write}; erasing what it left failed too: {erasing}; refused requests may take "
            "effect at the next start"
        )


class NotYetInLog(StorageError):
    """The frame is still open; it can be read as soon as it is handed to the writer."""

    def __init__(self, seq: int) -> None:
        super().__init__(f"frame {seq} is not in the log yet")
        self.seq = seq
