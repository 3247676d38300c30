"""The seam between the wire and a broker: what every engine offers.

Commands take `done`, which is called once, on the loop, with the outcome or the PenstockError
that refused it, and never before what it says is durable. Validation, hashing, backoff, the
max_attempts decision and status codes are pure functions of core and model that every engine uses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from penstock.core.effect_rules import EffectCommand
from penstock.core.produce import Produce
from penstock.core.settle import Settle
from penstock.engine.consumers import Consumer, Sink
from penstock.engine.ledger import Done
from penstock.model.caching import Delete, Increment, Put, Txn, Watch, WatchEvent
from penstock.model.errors import PenstockError
from penstock.model.journal import JournalRequest
from penstock.model.limits import Limits
from penstock.model.progress import Reached
from penstock.model.ranges import RangeRequest, RowBytes
from penstock.model.splits import SplitRequest
from penstock.model.streams import Lag, Publish, Subscribe
from penstock.model.tenancy import CacheConfig, Entry, Kind, Path, StreamConfig
from penstock.model.writes import CommitBatch, PieceName
from penstock.storage.staged_rows import CheckedRows


class Health(msgspec.Struct, frozen=True):
    """`ready` is false when nothing can be written; `reason` says why."""

    ready: bool
    reason: str = ""


class Capabilities(msgspec.Struct, frozen=True):
    wal_enabled: bool
    fsync: str
    durability: str
    """What a 2xx means here, in words."""


class Range(Protocol):
    """A reader's way through a range. `head`, all pieces and `tail` are one stream of bytes."""

    head: bytes
    tail: bytes

    def next(self, got: Callable[[RowBytes | PenstockError | None], None]) -> None:
        """Gives the next piece, None after the last, or why there are no more."""
        ...


class RangesPart(Protocol):
    """Reading what is stored, as often as one likes, without a lease."""

    def open(self, request: RangeRequest, done: Done) -> None:
        """Outcome: a Range."""
        ...

    def offsets(self, name: str, time_ms: int | None, done: Done) -> None:
        """Outcome: TopicOffsets."""
        ...

    def all_offsets(self, after: str, done: Done) -> None:
        """Outcome: an OffsetsPage, of the topics behind that name."""
        ...

    def splits(self, request: SplitRequest, done: Done) -> None:
        """Outcome: Splits."""
        ...


class JournalPart(Protocol):
    """Reading what happened to messages, and how far it is archived."""

    def open(self, request: JournalRequest, done: Done) -> None:
        """Outcome: a Range."""
        ...

    def offsets(self, fresh: bool, time_ms: int | None, done: Done) -> None:
        """Outcome: a JournalReport. Fresh: with all in it that was durable when it was asked."""
        ...

    def set_archived(self, next_: int, done: Done) -> None:
        """All below `next_` is archived elsewhere. Outcome: a JournalArchive."""
        ...

    def splits(
        self, start: int | None, end: int | None, rows: int, max_rows: int, done: Done
    ) -> None:
        """Outcome: Splits."""
        ...


class RegistryPart(Protocol):
    """Tenants, namespaces, streams and caches."""

    def create(self, wanted: Entry, done: Done) -> None:
        """Outcome: (the entry, whether it was created)."""
        ...

    def change(
        self,
        path: Path,
        done: Done,
        *,
        stream: StreamConfig | None = None,
        cache: CacheConfig | None = None,
        if_revision: int | None = None,
    ) -> None:
        """Outcome: the entry as it is now. VersionMismatch: it has changed since that revision."""
        ...

    def delete(self, kind: Kind, path: Path, cascade: bool, done: Done) -> None: ...

    def reconcile(self, wanted: Sequence[Entry], done: Done) -> None:
        """Outcome: how many steps it took to hold what another registry holds."""
        ...

    def get(self, kind: Kind, path: Path, done: Done) -> None:
        """Outcome: the Entry."""
        ...

    def children(self, kind: Kind, path: Path, done: Done) -> None:
        """Outcome: the entries directly in a tenant or namespace, sorted."""
        ...

    def tenants(self, done: Done) -> None:
        """Outcome: the tenants' entries, sorted."""
        ...

    def position(self, done: Done) -> None:
        """Outcome: (epoch, revision) of the registry."""
        ...

    def snapshot(self, done: Done) -> None:
        """Outcome: a tenancy.Snapshot."""
        ...

    def changes(self, since: int, epoch: int | None, done: Done) -> None:
        """Outcome: the Changes after revision `since`."""
        ...


class EventSink(Protocol):
    """The far end of a subscription."""

    def wake(self) -> None:
        """Something can be taken, where there was nothing before. Once until all is taken."""
        ...

    def lagging(self, lag: Lag) -> None:
        """The alert has begun or ended; only if it was asked for."""
        ...

    def ended(self, error: PenstockError) -> None:
        """The broker ends the subscription: its stream is gone, or it is too slow."""
        ...


class EventBatch(Protocol):
    """Events that were published together. What the wire makes of them is kept in `encoded`, by
    the wire's own key, and shared by all subscribers."""

    payloads: list[bytes]
    encoded: dict[str, bytes]


class EventRun(Protocol):
    """Events of one batch that a subscription has: all of them, or some."""

    batch: EventBatch
    start: int
    end: int


class Subscription(Protocol):
    id: str

    def take(self, max_events: int) -> list[EventRun]:
        """The next events in order, which then count as delivered; a batch may be split."""
        ...

    def lag(self) -> Lag: ...

    def close(self) -> None:
        """Discards what was not taken."""
        ...


