"""The interface of a log, and of the storage that an engine is opened on.

An engine needs a `Log` that makes records durable in order, and a `Storage` that recovers what an
earlier process left; it knows nothing else of the disk. The Wal in its data directory and the
MemoryLog satisfy both. A replicated log would too.

All methods but `Log.read` belong to one thread, that of the event loop; a listener is called there
too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from penstock.api.durability import Capabilities, FsyncMode
from penstock.model.limits import MIB

if TYPE_CHECKING:
    from penstock.model.limits import Limits
    from penstock.storage.checkpoint import Checkpoint
    from penstock.storage.data_directory import SealedFiles
    from penstock.storage.staging import PieceStore

Post = Callable[[Callable[[], None]], object]
"""Runs a callable on the loop's thread, from any thread: `loop.call_soon_threadsafe`."""

Replay = Callable[[bytes, int], object]
"""Takes a record and its position."""

RECORD_OVERHEAD_BYTES = 4
"""The bytes that a record takes in the log beside its own; for `has_room`."""


class WalOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`frame_bytes` is where an open frame is closed, between two appends."""

    segment_bytes: int = 64 * MIB
    fsync: FsyncMode = "commit"
    fsync_interval_ms: int = 100
    reserve_bytes: int = 64 * MIB
    frame_bytes: int = 8 * MIB


class LogListener(Protocol):
    """Told by a log what became of its frames. An exception that it raises is logged, and the log
    goes on."""

    def durable(self, seq: int) -> None:
        """Called when every frame up to `seq` is as durable as the log promises. Sequences only
        rise; not every one is reported."""
        ...

    def failed(self, error: BaseException) -> None:
        """Called once, when the log cannot be written any more. `durable` is not called after
        it."""
        ...

    def rolled(self) -> None:
        """Called when a segment was closed: `closed_segments` has one more."""
        ...


class NoListener:
    """The listener of a log that was not started."""

    def durable(self, seq: int) -> None: ...

    def failed(self, error: BaseException) -> None: ...

    def rolled(self) -> None: ...


class Log(Protocol):
    """Append-only records in frames.

    A position is `sequence << POSITION_BITS | offset in the frame`, so positions rise in the order
    of appending. A frame is durable whole or not at all. What is durable never changes.
    """

    seq: int
    """The sequence of the open frame: what is appended now is durable when this frame is."""
    durable_seq: int
    """The last sequence that `durable` reported, or that was recovered."""
    max_frame_bytes: int
    """Records that are appended together take fewer bytes than this."""
    is_shared: bool
    """Other brokers follow this log, and one of them may take over."""
    failed: BaseException | None
    """The reason why nothing is written any more."""
    commits: int
    commit_seconds: float
    last_commit_seconds: float
    last_commit_frames: int
    last_commit_bytes: int

    def start(self, listener: LogListener) -> None:
        """Tells `listener` from now on. Called once, before the first append."""
        ...

    def append(self, records: Sequence[bytes]) -> int:
        """Adds the records to the open frame, in memory, and returns the first one's position. All
        of them share a frame: after a crash all are there, or none. Room for them was asked for
        with `has_room`. Raises Unavailable once the log has failed or is closed, and TooLarge for
        what no frame can hold; then nothing was appended."""
        ...

    def append_one(self, record: bytes) -> int:
        """Appends a single record, like `append`."""
        ...

    def commit(self) -> None:
        """Sees to it that everything appended so far becomes durable, without blocking. The
        listener hears of it in a later turn, never within this call. Many commits may share one
        write."""
        ...

    def is_current(self) -> bool:
        """Says whether the state that was made of this log is known to be the newest. If it is
        not, another broker may have taken over: only a frame that is sent from now on, and becomes
        durable, shows that none has."""
        ...

    def has_room(self, nbytes: int, *, reserve: bool = False) -> bool:
        """Says whether records of `nbytes` in all, with RECORD_OVERHEAD_BYTES each, can be appended
        now and will find room to become durable. Without `reserve`, which is for what may be
        refused (a produce), some room stays behind for what may not: acks, deliveries and the rest
        ask with `reserve`."""
        ...

    @property
    def shortage(self) -> str:
        """Says why `has_room` returned False, in a few words for the refusal."""
        ...

    def check_space(self) -> None:
        """Looks at the room again, in the background. Called about once a second."""
        ...

    def read(self, positions: Sequence[int]) -> list[bytes]:
        """Returns the records at these positions, in their order. Blocks; from any thread. Raises
        SegmentGone for what was dropped, NotYetInLog for what is in the open frame, CorruptLog for
        what has changed on disk."""
        ...

    def roll(self) -> None:
        """Asks for the active segment to be closed behind what is appended, so that it can be
        sealed; the listener hears when that is done. Does nothing while the segment is empty."""
        ...

    def closed_segments(self) -> list[tuple[int, str]]:
        """Returns number and path of the segments that are on disk whole and not written any more,
        oldest first. A log that is never sealed has none."""
        ...

    def drop_segments(self, up_to_number: int) -> None:
        """Removes the closed segments up to and with this one: they are sealed."""
        ...

    def stop_writing(self, error: BaseException) -> None:
        """Writes nothing more, as after a failed write, and tells nobody. What was appended and is
        not on its way to disk yet is dropped."""
        ...

    def close(self) -> None:
        """Makes durable what is appended, tells the listener and lets go of the storage. Blocks."""
        ...

    @property
    def has_pending(self) -> bool:
        """True while something is appended and not durable."""
        ...

    @property
    def first_position(self) -> int:
        """The position below which everything has been dropped."""
        ...

    @property
    def size_bytes(self) -> int:
        """The bytes that the log takes on disk."""
        ...


class Storage(Protocol):
    """The storage that an engine is opened on: a log, and the files sealed from it.

    `staged` keeps the pieces of batches until they are stored. `sealed` has history and journal; it
    is None where nothing is ever sealed and the log cannot be read back.
    """

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def staged(self) -> PieceStore: ...

    @property
    def sealed(self) -> SealedFiles | None: ...

    def open(self, limits: Limits, post: Post, recover: Callable[[Checkpoint], Replay]) -> Log:
        """Recovers what is there and opens the log behind it. Blocks.

        Calls `recover` once with what is sealed; the Replay that it returns is given every record
        of the log behind that, in order. `staged` has found its pieces before. Raises StorageError
        if something is damaged or in use; then nothing is held. `Log.close` lets go of it all.
        """
        ...
