"""The journal's part of a sealing step: notes records, writes a file, and lists the files
afterwards.

Invariant: the result of `finish` names every row of the step and all older rows that are kept, each
once. The new file belongs to nobody until a manifest names it. Retention drops whole files, with
`journal_after_archive` only archived ones. Small files are merged into the new one. Must not know
how a step is published.
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
from penstock.storage.message_lookup import MessageLookup
from penstock.storage.segments import first_position
from penstock.storage.vfs import Vfs

JOURNAL_ROWS = MAX_BATCH_ROWS
"""Rows held in memory before they are converted to columns."""


class JournalStep:
    """`number` is the number of the file that the step may write. `notes` has a function for each
    record type, to be called before the record is applied."""

    def __init__(
        self,
        vfs: Vfs,
        directory: str,
        number: int,
        index: JournalIndex,
        state: BrokerState,
        lookup: MessageLookup,
    ) -> None:
        self._vfs = vfs
        self._index = index
        self._start = index.start
        self._state = state
        self._lookup = lookup
        self._reader = JournalReader(vfs, directory)
        self._writer = JournalWriter(vfs, directory, number)
        self._rows = JournalRows(state)
        self.notes = self._rows.notes
        self._merged: list[JournalFile] | None = None

    def begin_segment(self, path: str) -> None:
        """Begins a segment. Call it before the segment's first record. The journal begins with its
        first segment, even if that has no rows."""
        if self._start < 0:
            self._start = first_position(self._vfs, path)

    def pack_if_full(self) -> None:
        """Converts the rows to columns if there are many. The lookup must know the messages of all
        records so far."""
        if len(self._rows) >= JOURNAL_ROWS:
            self._pack()

    def finish(self) -> JournalIndex:
        """Returns all files as they are after this step. The new file is on disk."""
        self._pack()
        file = self._writer.finish()
        merged = {file.number for file in self._merged or ()}
        kept = [file for file in self._index.files if file.number not in merged]
        start = self._start
        while kept and self._may_go(kept[0]):
            start = kept.pop(0).last + 1
        return JournalIndex(start, kept if file is None else [*kept, file])

    def abandon(self) -> None:
        """Removes the unfinished file after a failure."""
        self._writer.abandon()

    def _may_go(self, file: JournalFile) -> bool:
        limits = self._state.limits
        if limits.journal_after_archive and file.last >= self._state.journal_archived:
            return False
        return file.last_ts < self._state.last_ts - limits.journal_retention_ms

    def _pack(self) -> None:
        if len(self._rows):
            self._merge()
            self._writer.add(self._rows.take(self._lookup))

    def _merge(self) -> None:
        """Copies the last small files into the new one before its first row."""
        if self._merged is None:
            tail = small_tail(self._index.files)
            self._merged = tail if are_sound(tail, self._reader) else []
            for file in self._merged:
                for ref in file.batches:
                    self._writer.add(self._reader.batch(ref))
