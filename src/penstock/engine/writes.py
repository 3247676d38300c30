"""Writes by batch: stage, commit, abort and describe.

Invariant: a commit is decided once, in the log; repeated commits of the same batch share its
outcome. A commit is answered when every row is stored and durable or, after COMMIT_WAIT_MS, with
how many are stored: from then on it only takes time. Files are removed when the record that makes
them needless is durable.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from penstock.api.outcomes import Done
from penstock.core.state import BrokerState, is_emptied
from penstock.core.write_rules import AlreadyCommitted, decide_commit, describe_writer
from penstock.core.writers import Storing
from penstock.engine.batch_storing import BatchStoring
from penstock.engine.caches import Caches
from penstock.engine.dispatcher import Dispatcher
from penstock.engine.ledger import Ledger
from penstock.engine.scheduler import Cancellable, Scheduler
from penstock.engine.staging import PieceStaging
from penstock.engine.streams import Streams
from penstock.engine.write_quotas import WriteQuotas
from penstock.model.errors import PenstockError, Unavailable
from penstock.model.records import WriteCommitted
from penstock.model.tenancy import Entry
from penstock.model.writes import CommitBatch, CommitReport, WriterReport
from penstock.storage.staging import PieceStore

COMMIT_WAIT_MS = 20_000
"""The time that a commit is waited for; less than clients and proxies usually wait."""


class _Waiting:
    """A request that waits for a batch."""

    __slots__ = ("done", "rows", "timer")

    def __init__(self, done: Done[CommitReport], rows: int) -> None:
        self.done = done
        self.rows = rows
        self.timer: Cancellable | None = None


class Writes:
    def __init__(
        self,
        state: BrokerState,
        ledger: Ledger,
        scheduler: Scheduler,
        staging: PieceStaging,
        piece_store: PieceStore,
        caches: Caches,
        dispatcher: Dispatcher,
        streams: Streams,
        quotas: WriteQuotas,
        check_memory: Callable[[], None],
    ) -> None:
        self._quotas = quotas
        self.staging = staging
        self.stage = staging.stage
        self.batches = BatchStoring(
            state,
            ledger,
            scheduler,
            piece_store,
            caches,
            dispatcher,
            streams,
            quotas.stored,
            self._stored,
        )
        self._check_memory = check_memory
        self._state = state
        self._ledger = ledger
        self._scheduler = scheduler
        self._waiting: dict[tuple[str, int], list[_Waiting]] = {}

    def start(self) -> None:
        """Resumes batches that a stop or a crash interrupted."""
        storing = [each for writer in self._state.writers for each in writer.storing.values()]
        self.staging.start(piece.number for each in storing for piece in each.pieces)
        for writer in self._state.writers:
            for each in writer.storing.values():
                pieces = self.staging.numbered(piece.number for piece in each.pieces)
                self._quotas.resume(writer.producer, each, pieces)
            if writer.storing:
                self.batches.add(writer)

    @property
    def storing(self) -> int:
        """The number of batches that are committed and not stored to the end."""
        return sum(len(writer.storing) for writer in self._state.writers)

    def commit(self, command: CommitBatch, done: Done[CommitReport]) -> None:
        decision = self._ledger.attempt(lambda: self._decide(command))
        if isinstance(decision, PenstockError):
            self._ledger.answer(done, decision)
            return
        report = CommitReport("committed", decision.rows)
        if isinstance(decision, WriteCommitted):
            is_storing = bool(decision.rows)
        else:
            is_storing = decision.is_storing
            report = CommitReport("already_committed", decision.rows)
        if is_storing:
            self._wait(command, decision.rows, done)
        else:
            self._ledger.answer(done, report)

    def abort(self, producer: str, batch: int, done: Done[None]) -> None:
        self.staging.drop(producer, batch)
        self._ledger.answer(done, None)

    def describe(self, producer: str, done: Done[WriterReport]) -> None:
        try:
            outcome = describe_writer(self._state, producer, self._ledger.now_ms())
        except PenstockError as error:
            self._ledger.answer(done, error)
        else:
            self._ledger.answer(done, outcome)

    def end_waits(self) -> None:
        """Answers all who wait: the broker is about to stop, and stores the rest after the next
        start."""
        for key in list(self._waiting):
            for waiting in list(self._waiting.get(key, ())):
                self._give_up(key, waiting)

    def log_failed(self, failure: Unavailable) -> None:
        waiting, self._waiting = self._waiting, {}
        for each in (each for several in waiting.values() for each in several):
            self._answer(each, failure)

    def registry_changed(self, entry: Entry, deleted: bool) -> None:
        """Drops what is staged in a deleted namespace."""
        if deleted and is_emptied(self._state, entry):
            scope = (entry.tenant_id, entry.namespace)
            self._remove_when_durable(self.staging.forget_within(scope))

    # -- inside --------------------------------------------------------------------------------

    def _decide(self, command: CommitBatch) -> WriteCommitted | AlreadyCommitted:
        """Records the commit, if it is a new one, and begins to store its rows."""
        staged = self.staging.of(command.producer, command.batch)
        decision = decide_commit(self._state, command, staged, self._ledger.now_ms())
        if isinstance(decision, WriteCommitted):
            if decision.rows:
                self._check_memory()
            pieces = self.staging.numbered(piece.number for piece in decision.pieces)
            demand = self._quotas.check_commit(command.producer, pieces)
            if not self._ledger.record_together([decision], reserve=False):
                raise self._ledger.no_room("batches are taken when there is room")
            self._quotas.committed(command.producer, command.batch, decision.rows, demand)
            self._begin(decision)
        return decision

    def _begin(self, record: WriteCommitted) -> None:
        numbers = [piece.number for piece in record.pieces]
        # A crash may still undo a commit that is not durable: the pieces are kept until then.
        self._remove_when_durable(self.staging.committed(record.producer, record.batch, numbers))
        self._ledger.wake()
        writer = self._state.writers.get(record.producer, record.ts)
        if writer is not None and writer.storing:
            self.batches.add(writer)

    def _remove_when_durable(self, numbers: list[int]) -> None:
        def durable(failure: PenstockError | None) -> None:
            if failure is None:
                self.staging.remove(numbers)

        if numbers:
            self._ledger.when_durable(durable)

    def _stored(self, producer: str, storing: Storing) -> None:
        self._remove_when_durable([piece.number for piece in storing.pieces])
        report = CommitReport("committed", storing.rows)
        for waiting in self._waiting.pop((producer, storing.batch), ()):
            self._answer(waiting, report)

    def _wait(self, command: CommitBatch, rows: int, done: Done[CommitReport]) -> None:
        key = (command.producer, command.batch)
        waiting = _Waiting(done, rows)
        waiting.timer = self._scheduler.later(COMMIT_WAIT_MS, partial(self._give_up, key, waiting))
        self._waiting.setdefault(key, []).append(waiting)

    def _give_up(self, key: tuple[str, int], waiting: _Waiting) -> None:
        """Answers with how many rows are stored. Storing goes on."""
        several = self._waiting.get(key, [])
        if waiting not in several:
            return
        several.remove(waiting)
        if not several:
            del self._waiting[key]
        writer = self._state.writers.get(key[0], self._ledger.now_ms())
        storing = None if writer is None else writer.storing.get(key[1])
        stored = waiting.rows if storing is None else storing.done
        self._answer(waiting, CommitReport("storing", waiting.rows, stored))

    def _answer(self, waiting: _Waiting, outcome: CommitReport | PenstockError) -> None:
        if waiting.timer is not None:
            waiting.timer.cancel()
        self._ledger.answer(waiting.done, outcome)
