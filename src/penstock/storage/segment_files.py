"""The segment files of an open log: gives frames their places, rolls, and reads records back.

Invariants: a frame can be read from the moment it has its place until its segment is dropped; until
`written` says that it is on disk, it is read from memory. A segment is closed when a later one has
begun on disk. A read returns exactly the bytes that were appended at each position, or raises: a
frame is read and checked whole before a record is taken from it. Must not know who writes the
batches, nor what makes a frame durable.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from penstock.storage.errors import CorruptLog, NotYetInLog, SegmentGone
from penstock.storage.frames import (
    FRAME_HEADER_BYTES,
    LENGTH_BYTES,
    OFFSET_MASK,
    POSITION_BITS,
    encode_frame,
    frame_at,
    record_length,
)
from penstock.storage.log import Post, WalOptions
from penstock.storage.segments import SEGMENT_HEADER_BYTES, Segment
from penstock.storage.vfs import Vfs
from penstock.storage.wal_open import Opened
from penstock.storage.wal_supply import SegmentSupply
from penstock.storage.wal_writer import Batch, Write

_GAP_BYTES = 16 * 1024
"""Frames no further apart are read together: reading on is cheaper than another call."""
_RUN_BYTES = 1024 * 1024
"""The bytes that are read together, unless one frame alone is larger."""


class _Place(NamedTuple):
    """The place of frame `seq` in its segment."""

    seq: int
    start: int
    end: int


class _Payload(NamedTuple):
    """A frame's records: `data[start:end]`."""

    data: bytes
    start: int
    end: int


def read_records(
    vfs: Vfs, segments: Sequence[Segment], unwritten: Mapping[int, bytes], positions: Sequence[int]
) -> list[bytes]:
    """Returns the records in the order of `positions`. Each frame is read once, whatever that
    order is."""
    found = [b""] * len(positions)
    order = iter(sorted(range(len(positions)), key=positions.__getitem__))
    index = next(order, None)
    seqs = sorted({position >> POSITION_BITS for position in positions})
    for seq, payload in _payloads(vfs, segments, unwritten, seqs):
        while index is not None and positions[index] >> POSITION_BITS == seq:
            found[index] = _record_in(payload, positions[index])
            index = next(order, None)
    return found


def _record_in(payload: _Payload, position: int) -> bytes:
    data, start, end = payload
    begin = start + (position & OFFSET_MASK) + LENGTH_BYTES
    stop = begin + record_length(data, begin - LENGTH_BYTES) if begin <= end else begin
    if stop > end:
        raise ValueError(f"position {position} is not that of a record")
    return data[begin:stop]


def _payloads(
    vfs: Vfs, segments: Sequence[Segment], unwritten: Mapping[int, bytes], seqs: Sequence[int]
) -> Iterator[tuple[int, _Payload]]:
    """Yields the records of each frame; `seqs` rise. One run at a time is in memory."""
    fd = -1
    opened: Segment | None = None
    at = 0
    try:
        while at < len(seqs):
            # In this order: a frame gets its place after it is kept, and is kept until written.
            segment = _segment_of(segments, seqs[at])
            kept = unwritten.get(seqs[at])
            if kept is not None:
                yield seqs[at], _Payload(kept, 0, len(kept))
                at += 1
                continue
            if segment is not opened:
                if fd >= 0:
                    vfs.close(fd)
                    fd = -1
                fd = _open(vfs, segment, seqs[at])
                opened = segment
            run = _run(segment, unwritten, seqs, at)
            yield from _read_run(vfs, fd, segment, run)
            at += len(run)
    finally:
        if fd >= 0:
            vfs.close(fd)


def _segment_of(segments: Sequence[Segment], seq: int) -> Segment:
    index = bisect_right(segments, seq, key=lambda segment: segment.first_seq) - 1
    if index < 0:
        raise SegmentGone(seq << POSITION_BITS)
    if seq - segments[index].first_seq >= len(segments[index].offsets):
        raise NotYetInLog(seq)
    return segments[index]


def _open(vfs: Vfs, segment: Segment, seq: int) -> int:
    try:
        return vfs.open_read(segment.path)
    except FileNotFoundError:
        raise SegmentGone(seq << POSITION_BITS) from None


def _run(
    segment: Segment, unwritten: Mapping[int, bytes], seqs: Sequence[int], at: int
) -> list[_Place]:
    """Returns the frames from `at` on that are worth reading together."""
    offsets = segment.offsets
    places: list[_Place] = []
    for index in range(at, len(seqs)):
        seq = seqs[index]
        number = seq - segment.first_seq
        if number >= len(offsets) or seq in unwritten:
            break
        # In this order: the next frame is listed before it moves `used`.
        used = segment.used
        start = offsets[number]
        end = offsets[number + 1] if number + 1 < len(offsets) else used
        if places and (start > places[-1].end + _GAP_BYTES or end > places[0].start + _RUN_BYTES):
            break
        places.append(_Place(seq, start, end))
    return places


