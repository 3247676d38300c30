"""The newest messages in memory, and where the others are.

Invariant, per partition: every retained message is in exactly one place to read from. Those at or
above `dropped_end` are in a chunk, which is resident (its messages in memory) or evicted (their
positions in the log remain); those below it are in a sealed batch of history. What is resident
stays within the memory given: the oldest chunks are evicted first.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice
from typing import TYPE_CHECKING

from penstock.model.limits import MIB
from penstock.model.records import Message

if TYPE_CHECKING:
    from penstock.storage.history import BatchRef

Added = tuple[Message, int, int]
"""A message, its size, and its place in the log counted from that of others added with it."""

CHUNK_MSGS = 256
CHUNK_BYTES = MIB
CHUNK_SPAN = 2**62
"""How far apart in the log a chunk's first and last message may be."""
MOST_REMOVED = 1000
"""Removed chunks that may wait in the queue of those to evict, however few there are."""
MESSAGE_OVERHEAD = 320
"""What a small message costs in memory beside its key and value (bench/ measures it)."""


class Chunk:
    """Up to CHUNK_MSGS neighbouring messages of a partition."""

    __slots__ = ("base", "bytes", "first", "last", "last_ts", "messages", "msgs", "places")

    def __init__(self, first: int, base: int) -> None:
        self.first = first
        self.base = base
        self.last = first
        self.last_ts = 0
        self.msgs = 0
        self.bytes = 0
        self.messages: list[Message] | None = []
        # Positions in the log, counted from `base`: the log outgrows 64 bits, a chunk does not.
        self.places = array("Q")

    def positions_from(self, first: int) -> list[int]:
        """Where in the log the messages are, without what lies below `first`."""
        base = self.base
        return [base + place for place in self.places if base + place >= first]

    def evict(self) -> None:
        """The messages go. Their positions are all that is kept of what waits for its sealing,
        which may be millions; of neighbours in the log they fit in half the bytes."""
        self.messages = None
        if self.places[-1] < 2**32:
            self.places = array("I", self.places)


class PartitionLog:
    """Where one partition's messages are, oldest first: sealed batches, then chunks."""

    __slots__ = ("chunks", "dropped_end", "first_offset", "partition", "refs", "topic_id")

    def __init__(self, topic_id: int, partition: int) -> None:
        self.topic_id = topic_id
        self.partition = partition
        self.first_offset = 0
        self.dropped_end = 0
        self.refs: list[BatchRef] = []
        self.chunks: list[Chunk] = []

    def sealed_end(self) -> int:
        return self.refs[-1].last + 1 if self.refs else 0

    def chunk_at(self, offset: int) -> Chunk | None:
        """The chunk with the first message at or after `offset`, which is not below dropped_end."""
        chunks = self.chunks
        if chunks and chunks[-1].first <= offset <= chunks[-1].last:
            return chunks[-1]
        index = bisect_left(chunks, offset, key=_last_of)
        return chunks[index] if index < len(chunks) else None

    def chunks_from(self, offset: int) -> Iterator[Chunk]:
        """`chunk_at`, and those behind it."""
        return islice(self.chunks, bisect_left(self.chunks, offset, key=_last_of), None)

    def refs_from(self, offset: int) -> list[BatchRef]:
        """The sealed batches with messages at or after `offset`."""
        return self.refs[bisect_left(self.refs, offset, key=_last_of) :]

    def ref_at(self, offset: int) -> BatchRef | None:
        index = bisect_left(self.refs, offset, key=_last_of)
        return self.refs[index] if index < len(self.refs) else None


