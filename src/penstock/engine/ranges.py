"""Ranges of a partition, read again and again by whoever asks, without a lease.

Invariant: a range is fixed when it is opened, everything in it is durable, and each of its rows is
given once and in order, whatever is sealed or rewritten meanwhile; if retention or a deletion takes
something of it first, the read fails. Reads are off the loop, on threads that consumers' pages do
not need.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import msgspec

from penstock.core.produce import find_topic
from penstock.core.state import BrokerState
from penstock.core.topics import Partition, Topic
from penstock.engine.ledger import Done, Ledger
from penstock.engine.scheduler import Scheduler
from penstock.engine.window import Chunk, PartitionLog, Window
from penstock.model.errors import (
    Internal,
    InvalidArgument,
    NotFound,
    NotYet,
    OutOfRange,
    PenstockError,
)
from penstock.model.ranges import OffsetReport, RangeRequest, Selection
from penstock.model.records import Message, decode_record
from penstock.storage.errors import NotYetInLog, SegmentGone, StorageError
from penstock.storage.history import BatchRef, HistoryGone
from penstock.storage.history_reader import HistoryReader
from penstock.storage.log import Log
from penstock.storage.row_stream import FORMS, Form, may_want, message_piece, sealed_piece

PIECE_ROWS = 32_768
"""Rows of the unsealed tail that become one batch."""

_log = logging.getLogger("penstock.engine")

Piece = Callable[[], bytes]
GotPiece = Callable[[bytes | PenstockError | None], None]
"""Takes the next bytes, None after the last, or why there are no more."""


class Ranges:
    def __init__(
        self,
        state: BrokerState,
        window: Window,
        log: Log,
        history: HistoryReader | None,
        ledger: Ledger,
        scheduler: Scheduler,
    ) -> None:
        self._state = state
        self._window = window
        self._log = log
        self._history = history
        self._ledger = ledger
        self._scheduler = scheduler

    def open(self, request: RangeRequest, done: Done) -> None:
        """Outcome: a RangeRead of what is durable then."""
        try:
            topic = find_topic(self._state, request.topic)
            partition = find_partition(topic, request.partition)
            start, end = _bounds(partition, request)
            outcome: RangeRead | PenstockError = RangeRead(
                self,
                topic.id,
                partition.index,
                start,
                end,
                request.selection,
                FORMS[request.format],
            )
        except PenstockError as error:
            outcome = error
        self._ledger.answer(done, outcome)

    def offsets(self, name: str, time_ms: int | None, done: Done) -> None:
        """Outcome: an OffsetReport for each partition. With a time, where its messages begin."""
        try:
            topic = find_topic(self._state, name)
        except PenstockError as error:
            self._ledger.answer(done, error)
            return
        if time_ms is None:
            self._ledger.answer(done, [_offsets(partition) for partition in topic.partitions])
        else:
            self._ledger.answer(partial(self._find_time, topic, time_ms, done), None)

    def _find_time(
        self, topic: Topic, time_ms: int, done: Done, failure: PenstockError | None
    ) -> None:
        if failure is not None:
            done(failure)
            return
        reports = [_offsets(partition) for partition in topic.partitions]
        searches = [self._search(topic, partition, time_ms) for partition in topic.partitions]

        def work() -> None:
            """On a thread: a time may be in the middle of a batch."""
            try:
                found = [search() for search in searches]
            except (SegmentGone, HistoryGone, NotYetInLog):
                again = partial(self._find_time, topic, time_ms, done, None)
                self._scheduler.post(again)
            except (OSError, ValueError, StorageError, msgspec.MsgspecError) as error:
                _log.error("cannot look for a time in topic %r: %s", topic.name, error)
                self._scheduler.post(partial(done, Internal("the topic cannot be read")))
            else:
                outcome = [
                    msgspec.structs.replace(report, at_time=offset)
                    for report, offset in zip(reports, found, strict=True)
                ]
                self._scheduler.post(partial(done, outcome))

        self._scheduler.in_background(work)

    def _search(self, topic: Topic, partition: Partition, time_ms: int) -> Callable[[], int]:
        """How to find the first offset of that time or later; times never go back."""
        log, history = self._window.log(topic.id, partition.index), self._history
        ref = next((ref for ref in log.refs if ref.last_ts >= time_ms), None)
        if ref is not None and history is not None:
            return partial(_time_in_batch, history, ref, time_ms, partition.first_offset)
        start = max(log.sealed_end(), partition.first_offset)
        chunk = next((c for c in log.chunks_from(start) if c.last_ts >= time_ms), None)
        if chunk is None:
            return lambda: partition.end_offset
        if chunk.messages is None:
            read = self._from_log([chunk], start, partition.end_offset)
        else:
            read = _from_memory([chunk], start, partition.end_offset)
        return lambda: next(message.offset for message in read() if message.ts >= time_ms)

    # -- for a read ----------------------------------------------------------------------------

    def next_piece(self, read: RangeRead) -> tuple[Piece, int]:
        """How to read what comes next, and the offset that the piece ends before."""
        topic = self._state.topics_by_id.get(read.topic_id)
        if topic is None:
            raise NotFound("the topic was deleted while it was read")
        if read.at < topic.partitions[read.partition].first_offset:
            raise OutOfRange(f"retention removed offset {read.at} while the range was read")
        log = self._window.log(read.topic_id, read.partition)
        return self._sealed(log, read) or self._unsealed(log, read)

    def run(self, work: Callable[[], None]) -> None:
        self._scheduler.in_background(work)

    def post(self, turn: Callable[[], None]) -> None:
        self._scheduler.post(turn)

    def _sealed(self, log: PartitionLog, read: RangeRead) -> tuple[Piece, int] | None:
        ref, history = log.ref_at(read.at), self._history
        if ref is None or history is None:
            return None
        end = min(ref.last + 1, read.end)
        if ref.first >= read.end or not may_want(read.selection, ref):
            return bytes, end
        return partial(sealed_piece, history, ref, read.at, end, read.selection, read.form), end

    def _unsealed(self, log: PartitionLog, read: RangeRead) -> tuple[Piece, int]:
        chunks = _chunks(log, read.at, read.end)
        if not chunks:
            return bytes, read.end
        end = min(chunks[-1].last + 1, read.end)
        if chunks[0].messages is None:
            source = self._from_log(chunks, read.at, end)
        else:
            source = _from_memory(chunks, read.at, end)
        return partial(message_piece, source, read.selection, read.form), end

    def _from_log(self, chunks: list[Chunk], start: int, end: int) -> Callable[[], list[Message]]:
        log = self._log
        first = log.first_position
        positions = [place for chunk in chunks for place in chunk.positions_from(first)]

        def read() -> list[Message]:
            records = (decode_record(data) for data in log.read(positions))
            return [r for r in records if isinstance(r, Message) and start <= r.offset < end]

        return read


class RangeRead:
    """One reader's way through a range. `next` is asked for one piece at a time."""

    def __init__(
        self,
        ranges: Ranges,
        topic_id: int,
        partition: int,
        start: int,
        end: int,
        selection: Selection,
        form: Form,
    ) -> None:
        self._ranges = ranges
        self.topic_id = topic_id
        self.partition = partition
        self.start = start
        self.at = start
        self.end = end
        self.selection = selection
        self.form = form
        self.head = form.head(selection)
        self.tail = form.tail()

    def next(self, got: GotPiece) -> None:
        if self.at >= self.end:
            got(None)
            return
        try:
            piece, end = self._ranges.next_piece(self)
        except PenstockError as error:
            got(error)
            return
        self._ranges.run(partial(self._read, piece, end, got))

    def _read(self, piece: Piece, end: int, got: GotPiece) -> None:
        """On a thread."""
        try:
            data = piece()
        except (SegmentGone, HistoryGone, NotYetInLog):
            # Sealed or rewritten between the look-up and the read: look again.
            self._ranges.post(partial(self.next, got))
        except (OSError, ValueError, StorageError, msgspec.MsgspecError) as error:
            _log.error(
                "cannot read topic %d partition %d: %s", self.topic_id, self.partition, error
            )
            failure = Internal("a part of the range cannot be read; the broker's log says more")
            self._ranges.post(partial(got, failure))
        else:
            self._ranges.post(partial(self._got, data, end, got))

    def _got(self, data: bytes, end: int, got: GotPiece) -> None:
        self.at = end
        if data:
            got(data)
        else:
            self.next(got)


