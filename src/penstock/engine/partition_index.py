"""An index of the messages of a partition from an offset on: which rows lie where, without the
messages.

It is taken on the loop and used on a thread, since it may have to read. Invariant: it shows one
moment, and every message from its start on that was stored then is in exactly one of its pieces:
first the sealed batches, then the chunks behind them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from penstock.engine.window import Chunk, PartitionLog
from penstock.model.records import STORED, Stored, decode_record, stored_bytes
from penstock.storage.history import BatchRef
from penstock.storage.history_reader import HistoryReader
from penstock.storage.log import Log
from penstock.storage.splitting import StoredRun


class _Part(NamedTuple):
    """A chunk as it was when the index was taken; it may have grown since, or been evicted."""

    first: int
    last: int
    msgs: int
    bytes: int
    messages: list[Stored] | None
    chunk: Chunk


class PartitionIndex:
    def __init__(
        self, held: PartitionLog, start: int, log: Log, history: HistoryReader | None
    ) -> None:
        self._start = start
        self._log = log
        self._history = history
        self._first_position = log.first_position
        self._refs: list[BatchRef] = held.refs_from(start)
        # A chunk may begin below this: history has that part of it, and it counts there.
        self._unsealed = max(start, held.sealed_end())
        self._parts = [
            _Part(c.first, c.last, c.msgs, c.bytes, c.messages, c)
            for c in held.chunks_from(self._unsealed)
        ]

    def pieces(self) -> Iterator[StoredRun]:
        """Returns the pieces in order. May read from disk."""
        history = self._history
        if history is not None:
            for ref in self._refs:
                yield StoredRun(ref.first, ref.last, ref.msgs, partial(history.offsets, ref))
        for part in self._parts:
            if part.first >= self._unsealed:
                yield StoredRun(part.first, part.last, part.msgs, partial(self._offsets, part))
            elif offsets := self._offsets(part):
                yield StoredRun(offsets[0], offsets[-1], len(offsets), partial(_known, offsets))

    def count(self) -> tuple[int, int]:
        """Returns how many messages it has, and their bytes. May read from disk."""
        msgs = nbytes = 0
        for found_msgs, found_bytes in self._counts():
            msgs += found_msgs
            nbytes += found_bytes
        return msgs, nbytes

    def _counts(self) -> Iterator[tuple[int, int]]:
        history = self._history
        if history is not None:
            for ref in self._refs:
                is_whole = ref.first >= self._start
                yield (ref.msgs, ref.bytes) if is_whole else history.count_from(ref, self._start)
        for part in self._parts:
            if part.first >= self._unsealed:
                yield part.msgs, part.bytes
            else:
                messages = self._messages(part)
                yield len(messages), sum(stored_bytes(m) for m in messages)

    def _offsets(self, part: _Part) -> list[int]:
        return [message.offset for message in self._messages(part)]

    def _messages(self, part: _Part) -> list[Stored]:
        """Returns the messages of the part that are in this index."""
        if part.messages is not None:
            messages = part.messages[: part.msgs]
        else:
            positions = part.chunk.positions_from(self._first_position)
            records = (decode_record(data) for data in self._log.read(positions))
            messages = [record for record in records if isinstance(record, STORED)]
        return messages[bisect_left(messages, self._unsealed, key=_offset_of) :]


def _known(offsets: list[int]) -> list[int]:
    return offsets


def _offset_of(message: Stored) -> int:
    return message.offset
