"""Reads messages back from disk in pages, off the loop.

Owns a bounded cache of pages, which takes an eighth of the memory for messages, and the reads under
way. A page starts at the offset it was asked for. A read that fails is logged and tried again; the
messages are still on disk.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Sequence

from penstock.engine.message_size import held_bytes
from penstock.engine.reading import log_unreadable
from penstock.engine.scheduler import Scheduler
from penstock.engine.window import PartitionLog, Window
from penstock.model.records import STORED, Stored, decode_record, stored_bytes
from penstock.storage.errors import NotYetInLog, SegmentGone
from penstock.storage.history import BatchRef, HistoryGone
from penstock.storage.history_reader import HistoryReader
from penstock.storage.log import Log

PAGE_MSGS = 256
RETRY_MS = 1000
MAX_RETRY_MS = 60_000
"""The first and the longest wait before a page that cannot be read is tried again."""
SOON_MS = 10

_log = logging.getLogger("penstock.engine")

Loaded = Callable[[], None]
_Key = tuple[int, int, int]
_Read = Callable[[], list[Stored]]


class Pages:
    def __init__(
        self, window: Window, log: Log, history: HistoryReader | None, scheduler: Scheduler
    ) -> None:
        self.window = window
        self._log = log
        self._history = history
        self._scheduler = scheduler
        self._pages: OrderedDict[_Key, list[Stored]] = OrderedDict()
        # The first offsets of the pages of each partition.
        self._starts: dict[tuple[int, int], list[int]] = {}
        self._limit_bytes = window.memory_bytes // 8
        self._loading: dict[_Key, list[Loaded]] = {}
        self._retry_ms: dict[_Key, int] = {}
        self.reads = 0

    def page(self, log: PartitionLog, offset: int) -> list[Stored] | None:
        """Returns messages from the first one at or after `offset` on, perhaps with some before it;
        None if they are not in memory."""
        resident = self.window.resident(log, offset)
        if resident:
            return resident
        starts = self._starts.get((log.topic_id, log.partition))
        if not starts:
            return None
        index = bisect_right(starts, offset) - 1
        if index < 0:
            return None
        key = (log.topic_id, log.partition, starts[index])
        page = self._pages[key]
        if starts[index] != offset and (not page or page[-1].offset < offset):
            return None
        self._pages.move_to_end(key)
        return page

    def contains(self, log: PartitionLog, offset: int, answer: Callable[[bool], None]) -> None:
        """Tells `answer` whether there is a message at exactly `offset`, at once if memory
        knows."""

        def look() -> None:
            answer(self.message(log, offset) is not None)

        ref, history = log.ref_at(offset), self._history
        if self.page(log, offset) is not None:
            look()
        elif ref is None or history is None:
            self.load(log, offset, look)
        else:
            self._look_up(ref, history, log, offset, answer)

    def _look_up(
        self,
        ref: BatchRef,
        history: HistoryReader,
        log: PartitionLog,
        offset: int,
        answer: Callable[[bool], None],
    ) -> None:
        """Looks the offset up in a sealed batch, without reading messages."""

        def work() -> None:
            try:
                found = history.contains(ref, offset)
            except HistoryGone:
                self._scheduler.post(lambda: self.contains(log, offset, answer))
            except Exception as error:  # noqa: BLE001 - whatever it was, the caller waits
                log_unreadable(error, f"topic {ref.topic_id} partition {ref.partition}")
                self._scheduler.post(lambda: answer(True))
            else:
                self._scheduler.post(lambda: answer(found))

        self._scheduler.in_thread(work)

    def message(self, log: PartitionLog, offset: int) -> Stored | None:
        """Returns the message at exactly `offset`, if it is in memory."""
        page = self.page(log, offset)
        if page is None:
            return None
        index = bisect_left(page, offset, key=_offset_of)
        return page[index] if index < len(page) and page[index].offset == offset else None

    def load(self, log: PartitionLog, offset: int, loaded: Loaded) -> None:
        """Reads the page at `offset`, then calls `loaded`. `page` finds it for a while."""
        key = (log.topic_id, log.partition, offset)
        waiting = self._loading.get(key)
        if waiting is not None:
            waiting.append(loaded)
            return
        self._loading[key] = [loaded]
        self._start(key, log)

    def _start(self, key: _Key, log: PartitionLog) -> None:
        read = self._reader(log, key[2])

        def work() -> None:
            try:
                page = read()
            except (SegmentGone, HistoryGone):
                # Sealed or rewritten between the look-up and the read: look again.
                self._scheduler.post(lambda: self._start(key, log))
            except NotYetInLog:
                # Evicted in the turn that stored it.
                self._scheduler.post(lambda: self._again(key, log, SOON_MS))
            except Exception as error:  # noqa: BLE001 - whatever it was, consumers wait
                log_unreadable(error, f"topic {key[0]} partition {key[1]}")
                self._scheduler.post(lambda: self._retry(key, log))
            else:
                self._scheduler.post(lambda: self._finish(key, page))

        self._scheduler.in_thread(work)

    def _retry(self, key: _Key, log: PartitionLog) -> None:
        delay_ms = self._retry_ms.get(key, RETRY_MS)
        self._retry_ms[key] = min(2 * delay_ms, MAX_RETRY_MS)
        self._again(key, log, delay_ms)

    def _again(self, key: _Key, log: PartitionLog, delay_ms: int) -> None:
        self._scheduler.later(delay_ms, lambda: self._start(key, log))

    def _reader(self, log: PartitionLog, offset: int) -> _Read:
        """Returns how to read from `offset` on. Called on the loop; the result runs elsewhere."""
        ref, history = log.ref_at(offset), self._history
        if ref is not None and history is not None:
            return lambda: history.read(ref, offset, PAGE_MSGS)
        chunk = log.chunk_at(offset)
        if chunk is None:
            return list
        # A chunk may begin in a segment that is sealed and dropped; history had that part.
        positions = chunk.positions_from(self._log.first_position)
        return lambda: _from_log(self._log, positions, offset)

    def _finish(self, key: _Key, page: list[Stored]) -> None:
        self.reads += 1
        self._retry_ms.pop(key, None)
        if key in self._pages:
            self._drop(key)
        self._pages[key] = page
        insort(self._starts.setdefault(key[:2], []), key[2])
        self.window.page_bytes += _held_bytes(page)
        while self.window.page_bytes > self._limit_bytes and len(self._pages) > 1:
            self._drop(next(iter(self._pages)))
        for loaded in self._loading.pop(key):
            try:
                loaded()
            except Exception:  # noqa: BLE001 - whoever else waits for the page must hear of it
                _log.exception("a page could not be used; others who wait for it go on")

    def _drop(self, key: _Key) -> None:
        self.window.page_bytes -= _held_bytes(self._pages.pop(key))
        starts = self._starts[key[:2]]
        starts.remove(key[2])
        if not starts:
            del self._starts[key[:2]]


def _from_log(log: Log, positions: Sequence[int], offset: int) -> list[Stored]:
    records = (decode_record(record) for record in log.read(positions))
    return [record for record in records if isinstance(record, STORED) and record.offset >= offset]


def _held_bytes(page: list[Stored]) -> int:
    return sum([held_bytes(m, stored_bytes(m)) for m in page])


def _offset_of(message: Stored) -> int:
    return message.offset