def _offsets(partition: Partition) -> OffsetReport:
    return OffsetReport(partition.index, partition.first_offset, partition.end_offset)


def _time_in_batch(history: HistoryReader, ref: BatchRef, time_ms: int, oldest: int) -> int:
    return max(oldest, history.offset_at(ref, time_ms))


def find_partition(topic: Topic, index: int) -> Partition:
    if not 0 <= index < len(topic.partitions):
        raise InvalidArgument(
            f"partition {index} is out of range; topic {topic.name!r} has {len(topic.partitions)}"
        )
    return topic.partitions[index]


def _bounds(partition: Partition, request: RangeRequest) -> tuple[int, int]:
    oldest, newest = partition.first_offset, partition.end_offset
    start = oldest if request.start is None else request.start
    end = newest if request.end is None else request.end
    if start < oldest:
        raise OutOfRange(f"offsets below {oldest} are no longer kept; {start} was asked for")
    if end > newest:
        raise NotYet(f"the partition ends at offset {newest}; {end} was asked for")
    if start > end:
        raise InvalidArgument(f"start {start} is behind end {end}")
    return start, end


def _chunks(log: PartitionLog, start: int, end: int) -> list[Chunk]:
    """Neighbouring chunks from `start` on, all in memory or none, as many as make a piece."""
    found: list[Chunk] = []
    rows = 0
    for chunk in log.chunks_from(start):
        is_other = bool(found) and (chunk.messages is None) != (found[0].messages is None)
        if chunk.first >= end or rows >= PIECE_ROWS or is_other:
            break
        found.append(chunk)
        rows += chunk.msgs
    return found


def _from_memory(chunks: list[Chunk], start: int, end: int) -> Callable[[], list[Message]]:
    messages = [
        message
        for chunk in chunks
        for message in chunk.messages or ()
        if start <= message.offset < end
    ]
    return lambda: messages
