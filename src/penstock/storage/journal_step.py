"""The journal's part of a sealing step: records in, a file out, and which files there are then.

Invariant: what `finish` returns names every row of the step and all older ones that are kept, each
once; until a manifest names it, the file that was written is nobody's. Retention drops files whole,
with `journal_after_archive` only archived ones, and small ones become part of the new one. Must not
know how a step is published.
"""

from __future__ import annotations

from penstock.core.state import BrokerState
from penstock.storage.history import MAX_BATCH_ROWS
from penstock.storage.journal_files import (
    JournalFile,
    JournalIndex,
    JournalReader,
    JournalWriter,
    are_sound,
    small_tail,
)
from penstock.storage.journal_rows import JournalRows
from penstock.storage.lineage import Lineage
from penstock.storage.segments import first_position
from penstock.storage.vfs import Vfs

JOURNAL_ROWS = MAX_BATCH_ROWS
"""Rows that are held as they came in, before they become columns."""


class JournalStep:
    """`number` is that of the file it may write; `notes` takes in records before they are applied,
    by their type."""

    def __init__(
        self,
        vfs: Vfs,
        directory: str,
        number: int,
        index: JournalIndex,
        state: BrokerState,
        lineage: Lineage,
    ) -> None:
        self._vfs = vfs
        self._index = index
        self._start = index.start
        self._state = state
        self._lineage = lineage
        self._reader = JournalReader(vfs, directory)
        self._writer = JournalWriter(vfs, directory, number)
        self._rows = JournalRows(state)
        self.notes = self._rows.notes
        self._merged: list[JournalFile] | None = None

    def begin_segment(self, path: str) -> None:
        """Before the first record of a segment. The journal begins with its first segment, whether
        or not that has a row."""
        if self._start < 0:
            self._start = first_position(self._vfs, path)

    def pack_if_full(self) -> None:
        """Now and then. The messages of all records so far must be known to the lineage."""
        if len(self._rows) >= JOURNAL_ROWS:
            self._pack()

    def finish(self) -> JournalIndex:
        """All files as they are after this step; what is new is on disk."""
        self._pack()
        file = self._writer.finish()
        merged = {file.number for file in self._merged or ()}
        kept = [file for file in self._index.files if file.number not in merged]
        start = self._start
        while kept and self._may_go(kept[0]):
            start = kept.pop(0).last + 1
        return JournalIndex(start, kept if file is None else [*kept, file])

    def abandon(self) -> None:
        """The job failed."""
        self._writer.abandon()

    def _may_go(self, file: JournalFile) -> bool:
        limits = self._state.limits
        if limits.journal_after_archive and file.last >= self._state.journal_archived:
            return False
        return file.last_ts < self._state.last_ts - limits.journal_retention_ms

    def _pack(self) -> None:
        if len(self._rows):
            self._merge()
            self._writer.add(self._rows.take(self._lineage))

    def _merge(self) -> None:
        """Small files go first into the new one; they are just before it."""
        if self._merged is None:
            tail = small_tail(self._index.files)
            self._merged = tail if are_sound(tail, self._reader) else []
            for file in self._merged:
                for ref in file.batches:
                    self._writer.add(self._reader.batch(ref))
