"""Reads all entries of a cache as they are at one moment, without holding up those who change it.

Invariant: a snapshot has each entry of that moment once, except those that expired before they were
read, and nothing that was put later. Only the references are copied on the loop, about 25 ms for a
million entries; values are encoded off it, piece by piece as the reader takes them. A read changes
neither the order of an LRU cache nor its counters. Must not know the wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from weakref import WeakKeyDictionary

from penstock.api.outcomes import Done
from penstock.core.cache import Cache, CacheEntry
from penstock.core.cache_rules import find_cache
from penstock.core.state import BrokerState
from penstock.engine.ledger import Ledger
from penstock.engine.reading import Piece, RangeRead
from penstock.engine.scheduler import Scheduler
from penstock.model.errors import PenstockError, ResourceExhausted
from penstock.model.limits import MAX_CACHE_SNAPSHOTS, MAX_TENANT_SNAPSHOTS
from penstock.model.ranges import RangeFormat, Selection
from penstock.model.tenancy import Path
from penstock.storage.cache_rows import SCHEMA, Entries, entry_piece
from penstock.storage.row_stream import FORMS, Form, schema_of


class CacheSnapshots:
    def __init__(self, state: BrokerState, ledger: Ledger, scheduler: Scheduler) -> None:
        self._state = state
        self._ledger = ledger
        self._scheduler = scheduler
        self._open: WeakKeyDictionary[RangeRead, str] = WeakKeyDictionary()
        """The tenants of snapshots that somebody still holds."""

    def open(
        self, path: Path, columns: tuple[str, ...], form: RangeFormat, done: Done[RangeRead]
    ) -> None:
        cache = None
        outcome: RangeRead | PenstockError
        try:
            cache = find_cache(self._state, path)
            self._check_room(path[0])
            outcome = self._read(cache, columns, FORMS[form])
            self._open[outcome] = path[0]
        except PenstockError as error:
            outcome = error
        if cache is None or cache.is_durable:
            self._ledger.answer(done, outcome)
        else:
            self._ledger.answer_unlogged(done, outcome)

    def _read(self, cache: Cache, columns: tuple[str, ...], form: Form) -> RangeRead:
        schema = schema_of(Selection(columns=columns), SCHEMA)
        entries = _entries_of(cache)

        def next_piece(at: int, end: int) -> Piece:
            now_ms = self._ledger.now_ms()
            return partial(entry_piece, entries, at, end, now_ms, schema.names, form)

        return RangeRead(
            next_piece,
            self._scheduler,
            f"cache {'/'.join(cache.path)}",
            (0, len(entries[0])),
            form.head(schema),
            form.tail(),
        )

    def _check_room(self, tenant_id: str) -> None:
        own = sum(1 for each in self._open.values() if each == tenant_id)
        if own >= MAX_TENANT_SNAPSHOTS or len(self._open) >= MAX_CACHE_SNAPSHOTS:
            raise ResourceExhausted(
                f"{own} snapshots of caches of tenant {tenant_id!r} are being read, "
                f"{len(self._open)} in all; try again when one has ended",
                limit="cache_snapshots",
            )


def _entries_of(cache: Cache) -> Entries:
    """Copies the references, in the order of the hash table: that of eviction takes ten times as
    long, since each step looks the key up. Changes replace entries, and leave these as they are."""
    keys: Sequence[str] = list(dict.keys(cache.entries))
    values: Sequence[CacheEntry] = list(dict.values(cache.entries))
    return keys, values
