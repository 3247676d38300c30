"""Opens an embedded engine on any storage: recovers what is there, then serves behind it.

Must not know which log it opens: that is what `Storage` and `Log` are for (storage/log.py).
"""

from __future__ import annotations

from penstock.api.messages import Router
from penstock.core.state import apply, apply_message
from penstock.engine.clock import Clock, SystemClock
from penstock.engine.embedded import EmbeddedEngine
from penstock.engine.eviction import Eviction
from penstock.engine.registry import check_guarantees
from penstock.engine.scheduler import Scheduler
from penstock.engine.window import Window
from penstock.engine.wiring import Parts
from penstock.model.errors import PenstockError
from penstock.model.limits import Limits
from penstock.model.records import (
    STORED,
    TopicCreated,
    TopicDeleted,
    Trimmed,
    decode_record,
    stored_bytes,
)
from penstock.storage.checkpoint import Checkpoint
from penstock.storage.data_directory import DataDirectory
from penstock.storage.log import Replay, Storage, WalOptions
from penstock.storage.memory_log import MemoryStorage
from penstock.storage.vfs import Vfs


def open_in_memory(
    limits: Limits,
    scheduler: Scheduler,
    *,
    clock: Clock | None = None,
    router: Router | None = None,
) -> EmbeddedEngine:
    return open_engine(MemoryStorage(), limits, scheduler, clock=clock, router=router)


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
    storage = DataDirectory(vfs or Vfs(), directory, options)
    return open_engine(storage, limits, scheduler, clock=clock, router=router)


def open_engine(
    storage: Storage,
    limits: Limits,
    scheduler: Scheduler,
    *,
    clock: Clock | None = None,
    router: Router | None = None,
) -> EmbeddedEngine:
    """Blocks while the storage is recovered. Raises StorageError if that cannot be done."""
    clock = clock or SystemClock()
    recovery = Recovery(limits, scheduler)
    log = storage.open(limits, scheduler.post, recovery.begin)
    state = recovery.checkpoint.state
    try:
        check_guarantees(storage.capabilities, state.registry.streams.values())
    except PenstockError:
        log.close()
        raise
    clock.start_at(state.last_ts)
    checkpoint, window = recovery.checkpoint, recovery.window
    return EmbeddedEngine(Parts(checkpoint, window, log, storage, clock, scheduler, router=router))


class Recovery:
    """Applies the log's records to a state and its window, as the live engine did: at a start, and
    in a standby for as long as it is one."""

    checkpoint: Checkpoint

    def __init__(self, limits: Limits, scheduler: Scheduler) -> None:
        self.window = Window(limits.memory_bytes)
        self._scheduler = scheduler

    def begin(self, checkpoint: Checkpoint) -> Replay:
        """Starts from the sealed state. Returns the function that replays each later record."""
        self.checkpoint = checkpoint
        window = self.window
        for topic in checkpoint.state.topics.values():
            window.open_topic(topic.id, len(topic.partitions))
            for partition in topic.partitions:
                window.log(topic.id, partition.index).first_offset = partition.first_offset
        window.restore(checkpoint.refs)
        self._eviction = Eviction(checkpoint.state, window, self._scheduler)
        return self.take

    def take(self, data: bytes, position: int) -> None:
        record = decode_record(data)
        state, window = self.checkpoint.state, self.window
        if isinstance(record, STORED):
            size = stored_bytes(record)
            apply_message(state, record, size)
            window.add(record, size, position)
            self._eviction.turn()
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
