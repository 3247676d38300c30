"""Writes by batch: staged in pieces, committed as one, stored once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from penstock.api.outcomes import Done
from penstock.api.rows import CheckedRows
from penstock.model.tenancy import Path
from penstock.model.writes import (
    CommitBatch,
    CommitReport,
    PieceName,
    PieceReport,
    RowTarget,
    WriterReport,
)


class WritesPart(Protocol):
    def stage(
        self,
        name: PieceName,
        topic: str,
        cache: Path | None,
        nbytes: int,
        check: Callable[[int], CheckedRows],
        done: Done[PieceReport],
        *,
        approve: Callable[[list[RowTarget]], None] | None = None,
    ) -> None:
        """Calls `done` once the piece is durable. `check` runs on a thread, takes the time and
        decodes the body of `nbytes`. Rows that name no topic go to `topic`. `approve` runs on the
        loop, and raises if rows must not go to one of these targets."""
        ...

    def commit(self, command: CommitBatch, done: Done[CommitReport]) -> None:
        """Calls `done` when all rows are durable, or with the progress if that takes long."""
        ...

    def abort(self, producer: str, batch: int, done: Done[None]) -> None:
        """Drops the pieces that are staged and not committed."""
        ...

    def describe(self, producer: str, done: Done[WriterReport]) -> None: ...
