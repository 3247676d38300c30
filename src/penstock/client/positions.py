"""Remembers which events of a stream were handled, so that a repeat is not handled again.

Invariants: an offset that `add` returned for is known to every later `has`, also after a crash. A
file has the offsets of one stream, and one object at a time uses it. Handled offsets are kept as
ranges; these are few, since events come nearly in order. Must not know the broker.
"""

from __future__ import annotations

import os
import weakref
from bisect import bisect_right
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

import msgspec

from penstock.model.errors import FailedPrecondition, InvalidArgument, OutOfRange
from penstock.model.tenancy import Path


class HandledEvents(Protocol):
    """Says which events were handled. Keep it where the effects of handling are kept, in the same
    transaction, and every event has its effect exactly once."""

    def has(self, offset: int) -> bool: ...

    def add(self, offset: int) -> None:
        """Remembers the offset, durably. May be called for an offset that it has already."""
        ...


@runtime_checkable
class HandledEventsOfStream(HandledEvents, Protocol):
    """Handled events that are told which stream they are of."""

    def begin(self, stream: Path, stream_id: int) -> None:
        """Called when a subscription has begun, before its first event. Offsets of another
        `stream_id` are those of a stream that was deleted: keep them apart, or raise."""
        ...


class _Handled(msgspec.Struct, omit_defaults=True):
    """Ranges of handled offsets, each from its first to before its second number, in order. A file
    of an older version has no stream."""

    ranges: list[tuple[int, int]] = []
    stream: Path | None = None
    stream_id: int | None = None


class PositionFile:
    """Keeps the handled offsets of one stream in a small file, which is replaced as a whole.

    The first subscription that uses it writes the stream's path and id into it. Another stream is
    refused with InvalidArgument, and with OutOfRange one that was created again under the same
    name: its offsets begin at 0 again, so delete the file to handle its events. Until it is closed
    or gone, no other PositionFile opens the same file: that raises FailedPrecondition. `path` with
    `.lock` added is an empty file for this purpose.

    If the program stops between the effect of an event and `add`, the event is handled again. Use a
    position of your own, in the database of the effects, where that must not happen.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        self._lock = FileLock(self._path)
        try:
            with open(self._path, "rb") as file:
                found = msgspec.json.decode(file.read(), type=_Handled)
        except FileNotFoundError:
            found = _Handled()
        except BaseException:
            self._lock.release()
            raise
        self.ranges = found.ranges
        self.stream = found.stream
        self.stream_id = found.stream_id

    def has(self, offset: int) -> bool:
        at = bisect_right(self.ranges, offset, key=_first)
        return at > 0 and offset < self.ranges[at - 1][1]

    def add(self, offset: int) -> None:
        self._lock.check()
        if self.has(offset):
            return
        ranges = self.ranges
        at = bisect_right(ranges, offset, key=_first)
        first, end = offset, offset + 1
        if at < len(ranges) and ranges[at][0] == end:
            end = ranges.pop(at)[1]
        if at > 0 and ranges[at - 1][1] == first:
            at -= 1
            first = ranges.pop(at)[0]
        ranges.insert(at, (first, end))
        self._save()

    def expected_id(self, stream: Path) -> int | None:
        """Returns the id that the stream must have, None if the file has none yet. Raises
        InvalidArgument if the file is of a stream with another path."""
        if self.stream not in (None, stream):
            raise InvalidArgument(
                f"{self._path} has the position in stream {'/'.join(self.stream)!r}, not in "
                f"{'/'.join(stream)!r}; use a file for each stream"
            )
        return self.stream_id

    def begin(self, stream: Path, stream_id: int) -> None:
        self._lock.check()
        expected = self.expected_id(stream)
        if expected is None:
            self.stream, self.stream_id = stream, stream_id
            self._save()
        elif expected != stream_id:
            raise OutOfRange(
                f"{self._path} has the position in a stream with the id {expected}, and "
                f"{'/'.join(stream)!r} has the id {stream_id}: it was deleted and created again. "
                "Delete the file to handle the events of the new one"
            )

    def close(self) -> None:
        """Lets others open the file. Without it, that happens when this object is gone."""
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _save(self) -> None:
        data = msgspec.json.encode(_Handled(self.ranges, self.stream, self.stream_id))
        temporary = f"{self._path}.new"
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self._path)
        directory = os.open(os.path.dirname(os.path.abspath(self._path)), os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


class FileLock:
    """A lock on a file that is replaced as a whole, held by a file beside it. It ends with its
    object, or with the process."""

    def __init__(self, path: str) -> None:
        import fcntl  # POSIX only; the rest of the SDK works without it

        self._path = path
        self._pid = os.getpid()
        descriptor = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise FailedPrecondition(
                f"{path} is in use by another PositionFile, here or in another process. Close that "
                "one first; subscribers that run at the same time need a position that they can "
                "share, such as a table of a database"
            ) from error
        except BaseException:
            os.close(descriptor)
            raise
        self._close = weakref.finalize(self, _unlock, descriptor, self._pid)

    def check(self) -> None:
        """Raises unless this process holds the lock. A fork has a copy of the object, but must not
        write."""
        if not self._close.alive:
            raise FailedPrecondition(f"the PositionFile {self._path} is closed")
        if self._pid != os.getpid():
            raise FailedPrecondition(
                f"{self._path} was opened before this process was forked, and is in use by its "
                "parent; open the file in the process that uses it"
            )

    def release(self) -> None:
        self._close()


def _unlock(descriptor: int, pid: int) -> None:
    """Ends a lock, also while a fork has a copy of its descriptor. Not that of a parent process."""
    import fcntl

    if pid == os.getpid():
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def expected_id(once: HandledEvents | None, stream: Path, given: int | None) -> int | None:
    """Returns the id that the stream of a subscription must have: the one that the caller gives, or
    that of its position file."""
    found = once.expected_id(stream) if isinstance(once, PositionFile) else None
    return found if given is None else given


def begin(once: HandledEvents | None, stream: Path, stream_id: int | None) -> None:
    """Tells the handled events which stream they are of, if they want to know. Older brokers do
    not tell the id."""
    if stream_id is not None and isinstance(once, HandledEventsOfStream):
        once.begin(stream, stream_id)


def _first(handled: tuple[int, int]) -> int:
    return handled[0]
