"""Reads of the journal: what happened to messages, from sealed files.

Invariant: a range is fixed when it is opened and each of its rows is given once and in order,
whatever is sealed or merged meanwhile. If retention removes a part of it first, the read fails. The
archived position never goes back. Everything that can be read lies below the first position of the
log, and so is durable. Must not know what the rows say.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import partial

from penstock.api.outcomes import Done
from penstock.core.state import BrokerState
from penstock.engine.disk_lookups import DiskLookups
from penstock.engine.ledger import Ledger, Then
from penstock.engine.reading import Piece, RangeRead, bounds_within
from penstock.engine.scheduler import Scheduler
from penstock.model.errors import (
    FailedPrecondition,
    NotYet,
    OutOfRange,
    PenstockError,
)
from penstock.model.journal import (
    JournalArchive,
    JournalReport,
    JournalRequest,
    JournalSelection,
)
from penstock.model.records import JournalArchived
from penstock.model.splits import MAX_SPLITS, Splits
from penstock.storage import splitting
from penstock.storage.journal_files import JournalIndex, JournalReader, JournalRef
from penstock.storage.log import Log
from penstock.storage.row_stream import FORMS, Form, may_want, no_rows, schema_of, sealed_piece
from penstock.storage.seal import Sealed

NO_DISK = "a broker that keeps nothing on disk has no journal"
TURNED_OFF = "the journal is turned off: journal_retention_ms is 0"


class SealedJournal:
    """The sealed batches of the journal, oldest first, and their files. `start` is the first
    position that is kept; below 0 while nothing is sealed."""

    def __init__(self, index: JournalIndex) -> None:
        self.start = index.start
        self.files = {file.number for file in index.files}
        self.refs: list[JournalRef] = [ref for file in index.files for ref in file.batches]

    def sealed(self, result: Sealed) -> None:
        """Takes over the result of a sealing run, which added batches behind all others, dropped
        old ones and merged small ones."""
        gone = set(result.journal_dropped)
        added = [ref for file in result.journal_added for ref in file.batches]
        self.start = result.journal_start
        self.refs = [ref for ref in self.refs if ref.file not in gone] + added
        self.files |= {file.number for file in result.journal_added}
        self.files -= gone


class JournalCommands:
    """`refusal` says why there is no journal; empty if there is one. `catch_up` calls back once all
    that is durable now can be read."""

    def __init__(
        self,
        log: Log,
        reader: JournalReader | None,
        index: SealedJournal,
        catch_up: Callable[[Then], None],
        state: BrokerState,
        ledger: Ledger,
        scheduler: Scheduler,
        lookups: DiskLookups,
    ) -> None:
        self.refusal = (
            NO_DISK if reader is None else "" if state.limits.journal_retention_ms else TURNED_OFF
        )
        self._index = index
        self._catch_up = catch_up
        self._log = log
        self._reader = reader
        self._state = state
        self._ledger = ledger
        self._scheduler = scheduler
        self._lookups = lookups

    # -- reading -------------------------------------------------------------------------------

    def open(self, request: JournalRequest, done: Done[RangeRead]) -> None:
        try:
            reader = self._opened()
            bounds = self._bounds(request.start, request.end)
            form = FORMS[request.format]
            head = form.head(schema_of(request.selection, reader.schema))
            outcome: RangeRead | PenstockError = RangeRead(
                partial(self._next_piece, reader, request.selection, form),
                self._scheduler,
                "the journal",
                bounds,
                head,
                form.tail(),
            )
        except PenstockError as error:
            outcome = error
        self._ledger.answer(done, outcome)

    def offsets(self, fresh: bool, time_ms: int | None, done: Done[JournalReport]) -> None:
        def report(failure: PenstockError | None) -> None:
            if failure is not None:
                done(failure)
            elif time_ms is None:
                done(JournalReport(self.earliest, self.next, archived=self._archived))
            else:
                self._lookups.run(partial(self._search, time_ms), done)

        if self.refusal:
            done(FailedPrecondition(self.refusal))
        elif fresh:
            self._catch_up(report)
        else:
            self._ledger.when_durable(report)

    def splits(
        self, start: int | None, end: int | None, rows: int, max_rows: int, done: Done[Splits]
    ) -> None:
        def look() -> Callable[[], Splits]:
            reader = self._opened()
            first, last = self._bounds(start, end)
            refs = self._index.refs[self._index_of(first) :]

            def cut() -> Splits:
                pieces = (
                    splitting.StoredRun(
                        ref.first, ref.last, ref.rows, partial(reader.positions, ref)
                    )
                    for ref in refs
                )
                return splitting.split(pieces, first, last, rows, max_rows, MAX_SPLITS)

            return cut

        self._lookups.run(look, done)

    def set_archived(self, next_: int, done: Done[JournalArchive]) -> None:
        """Moves the archived position, never back. Nothing is recorded if no rows lie between: the
        record itself would move the end of the journal, and an archiver that always wants all of it
        would never finish."""
        try:
            self._opened()
            if self._ledger.failure is not None:
                raise self._ledger.failure
            if next_ > self.next:
                raise NotYet(f"the journal ends at {self.next}; {next_} cannot be archived yet")
            if self._has_rows(self._state.journal_archived, next_):
                record = JournalArchived(self._ledger.now_ms(), next_)
                self._ledger.must_record(record)
            outcome: JournalArchive | PenstockError = JournalArchive(self._state.journal_archived)
        except PenstockError as error:
            outcome = error
        self._ledger.answer(done, outcome)

    @property
    def earliest(self) -> int:
        return self.next if self._index.start < 0 else self._index.start

    @property
    def next(self) -> int:
        """The end of what can be read: what is not sealed yet cannot."""
        return self._log.first_position

    @property
    def _archived(self) -> int | None:
        return self._state.journal_archived or None

    # -- finding -------------------------------------------------------------------------------

    def _opened(self) -> JournalReader:
        if self._reader is None or self.refusal:
            raise FailedPrecondition(self.refusal)
        return self._reader

    def _bounds(self, start: int | None, end: int | None) -> tuple[int, int]:
        return bounds_within(self.earliest, self.next, start, end, "position")

    def _next_piece(
        self,
        reader: JournalReader,
        selection: JournalSelection,
        form: Form,
        at: int,
        end: int,
    ) -> Piece:
        if at < self.earliest:
            raise OutOfRange(
                f"retention removed position {at} of the journal while it was read; start again at "
                "`earliest`"
            )
        for ref in self._index.refs[self._index_of(at) :]:
            if ref.first >= end:
                break
            if may_want(selection, ref):
                stop = min(ref.last + 1, end)
                return partial(sealed_piece, reader, ref, at, stop, selection, form)
        return partial(no_rows, end)

    def _search(self, time_ms: int) -> Callable[[], JournalReport]:
        """Returns how to find the first position of that time or later; times never go back."""
        reader, earliest, next_ = self._opened(), self.earliest, self.next
        archived = self._archived
        ref = next((ref for ref in self._index.refs if ref.last_ts >= time_ms), None)

        def search() -> JournalReport:
            at = next_ if ref is None else max(earliest, reader.position_at(ref, time_ms))
            return JournalReport(earliest, next_, at, archived)

        return search

    def _has_rows(self, start: int, end: int) -> bool:
        at = self._index_of(start)
        return at < len(self._index.refs) and self._index.refs[at].first < end

    def _index_of(self, position: int) -> int:
        """Returns the index of the first batch with rows at or behind `position`."""
        return bisect_left(self._index.refs, position, key=_last)


def _last(ref: JournalRef) -> int:
    return ref.last
