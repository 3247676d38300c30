"""Sealing: closed segments and the last snapshot become the next snapshot and a history file.

Runs as a process of its own (`python -m penstock.storage.seal`, a job as one line of JSON on
stdin), since a thread would hold up the broker's loop. Invariant: history, snapshot and manifest
are written in that order, each on disk before the next; ended at any point, it has done all or
nothing of a step, and the same job may be done again. It removes no log segment and no history
file: the broker does, once it no longer reads them.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from itertools import chain

import msgspec
import pyarrow as pa

from penstock.core.image import take_image
from penstock.core.state import BrokerState, apply
from penstock.model.limits import MIB, Limits
from penstock.model.records import Message, decode_record
from penstock.storage.checkpoint import SEAL_LOCK_NAME, is_live, load_state
from penstock.storage.columns import complete, to_batch
from penstock.storage.errors import CorruptLog, StorageError
from penstock.storage.history import (
    MAX_BATCH_BYTES,
    MAX_BATCH_ROWS,
    BatchRef,
    write_history,
)
from penstock.storage.history_reader import HistoryReader, row_at
from penstock.storage.manifest import Manifest, load_manifest, write_manifest
from penstock.storage.segments import read_segment, segment_name
from penstock.storage.snapshot import snapshot_name, write_snapshot
from penstock.storage.vacuum import kept_rows, plan_vacuum
from penstock.storage.vfs import Vfs, remove_if_there

STEP_BYTES = 32 * MIB
"""Messages held before they are written, plus those of one segment: a longer job is done in
several steps."""
_CHUNK_ROWS = MAX_BATCH_ROWS // 2
_CHUNK_BYTES = 16 * MIB


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """`known_files`: the history files the broker knows; the result says how that changed."""

    directory: str
    up_to_segment: int
    limits: Limits
    known_files: list[int] = []
    nice: int = 0


class Sealed(msgspec.Struct, kw_only=True):
    """The log is needed from `first_segment` on. `added` are the live batches of files that the
    broker did not know, `dropped` the files it knew that it may remove."""

    first_segment: int
    added: list[BatchRef]
    added_files: list[int]
    dropped: list[int]
    records: int
    messages: int
    seconds: float
    damaged: list[str] = []


class Failed(msgspec.Struct):
    error: str


def seal(vfs: Vfs, job: Job, step_bytes: int = STEP_BYTES) -> Sealed:
    """Does the job in this process and says what there is now."""
    began = time.monotonic()
    step = _Step(vfs, job)
    for number in range(step.manifest.first_segment, job.up_to_segment + 1):
        step.take_segment(number)
        if step.rows.bytes >= step_bytes:
            step.publish()
    step.publish()
    return step.result(time.monotonic() - began)


class _Step:
    """The state as of a segment's end, and the messages not yet published."""

    def __init__(self, vfs: Vfs, job: Job) -> None:
        self._vfs = vfs
        self._job = job
        self._reader = HistoryReader(vfs, job.directory)
        self.manifest = load_manifest(vfs, job.directory) or Manifest()
        self._state = load_state(vfs, job.directory, self.manifest, job.limits)
        self._next_segment = self.manifest.first_segment
        self._records = 0
        self._messages = 0
        self._damaged: list[str] = []
        self.rows = Harvest()

    def take_segment(self, number: int) -> None:
        path = os.path.join(self._job.directory, segment_name(number))
        state, rows = self._state, self.rows
        try:
            for _, data in read_segment(self._vfs, path):
                record = decode_record(data)
                apply(state, record)
                self._records += 1
                if type(record) is Message:
                    rows.add(record, len(data))
        except FileNotFoundError:
            raise CorruptLog(path, 0, "it is to be sealed and it is missing") from None
        except (msgspec.MsgspecError, LookupError) as error:
            detail = f"record {self._records + 1} of the job cannot be applied: {error!r}"
            raise CorruptLog(path, 0, detail) from error
        self._next_segment = number + 1

    def publish(self) -> None:
        """Writes what was taken in since the last time, and vacuums."""
        vfs, directory, old = self._vfs, self._job.directory, self.manifest
        free_bytes = vfs.free_bytes(directory)
        plan = plan_vacuum(old.history, self._state, self._reader, free_bytes)
        self._damaged = plan.damaged
        if self._next_segment == old.first_segment and plan.keep == old.history:
            return
        number = old.next_file
        old_rows = kept_rows(plan.rewrite, self._state, self._reader)
        new_rows = self.rows.batches(self._state)
        file = write_history(vfs, directory, number, chain(old_rows, new_rows))
        write_snapshot(vfs, directory, number, take_image(self._state))
        self.manifest = Manifest(
            snapshot=number,
            first_segment=self._next_segment,
            next_file=number + 1,
            history=[*plan.keep, file] if file.batches else plan.keep,
        )
        write_manifest(vfs, directory, self.manifest)
        self._messages += self.rows.messages
        self.rows = Harvest()
        # A snapshot that stays is a leftover, which the next start removes.
        with contextlib.suppress(OSError):
            remove_if_there(vfs, os.path.join(directory, snapshot_name(old.snapshot)))

    def result(self, seconds: float) -> Sealed:
        known = set(self._job.known_files)
        files = {file.number for file in self.manifest.history}
        added = [file for file in self.manifest.history if file.number not in known]
        return Sealed(
            first_segment=self.manifest.first_segment,
            added=[ref for file in added for ref in file.batches if is_live(ref, self._state)],
            added_files=[file.number for file in added],
            dropped=sorted(known - files),
            records=self._records,
            messages=self._messages,
            seconds=seconds,
            damaged=self._damaged,
        )


