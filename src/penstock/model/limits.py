"""The limits of the broker, each with its reason. A limit of a single module stands there."""

from __future__ import annotations

import msgspec

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

MAX_NAME_BYTES = 200
"""Topics, groups and owners appear in paths, logs and metric labels."""

MAX_PARTITIONS = 1024
"""Each partition takes memory even when empty, and a row in the snapshot for each group."""

MAX_BATCH_ITEMS = 10_000
"""A batch is decided in one turn of the loop; a larger one would delay other clients."""

MAX_REQUEST_ID_CHARS = 128

MAX_HEADER_BYTES = 64 * KIB
"""Request line and headers together. The connection is closed beyond it."""

MAX_ENVELOPE_FIELD_BYTES = 1024
"""An id in an envelope. It is kept in memory and copied into the journal."""

MAX_REASON_BYTES = 4 * KIB
"""A nack's reason, which is kept in memory with the unfinished message. Longer ones are cut."""

MAX_RESULT_BYTES = 64 * KIB
"""The result of a committed effect, which stays in memory until its TTL ends."""

MAX_LEASE_MS = 24 * 3600 * 1000

MAX_BACKOFF_MS = 24 * 3600 * 1000
"""The longest wait before a retry, if the policy sets none, and the longest delay of a nack."""

MAX_OFFSET = 2**53 - 1
"""The largest integer that every JSON reader keeps exact."""

MAX_POSITION = 2**63 - 1
"""The largest position of the journal, and the largest number in a query string."""

MAX_UNWRITTEN_BYTES = MIB
"""Bytes decided for one consumer and not yet written to its connection."""

MAX_UNFINISHED = 100_000
"""Unfinished messages of one group in one partition. Beyond it, nothing new is delivered there.
Only messages that wait for a retry can be so many, and each takes memory."""

MESSAGE_BYTES = 176
TEXT_BYTES = 57
ENVELOPE_BYTES = 96
RETRY_POLICY_BYTES = 112
DEAD_LETTER_BYTES = 208
ROUTING_BYTES = 160
META_ENTRY_BYTES = 36
CHUNK_BYTES_IN_MEMORY = 400
"""Overheads that `memory_bytes` counts besides the characters: for a message with its position in
the log, for each text, and for the parts of an envelope and a routing. They were fitted to the
resident memory of a CPython 3.11 process with 150,000 messages of each kind, within 4 %."""

DISPATCH_BURST = 256
"""Deliveries decided for one partition before the others have their turn."""

MAX_CACHE_KEY_BYTES = 1024
"""A key is in memory with its value, and is repeated in every event of a watch."""

MAX_CACHE_SNAPSHOTS = 32
MAX_TENANT_SNAPSHOTS = 4
"""Snapshots of caches that are being read, of all tenants and of one. Each keeps the entries that
were replaced meanwhile in memory, at most all that the cache had."""

MAX_TXN_OPS = 1000
"""Operations of a transaction, of caches or of the whole broker. It is decided in one turn of the
loop and is one frame of the log."""

MAX_WATCH_EVENTS = 1024
"""Events that wait for the reader of a watch. Beyond it, the rest becomes one gap."""

MAX_SUBSCRIPTIONS = 1024
"""Subscriptions and watches of one WebSocket together."""

MAX_QUEUE_DEPTH = 65_536
"""The deepest buffer that a stream, or a subscriber, may ask for."""

MAX_WAITING_PUBLISHES = 131_072
"""Publishes that wait for a full publish queue, over all streams. Each has a timer and a pending
answer, about 2 KiB. 128 WebSockets or 2,048 connections can send that many."""

MAX_WAITING_PUBLISH_BYTES = 256 * MIB
"""Memory of the payloads of waiting publishes: four full queues."""

MAX_GROUPS = 10_000
"""Groups of a topic, or named subscriptions of a stream: all are in memory and in every snapshot,
with a position in each partition."""

MAX_REGISTRY_ENTRIES = 100_000
"""Tenants, namespaces, streams and caches together: all are in memory and in every snapshot."""

MAX_REGISTRY_CHANGES = 10_000
"""Changes kept for followers of the registry. One that is further behind takes a snapshot."""

MAX_TOKENS = 10_000
"""Bearer tokens, expired ones included: all are in memory and in every snapshot."""

MAX_ROLES = 64
"""Roles of one token. They are compared with rules on every request."""

MAX_PRODUCERS = 100_000
"""Producers of batches that are remembered. All are in memory and in every snapshot."""

MAX_STREAM_PRODUCERS = 10_000
"""Producers of one stream whose numbers are remembered. All are in memory and in every snapshot."""

PRODUCER_TTL_MS = 7 * 24 * 3600 * 1000
"""How long a producer that publishes nothing is remembered. Later it needs a new id."""

MAX_PUBLISH_ANSWERS = 16
"""The last answers of a producer that are kept for repeats. Earlier repeats are answered without
their offset."""

MAX_STORING_BATCHES = 16
"""Batches of one producer that are committed and not stored yet. Further commits are refused."""

MAX_COMMIT_PARTS = 10_000
MAX_COMMIT_PIECES = 10_000
"""Parts and pieces of one batch. It is decided in one turn of the loop, and is one record."""

MAX_STAGED_PIECES = 100_000
"""Staged pieces of all producers. The description of each is in memory."""

MAX_TARGETS = 1000
"""Distinct targets of the rows of one piece. Each is looked up on the event loop."""

MAX_FRESH_WAIT_MS = 60_000
"""The longest wait for the newest events of the journal. Without disk space for the log's next
segment they cannot be sealed, and so not be read."""

MAX_RULES = 100_000
MAX_DEFINED_ROLES = 10_000
"""Access rules and roles of all tenants: all are in memory and in every snapshot."""

MAX_SUBJECT_RULES = 1000
"""Rules of one tenant for one principal, or for one role. A decision that is not cached looks at
all of them."""

MAX_RULE_PERMISSIONS = 64

AUDIT_BYTES = GIB
AUDIT_MEMORY_BYTES = 16 * MIB
"""The audit log keeps so many bytes, on disk and without one, whatever its age."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits that an operator may set. The defaults are the profile `work`."""

    max_in_flight: int = 256
    max_partition_msgs: int = 1_000_000
    max_partition_bytes: int = GIB
    max_message_bytes: int = 8 * MIB
    max_body_bytes: int = 64 * MIB
    lease_ms: int = 2000
    retry_backoff_ms: int = 250
    retry_max_backoff_ms: int = 30_000
    idempotency_ttl_ms: int = 10 * 60 * 1000
    max_idempotency_keys: int = 5_000_000
    memory_bytes: int = GIB
    tail_bytes: int = 16 * MIB
    event_queue_depth: int = 1024
    event_queue_bytes: int = 64 * MIB
    pub_queue_depth: int = 1024
    publish_queue_wait_timeout_ms: int = 2000
    pub_workers_per_conn: int = 4
    lag_alert_events: int = 1000
    disconnect_slow_ms: int = 0
    cache_memory_bytes: int = 256 * MIB
    journal_retention_ms: int = 7 * 24 * 3600 * 1000
    journal_after_archive: bool = False
    max_staged_bytes: int = 16 * GIB
    audit_retention_ms: int = 30 * 24 * 3600 * 1000


CONTRACT_LIMITS = Limits(
    max_in_flight=2, max_partition_msgs=2, max_partition_bytes=20, retry_max_backoff_ms=250
)
"""The values of the queue contract's documents, for trials."""
