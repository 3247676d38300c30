"""Quotas of batch writes: staged bytes count as disk, and a commit needs room for all of its rows.

Invariant: a piece counts from the moment that it is checked until its file is removed. The rows of
a committed batch count from the commit on, until they are stored and count themselves: a commit
cannot be refused any more. A batch is charged once, however often its commit is sent. Must not know
how a batch is staged or stored.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

from penstock.core.cache import ENTRY_OVERHEAD_BYTES
from penstock.core.scope_counts import ScopeCounts
from penstock.core.state import BrokerState
from penstock.core.write_rules import StagedPiece
from penstock.core.writers import Storing
from penstock.engine.quotas import Quotas
from penstock.model.scopes import Scope, split_name
from penstock.model.tenancy import Path

_ROOM = ("backlog_msgs", "backlog_bytes", "disk_bytes", "cache_memory", "idempotency_keys")

Room = dict[str, dict[Scope, int]]
"""How much of what, by the name of the quota and by namespace."""


class BatchDemand(msgspec.Struct, frozen=True, gc=False):
    """The demand of a batch's rows. `msgs` and `nbytes` count for the rates of the scope."""

    scope: Scope
    msgs: int
    nbytes: int
    room: Room


class _Pending:
    """A committed batch with rows that are not stored yet."""

    __slots__ = ("_demand", "_held", "_rows")

    def __init__(self, demand: BatchDemand, rows: int) -> None:
        self._demand = demand
        self._rows = rows
        self._held = 0

    def hold(self, rows: int, counts: dict[str, ScopeCounts]) -> None:
        """Counts so many of its rows, instead of those that counted before."""
        for name, demanded in self._demand.room.items():
            for scope, number in demanded.items():
                change = self._part(number, rows) - self._part(number, self._held)
                counts[name].add(scope, change)
        self._held = rows

    def _part(self, number: int, rows: int) -> int:
        return -(-number * rows // self._rows)


class WriteQuotas:
    """`staged` has the bytes of staged pieces, and of those that are being checked."""

    def __init__(self, state: BrokerState, quotas: Quotas) -> None:
        self.staged = ScopeCounts()
        self._state = state
        self._quotas = quotas
        self._counts = {name: ScopeCounts() for name in _ROOM}
        self._pending: dict[tuple[str, int], _Pending] = {}
        quotas.count_also("disk_bytes", self.staged.__getitem__)
        for name, counts in self._counts.items():
            quotas.count_also(name, counts.__getitem__)

    # -- staging -------------------------------------------------------------------------------

    def check_piece(self, scope: Scope, nbytes: int) -> None:
        """Raises if there is no room for so many more staged bytes; otherwise takes it."""
        if self._quotas.is_active:
            self._quotas.check_room("disk_bytes", {scope: nbytes})
            self._quotas.take_room("disk_bytes", {scope: nbytes})

    # -- committing ----------------------------------------------------------------------------

    def check_commit(self, producer: str, pieces: Iterable[StagedPiece]) -> BatchDemand:
        """Raises if the batch exceeds a quota. Like a large publish, it may exceed a rate, and then
        the next one waits."""
        demand = self._demand(producer, pieces)
        if self._quotas.is_active:
            self._quotas.check(demand.scope, demand.msgs, demand.nbytes, is_kept=False)
            for name, demanded in demand.room.items():
                self._quotas.check_room(name, demanded)
        return demand

    def committed(self, producer: str, batch: int, rows: int, demand: BatchDemand) -> None:
        """Charges a batch that was committed."""
        if self._quotas.is_active:
            self._quotas.take(demand.scope, demand.msgs, demand.nbytes, is_kept=False)
            for name, demanded in demand.room.items():
                self._quotas.take_room(name, demanded)
        self._add(producer, Storing(batch, rows, []), demand)

    def resume(self, producer: str, storing: Storing, pieces: Collection[StagedPiece]) -> None:
        """Counts a batch that was committed before the start. Nobody pays for it again."""
        self._add(producer, storing, self._demand(producer, pieces))

    def _add(self, producer: str, storing: Storing, demand: BatchDemand) -> None:
        if storing.rows:
            pending = self._pending[producer, storing.batch] = _Pending(demand, storing.rows)
            pending.hold(storing.rows - storing.done, self._counts)

    def stored(self, producer: str, storing: Storing) -> None:
        """Takes note of how far a batch is stored."""
        pending = self._pending.get((producer, storing.batch))
        if pending is not None:
            pending.hold(storing.rows - storing.done, self._counts)
            if storing.done == storing.rows:
                del self._pending[producer, storing.batch]

    def _demand(self, producer: str, pieces: Iterable[StagedPiece]) -> BatchDemand:
        scope = split_name(producer)[0]
        msgs = nbytes = keys = 0
        by_cache: dict[Path, int] = {}
        for piece in pieces:
            # Older brokers staged pieces without this number.
            size = piece.content_bytes or piece.bytes
            if piece.cache is None:
                msgs += piece.rows
                nbytes += size
                keys += piece.rows if piece.is_keyed else 0
            else:
                grown = size + piece.rows * ENTRY_OVERHEAD_BYTES
                by_cache[piece.cache] = by_cache.get(piece.cache, 0) + grown
        room: Room = {"backlog_msgs": {scope: msgs}, "backlog_bytes": {scope: nbytes}}
        room |= {"disk_bytes": {scope: nbytes}, "idempotency_keys": {scope: keys}}
        room["cache_memory"] = {}
        for path, grown in by_cache.items():
            self._add_cache(room, path, grown)
        return BatchDemand(scope, msgs, nbytes, room)

    def _add_cache(self, room: Room, path: Path, grown: int) -> None:
        """Adds the growth of a cache, as if no row replaced an entry. One that has `max_bytes`
        grows no further than to these."""
        entry = self._state.registry.caches.get(path)
        if entry is None:
            return
        cache = self._state.caches[entry.id]
        grown = min(grown, max(0, cache.max_bytes - cache.bytes))
        for name in ("cache_memory", "disk_bytes") if cache.is_durable else ("cache_memory",):
            room[name][path[:2]] = room[name].get(path[:2], 0) + grown
