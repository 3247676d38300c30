"""A broker that is written to by batch: rows are staged as a client's Arrow tables are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from penstock.api.outcomes import Done
from penstock.api.rows import CheckedRows
from penstock.model.errors import PenstockError
from penstock.model.limits import KIB
from penstock.model.scopes import DEFAULT_SCOPE
from penstock.model.tenancy import Path
from penstock.model.writes import CommitBatch, CommitReport, PartCommit, PieceName, PieceReport
from penstock.server.row_checks import check_cache_rows, check_event_rows, check_topic_rows
from penstock.storage.log import WalOptions
from tests.engine.harness import Broker, values
from tests.storage.faulty_vfs import FaultyVfs

EVERY_APPEND_A_FRAME = WalOptions(segment_bytes=64 * KIB, reserve_bytes=0, frame_bytes=1)
ROOMY = WalOptions(segment_bytes=256 * KIB, reserve_bytes=0)


CHANGES = frozenset({"write", "sync", "rename", "unlink", "fsync_dir", "open", "truncate"})
"""The calls before which a disk is photographed."""

Rows = Any
"""A list of values, or an Arrow table as it comes in a body."""


class WriteBroker(Broker):
    def stage_in_vain(self, rows: Rows, **options: Any) -> PenstockError:
        outcome = self.try_stage(rows, **options)
        assert isinstance(outcome, PenstockError), outcome
        return outcome

    def stage(self, rows: Rows, **options: Any) -> PieceReport:
        outcome = self.try_stage(rows, **options)
        assert isinstance(outcome, PieceReport), outcome
        return outcome

    def try_stage(self, rows: Rows, **options: Any) -> PieceReport | PenstockError:
        outcomes: list[Any] = []
        self.start_stage(rows, outcomes.append, **options)
        self.settle()
        assert len(outcomes) == 1
        outcome: PieceReport | PenstockError = outcomes[0]
        return outcome

    def start_stage(
        self,
        rows: Rows,
        done: Done[PieceReport],
        *,
        producer: str = "p",
        batch: int = 0,
        part: int = 0,
        attempt: str = "a",
        piece: int = 0,
        topic: str = "t",
        cache: Path | None = None,
        stream: Path | None = None,
    ) -> None:
        if not isinstance(rows, pa.Table):
            rows = pa.table({"value": pa.array(rows, pa.string())})
        table, limits = rows, self.limits
        if stream is not None:
            topic = self.engine.streams.log_name(stream)

        def check(now_ms: int) -> CheckedRows:
            if cache is not None:
                return check_cache_rows(table, limits.max_message_bytes)
            if stream is not None:
                return check_event_rows(table, topic, limits.max_message_bytes)
            return check_topic_rows(table, DEFAULT_SCOPE, topic, limits.max_message_bytes, now_ms)

        name = PieceName(producer, batch, part, attempt, piece)
        self.engine.writes.stage(name, topic, cache, table.nbytes, check, done)

    def ask_commit(
        self,
        rows: int,
        *,
        producer: str = "p",
        batch: int = 0,
        attempt: str = "a",
        pieces: int = 1,
        parts: list[PartCommit] | None = None,
        once: bool = False,
    ) -> list[Any]:
        """The outcome will be in the list once there is one."""
        if parts is None:
            parts = [PartCommit(0, attempt, pieces, rows)]
        return self.submit(self.engine.writes.commit, CommitBatch(producer, batch, parts, once))

    def try_commit(self, rows: int, **options: Any) -> CommitReport | PenstockError:
        outcomes = self.ask_commit(rows, **options)
        self.settle()
        while not outcomes:
            self.pass_ms(10)  # storing stands back while others are busy
        assert len(outcomes) == 1, outcomes
        outcome: CommitReport | PenstockError = outcomes[0]
        return outcome

    def commit_batch(self, rows: int, **options: Any) -> CommitReport:
        outcome = self.try_commit(rows, **options)
        assert isinstance(outcome, CommitReport), outcome
        return outcome

    def write_batch(self, rows: list[str], **options: Any) -> CommitReport:
        """Stages and commits one piece."""
        names = {key: options[key] for key in ("producer", "batch", "attempt") if key in options}
        self.stage(rows, **options)
        return self.commit_batch(len(rows), **names)

    def contents(self, topic: str = "t", partition: int = 0) -> list[str]:
        return values(self.stored(topic, partition))

    def staged_files(self) -> list[str]:
        return [path for path in self.disk.paths() if "/staged/" in path]


def write_broker(**options: Any) -> WriteBroker:
    broker = WriteBroker(FaultyVfs(), options=ROOMY, **options)
    broker.topic()
    return broker


def numbered(count: int, text: str = "row") -> list[str]:
    return [f"{text} {n}" for n in range(count)]


class Photographer(FaultyVfs):
    """Keeps what a crash at each call would leave, or in the midst of a write, and whether the
    commit had been answered by then."""

    def __init__(self, flavour: str) -> None:
        super().__init__()
        self.flavour = flavour
        self.answered: list[Any] = []
        self.photographs: list[tuple[FaultyVfs, bool]] = []
        self.is_watching = False

    def _called(self, name: str, path: str | None = None, *, writes: bool = False) -> bool:
        if self.is_watching and name in CHANGES:
            self.take()
        return super()._called(name, path, writes=writes)

    def _pwritev(
        self, fd: int, buffers: Sequence[bytes | memoryview], offset: int, flags: int
    ) -> int:
        with self._mutex:
            if self.is_watching and fd in self._open:
                file = self._open[fd][1]
                file.put(b"".join(buffers), offset)
                for _ in range(3):
                    self.take()
                file.dirty.pop()
        return super()._pwritev(fd, buffers, offset, flags)

    def take(self) -> None:
        survivor = self.crash(self.flavour, len(self.photographs))
        self.photographs.append((survivor, bool(self.answered)))
