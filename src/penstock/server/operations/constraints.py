"""The limits on members of requests, as JSON Schema says them: lengths, patterns, ranges, choices.

Invariant: the broker takes what these allow and refuses what they forbid, as far as a schema can
say it; a run of Schemathesis in the tests compares both. The broker limits bytes of UTF-8 where a
schema counts characters, so it may refuse long texts that are not ASCII although their schema
allows them. A name means the same everywhere, except where a tag has a meaning of its own for it.
"""

from __future__ import annotations

from typing import Any

from penstock.model.journal import KINDS
from penstock.model.limits import (
    MAX_BACKOFF_MS,
    MAX_BATCH_ITEMS,
    MAX_CACHE_KEY_BYTES,
    MAX_COMMIT_PARTS,
    MAX_ENVELOPE_FIELD_BYTES,
    MAX_LEASE_MS,
    MAX_NAME_BYTES,
    MAX_OFFSET,
    MAX_PARTITIONS,
    MAX_POSITION,
    MAX_QUEUE_DEPTH,
    MAX_REQUEST_ID_CHARS,
    MAX_RESULT_BYTES,
    MAX_TXN_OPS,
)
from penstock.server.registry.entries import MAX_TIMEOUT_MS

Json = dict[str, Any]

_CONTROL = r"\u0000-\u001f\u007f-\u009f"
_EDGE = rf"[^\s{_CONTROL}]"
_NAME = rf"(dlq\.)?{_EDGE}([^{_CONTROL}]{{0,{MAX_NAME_BYTES - 2}}}{_EDGE})?"
_PART = _NAME.replace("[^", "[^/").join((r"\s*", r"\s*"))
_BASE64 = r"^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
_DATE_TIME = r"\d{4}-\d{2}-\d{2}[Tt]\d{2}:\d{2}:\d{2}(\.\d{1,9})?([Zz]|[+-]\d{2}:\d{2})"

_ETAG = r'(W/)?"[!#-+\--~]*"'

ETAGS: Json = {
    "pattern": rf"^(\*|{_ETAG}( *, *{_ETAG})*)$",
    "examples": ['"1767225600000001"', "*"],
}
"""What If-Match and If-None-Match take."""

NAME: Json = {"pattern": rf"^\s*{_NAME}\s*$"}
_NAME_OR_NONE: Json = {"pattern": rf"^\s*({_NAME}\s*)?$"}
_ID: Json = {"maxLength": MAX_ENVELOPE_FIELD_BYTES}
_COUNT: Json = {"minimum": 0, "maximum": MAX_OFFSET}
_WAIT: Json = {"minimum": 0, "maximum": MAX_BACKOFF_MS}
_POSITION: Json = {"minimum": 0, "maximum": MAX_POSITION}
_DEPTH: Json = {"minimum": 1, "maximum": MAX_QUEUE_DEPTH}
_DURATION: Json = {
    "pattern": r"^\s*(\d{1,15}\s*(ms)?|\d{1,12}\s*s|\d{1,10}\s*m|\d{1,8}\s*[hd])\s*$"
}
_TIMEOUT: Json = {
    "minimum": 1,
    "maximum": MAX_TIMEOUT_MS,
    "pattern": r"^\s*(([1-9]\d{0,4}|[1-5]\d{5}|600000)\s*(ms)?|([1-9]\d?|[1-5]\d{2}|600)\s*s|"
    r"([1-9]|10)\s*m)\s*$",
}
_SIZE: Json = {
    "minimum": 1,
    "maximum": MAX_OFFSET,
    "pattern": r"^\s*([1-9]\d{0,14}\s*[Bb]?|[1-9]\d{0,11}\s*([Kk][Ii]?[Bb])|"
    r"[1-9]\d{0,8}\s*([Mm][Ii]?[Bb])|[1-9]\d{0,5}\s*([Gg][Ii]?[Bb])|"
    r"[1-9]\d{0,2}\s*([Tt][Ii]?[Bb]))\s*$",
}
_CACHE_KEY: Json = {
    "minLength": 1,
    "maxLength": MAX_CACHE_KEY_BYTES,
    "pattern": f"^[^{_CONTROL}]*$",
}

