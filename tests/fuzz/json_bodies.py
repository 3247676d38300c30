"""JSON bodies for every route that takes one: right, nearly right, and made to hurt a decoder.

The routes and their first bodies are those of the endpoint table. Everything comes from the
`Random` that is given, so a seed repeats a run.
"""

from __future__ import annotations

import json
from random import Random
from typing import Any, get_args

from penstock.server.routes.endpoint import Endpoint
from penstock.server.routes.table import ENDPOINTS
from penstock.server.routes.transaction_operations import OperationBody

Route = tuple[str, str, dict[str, Any]]

_PLACE = "/v1/tenants/default/namespaces/default"
PATH_NAMES = {
    "tenant_id": "default", "namespace": "default", "stream": "kept", "cache": "default",
    "key": "k", "topic": "t", "group": "g", "partition": "0", "producer": "p", "batch": "0",
    "part": "0", "piece": "0", "role": "r", "rule": "1", "subscription": "billing",
    "token_id": "0123456789abcdef",
}  # fmt: skip


def _of_endpoint(endpoint: Endpoint) -> Route:
    """The endpoint's example. A quota is that of another tenant than the one that is watched."""
    names = PATH_NAMES | ({"tenant_id": "fuzzed"} if endpoint.path.endswith("/quota") else {})
    example: Any = endpoint.example or {}
    fields = example[0] if isinstance(example, list) else example
    return endpoint.method, endpoint.path.format(**names), dict(fields)


MEMBERS: dict[str, Any] = {
    "topic": "t", "group": "g", "partition": 0, "offset": 0, "owner": "o", "key": "k", "value": "v",
    "stream": "once", "payload": "AAAA", "payloads": ["AAAA"], "producer_id": "p", "sequence": 0,
    "cache": "default", "name": "billing", "delivery_id": "1-1", "reason": "x", "delay_ms": 0,
    "delta": 1, "result": "r",
}  # fmt: skip


def _operation(kind: Any) -> dict[str, Any]:
    """An operation of a transaction with all members that have a sample."""
    known = {name: MEMBERS[name] for name in kind.__struct_fields__ if name in MEMBERS}
    if "payloads" in known:
        known.pop("payload", None)
    return {"op": kind.__struct_config__.tag, **known}


WITH_BODY = [each for each in ENDPOINTS if each.body is not None and each.method != "GET"]

ROUTES: list[Route] = [
    *map(_of_endpoint, WITH_BODY),
    ("POST", "/v1/produce", {"topic": "t", "key": "k", "value": "v", "envelope": {
        "run_id": "r", "deadline": "2031-01-01T00:00:00Z", "partition_override": 0,
        "retry_policy": {"max_attempts": 3, "backoff_ms": 10}}}),
    ("POST", "/v1/ack", {"topic": "t", "group": "g", "partition": 0, "offset": 0, "owner": "o"}),
    ("POST", "/v1/nack", {
        "topic": "t", "group": "g", "partition": 0, "offset": 0, "owner": "o", "reason": "x"}),
    ("POST", "/v1/extend", {
        "topic": "t", "group": "g", "partition": 0, "offset": 0, "owner": "o", "lease_ms": 10}),
    ("POST", "/v1/topics", {"name": "t", "partitions": 1}),
    ("POST", "/v1/idempotency/begin", {
        "topic": "t", "group": "g", "idempotency_key": "k", "owner": "o", "lease_ms": 1000}),
    ("POST", "/v1/idempotency/commit", {
        "topic": "t", "group": "g", "idempotency_key": "k", "owner": "o", "result": "r"}),
    ("POST", "/v1/transactions", {"transaction_id": "x", "operations": [
        {"op": "produce", "topic": "t", "value": "v"},
        {"op": "nack", "topic": "t", "group": "g", "partition": 0, "offset": 0, "owner": "o"},
        {"op": "event_nack", "stream": "default", "name": "n", "owner": "o", "offset": 0},
        {"op": "cache_incr", "cache": "default", "key": "k", "delta": 1}]}),
    *(("POST", "/v1/transactions", {"operations": [_operation(kind)]})
      for kind in get_args(OperationBody)),
    ("POST", "/v1/apply", {
        "tenants": [{"tenant_id": "fuzzed", "namespaces": ["n"]}],
        "streams": [{"name": "s", "delivery": "at_least_once", "retention": "7d"}],
        "topics": [{"name": "t", "partitions": 1, "retention_ms": "1d"}],
        "caches": [{"name": "c", "max_entries": 10}],
        "quotas": [{"tenant_id": "fuzzed", "topics": 7, "publish_rate_limit": "10/s"}],
        "dry_run": True}),
    ("PATCH", "/v1/tenants/fuzzed/quota", {
        "publish_bytes_limit": "10MB/s", "subscribe_connections": 5, "cache_memory": "1GB",
        "backlog_msgs": 7, "backlog_bytes": "1MB", "disk_bytes": 10, "stream_retention": "7d"}),
    ("POST", "/v1/tokens", {
        "principal": "p", "tenant_id": "default", "namespace": "default", "roles": ["reader"],
        "expires_in_ms": 1000}),
    ("POST", "/v1/access/rules", {
        "tenant_id": "default", "namespace": "d*", "resource": "topic:t*", "role": "reader",
        "permissions": ["produce", "r"]}),
    ("POST", _PLACE + "/streams", {
        "name": "kept", "delivery": "at_least_once", "retention": "7d", "retention_bytes": "10GB"}),
    ("POST", _PLACE + "/streams/once/publish", {
        "payload": "AAAA", "producer_id": "p", "sequence": 0}),
    ("POST", "/v1/writes/p/0/commit", {"parts": [{"part": 0, "pieces": 1, "rows": 1}]}),
    ("POST", "/v1/journal/archived", {"next": 0}),
    ("POST", "/v1/tenants", {"tenant_id": "default"}),
    ("POST", _PLACE + "/streams/default/publish", {"payload": "AAAA"}),
    ("POST", _PLACE + "/streams/default/publish_batch", {"payloads": ["AAAA", "BBBB"]}),
    ("PUT", _PLACE + "/caches/default/entries/k", {"value": "AAAA", "ttl_ms": 1000}),
    ("POST", _PLACE + "/caches/default/get_many", {"keys": ["a", "b"]}),
    ("POST", _PLACE + "/caches/default/txn", {"ops": [{"op": "put", "key": "k", "value": "AAAA"}]}),
    ("POST", "/v1/felix", {"type": "cache_get", "cache": "default", "key": "k"}),
]  # fmt: skip

