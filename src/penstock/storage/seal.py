"""Sealing: turns closed segments and the last snapshot into a new snapshot, history and journal
file.

Runs as its own process (`python -m penstock.storage.seal`, with a job as one line of JSON on
stdin), because a thread would block the broker's event loop. Invariant: journal, history, snapshot
and manifest are written in that order, each on disk before the next. When killed at any point, it
has done a step completely or not at all, and the same job can be repeated. A step whose manifest
would not hold every row fails before the manifest is written, so the log is kept. Removes no file
that a manifest named except old snapshots: the broker removes files when it no longer reads them.
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
from penstock.model.records import STORED, Stored, decode_record
from penstock.storage.checkpoint import SEAL_LOCK_NAME, is_live, load_state
from penstock.storage.columns import to_batch
from penstock.storage.errors import CorruptLog, DirectoryReplaced, SealingInUse, StorageError
from penstock.storage.history import (
    MAX_BATCH_ROWS,
    BatchRef,
    PartitionKey,
    PartitionRows,
    batches_of,
    write_history,
)
from penstock.storage.history_reader import HistoryReader, row_at
from penstock.storage.journal_files import JournalFile, JournalIndex
from penstock.storage.journal_rows import RecordHandlers
from penstock.storage.journal_step import JournalStep
from penstock.storage.manifest import Manifest, load_manifest, write_manifest
from penstock.storage.message_lookup import MessageLookup
from penstock.storage.segments import SegmentEnd, read_segment, segment_name
from penstock.storage.snapshot import snapshot_name, write_snapshot
from penstock.storage.vacuum import kept_rows, plan_vacuum
from penstock.storage.vfs import Vfs, remove_if_there

STEP_BYTES = 32 * MIB
"""Messages held before a step is published, plus those of one segment. A longer job is done in
several steps."""
_PACK_RECORDS = 256
"""Records between two checks of how many rows of the journal are held."""
_CHUNK_ROWS = MAX_BATCH_ROWS // 2
_CHUNK_BYTES = 16 * MIB


class SealJob(msgspec.Struct, frozen=True, kw_only=True):
    """`known_files` and `known_journal` are the history and journal files that the broker knows;
    the result tells what changed. `identity` identifies the directory, in case another one takes
    its path."""

    directory: str
    up_to_segment: int
    limits: Limits
    known_files: list[int] = []
    known_journal: list[int] = []
    identity: tuple[int, int] | None = None


class Sealed(msgspec.Struct, kw_only=True):
    """The result of a job. The log is needed from `first_segment` on. `added` are the live batches
    of files that the broker did not know; it may remove the files in `dropped`. The `journal_`
    fields say the same of the journal, which begins at position `journal_start`. `next_seq` is the
    frame behind those that are sealed."""

    first_segment: int
    added: list[BatchRef]
    added_files: list[int]
    dropped: list[int]
    records: int
    messages: int
    seconds: float
    damaged: list[str] = []
    journal_start: int = -1
    journal_added: list[JournalFile] = []
    journal_dropped: list[int] = []
    next_seq: int = 0


class Failed(msgspec.Struct):
    error: str


def seal(vfs: Vfs, job: SealJob, step_bytes: int = STEP_BYTES) -> Sealed:
    """Does the job in this process and returns the result."""
    began = time.monotonic()
    step = _Step(vfs, job)
    try:
        for number in range(step.manifest.first_segment, job.up_to_segment + 1):
            step.take_segment(number)
            if step.rows.bytes >= step_bytes:
                step.publish()
        step.publish()
    except BaseException:
        step.abandon()
        raise
    return step.result(time.monotonic() - began)


class _Step:
    """The state at the end of a segment, and the messages that are not published yet."""

    def __init__(self, vfs: Vfs, job: SealJob) -> None:
        self._vfs = vfs
        self._job = job
        self._reader = HistoryReader(vfs, job.directory)
        self.manifest = load_manifest(vfs, job.directory) or Manifest()
        self._state = load_state(vfs, job.directory, self.manifest, job.limits)
        self._next_segment = self.manifest.first_segment
        self._end = SegmentEnd(self.manifest.next_seq, self.manifest.ends_empty)
        self._records = 0
        self._messages = 0
        self._damaged: set[str] = set()
        self._begin()

    def _begin(self) -> None:
        """Starts the next step, with a file of its own."""
        manifest = self.manifest
        self.rows = CollectedMessages()
        self._lookup = MessageLookup(self.rows.packed, manifest.history, self._reader)
        self._journal: JournalStep | None = None
        if self._job.limits.journal_retention_ms:
            self._journal = JournalStep(
                self._vfs,
                self._job.directory,
                manifest.next_file,
                manifest.journal,
                self._state,
                self._lookup,
            )

    def take_segment(self, number: int) -> None:
        path = os.path.join(self._job.directory, segment_name(number))
        state, rows, journal = self._state, self.rows, self._journal
        notes: RecordHandlers = {}
        try:
            if journal is not None:
                notes = journal.notes
                journal.begin_segment(path)
            for position, data in read_segment(self._vfs, path, self._end):
                record = decode_record(data)
                note = notes.get(type(record))
                if note is not None:
                    note(position, record)
                apply(state, record)
                self._records += 1
                if isinstance(record, STORED):
                    rows.add(record, len(data))
                if journal is not None and not self._records % _PACK_RECORDS:
                    journal.pack_if_full()
        except FileNotFoundError:
            raise CorruptLog(path, 0, "it is missing and should be sealed") from None
        except (msgspec.MsgspecError, LookupError) as error:
            detail = f"record {self._records + 1} of the job cannot be applied: {error!r}"
            raise CorruptLog(path, 0, detail) from error
        self._next_segment = number + 1

    def publish(self) -> None:
        """Writes everything taken since the last publish, and vacuums."""
        check_identity(self._vfs, self._job)
        vfs, directory, old = self._vfs, self._job.directory, self.manifest
        free_bytes = vfs.free_bytes(directory)
        plan = plan_vacuum(old.history, self._state, self._reader, free_bytes)
        journal = JournalIndex() if self._journal is None else self._journal.finish()
        self._damaged.update(plan.damaged, self._lookup.damaged)
        is_same = plan.keep == old.history and journal == old.journal
        if is_same and self._next_segment == old.first_segment:
            return
        number = old.next_file
        old_rows = kept_rows(plan, self._state, self._reader)
        new_rows = self.rows.batches(self._state)
        file = write_history(vfs, directory, number, chain(old_rows, new_rows))
        mark = write_snapshot(vfs, directory, number, take_image(self._state))
        manifest = Manifest(
            snapshot=number,
            first_segment=self._next_segment,
            next_seq=self._end.next_seq,
            ends_empty=self._end.is_empty,
            next_file=number + 1,
            history=[*plan.keep, file] if file.batches else plan.keep,
            journal=journal,
            snapshot_mark=mark,
        )
        write_manifest(vfs, directory, manifest, self._state)
        self.manifest = manifest
        self._messages += self.rows.messages
        self._begin()
        # If this fails, the old snapshot is a leftover, which the next start removes.
        with contextlib.suppress(OSError):
            remove_if_there(vfs, os.path.join(directory, snapshot_name(old.snapshot)))

    def abandon(self) -> None:
        if self._journal is not None:
            self._journal.abandon()

    def result(self, seconds: float) -> Sealed:
        known = set(self._job.known_files)
        files = {file.number for file in self.manifest.history}
        added = [file for file in self.manifest.history if file.number not in known]
        known_journal = set(self._job.known_journal)
        journal = self.manifest.journal
        return Sealed(
            first_segment=self.manifest.first_segment,
            added=[ref for file in added for ref in file.batches if is_live(ref, self._state)],
            added_files=[file.number for file in added],
            dropped=sorted(known - files),
            records=self._records,
            messages=self._messages,
            seconds=seconds,
            damaged=sorted(self._damaged),
            journal_start=journal.start,
            journal_added=[file for file in journal.files if file.number not in known_journal],
            journal_dropped=sorted(known_journal - {file.number for file in journal.files}),
            next_seq=self.manifest.next_seq,
        )


def check_identity(vfs: Vfs, job: SealJob) -> None:
    """Raises DirectoryReplaced if another directory is at the path: files made here are not for
    it."""
    if job.identity is not None and vfs.identity(job.directory) != job.identity:
        raise DirectoryReplaced(job.directory)


class CollectedMessages:
    """The messages of a step by partition, packed into columns as they come in."""

    def __init__(self) -> None:
        self._pending: dict[PartitionKey, list[Stored]] = {}
        self._pending_rows = 0
        self._pending_bytes = 0
        self._chunks: dict[PartitionKey, list[pa.RecordBatch]] = {}
        self.bytes = 0
        self.messages = 0

    def add(self, message: Stored, size: int) -> None:
        """Adds a message. `size` is the record's size in the log, an estimate of the memory it
        takes."""
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

    def packed(self, place: PartitionKey) -> list[pa.RecordBatch]:
        """Returns all messages of a partition, in offset order."""
        self._pack()
        return self._chunks.get(place, [])

    def batches(self, state: BrokerState) -> Iterator[PartitionRows]:
        """Yields batches of history's size, without rows that `state` has trimmed or deleted."""
        self._pack()
        for topic_id, index in sorted(self._chunks):
            chunks = self._chunks.pop((topic_id, index))
            topic = state.topics_by_id.get(topic_id)
            if topic is not None:
                partition = topic.partitions[index]
                first = partition.first_offset
                live = [chunk.slice(row_at(chunk, first)) for chunk in chunks]
                live = [chunk for chunk in live if chunk.num_rows]
                preceding = partition.backlog.stored_msgs - sum(chunk.num_rows for chunk in live)
                yield from batches_of(topic_id, index, preceding, live)

    def _pack(self) -> None:
        for place, messages in self._pending.items():
            self._chunks.setdefault(place, []).append(to_batch(messages))
        self._pending.clear()
        self._pending_rows = self._pending_bytes = 0


