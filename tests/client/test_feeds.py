"""The sans-IO half of streams and caches in the SDK: what is sent, what lines mean."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.client import caches, registry, streams
from penstock.client.caches import CacheCheck, CacheDelete, CacheIncr, CachePut
from penstock.client.feeds import FeedBuffer, PayloadBuffer, WatchBuffer
from penstock.model.caching import CacheValue, WatchEvent, Written
from penstock.model.errors import (
    AlreadyExists,
    Internal,
    InvalidArgument,
    NotFound,
    NotYet,
    OutOfRange,
    PenstockError,
    ResourceExhausted,
    Unavailable,
    VersionMismatch,
)

PATH = ("t", "n", "x")
CACHE = "/v1/tenants/t/namespaces/n/caches/x"
STREAM = "/v1/tenants/t/namespaces/n/streams/x"


def line(**members: Any) -> bytes:
    return json.dumps(members).encode() + b"\n"


SUBSCRIBED = line(type="subscribed", subscription_id="s7")
EVENT = line(type="event", subscription_id="s7", payload="AP8=")
WATCHING = line(type="ok", version=4, watch_id="w1")


def taken(buffer: FeedBuffer[Any]) -> list[Any]:
    found = []
    while (event := buffer.take(0.0)) is not None:
        found.append(event)
    return found


# -- requests and answers ------------------------------------------------------------------------


def test_text_goes_as_its_utf_8_and_bytes_as_they_are() -> None:
    for payload in ("ü", "ü".encode()):
        assert json.loads(streams.publish(PATH, payload).body)["payload"] == "w7w="
        assert json.loads(caches.put(PATH, "k", payload).body)["value"] == "w7w="
        ops = json.loads(caches.txn(PATH, [], [CachePut("k", payload)]).body)["ops"]
        assert ops == [{"op": "put", "key": "k", "value": "w7w="}]
    for refused in (streams.publish, lambda path, text: caches.put(path, "k", text)):
        with pytest.raises(InvalidArgument, match="Unicode"):
            refused(PATH, "\udcff")


def test_one_in_the_place_of_several_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="payloads must be a list"):
        streams.publish_batch(PATH, "abc")
    with pytest.raises(InvalidArgument, match="keys must be a list"):
        caches.get_many(PATH, "abc")
    with pytest.raises(InvalidArgument, match="invalidate must be a list"):
        streams.publish(PATH, "v", invalidate="cache:c:k")


def test_what_is_invalidated_goes_with_the_event() -> None:
    """felix-82"""
    body = json.loads(streams.publish(PATH, "v", invalidate=["cache:c:k"]).body)
    assert body == {"payload": "dg==", "ack": "per_message", "invalidate": ["cache:c:k"]}
    assert "invalidate" not in json.loads(streams.publish_batch(PATH, ["v"]).body)


@pytest.mark.parametrize(
    ("key", "path"),
    [
        ("user/1", "user%2F1"),
        (" ", "%20"),
        ("ü", "%C3%BC"),
        ("..", "%2E%2E"),
        (".", "%2E"),
        ("...", "..."),
        ("?a=b", "%3Fa%3Db"),
    ],
)
def test_a_key_is_one_segment_whatever_it_is(key: str, path: str) -> None:
    assert caches.get(PATH, key).path == f"{CACHE}/entries/{path}"


def test_a_name_of_dots_does_not_name_what_is_above_it() -> None:
    """Or deleting a stream `..` would delete its namespace."""
    assert registry.delete_stream("t", "n", "..").path.endswith("/streams/%2E%2E")


def test_a_key_is_required() -> None:
    with pytest.raises(InvalidArgument, match="key is required"):
        caches.get(PATH, "")
    with pytest.raises(InvalidArgument, match="name is required"):
        caches.get(("t", "n", ""), "k")


def test_the_query_has_only_the_given_parameters() -> None:
    assert caches.delete(PATH, "k").path == f"{CACHE}/entries/k"
    assert caches.delete(PATH, "k", if_version=0).path == f"{CACHE}/entries/k?if_version=0"
    path = streams.subscribe_path(PATH, name=None, heartbeat_ms=5000)
    assert path == f"{STREAM}/subscribe?heartbeat_ms=5000"
    watch = caches.watch_path(PATH, None, "", ["expire", "evict"], 3, 100)
    query = "prefix=&include=expire%2Cevict&since_version=3&heartbeat_ms=100"
    assert watch == f"{CACHE}/watch?{query}"
    with pytest.raises(InvalidArgument, match="Unicode"):
        caches.watch_path(PATH, "\udcff", None, (), None, 100)


def test_a_transaction_says_its_checks_and_steps() -> None:
    checks = [CacheCheck("a", version=3), CacheCheck("b", exists=False, cache="other")]
    call = caches.txn(PATH, checks, [CacheIncr("n", -1), CacheDelete("a"), CacheIncr("m")])
    assert json.loads(call.body) == {
        "checks": [{"key": "a", "version": 3}, {"key": "b", "exists": False, "cache": "other"}],
        "ops": [
            {"op": "incr", "key": "n", "delta": -1},
            {"op": "delete", "key": "a"},
            {"op": "incr", "key": "m"},
        ],
    }
    results = [{"version": 4, "number": 6}, {"version": 5, "deleted": True}]
    answer = call.answer(200, json.dumps({"type": "ok", "results": results}).encode())
    assert answer == [Written(4, number=6), Written(5, deleted=True)]


def test_a_value_that_is_not_there_is_none() -> None:
    """felix-56"""
    call = caches.get(PATH, "k")
    assert call.answer(200, b'{"type":"cache_value","value":null,"version":0}') is None
    found = call.answer(200, b'{"type":"cache_value","value":"","version":3,"ttl_ms":5}')
    assert found == CacheValue(b"", 3, 5)


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (409, "ALREADY_EXISTS", AlreadyExists),
        (412, "FAILED_PRECONDITION", VersionMismatch),
        (410, "OUT_OF_RANGE", OutOfRange),
        (416, "OUT_OF_RANGE", NotYet),
    ],
)
@pytest.mark.parametrize("type_", ["error", "publish_error"])
def test_a_refusal_is_the_error_that_the_broker_raised(
    status: int, code: str, kind: type[PenstockError], type_: str
) -> None:
    """Older brokers say `publish_error` of a failed publish."""
    body = json.dumps({"type": type_, "error": code, "message": "no"}).encode()
    with pytest.raises(kind) as failure:
        streams.publish(PATH, "v").answer(status, body)
    assert type(failure.value) is kind
    feed = PayloadBuffer()
    feed.feed(SUBSCRIBED + line(type=type_, error=code, message="no"))
    with pytest.raises(PenstockError, match="no"):
        feed.take(0.0)


# -- lines of a feed -----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 64, 10_000])
def test_a_feed_is_read_the_same_however_it_is_cut(size: int) -> None:
    data = b"\n" + SUBSCRIBED + EVENT + b"\n" + EVENT
    buffer = PayloadBuffer()
    for start in range(0, len(data), size):
        buffer.feed(data[start : start + size])
    assert (buffer.is_open, buffer.subscription_id) == (True, "s7")
    assert taken(buffer) == [b"\x00\xff", b"\x00\xff"]


def test_a_feed_is_open_once_it_has_its_name() -> None:
    buffer = PayloadBuffer()
    buffer.feed(SUBSCRIBED[:-1])
    assert not buffer.is_open
    buffer.feed(b"\n")
    assert buffer.is_open


def test_a_watch_brings_changes_and_gaps() -> None:
    buffer = WatchBuffer()
    put = line(type="cache_event", watch_id="w1", event="put", key="k", value="dg==", version=5)
    gap = line(
        type="cache_event", watch_id="w1", event="gap", version=9, from_version=5, to_version=9
    )
    buffer.feed(WATCHING + put + gap)
    assert (buffer.watch_id, buffer.version) == ("w1", 4)
    assert taken(buffer) == [WatchEvent("put", 5, "k", b"v"), WatchEvent("gap", 9, from_version=5)]


def test_events_come_before_the_error_that_ended_them_and_it_comes_once() -> None:
    error = line(type="error", error="NOT_FOUND", message="gone", subscription_id="s7")
    buffer = PayloadBuffer()
    buffer.feed(SUBSCRIBED + EVENT + error)
    assert buffer.take(0.0) == b"\x00\xff"
    with pytest.raises(NotFound, match="gone"):
        buffer.take(0.0)
    assert buffer.take(0.0) is None


def test_what_was_not_taken_when_it_was_closed_is_not_given_out() -> None:
    buffer = PayloadBuffer()
    buffer.feed(SUBSCRIBED + EVENT + EVENT)
    assert buffer.take(0.0) == b"\x00\xff"
    buffer.close()
    assert buffer.take(0.0) is None


def test_a_subscriber_that_was_too_slow_is_told_the_limit() -> None:
    """felix-117"""
    members = {"error": "RESOURCE_EXHAUSTED", "message": "slow", "limit": "disconnect_slow_ms"}
    buffer = PayloadBuffer()
    buffer.feed(SUBSCRIBED + line(type="error", **members))
    with pytest.raises(ResourceExhausted) as failure:
        buffer.take(0.0)
    assert failure.value.limit == "disconnect_slow_ms"


def test_the_end_without_a_reason_is_a_lost_connection() -> None:
    """felix-49: never a quiet end, as if there were no more events."""
    buffer = PayloadBuffer()
    buffer.feed(SUBSCRIBED)
    with pytest.raises(Unavailable):
        buffer.end()


def test_lines_of_the_future_are_passed_over() -> None:
    buffer = PayloadBuffer()
    buffer.feed(SUBSCRIBED + line(type="lag", alert=True) + line(type="new", code=3) + EVENT)
    assert taken(buffer) == [b"\x00\xff"]


def test_a_line_that_is_none_is_an_error() -> None:
    with pytest.raises(Internal):
        PayloadBuffer().feed(b'{"type": 3}\n')
    with pytest.raises(Internal):
        PayloadBuffer().feed(b'{"type": "event", "payload": "not base64"}\n')
