"""What the members of requests mean, and of what kind those are that a query may have.

A name means the same everywhere, but for those that mean something else under some tag.
"""

from __future__ import annotations

_TEXTS = {
    "topic": "The topic's name: 1 to 200 bytes of UTF-8.",
    "name": "The topic's name: 1 to 200 bytes of UTF-8.",
    "partitions": "How many partitions, 1 to 1,024; 1 when omitted.",
    "group": "The consumer group's name.",
    "owner": "Who consumes: the same name acks what it was given.",
    "key": "Messages of one key go to one partition.",
    "value": "The payload: a string that is not empty.",
    "partition": "The delivery's partition.",
    "offset": "The delivery's offset.",
    "delivery_id": "The delivery's fencing token: a later delivery is not meant.",
    "lease_ms": "How long a lease lasts; 0 or omitted is the broker's default.",
    "prefetch": "How many deliveries of this stream may be unfinished; 0 is no limit of its own.",
    "heartbeat_ms": "Sends a blank line so often; 0 is never.",
    "reason": "Why it failed; the next delivery's last_error.",
    "delay_ms": "The retry waits so long, up to a day, whatever the policy; 0 is at once.",
    "dead": "true: there is no retry, and the message goes to the dead letters now.",
    "result": "What the effect came to, for those who ask later.",
    "retention_ms": "Finished messages are kept so long; 0 is for ever.",
    "retention_bytes": "Finished messages are kept up to so many bytes; 0 is all.",
    "after_archive": "true: nothing goes before the group archive has finished it.",
    "run_id": "The workflow run.",
    "step_id": "The step of the run.",
    "parent_step_id": "The step that caused it.",
    "tenant_id": "The tenant; idempotency keys are its own.",
    "tenant": "The same as tenant_id.",
    "idempotency_key": "A second message with this key is not stored.",
    "idem_key": "The same as idempotency_key.",
    "target_topic": "Stores the message in this topic instead.",
    "partition_override": "Stores the message in this partition.",
    "deadline": "RFC 3339 with a zone; a produce after it is refused.",
    "deadline_rfc3339": "The same as deadline.",
    "deadline_ms": "The same in milliseconds since 1970.",
    "max_attempts": "Deliveries before the message is dead-lettered; 0 is no limit.",
    "backoff_ms": "The wait before the first retry; it doubles. Without max_attempts, without end.",
    "max_backoff_ms": "The longest wait; 0 is a day.",
    "retry_max_attempts": "retry_policy.max_attempts.",
    "retry_backoff_ms": "retry_policy.backoff_ms.",
    "retry_max_backoff_ms": "retry_policy.max_backoff_ms.",
}
_FELIX = {
    "request_id": "Comes back in every answer: a text of up to 128 characters, or an integer.",
    "tenant_id": "The tenant's name: 1 to 200 bytes of UTF-8.",
    "namespace": "The namespace's name.",
    "stream": "The stream's name.",
    "cache": "The cache's name.",
    "name": "Its name: 1 to 200 bytes of UTF-8.",
    "raw": "The body is the bytes themselves instead of JSON with base64.",
    "format": "ndjson or sse; without it, as the header Accept says.",
    "heartbeat_ms": "Sends a blank line, or a comment, so often; 0 is never. By default 0, and "
    "15000 for server-sent events.",
    # streams
    "payload": "The event, in base64; it may be empty.",
    "payloads": "The events, in order, each in base64.",
    "ack": "none: no answer but errors. per_message: one for each event. per_batch: one for all.",
    "invalidate": "Keys to remove with it, each as cache:<cache>:<key>, of the same namespace.",
    "event_queue_depth": "Events a subscription may be behind, 1 to 65,536, before it loses the "
    "newest; without it, as the stream or else the broker is set.",
    "event_queue_bytes": "The same in bytes; 64MB and the like are understood.",
    "lag": "true: is told when it begins to lag, and when it no longer does.",
    "batch": "false: every event comes as a frame of its own.",
    "subscription_id": "As subscribed said it.",
    "delivery": "at_most_once. at_least_once and exactly_once are refused: not available yet.",
    "durable": "Keeps what it holds across restarts. Caches only; for streams not available yet.",
    "retention": "How long events are kept. Refused: a stream keeps none, and none is durable yet.",
    "pub_queue_depth": "Events accepted and not yet fanned out, before a publish must wait.",
    "publish_queue_wait_timeout_ms": "How long a publish waits before it is 429; 2s is understood.",
    "lag_alert_events": "Beyond so many behind, a subscription's alert is on; 0 is never.",
    "disconnect_slow_ms": "Ends who was too slow for so long; 0 is never.",
    # caches
    "key": "1 to 1,024 bytes of UTF-8 without control characters.",
    "value": "The value, in base64; it may be empty.",
    "ttl_ms": "How long it lasts: 0 is over at once, none is for ever. Of a counter, only when "
    "this creates it.",
    "if_not_exists": "Only if there is nothing; otherwise 409.",
    "if_version": "Only if this is its version, 0 for nothing; otherwise 412.",
    "keys": "Up to 10,000.",
    "delta": "What is added; 1 when omitted, below 0 to subtract.",
    "checks": "What must hold before: a key's version, or whether it exists. Up to 1,000.",
    "ops": "put, delete or incr, 1 to 1,000.",
    "version": "The key must have this version; 0 is nothing.",
    "exists": "The key must be there, or must not.",
    "prefix": "All keys that begin with it; the empty one is every key.",
    "include": "expire, evict: changes that are told only if they are asked for.",
    "since_version": "The version that is known: a gap comes first if the cache is past it.",
    "watch_id": "As the answer to cache_watch said it.",
    "max_entries": "Entries it may hold; null is no limit of its own.",
    "max_bytes": "Bytes of keys and values, and 320 an entry; 1GB and the like are understood.",
    "eviction_policy": "Who goes when it is full. lru: the least recently used; best_effort: any.",
    # the registry
    "cascade": "Deletes what is in it too.",
    "since": "A revision: changes after it are told.",
    "epoch": "The registry that the revision is of.",
}
_RANGES = {
    "partition": "The partition's number, from 0.",
    "topic_id": "Only of the topic with this id, not of one that was made later under its name.",
    "start": "The first offset; omitted, the oldest that is kept.",
    "end": "The offset to end before; omitted, what is there now.",
    "columns": "Names of columns with commas between; omitted, all of them.",
    "nulls": "omit: leave out columns that are sealed and null in all of the range; or keep.",
    "run_id": "Only messages of this run.",
    "tenant_id": "Only messages of this tenant.",
    "from_ms": "Only messages produced at this time or later, in milliseconds since 1970.",
    "to_ms": "Only messages produced before this time.",
    "time_ms": "A time in milliseconds since 1970.",
    "after": "The name behind which to begin: after of the page before.",
    "format": "arrow, or ndjson: a row is then an object of its columns that are not null.",
    "rows": "Rows of a split at most, 1 to 10,000,000; 131,072 when omitted.",
    "max_rows": "Rows of all splits together at most; omitted, all there are.",
    "partitions": "How far the group is in each; in those not named it stays where it is.",
    "next": "Everything below this offset, or position of the journal, is done.",
}
_WRITES = {
    "producer": "Who writes: 1 to 200 bytes of UTF-8.",
    "batch": "The batch's number, 0 or more; those of a producer rise.",
    "part": "A part of the batch, by its number.",
    "piece": "A piece of the part, from 0 on.",
    "attempt": "Which try at the part this is, by a name; only one of them is committed.",
    "topic": "The topic of rows that name none.",
    "cache": "Puts the rows into a cache instead: <tenant>/<namespace>/<cache>.",
    "parts": "The parts in their order, at most 10,000, each with the attempt that counts.",
    "pieces": "How many pieces the attempt has.",
    "rows": "How many rows the attempt has, in all its pieces.",
    "once": "The producer will write no other batch, and is forgotten after 7 days.",
}
_JOURNAL = _RANGES | {
    "from": "The first position; omitted, the oldest that is kept.",
    "to": "The position to end before; omitted, what can be read now.",
    "kind": "Only events of this kind, such as acked.",
    "topic": "Only events of this topic.",
    "group": "Only events of this group.",
    "from_ms": "Only events of this time or later, in milliseconds since 1970.",
    "to_ms": "Only events before this time.",
    "fresh": "true: what is durable now is made readable first, which may take a while.",
}
_BY_TAG = {
    "Journal": _JOURNAL,
    "Writes": _WRITES,
    "Ranges": _RANGES,
    "Topics": {
        "max_attempts": "Deliveries of a message that names no max_attempts; 0 is no limit.",
        "retry_backoff_ms": "The first wait after a nack of a message without a retry policy; it "
        "doubles. 0 is the broker's retry_backoff_ms.",
        "retry_max_backoff_ms": "The longest such wait; 0 is the broker's retry_max_backoff_ms.",
    },
    "Effects": {"key": "The idempotency key of the effect."},
    "Streams": _FELIX,
    "Caches": _FELIX,
    "Tenants": _FELIX,
    "Registry": _FELIX,
}

_NUMBERS = frozenset(
    {
        "partition",
        "partitions",
        "offset",
        "prefetch",
        "topic_id",
        "batch",
        "part",
        "piece",
        "since",
        "epoch",
        "start",
        "end",
        "rows",
        "from",
        "to",
    }
)
_NUMBER_ENDINGS = ("_ms", "_bytes", "_attempts", "_override", "_depth", "_version", "_rows")
_FLAGS = frozenset({"raw", "lag", "cascade", "if_not_exists", "fresh", "after_archive", "dead"})


def texts_of(tag: str) -> dict[str, str]:
    """What each name means under this tag."""
    return _TEXTS | _BY_TAG.get(tag, {})


def kind_of(name: str) -> str:
    """The JSON type of a parameter of the query."""
    if name in _FLAGS:
        return "boolean"
    return "integer" if name in _NUMBERS or name.endswith(_NUMBER_ENDINGS) else "string"