class Harvest:
    """Messages by (topic, partition), packed into columns as they come in."""

    def __init__(self) -> None:
        self._pending: dict[tuple[int, int], list[Message]] = {}
        self._pending_rows = 0
        self._pending_bytes = 0
        self._chunks: dict[tuple[int, int], list[pa.RecordBatch]] = {}
        self.bytes = 0
        self.messages = 0

    def add(self, message: Message, size: int) -> None:
        """`size` is what it takes in the log: near enough."""
        place = (message.topic_id, message.partition)
        pending = self._pending.get(place)
        if pending is None:
            pending = self._pending[place] = []
        pending.append(message)
        self.messages += 1
        self.bytes += size
        self._pending_rows += 1
        self._pending_bytes += size
        if self._pending_rows >= _CHUNK_ROWS or self._pending_bytes >= _CHUNK_BYTES:
            self._pack()

    def batches(self, state: BrokerState) -> Iterator[tuple[int, int, pa.RecordBatch]]:
        """Batches of the size history wants, without what `state` has trimmed or deleted."""
        self._pack()
        for topic_id, index in sorted(self._chunks):
            chunks = self._chunks.pop((topic_id, index))
            topic = state.topics_by_id.get(topic_id)
            if topic is not None:
                first = topic.partitions[index].first_offset
                live = (chunk.slice(row_at(chunk, first)) for chunk in chunks)
                for batch in _joined([chunk for chunk in live if chunk.num_rows]):
                    yield topic_id, index, batch

    def _pack(self) -> None:
        for place, messages in self._pending.items():
            self._chunks.setdefault(place, []).append(to_batch(messages))
        self._pending.clear()
        self._pending_rows = self._pending_bytes = 0


def _joined(chunks: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Neighbours together, as many as fit into a batch."""
    run: list[pa.RecordBatch] = []
    rows = size = 0
    for chunk in chunks:
        if run and (
            rows + chunk.num_rows > MAX_BATCH_ROWS or size + chunk.nbytes > MAX_BATCH_BYTES
        ):
            yield _concatenated(run)
            run, rows, size = [], 0, 0
        run.append(chunk)
        rows += chunk.num_rows
        size += chunk.nbytes
    if run:
        yield _concatenated(run)


def _concatenated(run: list[pa.RecordBatch]) -> pa.RecordBatch:
    if len({chunk.num_columns for chunk in run}) > 1:
        run = [complete(chunk) for chunk in run]
    return pa.concat_batches(run)


# The process


def main() -> int:
    """Exit status 0 and a Sealed as the last line of stdout, or 1 and a Failed."""
    job = msgspec.json.decode(sys.stdin.readline(), type=Job)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is the broker's
    os.nice(job.nice)
    gc.disable()  # short-lived, and almost nothing here is in a cycle
    vfs = Vfs()
    try:
        vfs.lock_file(os.path.join(job.directory, SEAL_LOCK_NAME))
        if _is_orphan():
            return 1
        result: Sealed | Failed = seal(vfs, job)
    except (StorageError, OSError, pa.ArrowException) as error:
        result = Failed(f"{type(error).__name__}: {error}")
    sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
    sys.stdout.flush()
    return 1 if isinstance(result, Failed) else 0


def _end_with_parent() -> None:
    """The broker holds the other end of stdin. Once it is gone, another may start on the same
    directory; that one waits for the lock, and should not wait long."""
    while os.read(0, 1):
        pass
    os._exit(1)


def _is_orphan() -> bool:
    """Asked with the lock held: a broker that starts later waits for it, and one that started
    earlier did so because the parent was gone."""
    poll = select.poll()
    poll.register(0, 0)
    return any(event & select.POLLHUP for _, event in poll.poll(0))


if __name__ == "__main__":
    sys.exit(main())
