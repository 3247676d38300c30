"""The shapes of answers that are plain mappings where they are sent, for the documentation.

Must not hold behaviour; a test compares them with what the broker answers.
"""

from __future__ import annotations

import msgspec


class Status(msgspec.Struct):
    status: str


class TopicNames(msgspec.Struct):
    topics: list[str]


class TopicAnswer(msgspec.Struct):
    status: str
    name: str
    partitions: int


class VersionAnswer(msgspec.Struct):
    """`durability` says in words what a success means."""

    version: str
    commit: str
    wal_enabled: bool
    fsync: str
    durability: str


class Begun(msgspec.Struct, omit_defaults=True):
    """`RUN`: run the effect. `COMMITTED`: it was run, with this result."""

    status: str
    result: str = ""


class BatchError(msgspec.Struct):
    """The common error body with its HTTP status as `code`."""

    error: str
    message: str
    code: int
