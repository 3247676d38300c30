"""Reads payloads of a durable stream from memory, the log or history, in offset order.

Invariant: a read begins at exactly the offset asked for and leaves none out, or it fails. What is
in memory is read at once; the rest off the loop. Must not know who reads.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pyarrow as pa

from penstock.core.topics import Topic
from penstock.engine.window import Chunk, PartitionLog, Window
from penstock.model.errors import NotFound, OutOfRange
from penstock.model.limits import MIB
from penstock.model.records import StoredEvent, decode_record
from penstock.storage.history import BatchRef
from penstock.storage.history_reader import HistoryReader, row_at
from penstock.storage.log import Log

READ_EVENTS = 8192
READ_BYTES = 2 * MIB
"""About as much is read at once; one event at least."""
STEP_EVENTS = 1024
"""Events converted at a time. The thread that converts them blocks the event loop meanwhile."""

Payloads = list[bytes]
Read = Callable[[], Payloads]
"""Reads payloads. Blocks."""


class EventReading:
    def __init__(
        self, topics: dict[int, Topic], window: Window, log: Log, history: HistoryReader | None
    ) -> None:
        self._topics = topics
        self._window = window
        self._log = log
        self._history = history

    def read(self, topic_id: int, at: int, end: int) -> Payloads | Read:
        """Returns payloads from `at` on, some or all of those before `end`, or how to read them."""
        topic = self._topics.get(topic_id)
        if topic is None:
            raise NotFound("the stream was deleted")
        first = topic.partitions[0].first_offset
        if at < first:
            raise OutOfRange(f"events below {first} are no longer kept; {at} is the next to read")
        log = self._window.log(topic_id, 0)
        found = self._resident(log, at, end)
        if found:
            return found
        ref, history = log.ref_at(at), self._history
        if ref is not None and history is not None:
            return lambda: _from_history(history, ref, at, end)
        chunk = log.chunk_at(at)
        if chunk is None:
            raise LookupError(f"no event at offset {at} of topic {topic_id}")
        return self._from_log(chunk, at, end)

    def _resident(self, log: PartitionLog, at: int, end: int) -> Payloads:
        found: Payloads = []
        nbytes = 0
        while at < end and len(found) < READ_EVENTS and nbytes < READ_BYTES:
            messages = self._window.resident(log, at)
            if not messages:
                break
            start = at - messages[0].offset
            some = [
                m.value for m in messages[start : start + end - at] if isinstance(m, StoredEvent)
            ]
            found += some
            nbytes += sum(map(len, some))
            at += len(some)
        return found

    def _from_log(self, chunk: Chunk, at: int, end: int) -> Read:
        # A chunk may begin in a segment that is sealed and dropped; history had that part.
        log, positions = self._log, chunk.positions_from(self._log.first_position)

        def read() -> Payloads:
            records = (decode_record(data) for data in log.read(positions))
            return [r.value for r in records if isinstance(r, StoredEvent) and at <= r.offset < end]

        return read


def _from_history(history: HistoryReader, ref: BatchRef, at: int, end: int) -> Payloads:
    batch = history.batch(ref)
    row = row_at(batch, at)
    rows = min(batch.num_rows - row, end - at, READ_EVENTS)
    column = batch.column("payload")
    found: Payloads = []
    nbytes = 0
    for start in range(row, row + rows, STEP_EVENTS):
        found += _payloads(column.slice(start, min(STEP_EVENTS, row + rows - start)))
        nbytes += sum(map(len, found[start - row :]))
        if nbytes >= READ_BYTES:
            break
        time.sleep(0)
    return found


def _payloads(column: pa.Array) -> Payloads:
    found: Payloads = column.to_pylist()
    return found
