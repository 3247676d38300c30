"""Stores committed batches, some rows at a time, beside all else that the broker does.

Invariant: the rows of a burst and the record of how many rows are done share a frame of the log. So
storing goes on behind the last stored row after a crash, and no row is stored twice or left out.
Batches of one producer are stored in order, those of several producers in turns. While others use
the loop, storing takes no more than a tenth of it. Rows for a stream wait while its publish queue
is full, as publishes do. Slices are read off the loop.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from penstock.core.state import BrokerState
from penstock.core.write_rules import decide_events, decide_rows
from penstock.core.writers import Storing, Writer
from penstock.engine.caches import Caches
from penstock.engine.dispatcher import Dispatcher
from penstock.engine.ledger import Ledger
from penstock.engine.scheduler import Scheduler
from penstock.engine.streams import Streams
from penstock.model.errors import NotFound, PenstockError, TooLarge
from penstock.model.limits import MAX_TXN_OPS, MIB
from penstock.model.records import StagedRows, WriteStored
from penstock.model.scopes import quoted
from penstock.model.tenancy import Path
from penstock.storage.staged_rows import RowSlice
from penstock.storage.staging import PieceStore, StagedPieceReader

BURST_ROWS = 1000
BURST_S = 0.0015
"""The longest a burst should take. A longer one is followed by smaller ones."""
SHARED_ROWS = 250
"""The rows of a burst while others use the loop: they may have to wait for it."""
BURST_BYTES = MIB
SHARED_MS = 20
"""The loop counts as shared for this long after the last request of somebody else."""
OTHERS_SHARE = 9
"""The part of the loop that others have after a burst, as a multiple of its duration."""
MAX_UNSYNCED_BYTES = 2 * MIB
"""The bytes of bursts that may be on their way to disk: a slow disk slows storing. While the loop
is shared there is one burst at a time, since it delays the answers it is written with."""
AHEAD_SLICES = 2
SIDE_BY_SIDE = 8
"""The number of batches that are stored in turns; each holds slices in memory."""
RIDE_MS = 4
"""The time a burst waits to share a commit with others: one of its own would delay them."""
FAN_OUT_RETRY_MS = 5
NO_ROOM_RETRY_MS = 250
UNREADABLE_RETRY_MS = 5000

Stored = Callable[[str, Storing], None]
"""Takes a producer and its batch, of which rows were stored that may not be durable yet."""

_log = logging.getLogger("penstock.engine")


class BatchStoring:
    """`rows` counts rows stored since the start, `skipped` those whose topic, stream or cache was
    gone."""

    def __init__(
        self,
        state: BrokerState,
        ledger: Ledger,
        scheduler: Scheduler,
        piece_store: PieceStore,
        caches: Caches,
        dispatcher: Dispatcher,
        streams: Streams,
        on_progress: Stored,
        on_stored: Stored,
    ) -> None:
        self.rows = 0
        self.skipped = 0
        self._on_progress = on_progress
        self._on_stored = on_stored
        self._state = state
        self._ledger = ledger
        self._scheduler = scheduler
        self._piece_store = piece_store
        self._caches = caches
        self._dispatcher = dispatcher
        self._streams = streams
        self._sources: deque[BatchRows] = deque()
        self._waiting: dict[str, Writer] = {}
        self._is_resting = False
        self._is_looking_again = False
        self._unsynced_bytes = 0
        self._answers = 0
        self._shared_until_ms = 0
        self._most_rows = BURST_ROWS

    def add(self, writer: Writer) -> None:
        """Begins to store a batch of the writer, or queues it."""
        if not self._sources:
            self._answers = self._ledger.answers
        self._waiting[writer.producer] = writer
        self._begin_some()

    def turn(self) -> None:
        """Stores a burst, if there is something to store and it is time for it."""
        if not self._sources or self._is_resting or self._unsynced_bytes > self._most_unsynced():
            return
        for _ in range(len(self._sources)):
            source = self._sources[0]
            self._sources.rotate(-1)
            if not source.is_ready():
                continue
            if self._is_fan_out_behind(source):
                self._look_again()
            else:
                self._burst(source)
                return

    # -- bursts --------------------------------------------------------------------------------

    def _is_shared(self) -> bool:
        """Says whether somebody else used the loop just now. Between two requests of a client lies
        a commit; it should not meet a large burst each time."""
        now_ms = self._ledger.now_ms()
        if self._ledger.answers != self._answers:
            self._answers = self._ledger.answers
            self._shared_until_ms = now_ms + SHARED_MS
        return now_ms < self._shared_until_ms

    def _most_unsynced(self) -> int:
        return 0 if self._is_shared() else MAX_UNSYNCED_BYTES

    def _burst(self, source: BatchRows) -> None:
        # CPU time of this thread: what others on the machine do says nothing about the rows.
        began_s = time.thread_time()
        is_shared = self._is_shared()
        part, start = source.head()
        most = min(SHARED_ROWS if is_shared else BURST_ROWS, self._most_rows)
        rows = part.rows_within(start, most, BURST_BYTES)
        if part.stream is not None:
            taken = self._store_in_stream(source, part, part.stream, start, rows)
        elif part.cache is not None:
            taken = self._store_in_cache(source, part, part.cache, start, rows)
        else:
            taken = self._store_in_topics(source, part, start, rows)
        if not taken:
            # Fewer may find room.
            self._most_rows = max(1, rows // 2)
            self._rest(NO_ROOM_RETRY_MS)
            return
        source.advance(taken)
        self._on_progress(source.producer, source.storing)
        if source.is_done():
            self._finish(source)
        else:
            self._read_ahead(source)
        self._answers = self._ledger.answers
        spent_s = time.thread_time() - began_s
        self._most_rows = max(1, rows // 2) if spent_s > BURST_S else min(BURST_ROWS, 2 * most)
        if is_shared:
            self._rest(math.ceil(spent_s * OTHERS_SHARE * 1000), then_wait_ms=RIDE_MS)
        else:
            self._ledger.wake()

    def _rest(self, ms: int, then_wait_ms: int = 0) -> None:
        """Postpones the next burst by `ms`. It then runs in the next turn that others ask for, to
        share their commit, or after `then_wait_ms` without one."""
        self._is_resting = True

        def again() -> None:
            self._is_resting = False
            if then_wait_ms:
                self._scheduler.later(then_wait_ms, self._ledger.wake)
            else:
                self._ledger.wake()

        self._scheduler.later(max(1, ms), again)

    def _store_in_topics(self, source: BatchRows, part: RowSlice, start: int, rows: int) -> int:
        """Returns how many rows were stored; 0 without room."""
        now_ms = self._ledger.now_ms()
        decided = decide_rows(self._state, part.take(start, rows), now_ms)
        record = source.progress(rows, now_ms)
        partitions = self._ledger.store_all(decided.messages, decided.sizes, record)
        if partitions is None:
            return 0
        for topic_id, partition in partitions:
            topic = self._state.topics_by_id[topic_id]
            if topic.groups:
                self._dispatcher.mark_topic(topic, partition)
        self.rows += len(decided.messages)
        self._count_skipped(source, decided.skipped)
        self._count_unsynced(sum(decided.sizes) + rows * _ROW_OVERHEAD_BYTES)
        return rows

    def _store_in_stream(
        self, source: BatchRows, part: RowSlice, path: Path, start: int, rows: int
    ) -> int:
        """Returns how many rows were stored; 0 without room."""
        now_ms = self._ledger.now_ms()
        payloads = part.take_payloads(start, rows)
        events = decide_events(self._state, part.topic, payloads, now_ms)
        # Found first: nothing may fail between storing the events and telling the stream of them.
        stream = self._streams.in_use(path) if events else None
        sizes = [len(event.value) for event in events]
        if self._ledger.store_all(events, sizes, source.progress(rows, now_ms)) is None:
            return 0
        if stream is not None:
            topic = self._state.topics[part.topic]
            if topic.groups:
                self._dispatcher.mark_topic(topic, 0)
            stream.stored(payloads, events[0].offset)
        self.rows += len(events)
        self._count_skipped(source, rows - len(events))
        self._count_unsynced(sum(sizes) + rows * _ROW_OVERHEAD_BYTES)
        return rows

    def _is_fan_out_behind(self, source: BatchRows) -> bool:
        part, _ = source.head()
        if part.stream is None or part.topic not in self._state.topics:
            return False
        return self._streams.in_use(part.stream).queue.is_full()

    def _look_again(self) -> None:
        """Takes another turn when the publish queue may have room."""
        if self._is_looking_again:
            return
        self._is_looking_again = True

        def again() -> None:
            self._is_looking_again = False
            self._ledger.wake()

        self._scheduler.later(FAN_OUT_RETRY_MS, again)

    def _store_in_cache(
        self, source: BatchRows, part: RowSlice, cache: Path, start: int, rows: int
    ) -> int:
        """Stores fewer rows at a time in a cache that cannot hold so many. Returns how many."""
        rows = min(rows, MAX_TXN_OPS)
        while True:
            now_ms = self._ledger.now_ms()
            record = source.progress(rows, now_ms)
            try:
                found = part.take_for_cache(start, rows)
                if not self._caches.write(cache, found, record):
                    return 0
                self.rows += rows
            except (NotFound, TooLarge) as error:
                if isinstance(error, TooLarge) and rows > 1:
                    rows //= 2
                    continue
                if not self._ledger.record_together([record], reserve=False):
                    return 0
                self._count_skipped(source, rows)
            self._count_unsynced(rows * _ROW_OVERHEAD_BYTES)
            return rows

    def _count_skipped(self, source: BatchRows, rows: int) -> None:
        self.skipped += rows
        source.skipped += rows

    def _count_unsynced(self, nbytes: int) -> None:
        self._unsynced_bytes += nbytes

        def synced(_: PenstockError | None) -> None:
            self._unsynced_bytes -= nbytes
            if self._sources:
                self._ledger.wake()

        self._ledger.when_durable(synced)

    def _finish(self, source: BatchRows) -> None:
        self._sources.remove(source)
        if source.skipped:
            _log.warning(
                "batch %d of producer %r: %d rows were left out, their target has gone",
                source.storing.batch,
                source.producer,
                source.skipped,
            )
        self._on_stored(source.producer, source.storing)
        self._begin_some()

    # -- reading -------------------------------------------------------------------------------

    def _begin_some(self) -> None:
        """Begins batches that wait, one at a time for each producer."""
        active = {source.producer for source in self._sources}
        for producer, writer in list(self._waiting.items()):
            if len(self._sources) >= SIDE_BY_SIDE:
                return
            if not writer.storing:
                del self._waiting[producer]
            elif producer not in active:
                source = BatchRows(producer, next(iter(writer.storing.values())))
                self._sources.append(source)
                self._read_ahead(source)

    def _read_ahead(self, source: BatchRows) -> None:
        if source.wants_more():
            source.is_reading = True
            self._scheduler.in_background(partial(self._read, source))

    def _read(self, source: BatchRows) -> None:
        """Runs on a thread."""
        try:
            part = source.read(self._piece_store)
        except Exception as error:  # noqa: BLE001 - whatever it was, the log says so
            _log.error(
                "batch %d of producer %r cannot be stored, and is tried again: %s",
                source.storing.batch,
                source.producer,
                str(error) or repr(error),
            )
            self._scheduler.post(partial(self._give_up, source))
        else:
            self._scheduler.post(partial(self._got, source, part))

    def _got(self, source: BatchRows, part: RowSlice) -> None:
        source.add(part)
        self._read_ahead(source)
        self._ledger.wake()

    def _give_up(self, source: BatchRows) -> None:
        """Postpones a batch that cannot be read, and leaves its place to others. The state knows
        how far it is."""
        self._sources.remove(source)
        writer = self._waiting.pop(source.producer)
        self._scheduler.later(UNREADABLE_RETRY_MS, partial(self.add, writer))
        self._begin_some()


_ROW_OVERHEAD_BYTES = 48
"""The bytes that a row takes in the log beside its key and value, roughly."""


class BatchRows:
    """The rows of one batch that are to be stored, slice by slice."""

    def __init__(self, producer: str, storing: Storing) -> None:
        self.producer = producer
        self.storing = storing
        self.skipped = 0
        self.is_reading = False
        self._slices: deque[tuple[RowSlice, int]] = deque()
        # The next piece to read, and the row in it to begin with.
        self._piece = 0
        self._row = storing.done
        self._open: StagedPieceReader | None = None
        while self._row and self._row >= storing.pieces[self._piece].rows:
            self._row -= storing.pieces[self._piece].rows
            self._piece += 1

    def is_ready(self) -> bool:
        return bool(self._slices)

    def is_done(self) -> bool:
        return self.storing.done == self.storing.rows

    def head(self) -> tuple[RowSlice, int]:
        """Returns the slice with the next rows, and the index of the first of them."""
        return self._slices[0]

    def advance(self, rows: int) -> None:
        part, start = self._slices.popleft()
        if start + rows < part.rows:
            self._slices.appendleft((part, start + rows))

    def progress(self, rows: int, now_ms: int) -> WriteStored:
        """Returns the record that so many more rows are stored."""
        storing = self.storing
        return WriteStored(now_ms, self.producer, storing.batch, storing.done + rows)

    # -- reading -------------------------------------------------------------------------------

    def wants_more(self) -> bool:
        is_hungry = len(self._slices) < AHEAD_SLICES and not self.is_reading
        return is_hungry and self._piece < len(self.storing.pieces)

    def read(self, piece_store: PieceStore) -> RowSlice:
        """Reads the slice with the next row. Runs on a thread."""
        number = self.storing.pieces[self._piece].number
        if self._open is None:
            self._open = self._opened(piece_store, self.storing.pieces[self._piece])
        content = self._open.content
        row = 0
        for part in content.slices:
            if row + part.rows > self._row:
                return RowSlice(self._open.read(part), content, row)
            row += part.rows
        raise ValueError(f"staged piece {number} has only {row} rows")

    def _opened(self, piece_store: PieceStore, wanted: StagedRows) -> StagedPieceReader:
        """Opens a piece. Raises ValueError if the file is not the piece that the commit named."""
        found = piece_store.open(wanted.number)
        name = found.piece.name
        if (name.producer, name.batch) != (self.producer, self.storing.batch):
            of = f"batch {name.batch} of producer {quoted(name.producer)}"
            raise ValueError(f"staged piece {wanted.number} is of {of}")
        if found.piece.rows != wanted.rows:
            has = f"{found.piece.rows} rows, not {wanted.rows}"
            raise ValueError(f"staged piece {wanted.number} has {has}")
        return found

    def add(self, part: RowSlice) -> None:
        self.is_reading = False
        self._slices.append((part, self._row - part.first_row))
        self._row = part.first_row + part.rows
        if self._row >= self.storing.pieces[self._piece].rows:
            self._row = 0
            self._piece += 1
            self._open = None
