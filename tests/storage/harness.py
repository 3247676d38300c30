"""A log, the loop it posts to, and a memory of what was appended and what was reported."""

from __future__ import annotations

import queue
from collections.abc import Callable

from penstock.model.records import TopicCreated, encode_record
from penstock.storage.errors import StorageError
from penstock.storage.frames import POSITION_BITS
from penstock.storage.lock import DirectoryLock
from penstock.storage.log import WalOptions
from penstock.storage.vfs import Vfs
from penstock.storage.wal import Wal
from tests.storage.faulty_vfs import FaultyVfs

DIRECTORY = "/data"
SEGMENT_BYTES = 32 * 1024
SMALL = WalOptions(segment_bytes=SEGMENT_BYTES, reserve_bytes=0, frame_bytes=4 * 1024)
PATIENCE_S = 20


class Loop:
    """The event loop's place: what is posted runs when the test says so."""

    def __init__(self) -> None:
        self._posted: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self.post = self._posted.put

    def run_until(self, done: Callable[[], bool]) -> None:
        while not done():
            try:
                callback = self._posted.get(timeout=PATIENCE_S)
            except queue.Empty:
                raise AssertionError("waited in vain for the log") from None
            callback()

    def run_posted(self) -> None:
        while not self._posted.empty():
            self._posted.get()()


class Bench:
    """One broker's life with a log: `appended` is every record in order, `reported` how many of
    them were told durable."""

    def __init__(
        self,
        vfs: Vfs,
        options: WalOptions = SMALL,
        *,
        directory: str = DIRECTORY,
        first_segment: int = 1,
        lock: DirectoryLock | None = None,
    ) -> None:
        self.vfs = vfs
        self.loop = Loop()
        self.replayed: list[bytes] = []
        self.positions: list[int] = []
        self.failures: list[BaseException] = []
        self.rolls = 0
        self.wal = Wal.open(
            vfs,
            directory,
            options,
            first_segment=first_segment,
            replay=self._replay,
            post=self.loop.post,
            lock=lock,
        )
        self.appended = list(self.replayed)
        self.reported = len(self.appended)
        self.wal.start(self)

    def failed(self, error: BaseException) -> None:
        self.failures.append(error)

    def append(self, *records: bytes) -> int:
        position = self.wal.append(records)
        self.appended += records
        for record in records:
            self.positions.append(position)
            position += len(record) + 4
        return self.positions[-len(records)]

    def commit(self) -> None:
        """Everything appended is durable, or the log has failed, when this returns."""
        self.wal.commit()
        self.loop.run_until(lambda: not self.wal.has_pending or self.wal.failed is not None)

    def commit_and_look(self, vfs: FaultyVfs, look: Callable[[], object]) -> None:
        """Commits, and calls `look` while the sync is under way and once more when it is done."""
        vfs.hold(self.wal.files.active.path, lambda: self.loop.post(bool))
        self.wal.commit()
        self.loop.run_until(lambda: vfs.is_held or not self.wal.has_pending)
        self.loop.run_posted()
        look()
        vfs.release()
        self.commit()
        look()

    def roll(self) -> None:
        wanted = self.rolls + 1
        self.wal.roll()
        self.loop.run_until(lambda: self.rolls == wanted or self.wal.failed is not None)

    def await_spare(self) -> None:
        supply = self.wal.files.supply
        self.loop.run_until(lambda: not supply.preparing)

    def close(self) -> None:
        self.wal.close()
        self.loop.run_posted()

    def _replay(self, record: bytes, position: int) -> None:
        self.replayed.append(record)
        self.positions.append(position)

    def durable(self, seq: int) -> None:
        if self.failures:
            raise AssertionError("durable was told after the failure")
        self.reported = sum(position >> POSITION_BITS <= seq for position in self.positions)

    def rolled(self) -> None:
        self.rolls += 1


def record(number: int, size: int = 20) -> bytes:
    return (b"record-%d " % number).ljust(size, b".")


def topic_record(number: int) -> bytes:
    """As long as `record`, and one that can be applied to a state."""
    record = encode_record(TopicCreated(number + 1, 0, f"topic-{number:04d}", 1))
    assert len(record) == 20
    return record


def written(
    vfs: Vfs,
    count: int,
    *,
    options: WalOptions = SMALL,
    per_commit: int = 2,
    record: Callable[[int], bytes] = record,
) -> Bench:
    """A log with records 0 to `count`, `per_commit` to a frame, still open."""
    bench = Bench(vfs, options)
    for first in range(0, count, per_commit):
        bench.append(*(record(n) for n in range(first, min(count, first + per_commit))))
        bench.commit()
    return bench


def read_back(vfs: Vfs, options: WalOptions = SMALL) -> list[bytes]:
    """What a start on this disk replays."""
    bench = Bench(vfs, options)
    bench.close()
    return bench.replayed


def outcome(vfs: Vfs) -> tuple[Bench | None, StorageError | None]:
    """A start that succeeds, or is refused."""
    try:
        bench = Bench(vfs)
    except StorageError as error:
        return None, error
    bench.close()
    return bench, None