class StreamsPart(Protocol):
    def publish(self, command: Publish, done: Done) -> None:
        """Outcome: None, once it is in the stream's queue."""
        ...

    def subscribe(self, command: Subscribe, sink: EventSink, done: Done) -> None:
        """Outcome: a Subscription, to which everything accepted from then on goes."""
        ...

    def subscriptions(self, path: Path, done: Done) -> None:
        """Outcome: a Lag for every subscription of the stream."""
        ...


class WatchSink(Protocol):
    def wake(self) -> None: ...

    def ended(self, error: PenstockError) -> None: ...


class WatchHandle(Protocol):
    id: str
    version: int
    """The cache's when the watch began: every later change is seen, or in a gap."""

    def take(self, max_events: int) -> list[WatchEvent]: ...

    def close(self) -> None: ...


class CachesPart(Protocol):
    def get(self, path: Path, key: str, done: Done) -> None:
        """Outcome: a CacheValue, or None."""
        ...

    def get_many(self, path: Path, keys: list[str], done: Done) -> None:
        """Outcome: a list of CacheValue or None, in order, of one moment."""
        ...

    def put(self, command: Put, done: Done) -> None:
        """Outcome: Written."""
        ...

    def delete(self, command: Delete, done: Done) -> None:
        """Outcome: Written; its version is 0 when there was nothing to delete."""
        ...

    def increment(self, command: Increment, done: Done) -> None:
        """Outcome: Written, with the new number."""
        ...

    def transact(self, command: Txn, done: Done) -> None:
        """Outcome: a list of Written, one for each op."""
        ...

    def watch(self, command: Watch, sink: WatchSink, done: Done) -> None:
        """Outcome: a WatchHandle."""
        ...

    def size(self, path: Path, done: Done) -> None:
        """Outcome: (entries, bytes) held, expired ones that nobody asked for included."""
        ...


class WritesPart(Protocol):
    """Writes by batch: staged in pieces, committed as one, stored once."""

    def stage(
        self,
        name: PieceName,
        topic: str,
        cache: Path | None,
        nbytes: int,
        check: Callable[[int], CheckedRows],
        done: Done,
    ) -> None:
        """`check` reads the body of `nbytes`, given the time, on a thread; rows that name no topic
        are of `topic`. Outcome: a PieceReport, once the piece is durable."""
        ...

    def commit(self, command: CommitBatch, done: Done) -> None:
        """Outcome: a CommitReport, when all rows are durable, or it takes long."""
        ...

    def abort(self, producer: str, batch: int, done: Done) -> None:
        """Outcome: None. Drops what is staged and not committed."""
        ...

    def describe(self, producer: str, done: Done) -> None:
        """Outcome: a WriterReport."""
        ...


class Engine(Protocol):
    limits: Limits
    capabilities: Capabilities

    @property
    def ranges(self) -> RangesPart: ...

    @property
    def journal(self) -> JournalPart: ...

    @property
    def registry(self) -> RegistryPart: ...

    @property
    def streams(self) -> StreamsPart: ...

    @property
    def caches(self) -> CachesPart: ...

    @property
    def writes(self) -> WritesPart: ...

    def produce(self, command: Produce, done: Done) -> None:
        """Outcome: the stored Message, or None for a duplicate."""
        ...

    def produce_many(self, commands: list[Produce], done: Done) -> None:
        """Outcome: a list with an outcome or an error per command, in order; one commit."""
        ...

    def ack(self, command: Settle, done: Done) -> None: ...

    def ack_many(self, commands: list[Settle], done: Done) -> None: ...

    def nack(self, command: Settle, reason: str, done: Done) -> None: ...

    def extend(self, command: Settle, lease_ms: int, done: Done) -> None: ...

    def begin_effect(self, command: EffectCommand, lease_ms: int, done: Done) -> None:
        """Outcome: None to run it, or the committed Effect."""
        ...

    def renew_effect(self, command: EffectCommand, lease_ms: int, done: Done) -> None: ...

    def commit_effect(self, command: EffectCommand, result: str, done: Done) -> None: ...

    def fail_effect(self, command: EffectCommand, reason: str, done: Done) -> None: ...

    def create_topic(
        self, name: str, partitions: int, done: Done, *, after_archive: bool | None = None
    ) -> None:
        """Outcome: True when created, False when it existed."""
        ...

    def delete_topic(self, name: str, done: Done) -> None: ...

    def configure_topic(
        self,
        name: str,
        retention_ms: int | None,
        retention_bytes: int | None,
        done: Done,
        *,
        after_archive: bool | None = None,
    ) -> None: ...

    def delete_group(self, topic: str, group: str, done: Done) -> None: ...

    def set_progress(
        self,
        topic: str,
        group: str,
        reached: Sequence[Reached],
        done: Done,
        *,
        topic_id: int | None = None,
    ) -> None:
        """Outcome: a Reached for each partition named, where the group is now. `topic_id`: of that
        topic only, not of one that was made later under its name."""
        ...

    def list_topics(self, done: Done) -> None:
        """Outcome: the names, sorted."""
        ...

    def describe_topic(self, name: str, done: Done) -> None:
        """Outcome: a TopicReport."""
        ...

    def open_consumer(
        self,
        topic: str,
        group: str,
        owner: str,
        lease_ms: int,
        prefetch: int,
        sink: Sink,
        done: Done,
    ) -> None:
        """Outcome: a Consumer. Nothing is delivered to `sink` before `done` was called."""
        ...

    def health(self) -> Health: ...

    def end_streams(self, reason: str) -> None:
        """Ends every open stream, as a broker does that is about to stop."""
        ...

    def close(self) -> None:
        """Flushes, syncs and lets go of the data directory."""
        ...


__all__ = ["Capabilities", "Consumer", "Done", "Engine", "Health", "Sink"]