BATCHES = [each.path for each in WITH_BODY if each.batch or each.or_array]

_VALUES = [
    "null", "true", "0", "-1", "1.5", "1e400", "-1e400", "NaN", "Infinity", "9" * 400, "-0", "01",
    "1e-400", "9223372036854775807", "9223372036854775808", "-9223372036854775809", "0.1e1",
    "18446744073709551616", '""', '"\\u0000"', '"\\ud800"', '"\\udc00\\ud800"', '"\\ud83d\\ude00"',
    '"\\x"', '"a', "[]", "{}", "[[]]", '{"":""}', '"' + "x" * 5000 + '"', '"\u00e9"', '"\t"',
    '"\x00"', '" "', '"a/b"', '"..%2f"', '"2031-01-01T00:00:00Z"', '"AAAA"', '"A"', '"====="',
    '"9999-12-31T23:59:59-23:59"', '"0001-01-01T00:00:00+23:59"', '"10000-01-01T00:00:00Z"',
]  # fmt: skip


def body(random: Random) -> tuple[str, str, bytes]:
    """A method, a path and a body."""
    method, path, fields = random.choice(ROUTES)
    if random.random() < 0.15:
        items = [_encoded(random, fields) for _ in range(random.choice([1, 3, 20]))]
        path = random.choice(BATCHES)
        text = "[" + ",".join(items) + "]" if random.random() < 0.5 else "\n".join(items)
        return "POST", path, _bytes(random, text)
    if random.random() < 0.1:
        return method, path, _bytes(random, _deep(random))
    return method, path, _bytes(random, _encoded(random, fields))


def lines(random: Random) -> bytes:
    """Rows to be staged, a line each."""
    row: dict[str, Any] = {"topic": "t", "key": "k", "value": "v"}
    return b"\n".join(
        _bytes(random, _encoded(random, row)) for _ in range(random.choice([1, 3, 9]))
    )


def _encoded(random: Random, fields: dict[str, Any]) -> str:
    """The fields as JSON, with some of them replaced, doubled, left out or put in."""
    members = [(json.dumps(name), json.dumps(value)) for name, value in fields.items()]
    for _ in range(random.choice([0, 1, 1, 1, 2])):
        way = random.randrange(5)
        at = random.randrange(len(members)) if members else 0
        value = _deep(random) if random.random() < 0.1 else random.choice(_VALUES)
        if way == 0 and members:
            del members[at]
        elif way == 1 and members:
            members.append((members[at][0], value))
        elif way == 2:
            name = random.choice(['"unknown"', '""', '"\\u0000"', '"\\ud800"', "unquoted", "1"])
            members.append((name, value))
        elif members:
            members[at] = (members[at][0], value)
    return "{" + ",".join(f"{name}:{value}" for name, value in members) + "}"


def _deep(random: Random) -> str:
    depth = random.choice([10, 500, 2000, 100_000])
    opened, closed = random.choice([("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")])
    inner = random.choice(["", "1", "null"]) if opened == "[" else "1"
    return opened * depth + inner + (closed * depth if random.random() < 0.8 else "")


def _bytes(random: Random, text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    chance = random.random()
    if chance < 0.04:
        return b"\xef\xbb\xbf" + data
    if chance < 0.08:
        return text.encode("utf-16", "surrogatepass")
    if chance < 0.2 and data:
        mutant = bytearray(data)
        mutant[random.randrange(len(mutant))] = random.randrange(256)
        return bytes(mutant)
    return data
