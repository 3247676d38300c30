"""The newest messages in memory, and the places of all others.

Invariant, per partition: every retained message is in exactly one place to read from. Those at or
above `dropped_end` are in a chunk, which is resident (its messages are in memory) or evicted (their
positions in the log are kept); those below it are in a sealed batch of history. The resident chunks
of a partition are its newest ones. `used_bytes` counts exactly what is resident, and stays within
the memory given: chunks that every group has finished are evicted first (engine/eviction.py), then
the oldest.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice
from typing import TYPE_CHECKING

from penstock.engine.message_size import held_bytes
from penstock.model.limits import CHUNK_BYTES_IN_MEMORY, MIB
from penstock.model.records import Stored

if TYPE_CHECKING:
    from penstock.storage.history import BatchRef

Added = tuple[Stored, int, int]
"""A message, its size, and its place in the log relative to that of the whole run."""

CHUNK_MSGS = 256
CHUNK_BYTES = MIB
CHUNK_SPAN = 2**62
"""The largest distance in the log between the first and last message of a chunk."""
MOST_REMOVED = 1000
"""The number of removed chunks that may stay in the eviction queue, however short it is."""


class Chunk:
    """Up to CHUNK_MSGS neighbouring messages of a partition.

    `bytes` counts keys and values, `held` the memory that the chunk takes while it is resident.
    `added_end` is `Window.added_bytes` after its newest message.
    """

    __slots__ = (
        "added_end",
        "base",
        "bytes",
        "first",
        "held",
        "last",
        "last_ts",
        "messages",
        "msgs",
        "positions",
    )

    def __init__(self, first: int, base: int) -> None:
        self.first = first
        self.base = base
        self.last = first
        self.last_ts = 0
        self.msgs = 0
        self.bytes = 0
        self.held = CHUNK_BYTES_IN_MEMORY
        self.added_end = 0
        self.messages: list[Stored] | None = []
        # Positions in the log, counted from `base`: the log outgrows 64 bits, a chunk does not.
        self.positions = array("Q")

    def positions_from(self, first: int) -> list[int]:
        """Returns the positions of the messages in the log, without those below `first`."""
        base = self.base
        return [base + each for each in self.positions if base + each >= first]

    def evict(self) -> None:
        """Drops the messages and keeps their positions, in half the bytes where they are close
        together: millions of them may wait to be sealed."""
        self.messages = None
        if self.positions[-1] < 2**32:
            self.positions = array("I", self.positions)


class PartitionLog:
    """The places of one partition's messages, oldest first: sealed batches, then chunks. The last
    `residents` chunks are in memory."""

    __slots__ = (
        "chunks",
        "dropped_end",
        "first_offset",
        "partition",
        "refs",
        "residents",
        "topic_id",
    )

    def __init__(self, topic_id: int, partition: int) -> None:
        self.topic_id = topic_id
        self.partition = partition
        self.first_offset = 0
        self.dropped_end = 0
        self.refs: list[BatchRef] = []
        self.chunks: list[Chunk] = []
        self.residents = 0

    def oldest_resident(self) -> Chunk:
        """Returns the oldest chunk in memory. There must be one."""
        return self.chunks[-self.residents]

    def sealed_end(self) -> int:
        return self.refs[-1].last + 1 if self.refs else 0

    def chunk_at(self, offset: int) -> Chunk | None:
        """Returns the chunk with the first message at or after `offset`, which is not below
        `dropped_end`."""
        chunks = self.chunks
        if chunks and chunks[-1].first <= offset <= chunks[-1].last:
            return chunks[-1]
        index = bisect_left(chunks, offset, key=_last_of)
        return chunks[index] if index < len(chunks) else None

    def chunks_from(self, offset: int) -> Iterator[Chunk]:
        """Returns `chunk_at`, and the chunks behind it."""
        return islice(self.chunks, bisect_left(self.chunks, offset, key=_last_of), None)

    def refs_from(self, offset: int) -> list[BatchRef]:
        """Returns the sealed batches with messages at or after `offset`."""
        return self.refs[bisect_left(self.refs, offset, key=_last_of) :]

    def ref_at(self, offset: int) -> BatchRef | None:
        index = bisect_left(self.refs, offset, key=_last_of)
        return self.refs[index] if index < len(self.refs) else None


class Window:
    """`used_bytes` counts resident messages, `page_bytes` pages that were read back, which have
    their share of `memory_bytes`. `added_bytes` only grows."""

    def __init__(self, memory_bytes: int) -> None:
        self.memory_bytes = memory_bytes
        self.used_bytes = 0
        self.page_bytes = 0
        self.added_bytes = 0
        self._topics: dict[int, list[PartitionLog]] = {}
        # Oldest first; those that were removed before their turn stay until they are many.
        self._resident: deque[tuple[PartitionLog, Chunk]] = deque()
        self._removed = 0
        # Partitions with resident chunks, in the order in which they are looked at.
        self._with_residents: OrderedDict[PartitionLog, None] = OrderedDict()

    def open_topic(self, topic_id: int, partitions: int) -> None:
        self._topics[topic_id] = [PartitionLog(topic_id, index) for index in range(partitions)]

    def drop_topic(self, topic_id: int) -> None:
        for log in self._topics.pop(topic_id):
            self._remove(log, log.chunks)
            log.chunks.clear()
            log.refs.clear()

    def log(self, topic_id: int, partition: int) -> PartitionLog:
        return self._topics[topic_id][partition]

    def add(self, message: Stored, size: int, position: int) -> None:
        log = self._topics[message.topic_id][message.partition]
        chunk, messages = self._open_chunk(log, message.offset, position)
        messages.append(message)
        chunk.positions.append(position - chunk.base)
        chunk.last = message.offset
        chunk.last_ts = message.ts
        chunk.msgs += 1
        chunk.bytes += size
        held = held_bytes(message, size)
        chunk.held += held
        self.used_bytes += held
        self.added_bytes += held
        chunk.added_end = self.added_bytes

    def add_run(self, run: Sequence[Added], start: int) -> None:
        """Does what `add` does, for messages of one partition in their order, a chunk at a time."""
        first = run[0][0]
        log = self._topics[first.topic_id][first.partition]
        at = 0
        while at < len(run):
            chunk, messages = self._open_chunk(log, run[at][0].offset, start + run[at][2])
            added, sizes, positions = zip(*run[at : at + CHUNK_MSGS - chunk.msgs], strict=True)
            totals = list(accumulate(map(held_bytes, added, sizes), initial=chunk.held))
            count = min(bisect_left(totals, CHUNK_BYTES), len(added))
            messages.extend(added[:count])
            shift = start - chunk.base
            chunk.positions.extend([shift + each for each in positions[:count]])
            chunk.last = messages[-1].offset
            chunk.last_ts = messages[-1].ts
            chunk.msgs += count
            chunk.bytes += sum(sizes[:count])
            chunk.held = totals[count]
            self.used_bytes += totals[count] - totals[0]
            self.added_bytes += totals[count] - totals[0]
            chunk.added_end = self.added_bytes
            at += count

    def _open_chunk(
        self, log: PartitionLog, offset: int, position: int
    ) -> tuple[Chunk, list[Stored]]:
        """Returns the chunk that takes the next message, which is at `position` in the log."""
        if log.chunks:
            chunk = log.chunks[-1]
            if (
                chunk.messages is not None
                and chunk.msgs < CHUNK_MSGS
                and chunk.held < CHUNK_BYTES
                and position - chunk.base < CHUNK_SPAN
            ):
                return chunk, chunk.messages
        chunk = Chunk(offset, position)
        log.chunks.append(chunk)
        self._resident.append((log, chunk))
        log.residents += 1
        self._with_residents[log] = None
        self.used_bytes += chunk.held
        messages = chunk.messages = []
        return chunk, messages

    def is_over(self) -> bool:
        return self.used_bytes + self.page_bytes > self.memory_bytes

    def evict(self) -> None:
        """Evicts the oldest chunks until what is resident fits. They can be read back."""
        while self.is_over() and self._resident:
            log, chunk = self._resident.popleft()
            self._evict(log, chunk)
            _drop_sealed(log)

    @property
    def resident_partitions(self) -> int:
        """The number of partitions with messages in memory."""
        return len(self._with_residents)

    def next_resident(self) -> PartitionLog:
        """Returns a partition with messages in memory, each time the next one. There must be
        one."""
        log, _ = self._with_residents.popitem(last=False)
        self._with_residents[log] = None
        return log

    def evict_finished(self, log: PartitionLog, floor: int, added_end: int) -> None:
        """Evicts chunks whose messages are all below the offset `floor`, and that were complete
        when `added_bytes` was `added_end`. They can be read back."""
        before = log.residents
        while log.residents:
            chunk = log.oldest_resident()
            if chunk.last >= floor or chunk.added_end > added_end:
                break
            self._evict(log, chunk)
        self._count_removed(before - log.residents)
        _drop_sealed(log)

    def take_oldest(self) -> tuple[PartitionLog, Chunk] | None:
        """Takes the oldest resident chunk from the queue. It must be removed, or put back."""
        while self._resident:
            log, chunk = self._resident.popleft()
            if chunk.messages is not None:
                return log, chunk
        return None

    def put_back(self, log: PartitionLog, chunk: Chunk) -> None:
        self._resident.append((log, chunk))

    def resident(self, log: PartitionLog, offset: int) -> list[Stored] | None:
        """Returns the messages of the chunk around the first one at or after `offset`, if it is in
        memory."""
        if offset < log.dropped_end:
            return None
        chunk = log.chunk_at(offset)
        return chunk.messages if chunk is not None else None

    def seal(self, refs: list[BatchRef], dropped_files: set[int]) -> None:
        """Adds batches that are in history now; `dropped_files` were rewritten or removed."""
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
        """Adds the batches that a start found. Nothing else lies below the log that is about to be
        replayed."""
        self.seal(refs, set())
        for logs in self._topics.values():
            for log in logs:
                log.dropped_end = log.sealed_end()

    def trim(self, log: PartitionLog, before: int) -> None:
        log.first_offset = before
        log.refs = [ref for ref in log.refs if ref.last >= before]
        gone = bisect_left(log.chunks, before, key=_last_of)
        self._remove(log, log.chunks[:gone])
        del log.chunks[:gone]
        log.dropped_end = max(log.dropped_end, before)

    def _remove(self, log: PartitionLog, chunks: list[Chunk]) -> None:
        """Removes chunks whose messages nobody needs."""
        for chunk in chunks:
            self._evict(log, chunk)
        self._count_removed(len(chunks))

    def _count_removed(self, chunks: int) -> None:
        """Counts chunks that were removed before their turn. Takes them out of the queue when they
        are many."""
        self._removed += chunks
        if self._removed > MOST_REMOVED and self._removed * 2 > len(self._resident):
            self._removed = 0
            live = [entry for entry in self._resident if entry[1].messages is not None]
            self._resident = deque(live)

    def _evict(self, log: PartitionLog, chunk: Chunk) -> None:
        if chunk.messages is not None:
            chunk.evict()
            self.used_bytes -= chunk.held
            log.residents -= 1
            if not log.residents:
                del self._with_residents[log]


def _drop_sealed(log: PartitionLog) -> None:
    """Drops chunks that are both evicted and sealed."""
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
