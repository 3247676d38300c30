"""The records of the log: everything that ever changes durable state, and nothing else.

A record is complete: applying it needs neither message bodies nor a clock, so that replay, the
snapshot writer and the live broker share one `apply`. On disk a record is a msgpack array whose
first element is its tag; tags and field order are the format (docs/storage-format.md) and only
ever grow at the end. `ts` is the broker's wall clock in ms when the record was decided.

A `Message` is both the record of a produce and the message held in memory.
"""

from __future__ import annotations

import msgspec

from penstock.model.envelope import Envelope, RetryPolicy, Routing
from penstock.model.tenancy import Entry


class Message(msgspec.Struct, array_like=True, tag=1, gc=False):
    topic_id: int
    partition: int
    offset: int
    ts: int
    key: str
    value: str
    envelope: Envelope | None = None
    routing: Routing | None = None


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
    """0 means no limit; of the backoffs, the broker's. `after_archive`: nothing goes before it is
    archived."""

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
    """What a group must remember of a message until it is finished there."""

    offset: int
    size: int
    policy: RetryPolicy | None = None
    effect_key: str = ""


class Delivered(msgspec.Struct, array_like=True, tag=7, gc=False):
    """One consumer's deliveries from one partition, decided together."""

    topic_id: int
    group_id: int
    partition: int
    ts: int
    owner: str
    items: list[DeliveredItem]


class Returned(msgspec.Struct, array_like=True, tag=8, gc=False):
    """Deliveries that nobody began to handle: they never reached a connection, or their owner
    released them. Their attempt does not count."""

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
    """A delivery ended without success. `retry_at` is a wall-clock ms, or DEAD."""

    topic_id: int
    group_id: int
    partition: int
    ts: int
    offset: int
    reason: str
    retry_at: int


class Trimmed(msgspec.Struct, array_like=True, tag=12, gc=False):
    """Retention removed everything of the partition below `before`."""

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
    """A tenant, namespace, stream or cache was created, changed or, `deleted`, removed."""

    ts: int
    entry: Entry
    deleted: bool = False


class CacheStored(msgspec.Struct, array_like=True, tag=15, gc=False):
    """A durable cache's entry has this value now. `expires` is a wall-clock ms, 0 for never."""

    cache_id: int
    ts: int
    key: str
    value: bytes
    version: int
    expires: int = 0


class Advanced(msgspec.Struct, array_like=True, tag=20, gc=False):
    """All of the partition below `next` is done for the group: as somebody said, who keeps count
    elsewhere. `msgs` and `bytes` of it were not done before."""

    topic_id: int
    group_id: int
    partition: int
    ts: int
    next: int
    msgs: int
    bytes: int


class JournalArchived(msgspec.Struct, array_like=True, tag=21, gc=False):
    """All of the journal below `next` is archived, as somebody said who keeps it elsewhere."""

    ts: int
    next: int


DELETED = 0
EXPIRED = 1
EVICTED = 2


class CacheRemoved(msgspec.Struct, array_like=True, tag=16, gc=False):
    """A durable cache's entry is gone. `how`: 0 deleted, 1 expired, 2 evicted."""

    cache_id: int
    ts: int
    key: str
    version: int
    how: int = DELETED


class StagedRows(msgspec.Struct, array_like=True, gc=False):
    """A staged piece of a batch, by its number, and its rows."""

    number: int
    rows: int


class WriteCommitted(msgspec.Struct, array_like=True, tag=17, gc=False):
    """A producer's batch is fixed: the rows of these pieces, in order, are stored from now on."""

    ts: int
    producer: str
    batch: int
    rows: int
    pieces: list[StagedRows]
    once: bool = False


class WriteStored(msgspec.Struct, array_like=True, tag=18, gc=False):
    """The first `done` rows of a committed batch are stored; with the last of them it is done."""

    ts: int
    producer: str
    batch: int
    done: int


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
    | WriteCommitted
    | WriteStored
)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Record)

encode_record = _encoder.encode
decode_record = _decoder.decode
