"""Batch writes: a producer stages rows in pieces and commits them together.

A producer is a name. Its batches have rising numbers. A batch has parts, a part may be tried
several times, and an attempt is sent in pieces.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class PieceName(msgspec.Struct, frozen=True, array_like=True):
    """Identifies a piece: producer, batch, part, attempt and number."""

    producer: str
    batch: int
    part: int
    attempt: str
    piece: int


class RowTarget(msgspec.Struct, frozen=True):
    """The target of some rows; `row` is the first of them. A `key` of None means any key. For a
    stream, `topic` is the name of its log."""

    topic: str
    key: str | None
    partition_override: int | None
    row: int


class PartCommit(msgspec.Struct, frozen=True):
    """The attempt that counts, with the number of its pieces and rows. Pieces are 0 to `pieces` -
    1."""

    part: int
    attempt: str
    pieces: int
    rows: int


class CommitBatch(msgspec.Struct, frozen=True):
    """Commits a batch. With `once` the producer writes no other batch, and may be forgotten
    soon."""

    producer: str
    batch: int
    parts: list[PartCommit]
    once: bool = False


class PieceReport(msgspec.Struct, frozen=True):
    """Describes a staged piece. `bytes` is its share of `max_staged_bytes`."""

    rows: int
    bytes: int


CommitStatus = Literal["committed", "already_committed", "storing"]


class CommitReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """`done` counts the stored rows. It is present only while rows are being stored."""

    status: CommitStatus
    rows: int
    done: int | None = None


class WriterReport(msgspec.Struct, frozen=True):
    """`rows` and `committed_at_ms` are of the last batch. `storing` is True while a batch is being
    stored."""

    producer: str
    last_batch: int
    rows: int
    committed_at_ms: int
    storing: bool
