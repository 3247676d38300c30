"""The log as the engine sees it: append, commit, and be told what is on disk.

Both the Wal and the MemoryLog satisfy `Log`. All methods but `read` belong to one thread, that
of the event loop; callbacks are called there too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from penstock.api.durability import FsyncMode
from penstock.model.limits import MIB

Post = Callable[[Callable[[], None]], object]
"""Runs a callable on the loop's thread, from any thread: `loop.call_soon_threadsafe`."""

RECORD_OVERHEAD_BYTES = 4
"""What a record takes in the log beside its own bytes; for `has_room`."""


class WalOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`frame_bytes` is where an open frame is closed, between two appends."""

    segment_bytes: int = 64 * MIB
    fsync: FsyncMode = "commit"
    fsync_interval_ms: int = 100
    reserve_bytes: int = 64 * MIB
    frame_bytes: int = 8 * MIB


def ignore(*_: object) -> None:
    """A callback nobody has set."""


class Log(Protocol):
    """Append-only records in frames. A position is `sequence << 28 | offset in the frame`."""

    seq: int
    """The sequence of the open frame: what is appended now is durable when this is."""
    durable_seq: int
    failed: BaseException | None
    on_durable: Callable[[int], object]
    on_failed: Callable[[BaseException], object]
    on_rolled: Callable[[], object]
    commits: int
    commit_seconds: float
    last_commit_seconds: float
    last_commit_frames: int
    last_commit_bytes: int

    def append(self, records: Sequence[bytes]) -> int: ...

    def append_one(self, record: bytes) -> int: ...

    def commit(self) -> None: ...

    def has_room(self, nbytes: int, *, reserve: bool = False) -> bool: ...

    def check_space(self) -> None: ...

    def read(self, positions: Sequence[int]) -> list[bytes]: ...

    def roll(self) -> None: ...

    def closed_segments(self) -> list[tuple[int, str]]: ...

    def drop_segments(self, up_to_number: int) -> None: ...

    def stop_writing(self, error: BaseException) -> None:
        """Writes nothing more, as after a failed write, and tells nobody. What was appended and is
        not on its way to disk yet is dropped."""
        ...

    def close(self) -> None: ...

    @property
    def has_pending(self) -> bool: ...

    @property
    def first_position(self) -> int:
        """What lies below it has been dropped."""
        ...

    @property
    def segment_of_open_frame(self) -> int: ...

    @property
    def size_bytes(self) -> int: ...