class Window:
    def __init__(self, memory_bytes: int) -> None:
        self.memory_bytes = memory_bytes
        self.used_bytes = 0
        self._topics: dict[int, list[PartitionLog]] = {}
        # Oldest first; those that were removed before their turn stay until they are many.
        self._resident: deque[tuple[PartitionLog, Chunk]] = deque()
        self._removed = 0

    def open_topic(self, topic_id: int, partitions: int) -> None:
        self._topics[topic_id] = [PartitionLog(topic_id, index) for index in range(partitions)]

    def drop_topic(self, topic_id: int) -> None:
        for log in self._topics.pop(topic_id):
            self._remove(log.chunks)
            log.chunks.clear()
            log.refs.clear()

    def log(self, topic_id: int, partition: int) -> PartitionLog:
        return self._topics[topic_id][partition]

    def add(self, message: Message, size: int, position: int) -> None:
        log = self._topics[message.topic_id][message.partition]
        chunk, messages = self._open_chunk(log, message.offset, position)
        messages.append(message)
        chunk.places.append(position - chunk.base)
        chunk.last = message.offset
        chunk.last_ts = message.ts
        chunk.msgs += 1
        chunk.bytes += size
        self.used_bytes += size + MESSAGE_OVERHEAD

    def add_run(self, run: Sequence[Added], start: int) -> None:
        """What `add` does, for messages of one partition in their order, a chunk at a time."""
        first = run[0][0]
        log = self._topics[first.topic_id][first.partition]
        at = 0
        while at < len(run):
            chunk, messages = self._open_chunk(log, run[at][0].offset, start + run[at][2])
            added, sizes, places = zip(*run[at : at + CHUNK_MSGS - chunk.msgs], strict=True)
            totals = list(accumulate(sizes, initial=chunk.bytes))
            count = min(bisect_left(totals, CHUNK_BYTES), len(added))
            messages.extend(added[:count])
            shift = start - chunk.base
            chunk.places.extend([shift + place for place in places[:count]])
            chunk.last = messages[-1].offset
            chunk.last_ts = messages[-1].ts
            chunk.msgs += count
            chunk.bytes = totals[count]
            self.used_bytes += totals[count] - totals[0] + count * MESSAGE_OVERHEAD
            at += count

    def _open_chunk(
        self, log: PartitionLog, offset: int, position: int
    ) -> tuple[Chunk, list[Message]]:
        """The chunk that takes the next message, which is at `position` in the log."""
        if log.chunks:
            chunk = log.chunks[-1]
            if (
                chunk.messages is not None
                and chunk.msgs < CHUNK_MSGS
                and chunk.bytes < CHUNK_BYTES
                and position - chunk.base < CHUNK_SPAN
            ):
                return chunk, chunk.messages
        chunk = Chunk(offset, position)
        log.chunks.append(chunk)
        self._resident.append((log, chunk))
        messages = chunk.messages = []
        return chunk, messages

    def is_over(self) -> bool:
        return self.used_bytes > self.memory_bytes

    def evict(self) -> None:
        """Lets the oldest chunks go until what is resident fits; they can be read back."""
        while self.used_bytes > self.memory_bytes and self._resident:
            log, chunk = self._resident.popleft()
            self._evict(chunk)
            _drop_sealed(log)

    def take_oldest(self) -> tuple[PartitionLog, Chunk] | None:
        """The chunk whose turn it is to go; it goes, or is put back to the end of the queue."""
        while self._resident:
            log, chunk = self._resident.popleft()
            if chunk.messages is not None:
                return log, chunk
        return None

    def put_back(self, log: PartitionLog, chunk: Chunk) -> None:
        self._resident.append((log, chunk))

    def resident(self, log: PartitionLog, offset: int) -> list[Message] | None:
        """The messages of the chunk around the first one at or after `offset`, if in memory."""
        if offset < log.dropped_end:
            return None
        chunk = log.chunk_at(offset)
        return chunk.messages if chunk is not None else None

    def seal(self, refs: list[BatchRef], dropped_files: set[int]) -> None:
        """History has taken over these batches; `dropped_files` were rewritten or removed."""
        if dropped_files:
            for logs in self._topics.values():
                for log in logs:
                    log.refs = [ref for ref in log.refs if ref.file not in dropped_files]
        touched: dict[int, PartitionLog] = {}
        for ref in refs:
            logs_of_topic = self._topics.get(ref.topic_id)
            if logs_of_topic is not None and ref.last >= logs_of_topic[ref.partition].first_offset:
                log = logs_of_topic[ref.partition]
                log.refs.append(ref)
                touched[id(log)] = log
        for log in touched.values():
            log.refs.sort(key=_last_of)
            _drop_sealed(log)

    def restore(self, refs: list[BatchRef]) -> None:
        """At a start: history is all there is below the log that is about to be replayed."""
        self.seal(refs, set())
        for logs in self._topics.values():
            for log in logs:
                log.dropped_end = log.sealed_end()

    def trim(self, log: PartitionLog, before: int) -> None:
        log.first_offset = before
        log.refs = [ref for ref in log.refs if ref.last >= before]
        gone = bisect_left(log.chunks, before, key=_last_of)
        self._remove(log.chunks[:gone])
        del log.chunks[:gone]
        log.dropped_end = max(log.dropped_end, before)

    def _remove(self, chunks: list[Chunk]) -> None:
        """These hold nothing that is wanted any more, in memory or elsewhere."""
        for chunk in chunks:
            self._evict(chunk)
        self._removed += len(chunks)
        if self._removed > MOST_REMOVED and self._removed * 2 > len(self._resident):
            self._removed = 0
            live = [entry for entry in self._resident if entry[1].messages is not None]
            self._resident = deque(live)

    def _evict(self, chunk: Chunk) -> None:
        if chunk.messages is not None:
            chunk.evict()
            self.used_bytes -= chunk.bytes + chunk.msgs * MESSAGE_OVERHEAD


def _drop_sealed(log: PartitionLog) -> None:
    """Chunks that are evicted and sealed have nothing left to say."""
    sealed_end = log.sealed_end()
    gone = 0
    for chunk in log.chunks:
        if chunk.messages is not None or chunk.last >= sealed_end:
            break
        log.dropped_end = chunk.last + 1
        gone += 1
    del log.chunks[:gone]


def _last_of(unit: Chunk | BatchRef) -> int:
    return unit.last
