"""Producers that write in batches: the last batch of each, and the batches that are being stored.

Invariant: `last_batch` only rises. A batch is in `storing` from its commit until all its rows are
stored; `done` counts the stored rows. Batches of one producer are stored in the order of their
commits. A producer is forgotten some time after its last commit. The time of later records decides,
so a replay forgets the same producers. A producer with a batch that is being stored is kept. Must
not know how rows are staged.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.model.records import StagedRows, WriteCommitted, WriteStored
from penstock.model.scopes import Scope, split_name

DAY_MS = 24 * 3600 * 1000
ONCE_MS = 7 * DAY_MS
"""A producer with a single batch is needed again only by a retry of that batch."""
LASTING_MS = 90 * DAY_MS
"""A streaming query may be stopped for a long time and then continue."""


class Storing:
    """A committed batch with rows that are not stored yet."""

    __slots__ = ("batch", "done", "pieces", "rows")

    def __init__(self, batch: int, rows: int, pieces: list[StagedRows], done: int = 0) -> None:
        self.batch = batch
        self.rows = rows
        self.pieces = pieces
        self.done = done


class Writer:
    """A producer. `rows` and `committed_ms` are of its last batch."""

    __slots__ = ("committed_ms", "last_batch", "once", "producer", "rows", "storing")

    def __init__(
        self, producer: str, last_batch: int, rows: int, committed_ms: int, once: bool
    ) -> None:
        self.producer = producer
        self.last_batch = last_batch
        self.rows = rows
        self.committed_ms = committed_ms
        self.once = once
        self.storing: dict[int, Storing] = {}

    def is_over(self, now_ms: int) -> bool:
        kept_ms = ONCE_MS if self.once else LASTING_MS
        return not self.storing and self.committed_ms + kept_ms <= now_ms


class Writers:
    """All producers, in two dicts. Each is in the order of last commits, so that those to forget
    come first."""

    __slots__ = ("_lasting", "_once")

    def __init__(self) -> None:
        self._lasting: dict[str, Writer] = {}
        self._once: dict[str, Writer] = {}

    def __iter__(self) -> Iterator[Writer]:
        yield from self._lasting.values()
        yield from self._once.values()

    def get(self, producer: str, now_ms: int) -> Writer | None:
        """Returns None also for a producer that is due to be forgotten."""
        writer = self._lasting.get(producer) or self._once.get(producer)
        return None if writer is None or writer.is_over(now_ms) else writer

    def count(self, now_ms: int) -> int:
        """Counts the producers that are remembered at that time."""
        over = sum(1 for _ in self._over(now_ms))
        return len(self._lasting) + len(self._once) - over

    def commit(self, record: WriteCommitted) -> None:
        for writer in list(self._over(record.ts)):
            self._forget(writer)
        new = Writer(record.producer, record.batch, record.rows, record.ts, record.once)
        writer = self._lasting.pop(record.producer, self._once.pop(record.producer, new))
        writer.last_batch = record.batch
        writer.rows = record.rows
        writer.committed_ms = record.ts
        writer.once = record.once
        if record.rows:
            writer.storing[record.batch] = Storing(record.batch, record.rows, record.pieces)
        self.add(writer)

    def store(self, record: WriteStored) -> None:
        writer = self._lasting.get(record.producer) or self._once[record.producer]
        storing = writer.storing[record.batch]
        storing.done = record.done
        if storing.done == storing.rows:
            del writer.storing[record.batch]

    def forget_within(self, scope: Scope) -> None:
        """Forgets the producers of a deleted namespace, except those whose rows are being
        stored."""
        for writer in list(self):
            if not writer.storing and split_name(writer.producer)[0] == scope:
                self._forget(writer)

    def add(self, writer: Writer) -> None:
        """Adds a producer, which must have the latest commit of all."""
        (self._once if writer.once else self._lasting)[writer.producer] = writer

    def _over(self, now_ms: int) -> Iterator[Writer]:
        for writers in (self._lasting, self._once):
            for writer in writers.values():
                if not writer.is_over(now_ms):
                    break
                yield writer

    def _forget(self, writer: Writer) -> None:
        del (self._once if writer.once else self._lasting)[writer.producer]
