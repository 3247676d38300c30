"""Messages that are no longer in memory, read back from disk in pages, never on the loop.

Owns a bounded cache of pages and the reads under way. A page starts at the offset it was asked
for. A reader that fails is logged and tried again; the messages are still on disk.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence

from msgspec import MsgspecError

from penstock.engine.scheduler import Scheduler
from penstock.engine.window import MESSAGE_OVERHEAD, PartitionLog, Window
from penstock.model.records import Message, decode_record
from penstock.storage.errors import SegmentGone, StorageError
from penstock.storage.history import HistoryGone
from penstock.storage.history_reader import HistoryReader
from penstock.storage.log import Log

PAGE_MSGS = 256
RETRY_MS = 1000

_log = logging.getLogger("penstock.engine")

Loaded = Callable[[], None]
_Key = tuple[int, int, int]
_Read = Callable[[], list[Message]]


class Pages:
    def __init__(
        self, window: Window, log: Log, history: HistoryReader | None, scheduler: Scheduler
    ) -> None:
        self._window = window
        self._log = log
        self._history = history
        self._scheduler = scheduler
        self._pages: OrderedDict[_Key, list[Message]] = OrderedDict()
        self._page_bytes = 0
        self._limit_bytes = window.memory_bytes // 8
        self._loading: dict[_Key, list[Loaded]] = {}
        self.reads = 0

    def page(self, log: PartitionLog, offset: int) -> list[Message] | None:
        """Messages from the first one at or after `offset` on (and maybe some before), or None."""
        resident = self._window.resident(log, offset)
        if resident:
            return resident
        key = (log.topic_id, log.partition, offset)
        page = self._pages.get(key)
        if page is not None:
            self._pages.move_to_end(key)
        return page

    def message(self, log: PartitionLog, offset: int) -> Message | None:
        """The message at exactly `offset`, if it is in memory."""
        page = self.page(log, offset)
        if page is None:
            return None
        index = bisect_left(page, offset, key=_offset_of)
        return page[index] if index < len(page) and page[index].offset == offset else None

    def load(self, log: PartitionLog, offset: int, loaded: Loaded) -> None:
        """Reads the page at `offset` and calls `loaded`; then `page` knows it for a while."""
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
            except (OSError, ValueError, StorageError, MsgspecError) as error:
                _log.error("cannot read topic %d partition %d: %s", key[0], key[1], error)
                self._scheduler.post(lambda: self._again(key, log))
            else:
                self._scheduler.post(lambda: self._finish(key, page))

        self._scheduler.in_thread(work)

    def _again(self, key: _Key, log: PartitionLog) -> None:
        self._scheduler.later(RETRY_MS, lambda: self._start(key, log))

    def _reader(self, log: PartitionLog, offset: int) -> _Read:
        """How to read from `offset` on; looked up on the loop, run elsewhere."""
        ref, history = log.ref_at(offset), self._history
        if ref is not None and history is not None:
            return lambda: history.read(ref, offset, PAGE_MSGS)
        chunk = log.chunk_at(offset)
        if chunk is None:
            return list
        # A chunk may begin in a segment that is sealed and dropped; history had that part.
        positions = chunk.positions_from(self._log.first_position)
        return lambda: _from_log(self._log, positions, offset)

    def _finish(self, key: _Key, page: list[Message]) -> None:
        self.reads += 1
        self._pages[key] = page
        self._page_bytes += _cost(page)
        while self._page_bytes > self._limit_bytes and len(self._pages) > 1:
            self._page_bytes -= _cost(self._pages.popitem(last=False)[1])
        for loaded in self._loading.pop(key):
            loaded()


def _from_log(log: Log, positions: Sequence[int], offset: int) -> list[Message]:
    records = (decode_record(record) for record in log.read(positions))
    return [record for record in records if isinstance(record, Message) and record.offset >= offset]


def _cost(page: list[Message]) -> int:
    return sum(len(m.key) + len(m.value) + MESSAGE_OVERHEAD for m in page)


def _offset_of(message: Message) -> int:
    return message.offset
