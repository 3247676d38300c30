"""Writes by batch: a producer stages rows in pieces and commits them as one.

A producer is a name. Its batches are numbered and rise; a batch has parts, a part may be tried
several times, and an attempt is sent in pieces.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class PieceName(msgspec.Struct, frozen=True, array_like=True):
    """Which piece of which attempt at which part of a batch."""

    producer: str
    batch: int
    part: int
    attempt: str
    piece: int


class RowTarget(msgspec.Struct, frozen=True):
    """Where some rows go; `row` is the first of them. `key` None: they may have any keys."""

    topic: str
    key: str | None
    partition_override: int | None
    row: int


class PartCommit(msgspec.Struct, frozen=True):
    """The attempt that counts, and what it is known to have staged: pieces 0 to `pieces` - 1."""

    part: int
    attempt: str
    pieces: int
    rows: int


class CommitBatch(msgspec.Struct, frozen=True):
    """`once`: the producer will write no other batch, and may be forgotten soon."""

    producer: str
    batch: int
    parts: list[PartCommit]
    once: bool = False


class PieceReport(msgspec.Struct, frozen=True):
    """What is staged now. `bytes` is what it takes of `max_staged_bytes`."""

    rows: int
    bytes: int


CommitStatus = Literal["committed", "already_committed", "storing"]


class CommitReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """`done` is there only while the rows are being stored: how many of them are."""

    status: CommitStatus
    rows: int
    done: int | None = None


class WriterReport(msgspec.Struct, frozen=True):
    """`rows` and `committed_at_ms` are of the last batch; `storing`: some batch is not done."""

    producer: str
    last_batch: int
    rows: int
    committed_at_ms: int
    storing: bool