_RULES: dict[str, Json] = {
    **dict.fromkeys(("topic", "name", "group", "owner"), NAME),
    **dict.fromkeys(("run_id", "step_id", "parent_step_id"), _ID),
    **dict.fromkeys(("tenant_id", "tenant", "idempotency_key", "idem_key"), _ID),
    **dict.fromkeys(("max_attempts", "backoff_ms", "max_backoff_ms"), _COUNT),
    **dict.fromkeys(("retention_ms", "retention_bytes", "prefetch", "heartbeat_ms"), _COUNT),
    **dict.fromkeys(("delay_ms", "retry_backoff_ms", "retry_max_backoff_ms"), _WAIT),
    "partitions": {"minimum": 1, "maximum": MAX_PARTITIONS},
    "value": {"minLength": 1},
    "partition": _COUNT,
    "offset": _COUNT,
    "lease_ms": {"minimum": 0, "maximum": MAX_LEASE_MS},
    "target_topic": _NAME_OR_NONE,
    "partition_override": {"minimum": 0, "maximum": MAX_PARTITIONS - 1},
    "deadline": {"pattern": rf"^\s*{_DATE_TIME}\s*$|^$"},
    "result": {"maxLength": MAX_RESULT_BYTES},
}
_STREAMS: dict[str, Json] = {
    **dict.fromkeys(("tenant_id", "namespace", "stream", "cache", "name"), NAME),
    **dict.fromkeys(("event_queue_depth", "pub_queue_depth"), _DEPTH),
    **dict.fromkeys(("event_queue_bytes", "max_bytes"), _SIZE),
    **dict.fromkeys(("if_version", "version", "since_version", "since", "ttl_ms"), _COUNT),
    "request_id": {
        "maxLength": MAX_REQUEST_ID_CHARS,
        "minimum": -(2**63),
        "maximum": 2**63 - 1,
    },
    "payload": {"pattern": _BASE64},
    "value": {"pattern": _BASE64, "minLength": 0},
    "payloads": {"minItems": 1, "maxItems": MAX_BATCH_ITEMS, "items": {"pattern": _BASE64}},
    "invalidate": {"items": {"pattern": rf"^cache:\s*{_NAME}\s*:[^{_CONTROL}]{{1,1024}}$"}},
    "retention": _DURATION | _COUNT,
    "publish_queue_wait_timeout_ms": _TIMEOUT,
    "disconnect_slow_ms": _TIMEOUT | {"minimum": 0},
    "lag_alert_events": _COUNT,
    "max_entries": {"minimum": 1, "maximum": MAX_OFFSET},
    "key": _CACHE_KEY,
    "prefix": {"maxLength": MAX_CACHE_KEY_BYTES, "pattern": f"^[^{_CONTROL}]*$"},
    "keys": {"minItems": 1, "maxItems": MAX_BATCH_ITEMS, "items": _CACHE_KEY},
    "delta": {"minimum": -(2**63), "maximum": 2**63 - 1},
    "checks": {"maxItems": MAX_TXN_OPS},
    "ops": {"minItems": 1, "maxItems": MAX_TXN_OPS},
    "format": {"enum": ["", "ndjson", "sse"]},
    "epoch": {"minimum": -(10**18), "maximum": 10**18},
}
_RANGES: dict[str, Json] = {
    **dict.fromkeys(("start", "end", "topic_id", "from_ms", "to_ms", "time_ms"), _POSITION),
    "run_id": {},
    "tenant_id": {},
    "nulls": {"enum": ["keep", "omit"]},
    "format": {"enum": ["", "arrow", "ndjson"]},
    "rows": {"minimum": 1, "maximum": 10_000_000},
    "max_rows": {"minimum": 1, "maximum": MAX_OFFSET},
    "partitions": {"minItems": 1, "maxItems": MAX_PARTITIONS},
    "next": _COUNT,
}
_BY_TAG: dict[str, dict[str, Json]] = {
    "Journal": _RANGES
    | {
        "from": _POSITION,
        "to": _POSITION,
        "kind": {"enum": ["", *KINDS]},
        "topic": {},
        "group": {},
    },
    "Writes": {
        "producer": NAME,
        **dict.fromkeys(("batch", "part", "piece", "pieces", "rows"), _COUNT),
        "attempt": _NAME_OR_NONE,
        "topic": _NAME_OR_NONE,
        "cache": {"pattern": rf"^$|^{_PART}/{_PART}/{_PART}$"},
        "parts": {"maxItems": MAX_COMMIT_PARTS},
    },
    "Ranges": _RANGES,
    "Effects": {"key": {"minLength": 1, "maxLength": MAX_ENVELOPE_FIELD_BYTES}},
    **dict.fromkeys(("Streams", "Caches", "Tenants", "Registry"), _STREAMS),
}
_FOR_TYPE = {
    "string": ("minLength", "maxLength", "pattern", "enum"),
    "integer": ("minimum", "maximum"),
    "array": ("minItems", "maxItems", "items"),
}
"""Which limits mean something to which type."""


def rules_of(tag: str) -> dict[str, Json]:
    """The limits of each name under this tag."""
    return _RULES | _BY_TAG.get(tag, {})


def constrain(schema: Json, rule: Json) -> None:
    """Adds the limits to a schema, or to each of its alternatives, as far as they fit its type."""
    for each in schema.get("anyOf", [schema]):
        for limit in _FOR_TYPE.get(each.get("type", ""), ()):
            if limit == "items" and limit in rule:
                constrain(each["items"], rule["items"])
            elif limit in rule and limit not in each:
                each[limit] = rule[limit]
