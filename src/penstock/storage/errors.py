"""Errors of a data directory. They are for the operator, never for a client.

StorageError
├── CorruptLog             a segment of the log is damaged
│   ├── CorruptManifest    the MANIFEST is damaged
│   ├── CorruptSnapshot    a snapshot is damaged
│   ├── CorruptHistory     a history or journal file is damaged
│   ├── CorruptStopped     the STOPPED file is damaged
│   ├── CorruptIndex       batches of history overlap, or rows are missing between them
│   └── CorruptStaged      a staged piece is damaged
├── DirectoryInUse         another process uses the directory
├── SealingInUse           another process holds the lock of sealing
├── DirectoryReplaced      another directory is at the path of the one that was opened
├── FailedWriteRemains     a write failed, and its bytes on disk could not be erased
├── NotYetInLog            a position was read whose frame is not closed
└── SegmentGone            a position was read whose segment was dropped (sealed or expired)

Code that raises a CorruptLog has changed and deleted nothing. Each message says what to do.
"""

from __future__ import annotations

from typing import ClassVar


class StorageError(Exception):
    """The root of the tree; never raised itself."""


class CorruptLog(StorageError):
    """Bytes that were durable are damaged. A start that finds such damage is refused."""

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
    """The manifest says which files belong to the store. Without it a start is refused."""

    advice = (
        "Restore the whole data directory from a copy: a manifest of another time names other "
        "files. `penstock wal repair` cannot repair it, since its content is nowhere else"
    )


class CorruptSnapshot(CorruptLog):
    """The snapshot's state is nowhere else once its segments are dropped. A start is refused."""

    advice = (
        "Restore this file from a copy that has it (a file of this name never changes), or else "
        "the whole data directory. `penstock wal repair` cannot repair it, since the state in it "
        "is nowhere else"
    )


class CorruptHistory(CorruptLog):
    """A start is refused only if the file is missing or has another length. A damaged batch is
    found when it is read, and stops the groups that need it."""

    advice = (
        "Restore this file from a copy that has it: a file of this name never changes. Damage "
        "within it stops only the groups that need these messages; if it is missing or has "
        "another length, the broker does not start before it is restored or `penstock wal repair "
        "--set-damage-aside` has given up its messages"
    )


class CorruptIndex(CorruptLog):
    """The batches that the manifest names overlap, or lack rows, so that readers would miss
    messages. A start is refused. A sealing run that finds this fails and keeps the log."""

    advice = (
        "`penstock wal verify` lists the messages that cannot be reached; `penstock wal repair` "
        "brings back those that are on disk and loses none. Both are for a stopped broker"
    )


class CorruptStaged(CorruptLog):
    """A staged piece is damaged. The broker starts all the same. Before its commit, a damaged piece
    counts as not staged. After the commit, the batch cannot be stored any further."""

    advice = (
        "Restore this file from a copy that has it: a file of this name never changes. Until then "
        "its batch is not stored any further; everything else goes on"
    )


class CorruptStopped(CorruptLog):
    """The file says where the log ended at the last stop. If it is damaged, a start is refused."""

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
            f"another process holds {path}; nothing is sealed until it ends. If it is not a "
            "sealing process of this broker, find it with `fuser` or `lsof` and end it"
        )
        self.path = path


class DirectoryReplaced(StorageError):
    """Files created by path would go into a directory that is not this broker's."""

    def __init__(self, directory: str) -> None:
        super().__init__(
            f"the data directory {directory} was moved, removed or replaced while the broker used "
            "it; the broker no longer writes. Put the directory back and restart the broker"
        )
        self.directory = directory


class SegmentGone(StorageError):
    """The log no longer holds this position. Its record is in a history file, or expired."""

    def __init__(self, position: int) -> None:
        super().__init__(f"the log no longer holds position {position}")
        self.position = position


class FailedWriteRemains(StorageError):
    """Requests that were refused for the failed write may take effect at the next start."""

    def __init__(self, write: BaseException, erasing: BaseException) -> None:
        super().__init__(
            f"{write}; erasing its bytes from the disk failed too: {erasing}; refused requests may "
            "take effect at the next start"
        )


class NotYetInLog(StorageError):
    """The frame is still open. It can be read once it is handed to the writer."""

    def __init__(self, seq: int) -> None:
        super().__init__(f"frame {seq} is not in the log yet")
        self.seq = seq
