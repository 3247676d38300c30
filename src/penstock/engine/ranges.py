"""Reads ranges of a partition, without a lease and as often as somebody asks.

Invariant: a range is fixed when it is opened, everything in it is durable, and each of its rows is
given once and in order, whatever is sealed or rewritten meanwhile. If retention or a deletion
removes a part of it first, the read fails. Reads run off the loop, on threads that consumers' pages
do not need.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from functools import partial

import msgspec

from penstock.api.outcomes import Done
from penstock.core.produce import find_topic
from penstock.core.state import BrokerState
from penstock.core.topics import Partition, Topic
from penstock.engine.disk_lookups import DiskLookups
from penstock.engine.ledger import Ledger
from penstock.engine.partition_index import PartitionIndex
from penstock.engine.reading import Piece, RangeRead, bounds_within
from penstock.engine.scheduler import Scheduler
from penstock.engine.window import Chunk, PartitionLog, Window
from penstock.model.errors import InvalidArgument, NotFound, OutOfRange, PenstockError
from penstock.model.ranges import (
    PAGE_PARTITIONS,
    PIECE_BYTES,
    NamedOffsets,
    OffsetReport,
    OffsetsPage,
    RangeRequest,
    Selection,
    TopicOffsets,
)
from penstock.model.records import STORED, Stored, decode_record
from penstock.model.scopes import Scope, full_name, names_within, noun_of, plain_name, quoted
from penstock.model.splits import MAX_SPLITS, SplitRequest, Splits
from penstock.storage.history import BatchRef
from penstock.storage.history_reader import HistoryReader
from penstock.storage.log import Log
from penstock.storage.row_stream import (
    FORMS,
    Form,
    may_want,
    message_piece,
    no_rows,
    schema_of,
    sealed_piece,
)
from penstock.storage.splitting import split

_BITS = {name: bit for bit, name in enumerate(HistoryReader.schema.names)}

PIECE_ROWS = 32_768
"""Rows of the unsealed tail that become one batch, unless they are larger than a piece."""


class Ranges:
    def __init__(
        self,
        state: BrokerState,
        window: Window,
        log: Log,
        history: HistoryReader | None,
        ledger: Ledger,
        scheduler: Scheduler,
        lookups: DiskLookups,
    ) -> None:
        self._lookups = lookups
        self._state = state
        self._window = window
        self._log = log
        self._history = history
        self._ledger = ledger
        self._scheduler = scheduler

    def open(self, request: RangeRequest, done: Done[RangeRead]) -> None:
        try:
            topic = find_topic(self._state, request.topic, request.topic_id)
            partition = find_partition(topic, request.partition)
            form = FORMS[request.format]
            bounds = _bounds(partition, request)
            selection = request.selection
            if request.omit_nulls:
                log = self._window.log(topic.id, partition.index)
                selection = _without_nulls(selection, log, *bounds)
            outcome: RangeRead | PenstockError = RangeRead(
                partial(self._next_piece, topic.id, partition.index, selection, form),
                self._scheduler,
                f"partition {partition.index} of {noun_of(topic.name)} {quoted(topic.name)}",
                bounds,
                form.head(schema_of(selection)),
                form.tail(),
            )
        except PenstockError as error:
            outcome = error
        self._ledger.answer(done, outcome)

    def offsets(self, name: str, time_ms: int | None, done: Done[TopicOffsets]) -> None:
        try:
            topic = find_topic(self._state, name)
        except PenstockError as error:
            self._ledger.answer(done, error)
            return
        if time_ms is None:
            self._ledger.answer(done, TopicOffsets(topic.id, _offsets(topic)))
        else:
            look = partial(self._look_for_time, name, time_ms)
            self._lookups.run(look, partial(self._ledger.answer, done))

    def all_offsets(self, scope: Scope, after: str, done: Done[OffsetsPage]) -> None:
        start = full_name(scope, after)
        behind = (name for name in names_within(scope, self._state.topics) if name > start)
        names = heapq.nsmallest(PAGE_PARTITIONS + 1, behind)
        found: list[NamedOffsets] = []
        room = PAGE_PARTITIONS
        for name in names:
            topic = self._state.topics[name]
            room -= len(topic.partitions)
            if room < 0:
                break
            found.append(NamedOffsets(plain_name(name), topic.id, _offsets(topic)))
        is_last = len(found) == len(names)
        self._ledger.answer(done, OffsetsPage(found, None if is_last else found[-1].topic))

    def _look_for_time(self, name: str, time_ms: int) -> Callable[[], TopicOffsets]:
        topic = find_topic(self._state, name)
        reports = _offsets(topic)
        searches = [self._search(topic, partition, time_ms) for partition in topic.partitions]

        def look() -> TopicOffsets:
            found = zip(reports, searches, strict=True)
            timed = [msgspec.structs.replace(each, at_time=search()) for each, search in found]
            return TopicOffsets(topic.id, timed)

        return look

    def splits(self, request: SplitRequest, done: Done[Splits]) -> None:
        self._lookups.run(
            partial(self._look_for_splits, request), partial(self._ledger.answer, done)
        )

    def _look_for_splits(self, request: SplitRequest) -> Callable[[], Splits]:
        topic = find_topic(self._state, request.topic, request.topic_id)
        partition = find_partition(topic, request.partition)
        start, end = _bounds(partition, request)
        held = self._window.log(topic.id, partition.index)
        index = PartitionIndex(held, start, self._log, self._history)
        rows, max_rows = request.rows, request.max_rows
        return lambda: split(index.pieces(), start, end, rows, max_rows, MAX_SPLITS)

    def _search(self, topic: Topic, partition: Partition, time_ms: int) -> Callable[[], int]:
        """Returns how to find the first offset of that time or later; times never go back."""
        log, history = self._window.log(topic.id, partition.index), self._history
        ref = next((ref for ref in log.refs if ref.last_ts >= time_ms), None)
        if ref is not None and history is not None:
            return partial(_time_in_batch, history, ref, time_ms, partition.first_offset)
        start = max(log.sealed_end(), partition.first_offset)
        chunk = next((c for c in log.chunks_from(start) if c.last_ts >= time_ms), None)
        if chunk is None:
            end = partition.end_offset
            return lambda: end
        if chunk.messages is None:
            read = self._from_log([chunk], start, partition.end_offset)
        else:
            read = _from_memory([chunk], start, partition.end_offset)
        return lambda: next(message.offset for message in read() if message.ts >= time_ms)

    # -- for a read ----------------------------------------------------------------------------

    def _next_piece(
        self, topic_id: int, partition: int, selection: Selection, form: Form, at: int, end: int
    ) -> Piece:
        """Returns how to read the next piece."""
        topic = self._state.topics_by_id.get(topic_id)
        if topic is None:
            raise NotFound("it was deleted while it was read")
        if at < topic.partitions[partition].first_offset:
            raise OutOfRange(f"retention removed offset {at} while the range was read")
        log = self._window.log(topic_id, partition)
        ref, history = log.ref_at(at), self._history
        if ref is None or history is None:
            return self._unsealed(log, at, end, selection, form)
        stop = min(ref.last + 1, end)
        if ref.first >= end or not may_want(selection, ref):
            return partial(no_rows, stop)
        return partial(sealed_piece, history, ref, at, stop, selection, form)

    def _unsealed(
        self, log: PartitionLog, at: int, end: int, selection: Selection, form: Form
    ) -> Piece:
        chunks = _chunks(log, at, end)
        if not chunks:
            return partial(no_rows, end)
        stop = min(chunks[-1].last + 1, end)
        if chunks[0].messages is None:
            source = self._from_log(chunks, at, stop)
        else:
            source = _from_memory(chunks, at, stop)
        return partial(message_piece, source, stop, selection, form)

    def _from_log(self, chunks: list[Chunk], start: int, end: int) -> Callable[[], list[Stored]]:
        log = self._log
        first = log.first_position
        positions = [place for chunk in chunks for place in chunk.positions_from(first)]

        def read() -> list[Stored]:
            records = (decode_record(data) for data in log.read(positions))
            return [r for r in records if isinstance(r, STORED) and start <= r.offset < end]

        return read


def _offsets(topic: Topic) -> list[OffsetReport]:
    return [OffsetReport(p.index, p.first_offset, p.end_offset) for p in topic.partitions]


def _time_in_batch(history: HistoryReader, ref: BatchRef, time_ms: int, oldest: int) -> int:
    return max(oldest, history.offset_at(ref, time_ms))


def find_partition(topic: Topic, index: int) -> Partition:
    if not 0 <= index < len(topic.partitions):
        raise InvalidArgument(
            f"partition {index} is out of range; topic {plain_name(topic.name)!r} has "
            f"{len(topic.partitions)}"
        )
    return topic.partitions[index]


def _bounds(partition: Partition, request: RangeRequest | SplitRequest) -> tuple[int, int]:
    oldest, newest = partition.first_offset, partition.end_offset
    return bounds_within(oldest, newest, request.start, request.end, "offset")


def _without_nulls(selection: Selection, log: PartitionLog, start: int, end: int) -> Selection:
    """Returns the selection without columns that are null in the whole range. Rows that are not
    sealed yet may have any column; a batch that is rewritten meanwhile keeps its columns."""
    wanted = schema_of(selection).names
    if log.sealed_end() < end:
        return selection
    filled = 0
    for ref in log.refs_from(start):
        if ref.first >= end:
            break
        filled |= ref.filled
    names = tuple(n for n in wanted if n == HistoryReader.order or filled >> _BITS[n] & 1)
    return (
        selection
        if len(names) == len(wanted)
        else msgspec.structs.replace(selection, columns=names)
    )


def _chunks(log: PartitionLog, start: int, end: int) -> list[Chunk]:
    """Returns neighbouring chunks from `start` on, all in memory or none, as many as make a
    piece."""
    found: list[Chunk] = []
    rows = nbytes = 0
    for chunk in log.chunks_from(start):
        is_other = bool(found) and (chunk.messages is None) != (found[0].messages is None)
        is_enough = rows >= PIECE_ROWS or nbytes >= PIECE_BYTES
        if chunk.first >= end or is_enough or is_other:
            break
        found.append(chunk)
        rows += chunk.msgs
        nbytes += chunk.held
    return found


def _from_memory(chunks: list[Chunk], start: int, end: int) -> Callable[[], list[Stored]]:
    messages = [
        message
        for chunk in chunks
        for message in chunk.messages or ()
        if start <= message.offset < end
    ]
    return lambda: messages
