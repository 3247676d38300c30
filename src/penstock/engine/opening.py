"""Opens an embedded engine: on a data directory, recovering what is there, or in memory."""

from __future__ import annotations

from penstock.api.durability import Capabilities
from penstock.api.messages import Router
from penstock.core.state import BrokerState, apply, apply_message
from penstock.engine.clock import Clock, SystemClock
from penstock.engine.embedded import EmbeddedEngine
from penstock.engine.parts import DataDirectory, Parts
from penstock.engine.scheduler import Scheduler
from penstock.engine.tail import Tail
from penstock.engine.window import Window
from penstock.model.limits import Limits
from penstock.model.records import Message, TopicCreated, TopicDeleted, Trimmed, decode_record
from penstock.model.units import utf8_bytes
from penstock.storage.checkpoint import load_checkpoint, remove_leftovers
from penstock.storage.lock import DirectoryLock
from penstock.storage.log import WalOptions
from penstock.storage.memory_log import MemoryLog
from penstock.storage.vfs import Vfs
from penstock.storage.wal import Wal

DURABILITY = {
    "commit": "every answer waits until its data is synced to disk",
    "interval": "an answer waits for the write, not for the sync: "
    "a power cut may lose the last moments, a crash of the broker loses nothing",
    "none": "the operating system decides when data reaches the disk: "
    "a power cut may lose recent answers, a crash of the broker loses nothing",
}
IN_MEMORY = "nothing is kept: all is lost when the broker stops"


def open_in_memory(
    limits: Limits,
    scheduler: Scheduler,
    *,
    clock: Clock | None = None,
    router: Router | None = None,
) -> EmbeddedEngine:
    parts = Parts(
        BrokerState(limits),
        MemoryLog(scheduler.post),
        Window(limits.memory_bytes),
        clock or SystemClock(),
        scheduler,
    )
    return EmbeddedEngine(parts, Capabilities(False, "none", IN_MEMORY), router)


def open_on_disk(
    directory: str,
    options: WalOptions,
    limits: Limits,
    scheduler: Scheduler,
    *,
    clock: Clock | None = None,
    router: Router | None = None,
    vfs: Vfs | None = None,
) -> EmbeddedEngine:
    """Blocks while the directory is recovered. Raises StorageError if that cannot be done."""
    vfs = vfs or Vfs()
    clock = clock or SystemClock()
    vfs.mkdir(directory)
    lock = DirectoryLock.take(vfs, directory)
    try:
        checkpoint = load_checkpoint(vfs, directory, limits)
        state = checkpoint.state
        window = Window(limits.memory_bytes)
        for topic in state.topics.values():
            window.open_topic(topic.id, len(topic.partitions))
            for partition in topic.partitions:
                window.log(topic.id, partition.index).first_offset = partition.first_offset
        window.restore(checkpoint.refs)
        disk = DataDirectory(
            vfs, directory, checkpoint.files, checkpoint.journal, options.reserve_bytes
        )
        disk.staged.load()
        wal = Wal.open(
            vfs,
            directory,
            options,
            replay=_Replay(state, window, Tail(state, window, scheduler)).take,
            post=scheduler.post,
            first_segment=checkpoint.first_segment,
            lock=lock,
        )
    except BaseException:
        lock.release()
        raise
    remove_leftovers(vfs, checkpoint)
    clock.start_at(state.last_ts)
    parts = Parts(state, wal, window, clock, scheduler, disk)
    capabilities = Capabilities(True, options.fsync, DURABILITY[options.fsync])
    return EmbeddedEngine(parts, capabilities, router)


class _Replay:
    """Applies the log's records to a state and its window, as the live engine did."""

    def __init__(self, state: BrokerState, window: Window, tail: Tail) -> None:
        self._state = state
        self._window = window
        self._tail = tail

    def take(self, data: bytes, position: int) -> None:
        record = decode_record(data)
        state, window = self._state, self._window
        if isinstance(record, Message):
            size = utf8_bytes(record.key) + utf8_bytes(record.value)
            apply_message(state, record, size)
            window.add(record, size, position)
            self._tail.turn()
            if window.is_over():
                window.evict()
            return
        apply(state, record)
        if isinstance(record, TopicCreated):
            window.open_topic(record.topic_id, record.partitions)
        elif isinstance(record, TopicDeleted):
            window.drop_topic(record.topic_id)
        elif isinstance(record, Trimmed):
            window.trim(window.log(record.topic_id, record.partition), record.before)
