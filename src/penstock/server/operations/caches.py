"""What a cache holds: entries, counters, transactions and watches, described."""

from __future__ import annotations

from penstock.server.operations.endpoint import Answer, Operation
from penstock.server.websocket.answers import CacheEvent, Ok, Value, Values
from penstock.server.websocket.messages import GetManyBody, IncrBody, PutBody, TxnBody

CACHE = "/v1/tenants/{tenant_id}/namespaces/{namespace}/caches/{cache}"
ENTRY = CACHE + "/entries/{key}"

_VERSION = 1_767_225_600_000_001

_CONDITIONS = {
    "If-Match": "The key must have a value with one of these ETags, or any value for *; "
    "otherwise 412.",
    "If-None-Match": "The key must not have a value with one of these ETags, nor any value for *; "
    "otherwise 412.",
}
_UNLESS_KNOWN = _CONDITIONS | {
    "If-None-Match": "304 if the value has one of these ETags, or for * if there is a value.",
}
_ETAG = {"ETag": ("The version of the value, in quotes.", "string")}

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        method="GET",
        path=ENTRY,
        tag="Caches",
        summary="Get a value",
        text="A key without one is null with version 0, not an error. With raw=true the answer is "
        "the bytes, and a miss is 404. The version is the value's ETag: with it in If-None-Match "
        "the answer is 304 while the value is the same.",
        query=("raw",),
        conditions=_UNLESS_KNOWN,
        answers={
            200: Answer(
                "The value, its version, and the time it has left if it expires.",
                Value,
                {
                    "type": "cache_value",
                    "value": "aGVsbG8=",
                    "version": _VERSION,
                    "ttl_ms": 59_000,
                },
                headers={
                    "ETag": ("The version of the value, in quotes; none on a miss.", "string")
                },
            ),
            304: Answer("If-None-Match names the value; it is not sent.", headers=_ETAG),
        },
        errors=(400, 404, 412, 413, 503),
    ),
    Operation(
        method="PUT",
        path=ENTRY,
        tag="Caches",
        summary="Put a value",
        text="It replaces what was there, and its TTL. With raw=true the body is the value, and "
        "the rest is in the query; without it, a query with these members is refused.",
        body=PutBody,
        required=("value",),
        query=("raw", "ttl_ms", "if_not_exists", "if_version", "request_id"),
        conditions=_CONDITIONS,
        example={"value": "aGVsbG8=", "ttl_ms": 60_000},
        answers={200: Answer("Put.", Ok, {"type": "ok", "version": _VERSION}, headers=_ETAG)},
        errors=(400, 404, 409, 412, 413, 503),
    ),
    Operation(
        method="DELETE",
        path=ENTRY,
        tag="Caches",
        summary="Delete a value",
        text="deleted says whether there was one.",
        query=("if_version",),
        conditions=_CONDITIONS,
        answers={
            200: Answer("It is gone.", Ok, {"type": "ok", "version": _VERSION, "deleted": True})
        },
        errors=(400, 404, 412, 413, 503),
    ),
    Operation(
        method="POST",
        path=f"{ENTRY}/incr",
        tag="Caches",
        summary="Add to a counter",
        text="A counter that was not there begins at 0. Its value is its number in decimal text. "
        "409 for a value that is no number, or beyond 64 bits.",
        body=IncrBody,
        query=(),
        conditions=_CONDITIONS,
        example={"delta": 1, "ttl_ms": 60_000},
        names={"key": "visits"},
        answers={
            200: Answer(
                "What it is now.",
                Value,
                {"type": "cache_value", "value": "MQ==", "version": _VERSION, "number": 1},
                headers=_ETAG,
            )
        },
        errors=(400, 404, 409, 412, 413, 503),
    ),
    Operation(
        method="POST",
        path=f"{CACHE}/get_many",
        tag="Caches",
        summary="Get many values",
        text="All as of one moment, in the order of the keys; up to 10,000.",
        body=GetManyBody,
        required=("keys",),
        query=(),
        example={"keys": ["greeting", "nothing"]},
        answers={
            200: Answer(
                "A value per key.",
                Values,
                {
                    "type": "cache_values",
                    "values": [
                        {"key": "greeting", "value": "aGVsbG8=", "version": _VERSION},
                        {"key": "nothing", "value": None, "version": 0},
                    ],
                },
            )
        },
        errors=(400, 404, 413, 503),
    ),
    Operation(
        method="POST",
        path=f"{CACHE}/txn",
        tag="Caches",
        summary="A transaction",
        text="All ops, in order, or none: when a check does not hold it is 412 and nothing "
        "changes. Checks look at what was before; ops see each other. cache names another cache "
        "of the namespace.",
        body=TxnBody,
        required=("ops",),
        query=(),
        example={
            "checks": [{"key": "order-1", "exists": False}],
            "ops": [
                {"op": "incr", "key": "stock", "delta": -1},
                {"op": "put", "key": "order-1", "value": "YXBwbGU="},
            ],
        },
        answers={
            200: Answer(
                "What each op came to.",
                Ok,
                {
                    "type": "ok",
                    "results": [{"version": _VERSION, "number": 16}, {"version": _VERSION + 1}],
                },
            )
        },
        errors=(400, 404, 409, 412, 413, 503),
    ),
    Operation(
        method="GET",
        path=f"{CACHE}/watch",
        tag="Caches",
        summary="Watch keys",
        text="One JSON object a line: ok first, with the cache's version, then every later change "
        "of the key, or of the keys that begin with prefix. A gap says that changes may be "
        "missing. As server-sent events with format=sse or Accept: text/event-stream.",
        query=("key", "prefix", "include", "since_version", "format", "heartbeat_ms"),
        example={"prefix": "user:"},
        answers={
            200: Answer(
                "Changes, until either side ends it.",
                CacheEvent,
                {
                    "type": "cache_event",
                    "watch_id": "w1",
                    "event": "put",
                    "version": _VERSION,
                    "key": "user:1",
                    "value": "aGVsbG8=",
                },
                media_type="application/x-ndjson",
            )
        },
        errors=(400, 404, 413, 503),
    ),
)
