"""Removes messages that every group has finished and that the limits of their topic no longer keep.

Invariant: of a topic with `after_archive` nothing is removed before the group `archive` has
finished it, and nothing at all while there is no such group. Sealed batches are removed whole. Of
what is not sealed yet, single messages are removed where they are in memory, and whole chunks where
they are not. It pauses during a sealing run, which would not know what was removed meanwhile.
"""

from __future__ import annotations

import logging

from penstock.core.state import BrokerState
from penstock.core.topics import Partition, Topic
from penstock.engine.ledger import Ledger
from penstock.engine.quotas import Quotas
from penstock.engine.window import Chunk, PartitionLog, Window
from penstock.model.errors import ResourceExhausted
from penstock.model.names import ARCHIVE_GROUP
from penstock.model.records import Trimmed, stored_bytes
from penstock.storage.errors import StorageError
from penstock.storage.history import BatchRef
from penstock.storage.history_reader import HistoryReader

_log = logging.getLogger("penstock.engine")

RECLAIM_CHUNKS = 64
"""The chunks that one produce looks at when memory is full; the next one looks further."""


class _Trim:
    """The messages to remove from the front of a partition; grows unit by unit."""

    def __init__(
        self, partition: Partition, floor: int, oldest_ts: int, limit_bytes: int = -1
    ) -> None:
        self.before = partition.first_offset
        self.msgs = 0
        self.bytes = 0
        self._floor = floor
        self._oldest_ts = oldest_ts
        self._retained = partition.backlog.retained_bytes()
        self._limit_bytes = limit_bytes

    def takes(self, last: int, last_ts: int, msgs: int, size: int) -> bool:
        """Adds the unit if it may be removed. Returns False if it may not. The bytes limit removes
        a unit only if enough is left."""
        if last >= self._floor:
            return False
        is_old = last_ts < self._oldest_ts
        is_excess = 0 <= self._limit_bytes <= self._retained - size
        if not (is_old or is_excess):
            return False
        self.take(last, msgs, size)
        return True

    def take(self, last: int, msgs: int, size: int) -> None:
        self.before = last + 1
        self.msgs += msgs
        self.bytes += size
        self._retained -= size


class Retention:
    """`history` is None without a disk: then what is trimmed is all that frees memory."""

    def __init__(
        self,
        state: BrokerState,
        window: Window,
        history: HistoryReader | None,
        ledger: Ledger,
        quotas: Quotas,
    ) -> None:
        self._state = state
        self._quotas = quotas
        self._window = window
        self._history = history
        self._ledger = ledger

    def run(self, now_ms: int) -> int:
        """Trims every topic that has limits. Returns the bytes removed."""
        removed = 0
        for topic in self._state.topics.values():
            retention_ms = self._quotas.retention_ms(topic)
            if retention_ms or topic.retention_bytes:
                oldest_ts = now_ms - retention_ms if retention_ms else -1
                total = sum(p.backlog.retained_bytes() for p in topic.partitions)
                for partition in topic.partitions:
                    limit = _share(topic, partition.backlog.retained_bytes(), total)
                    removed += self._trim(topic, partition, oldest_ts, limit)
        return removed

    def check_memory(self) -> None:
        """Raises if there is no room for another message: without a disk to page to, only what no
        group needs any more can make room."""
        if self._history is None and self._window.is_over():
            self._reclaim_memory()
            if self._window.is_over():
                raise ResourceExhausted("the broker's memory is full", limit="memory_bytes")

    def _reclaim_memory(self) -> None:
        """Removes messages that every group has finished, oldest first. What has to stay is put
        back, so that it keeps nothing else."""
        window = self._window
        for _ in range(RECLAIM_CHUNKS):
            if not window.is_over():
                return
            oldest = window.take_oldest()
            if oldest is None:
                return
            if not self._reclaim(*oldest):
                window.put_back(*oldest)

    def _reclaim(self, log: PartitionLog, chunk: Chunk) -> bool:
        topic = self._state.topics_by_id[log.topic_id]
        partition = topic.partitions[log.partition]
        floor = _floor(topic, partition)
        if not topic.groups or chunk.last >= floor or chunk is not log.chunks[0]:
            return False
        cut = _Trim(partition, floor, -1)
        for message in chunk.messages or ():
            if message.offset >= partition.first_offset:
                cut.take(message.offset, 1, stored_bytes(message))
        return self._record(topic, partition, log, cut)

    def _trim(self, topic: Topic, partition: Partition, oldest_ts: int, limit_bytes: int) -> int:
        log = self._window.log(topic.id, partition.index)
        cut = _Trim(partition, _floor(topic, partition), oldest_ts, limit_bytes)
        for ref in log.refs:
            left = self._left_of(ref, partition.first_offset)
            if left is None or not cut.takes(ref.last, ref.last_ts, *left):
                break
        else:
            self._trim_unsealed(log, cut)
        if cut.msgs and self._record(topic, partition, log, cut):
            return cut.bytes
        return 0

    def _left_of(self, ref: BatchRef, first_offset: int) -> tuple[int, int] | None:
        """Returns the messages and bytes of the batch that were not trimmed before it was sealed;
        None if that cannot be read."""
        if ref.first >= first_offset or self._history is None:
            return ref.msgs, ref.bytes
        try:
            return self._history.count_from(ref, first_offset)
        except (OSError, ValueError, StorageError) as error:
            _log.error("retention leaves a history batch that cannot be read: %s", error)
            return None

    def _trim_unsealed(self, log: PartitionLog, cut: _Trim) -> None:
        for chunk in log.chunks:
            if chunk.last < cut.before:
                continue
            is_whole = chunk.first >= cut.before
            if is_whole and cut.takes(chunk.last, chunk.last_ts, chunk.msgs, chunk.bytes):
                continue
            if chunk.messages is None:
                return
            for message in chunk.messages:
                if message.offset < cut.before:
                    continue
                size = stored_bytes(message)
                if not cut.takes(message.offset, message.ts, 1, size):
                    return

    def _record(self, topic: Topic, partition: Partition, log: PartitionLog, cut: _Trim) -> bool:
        now_ms = self._ledger.now_ms()
        record = Trimmed(topic.id, partition.index, now_ms, cut.before, cut.msgs, cut.bytes)
        if not self._ledger.record(record):
            return False
        try:
            self._window.trim(log, cut.before)
        except BaseException as error:
            raise self._ledger.stop_serving(error, is_appended=True) from error
        self._ledger.wake()
        return True


def _share(topic: Topic, retained_bytes: int, total: int) -> int:
    """Returns the share of the topic's limit for a partition, by its part of the bytes."""
    if not topic.retention_bytes:
        return -1
    return topic.retention_bytes * retained_bytes // total if total else topic.retention_bytes


def _floor(topic: Topic, partition: Partition) -> int:
    """Returns the lowest offset that must stay: some group has not finished it, or nobody
    archives."""
    if topic.after_archive and ARCHIVE_GROUP not in topic.groups:
        return partition.first_offset
    floors = (group.progress[partition.index].floor() for group in topic.groups.values())
    return min(floors, default=partition.end_offset)
