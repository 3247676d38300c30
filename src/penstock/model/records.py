"""The records of the log: every change of durable state.

A record is complete: applying it needs no message bodies and no clock, so that replay, the snapshot
writer and the live broker share one `apply`. On disk a record is a msgpack array whose first
element is its tag. Tags and field order are the format (docs/storage-format.md); fields are only
ever added at the end. `ts` is the broker's wall clock in ms when the record was decided.

A `Message` is both the record of a produce and the message held in memory. A `StoredEvent` is the
same for a durable stream, whose payloads are bytes.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from penstock.model.access import AccessRule, Role
from penstock.model.envelope import Envelope, RetryPolicy, Routing
from penstock.model.tenancy import Entry
from penstock.model.tokens import Token
from penstock.model.units import utf8_bytes


class Message(msgspec.Struct, array_like=True, tag=1, gc=False):
    topic_id: int
    partition: int
    offset: int
    ts: int
    key: str
    value: str
    envelope: Envelope | None = None
    routing: Routing | None = None


class StoredEvent(msgspec.Struct, array_like=True, tag=23, gc=False):
    """An event of a durable stream. Can be read like a message without key and envelope."""

    topic_id: int
    partition: int
    offset: int
    ts: int
    value: bytes

    key: ClassVar[str] = ""
    envelope: ClassVar[None] = None
    routing: ClassVar[None] = None


Stored = Message | StoredEvent
"""A record that is kept in a partition, at its offset."""

STORED = (Message, StoredEvent)


def stored_bytes(stored: Stored) -> int:
    """Returns the bytes of key and value, as limits and retention count them."""
    if isinstance(stored, StoredEvent):
        return len(stored.value)
    return utf8_bytes(stored.key) + utf8_bytes(stored.value)


class TopicCreated(msgspec.Struct, array_like=True, tag=2, gc=False):
    topic_id: int
    ts: int
    name: str
    partitions: int
    after_archive: bool = False
    max_attempts: int = 0
    retry_backoff_ms: int = 0
    retry_max_backoff_ms: int = 0


class TopicDeleted(msgspec.Struct, array_like=True, tag=3, gc=False):
    topic_id: int
    ts: int


class TopicConfigured(msgspec.Struct, array_like=True, tag=4, gc=False):
    """The settings of a topic. 0 means no limit, or the broker's backoff. With `after_archive`,
    retention removes only what is archived."""

    topic_id: int
    ts: int
    retention_ms: int
    retention_bytes: int
    after_archive: bool = False
    max_attempts: int = 0
    retry_backoff_ms: int = 0
    retry_max_backoff_ms: int = 0


class GroupCreated(msgspec.Struct, array_like=True, tag=5, gc=False):
    group_id: int
    topic_id: int
    ts: int
    name: str


class GroupDeleted(msgspec.Struct, array_like=True, tag=6, gc=False):
    group_id: int
    topic_id: int
    ts: int


class DeliveredItem(msgspec.Struct, array_like=True, gc=False):
    """The part of a message that a group remembers until the message is finished there."""

    offset: int
    size: int
    policy: RetryPolicy | None = None
    effect_key: str = ""


class Delivered(msgspec.Struct, array_like=True, tag=7, gc=False):
    """One consumer's deliveries from one partition, decided together. Their leases of `lease_ms`
    begin when the items leave; 0: not known, in older records."""

    topic_id: int
    group_id: int
    partition: int
    ts: int
    owner: str
    items: list[DeliveredItem]
    lease_ms: int = 0


class Extended(msgspec.Struct, array_like=True, tag=25, gc=False):
    """The lease of a delivery was renewed for `lease_ms`. Written only where another broker may
    take over: it then gives the lease again."""

    topic_id: int
    group_id: int
    partition: int
    ts: int
    offset: int
    lease_ms: int


class Returned(msgspec.Struct, array_like=True, tag=8, gc=False):
    """Deliveries that were not handled: they never reached a connection, or their owner released
    them. Their attempt does not count."""

    topic_id: int
    group_id: int
    partition: int
    ts: int
    offsets: list[int]


ACKED = 0
DEAD_LETTERED = 1
SKIPPED = 2


class Finished(msgspec.Struct, array_like=True, tag=9, gc=False):
    """One offset is done for the group. `how`: 0 acked, 1 dead-lettered, 2 effect committed."""

    topic_id: int
    group_id: int
    partition: int
    ts: int
    offset: int
    how: int = ACKED


class Skipped(msgspec.Struct, array_like=True, tag=10, gc=False):
    """A message at the cursor was finished without delivery: its effect is committed."""

    topic_id: int
    group_id: int
    partition: int
    ts: int
    offset: int
    size: int


class Released(msgspec.Struct, array_like=True, tag=11, gc=False):
    """A delivery ended without success. `retry_at` is a wall-clock time in ms, or DEAD."""

    topic_id: int
    group_id: int
    partition: int
    ts: int
    offset: int
    reason: str
    retry_at: int


class Trimmed(msgspec.Struct, array_like=True, tag=12, gc=False):
    """Retention removed everything in the partition below `before`."""

    topic_id: int
    partition: int
    ts: int
    before: int
    msgs: int
    bytes: int


class EffectSet(msgspec.Struct, array_like=True, tag=13, gc=False):
    """The new state of one consumer-side idempotency entry."""

    topic_id: int
    ts: int
    group: str
    effect_key: str
    status: int
    owner: str
    lease_until: int
    text: str


class RegistryChanged(msgspec.Struct, array_like=True, tag=14, gc=False):
    """A tenant, namespace, stream or cache was created, changed, or `deleted`."""

    ts: int
    entry: Entry
    deleted: bool = False


class CacheStored(msgspec.Struct, array_like=True, tag=15, gc=False):
    """A value was stored in a durable cache. `expires` is a wall-clock time in ms, 0 for never."""

    cache_id: int
    ts: int
    key: str
    value: bytes
    version: int
    expires: int = 0


class Advanced(msgspec.Struct, array_like=True, tag=20, gc=False):
    """Everything in the partition below `next` is done for the group, as a reader published.
    `msgs` messages of `bytes` bytes were not done before."""

    topic_id: int
    group_id: int
    partition: int
    ts: int
    next: int
    msgs: int
    bytes: int


class JournalArchived(msgspec.Struct, array_like=True, tag=21, gc=False):
    """Everything in the journal below `next` is archived, as the archive reported."""

    ts: int
    next: int


class TransactionCommitted(msgspec.Struct, array_like=True, tag=22, gc=False):
    """A transaction with an id is committed; its other records are in the same frame. `answer` has
    the results of its operations in msgpack, `fingerprint` tells its repeats from others that use
    the same id."""

    ts: int
    transaction_id: str
    fingerprint: bytes
    answer: bytes


DELETED = 0
EXPIRED = 1
EVICTED = 2


class CacheRemoved(msgspec.Struct, array_like=True, tag=16, gc=False):
    """An entry of a durable cache was removed. `how`: 0 deleted, 1 expired, 2 evicted."""

    cache_id: int
    ts: int
    key: str
    version: int
    how: int = DELETED


class StagedRows(msgspec.Struct, array_like=True, gc=False):
    """The number of a staged piece, and how many rows it has."""

    number: int
    rows: int


class WriteCommitted(msgspec.Struct, array_like=True, tag=17, gc=False):
    """A producer's batch is committed. The rows of these pieces are stored from now on, in
    order."""

    ts: int
    producer: str
    batch: int
    rows: int
    pieces: list[StagedRows]
    once: bool = False


class WriteStored(msgspec.Struct, array_like=True, tag=18, gc=False):
    """The first `done` rows of a committed batch are stored."""

    ts: int
    producer: str
    batch: int
    done: int


class TokenSet(msgspec.Struct, array_like=True, tag=30, gc=False):
    """A bearer token was created or got another secret. The record has the hash of it only."""

    ts: int
    token: Token


class TokenRevoked(msgspec.Struct, array_like=True, tag=31, gc=False):
    ts: int
    id: str


class RuleGranted(msgspec.Struct, array_like=True, tag=32, gc=False):
    """An access rule was added."""

    ts: int
    rule: AccessRule


class RuleRevoked(msgspec.Struct, array_like=True, tag=33, gc=False):
    """An access rule was removed."""

    ts: int
    rule_id: int


class RoleSet(msgspec.Struct, array_like=True, tag=34, gc=False):
    """A role was created, or has other permissions now."""

    ts: int
    role: Role


class RoleRemoved(msgspec.Struct, array_like=True, tag=35, gc=False):
    ts: int
    tenant_id: str
    name: str


class OwnerChanged(msgspec.Struct, array_like=True, tag=26, gc=False):
    """A broker has become the owner of the log. It is the first record of its epoch, and the log
    holds none of an earlier owner behind it. Without an `owner` it is that of the epoch, who found
    out with this record that it still is."""

    ts: int
    epoch: int
    owner: str


class Published(msgspec.Struct, array_like=True, tag=24, gc=False):
    """A publish with a number was stored: `count` events from `offset` on, with this `digest` of
    their payloads. It is in the same frame as these events."""

    topic_id: int
    ts: int
    producer_id: str
    sequence: int
    offset: int
    count: int
    digest: int


PENDING = 0
COMMITTED = 1
FAILED = 2

DEAD = -1
"""`Released.retry_at` of a message whose next step is the dead-letter topic."""

Record = (
    Message
    | TopicCreated
    | TopicDeleted
    | TopicConfigured
    | GroupCreated
    | GroupDeleted
    | Delivered
    | Returned
    | Finished
    | Skipped
    | Released
    | Trimmed
    | EffectSet
    | RegistryChanged
    | CacheStored
    | CacheRemoved
    | Advanced
    | JournalArchived
    | TransactionCommitted
    | WriteCommitted
    | WriteStored
    | TokenSet
    | TokenRevoked
    | RuleGranted
    | RuleRevoked
    | RoleSet
    | RoleRemoved
    | StoredEvent
    | Published
    | Extended
    | OwnerChanged
)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Record)

encode_record = _encoder.encode
decode_record = _decoder.decode