def _read_run(
    vfs: Vfs, fd: int, segment: Segment, run: list[_Place]
) -> Iterator[tuple[int, _Payload]]:
    base = run[0].start
    data = vfs.read_at(fd, run[-1].end - base, base)
    for seq, start, end in run:
        frame = frame_at(data, start - base, segment.salt)
        if frame is None or frame.seq != seq or frame.end != end - base:
            raise CorruptLog(segment.path, start, f"frame {seq}, which was sound, is invalid")
        yield seq, _Payload(data, frame.payload, frame.end)


class SegmentFiles:
    """`on_room` is called when there is news of the spare or the disk, `on_lost` when the directory
    was replaced. `next_batch` has the frames that were placed since the last `take_batch`."""

    def __init__(
        self,
        vfs: Vfs,
        directory: str,
        options: WalOptions,
        opened: Opened,
        *,
        post: Post,
        on_room: Callable[[], object],
        on_lost: Callable[[BaseException], None],
    ) -> None:
        self.active = opened.segments[-1]
        self.next_batch = Batch()
        self._vfs = vfs
        self._segment_bytes = options.segment_bytes
        self._segments = opened.segments  # replaced, never changed: `read` is on other threads
        self._unwritten: dict[int, bytes] = {}
        self._lock = opened.lock
        self.supply = SegmentSupply(
            vfs,
            directory,
            options,
            spare=opened.spare,
            free_bytes=opened.free_bytes,
            post=post,
            check_directory=self._lock.check,
            on_change=on_room,
            on_lost=on_lost,
        )

    def start(self) -> None:
        self.supply.start()
        self.supply.prepare(self.active.number + 1)

    # -- frames ----------------------------------------------------------------------------------

    def place(self, seq: int, synced: int, records: Sequence[bytes]) -> bytes:
        """Gives frame `seq` its place, behind the last one, and adds it to the next batch. Returns
        its payload."""
        segment = self.active
        header, payload = encode_frame(seq, synced, segment.salt, records)
        self._unwritten[seq] = payload
        batch = self.next_batch
        write = batch.writes[-1] if batch.writes else None
        if write is not None and write.segment is segment:
            write.buffers += (header, payload)
        else:
            batch.writes.append(Write(segment, segment.used, [header, payload]))
        size = FRAME_HEADER_BYTES + len(payload)
        batch.frames += 1
        batch.nbytes += size
        segment.offsets.append(segment.used)
        segment.used += size
        if segment.used > segment.capacity:
            self.supply.free_bytes -= segment.used - segment.capacity
            segment.capacity = segment.used
        return payload

    def take_batch(self) -> Batch:
        batch, self.next_batch = self.next_batch, Batch()
        return batch

    def written(self, first_seq: int, last_seq: int, batch: Batch | None = None) -> None:
        """Notes that these frames are on disk; the batch may have begun segments."""
        for seq in range(first_seq, last_seq + 1):
            del self._unwritten[seq]
        if batch is not None and batch.rolled:
            self._mark_closed(batch.writes[-1].segment)

    def read(self, positions: Sequence[int]) -> list[bytes]:
        return read_records(self._vfs, self._segments, self._unwritten, positions)

    # -- segments --------------------------------------------------------------------------------

    def roll(self, next_seq: int) -> bool:
        """Makes the spare the active segment; the next frame is `next_seq`. Without a spare, or
        when the active segment is empty, that one grows instead: then it returns False."""
        segment = self.supply.take_spare() if self.active.offsets else None
        if segment is None:
            return False
        self.supply.last_took(self.active.used)
        segment.first_seq = next_seq
        self._segments = [*self._segments, segment]
        self.active = segment
        self.next_batch.writes.append(Write(segment, SEGMENT_HEADER_BYTES, []))
        self.next_batch.rolled = True
        self.supply.prepare(segment.number + 1)
        return True

    def closed(self) -> list[tuple[int, str]]:
        return [(segment.number, segment.path) for segment in self._segments if segment.closed]

    def drop(self, up_to_number: int) -> None:
        """Files are removed in the background."""
        gone = [s.path for s in self._segments if s.closed and s.number <= up_to_number]
        if gone:
            self._segments = self._segments[len(gone) :]
            self.supply.remove(gone)

    @property
    def first_position(self) -> int:
        return self._segments[0].first_seq << POSITION_BITS

    @property
    def size_bytes(self) -> int:
        """Does not count the spare."""
        return sum(segment.capacity for segment in self._segments)

    def _mark_closed(self, begun: Segment) -> None:
        for segment in self._segments:
            if segment.number < begun.number and not segment.closed:
                segment.capacity = segment.used
                segment.closed = True

    # -- room ------------------------------------------------------------------------------------

    def room(self) -> tuple[int, int]:
        """Returns the bytes that the next frame may take: with the reserve, and for produces."""
        prepared = self.active.room
        kept_back = self._segment_bytes // 8
        spare = self.supply.spare
        if spare is not None:
            prepared = max(prepared, spare.room)
            kept_back = 0
        growth = self.supply.growth_bytes
        return max(prepared, growth), max(prepared - kept_back, growth)

    def look(self) -> None:
        """Measures the free disk and prepares a spare, in the background."""
        self.supply.measure()
        self.supply.prepare(self.active.number + 1)

    # -- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Closes all files and lets go of the directory. The writer has ended before."""
        for segment in self._segments:
            if segment.fd >= 0:
                self._vfs.close(segment.fd)
                segment.fd = -1
        self._lock.release()