# The process


def main() -> int:
    """Writes a Sealed as the last line of stdout and returns 0, or a Failed and 1."""
    job = msgspec.json.decode(sys.stdin.readline(), type=SealJob)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the broker
    gc.disable()  # the process is short-lived and makes few reference cycles
    vfs = Vfs()
    try:
        check_identity(vfs, job)
        _take_lock(vfs, job.directory)
        if _is_orphan():
            return 1
        result: Sealed | Failed = seal(vfs, job)
    except (StorageError, OSError, pa.ArrowException) as error:
        result = Failed(f"{type(error).__name__}: {error}")
    sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
    sys.stdout.flush()
    return 1 if isinstance(result, Failed) else 0


def _take_lock(vfs: Vfs, directory: str) -> None:
    """Locks SEAL-LOCK until this process ends. Raises SealingInUse if another process has it."""
    path = os.path.join(directory, SEAL_LOCK_NAME)
    try:
        vfs.lock_file(path)
    except BlockingIOError:
        raise SealingInUse(path) from None


def _end_with_parent() -> None:
    """Ends this process when the broker, which holds the other end of stdin, is gone. A broker that
    starts then on the same directory waits for the lock, and should not wait long."""
    while os.read(0, 1):
        pass
    os._exit(1)


def _is_orphan() -> bool:
    """Returns True if the broker is gone. Call it with the lock held: a broker that starts later
    waits for the lock, and one that started before could only do so because the parent was gone."""
    poll = select.poll()
    poll.register(0, 0)
    return any(event & select.POLLHUP for _, event in poll.poll(0))


if __name__ == "__main__":
    sys.exit(main())
