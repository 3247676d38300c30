"""Transactions: routes their messages, decides all in one turn, and records it as one frame.

Invariant: the records of a transaction share a frame of the log, so a crash keeps all of it or
nothing; its answer waits until that frame is durable. A refusal, also for lack of room, changes
nothing. What it makes deliverable is dispatched in the same turn and shares its commit. Must not
know the wire.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from penstock.api.messages import Produce
from penstock.api.outcomes import Done
from penstock.api.transactions import Operation, TransactionCommand
from penstock.core.groups import DYING
from penstock.core.state import BrokerState
from penstock.core.transaction_rules import (
    TransactionDraft,
    decide_transaction,
    find_committed,
)
from penstock.engine.caches import Caches, Countdown
from penstock.engine.dead_letters import DeadLetters
from penstock.engine.dispatcher import Dispatcher
from penstock.engine.ledger import Ledger
from penstock.engine.producing import Producing
from penstock.engine.quotas import Quotas
from penstock.engine.routing import PendingRoutes, route_many
from penstock.engine.streams import Streams
from penstock.model.errors import PenstockError
from penstock.model.scopes import Scope
from penstock.model.transactions import OperationResult

_Results = list[OperationResult]


class _Use(NamedTuple):
    """Messages and bytes that a transaction stores, and the growth of caches, by namespace. `keys`:
    so many of the messages have an idempotency key."""

    stored: dict[Scope, tuple[int, int]]
    grown: dict[Scope, int]
    keys: int


class TransactionCommands:
    """`routing` is set if the broker has a router."""

    def __init__(
        self,
        state: BrokerState,
        ledger: Ledger,
        dispatcher: Dispatcher,
        dead_letters: DeadLetters,
        producing: Producing,
        caches: Caches,
        check_memory: Callable[[], None],
        quotas: Quotas,
        streams: Streams,
        routing: PendingRoutes | None,
    ) -> None:
        self._streams = streams
        self._routing = routing
        self._state = state
        self._ledger = ledger
        self._dispatcher = dispatcher
        self._dead_letters = dead_letters
        self._producing = producing
        self._caches = caches
        self._check_memory = check_memory
        self._quotas = quotas

    def commit(self, command: TransactionCommand, done: Done[_Results]) -> None:
        if self._routing is None:
            self._commit(command, command.operations, done)
            return
        produces = [each for each in command.operations if isinstance(each, Produce)]
        if not produces or self._is_known(command):
            self._commit(command, command.operations, done)
            return
        route_many(self._routing, produces, partial(self._routed, command, done))

    def _is_known(self, command: TransactionCommand) -> bool:
        now_ms = self._ledger.now_ms()
        return self._state.transactions.get(command.transaction_id, now_ms) is not None

    def _routed(
        self,
        command: TransactionCommand,
        done: Done[_Results],
        routed: list[Produce | PenstockError],
    ) -> None:
        """Commits with the commands that the router changed, unless one may not be produced now."""
        found = iter(routed)
        operations: list[Operation] = []
        for index, operation in enumerate(command.operations):
            final = next(found) if isinstance(operation, Produce) else operation
            if isinstance(final, PenstockError):
                self._ledger.answer(done, final.at_operation(index))
                return
            operations.append(final)
        self._commit(command, operations, done)

    def _commit(
        self, command: TransactionCommand, operations: list[Operation], done: Done[_Results]
    ) -> None:
        countdowns: list[Countdown] = []

        def decide() -> _Results:
            state, ledger = self._state, self._ledger
            now_ms = ledger.now_ms()
            if command.transaction_id:
                known = find_committed(state, command, now_ms)
                if known is not None:
                    return known
            try:
                wall_ms = ledger.wall_ms() if _has_deadline(operations) else now_ms
                draft = decide_transaction(state, command, operations, now_ms, wall_ms)
                if draft.partitions:
                    self._check_memory()
                use = self._use_of(draft) if self._quotas.is_active else None
                if use is not None:
                    self._check_quotas(use)
            except PenstockError as error:
                self._count(operations, error)
                raise
            countdowns.extend(self._record(draft))
            if use is not None:
                self._charge(use)
            return draft.results

        outcome = self._ledger.attempt(decide)
        if countdowns:
            self._ledger.answer(partial(self._caches.begin, countdowns, done), outcome)
        else:
            self._ledger.answer(done, outcome)

    def _record(self, draft: TransactionDraft) -> list[Countdown]:
        """Records and applies what was decided, then tells those it concerns."""
        records, caches = draft.records, draft.caches
        if caches is not None:
            records += [(record, 0) for record in self._caches.durable_among(caches.records)]
        followers = [self._streams.in_use(command.path) for command, _ in draft.published]
        # New data may be refused without room; what only settles may use the reserve.
        reserve = draft.is_all_settling()
        if records and not self._ledger.store_together(records, reserve=reserve):
            raise self._ledger.no_room(
                "nothing of the transaction was done, send it again when there is room"
            )
        for entry in draft.settled:
            self._dispatcher.left_flight(entry)
            if entry.state == DYING:
                self._dead_letters.add(entry)
        if draft.partitions:
            self._producing.mark(draft.partitions)
        for stream, (command, offset) in zip(followers, draft.published, strict=True):
            stream.stored(command.payloads, offset)
        countdowns: list[Countdown] = []
        if caches is not None:
            countdowns = self._caches.finish(caches, is_logged=True)
        self._ledger.wake()
        return countdowns

    def _use_of(self, draft: TransactionDraft) -> _Use:
        stored: defaultdict[Scope, tuple[int, int]] = defaultdict(lambda: (0, 0))
        for (topic_id, _), (msgs, nbytes) in draft.partitions.items():
            scope = self._state.topics_by_id[topic_id].scope
            stored[scope] = (stored[scope][0] + msgs, stored[scope][1] + nbytes)
        growth = draft.caches.growth() if draft.caches is not None else {}
        grown = {scope: nbytes for scope, nbytes in growth.items() if nbytes > 0}
        return _Use(stored, grown, draft.new_keys)

    def _check_quotas(self, use: _Use) -> None:
        """Raises if a quota has no room. Counts nothing: another one may refuse the transaction,
        or the log."""
        on_disk = dict(use.grown)
        for scope, (msgs, nbytes) in use.stored.items():
            self._quotas.check(scope, msgs, nbytes, is_kept=True, keys=use.keys)
            on_disk[scope] = on_disk.get(scope, 0) + nbytes
        if use.grown:
            self._quotas.check_room("cache_memory", use.grown)
            self._quotas.check_room("disk_bytes", on_disk)

    def _charge(self, use: _Use) -> None:
        """Counts a transaction that happened against the quotas."""
        for scope, (msgs, nbytes) in use.stored.items():
            self._quotas.take(scope, msgs, nbytes, is_kept=True, keys=use.keys)
        if use.grown:
            self._quotas.take_room("cache_memory", use.grown)
            self._quotas.take_room("disk_bytes", use.grown)

    def _count(self, operations: list[Operation], error: PenstockError) -> None:
        """Counts a refused produce like one that stands alone."""
        if error.operation is not None:
            refused = operations[error.operation]
            if isinstance(refused, Produce):
                self._producing.count_refusal(refused, error)


def _has_deadline(operations: list[Operation]) -> bool:
    return any(isinstance(each, Produce) and each.deadline_ms for each in operations)
