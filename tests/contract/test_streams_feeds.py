"""Streams and caches listened to over plain HTTP: NDJSON and server-sent events."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.broker_process import BrokerProcess, eventually
from tests.contract.conftest import StartBroker
from tests.contract.namespaces import Feed, Namespace, assert_typed_error, b64, unb64

BIG = 32 * 1024


@pytest.fixture
def ns(broker: BrokerProcess) -> Namespace:
    return Namespace(broker)


@contextmanager
def sse(ns: Namespace, path: str, **options: Any) -> Iterator[Iterator[tuple[str, Any]]]:
    """The events of a server-sent stream: name and data; a comment is ("", None)."""
    with ns.broker.client.stream("GET", path, **options) as reply:
        assert reply.status_code == 200
        assert reply.headers["content-type"] == "text/event-stream"
        yield _events(reply.iter_lines())


def _events(lines: Iterator[str]) -> Iterator[tuple[str, Any]]:
    for line in lines:
        if line.startswith(":"):
            assert next(lines) == ""
            yield "", None
            continue
        name, data, end = line, next(lines), next(lines)
        assert (name[:7], data[:6], end) == ("event: ", "data: ", "")
        yield name[7:], json.loads(data[6:])


def number_of(item: Any) -> int:
    return int(unb64(item.members["payload"]).split(b":")[0])


def publish_numbered(ns: Namespace, stream: str, first: int, count: int, size: int = 0) -> None:
    """In batches; each payload begins with its number."""
    for start in range(first, first + count, 100):
        numbers = range(start, min(first + count, start + 100))
        payloads = [f"{n}:".encode().ljust(size, b"x") for n in numbers]
        assert ns.publish(stream, *payloads, b"-1:").status_code == 200


# -- streams ---------------------------------------------------------------------------------------


def test_a_subscription_begins_with_its_id_and_ends_with_its_reader(ns: Namespace) -> None:
    """felix-3, felix-41, felix-42, felix-44, felix-45"""
    stream = ns.create_stream()
    ns.publish(stream, b"before")
    feed = ns.subscribe(stream)
    assert feed.headers["content-type"].startswith("application/x-ndjson")
    assert feed.headers["connection"] == "close"
    subscription_id = feed.first["subscription_id"]
    assert feed.first == {"type": "subscribed", "subscription_id": subscription_id}
    assert subscription_id[0] == "s"
    ns.publish(stream, b"after")
    event = feed.next().members
    assert event == {
        "type": "event",
        "subscription_id": subscription_id,
        "payload": b64(b"after"),
    }
    (shown,) = ns.subscriptions(stream)
    since_ms = shown.pop("since_ms")
    assert abs(since_ms / 1000 - time.time()) < 60
    assert shown == {
        "subscription_id": subscription_id,
        "messages_behind": 0,
        "dropped": 0,
        "delivered": 1,
        "event_queue_depth": 1024,
        "alert": False,
    }
    feed.close()
    eventually(lambda: ns.subscriptions(stream), lambda found: found == [])
    ns.publish(stream, b"missed")
    with ns.subscribe(stream) as again:
        assert again.first["subscription_id"] != subscription_id
        ns.publish(stream, b"new")
        assert again.payloads(1) == [b"new"]


def test_a_reader_that_closes_its_side_is_gone_too(ns: Namespace) -> None:
    """felix-41: half a connection says nothing more, so nothing is sent to it."""
    stream = ns.create_stream()
    feed = ns.subscribe(stream)
    feed.socket.shutdown(socket.SHUT_WR)
    eventually(lambda: ns.subscriptions(stream), lambda found: found == [])
    feed.close()


def test_everybody_gets_everything_in_one_order(ns: Namespace) -> None:
    """felix-1, felix-11, felix-12, felix-13, felix-14, felix-18, felix-25, felix-128"""
    stream, other = ns.create_stream(), ns.create_stream()
    feeds = [ns.subscribe(stream) for _ in range(5)]
    with ns.subscribe(other) as elsewhere:
        expected = []
        for n in range(40):
            some = [b"%d-%d" % (n, part) for part in range(1 + n % 3)]
            ns.publish(stream, *some)
            expected.extend(some)
        for feed in feeds:
            assert feed.payloads(len(expected)) == expected
            feed.close()
        ns.publish(other, b"last")
        assert elsewhere.payloads(1) == [b"last"]


def test_a_reader_that_stands_still_loses_the_newest_and_only_for_itself(ns: Namespace) -> None:
    """felix-4, felix-5, felix-15, felix-20, felix-21, felix-22, felix-24, felix-27, felix-114"""
    stream = ns.create_stream(event_queue_depth=50)
    slow = ns.subscribe(stream, receive_buffer=4096)
    with ns.subscribe(stream, "event_queue_depth=4096") as fast:
        count = 2000
        publish_numbered(ns, stream, 0, count, BIG)
        seen = [number_of(item) for item in fast.take(count + count // 100, timeout_s=30)]
        assert [n for n in seen if n >= 0] == list(range(count))
    (shown,) = eventually(lambda: ns.subscriptions(stream), lambda found: len(found) == 1)
    assert (shown["messages_behind"], shown["event_queue_depth"]) == (50, 50)
    total = count + count // 100
    assert shown["delivered"] + shown["messages_behind"] + shown["dropped"] == total
    assert shown["dropped"] > 0
    kept = shown["delivered"] + shown["messages_behind"]
    numbers = [n for n in map(number_of, slow.take(kept, timeout_s=30)) if n >= 0]
    # The oldest are there without a gap, up to where it was full.
    assert numbers == list(range(len(numbers)))
    ns.publish(stream, b"5000:")
    assert number_of(slow.next()) == 5000
    assert ns.subscriptions(stream)[0]["messages_behind"] == 0
    slow.close()


def test_readers_that_stand_still_cost_no_more_than_their_buffers(
    start_broker: StartBroker,
) -> None:
    """felix-26, felix-27: 20 of them, 200 MB published, 1024 events of 32 KiB may wait."""
    broker = start_broker(memory=True)
    ns = Namespace(broker)
    stream = ns.create_stream()
    publish_numbered(ns, stream, 0, 500, BIG)
    before = broker.rss_bytes()
    stalled = [ns.subscribe(stream, receive_buffer=4096) for _ in range(20)]
    publish_numbered(ns, stream, 0, 6000, BIG)
    grown = broker.rss_bytes() - before
    # The events that wait, 32 MiB, are shared; what was handed to a connection is not.
    assert grown < 150 * 2**20, f"{grown / 2**20:.0f} MiB"
    for feed in stalled:
        feed.close()
    eventually(lambda: ns.subscriptions(stream), lambda found: found == [])


def test_events_of_any_size_are_written_a_few_at_a_time(ns: Namespace) -> None:
    """felix-132: a write holds little, however large the events after small ones are."""
    stream = ns.create_stream()
    payloads = [b"s"] * 200 + [b"L" * 2_000_000, b"M" * 2_000_000] + [b"t"] * 200
    with ns.subscribe(stream) as feed:
        ns.publish(stream, *payloads)
        assert feed.payloads(len(payloads)) == payloads


def test_lag_is_sent_to_subscribers_that_asked_for_it(ns: Namespace) -> None:
    """felix-4, felix-115, felix-116"""
    stream = ns.create_stream(event_queue_depth=2000, lag_alert_events=100)
    silent = ns.subscribe(stream, receive_buffer=4096)
    told = ns.subscribe(stream, "lag=true", receive_buffer=4096)
    count = 800
    publish_numbered(ns, stream, 0, count, BIG)
    assert [each["alert"] for each in ns.subscriptions(stream)] == [True, True]
    total = count + count // 100
    lags: list[dict[str, Any]] = []
    events = 0
    while events < total or len(lags) < 2:
        item = told.next()
        if item.members["type"] == "lag":
            lags.append(item.members)
        else:
            events += 1
    assert [lag["alert"] for lag in lags] == [True, False]
    assert set(lags[0]) == {
        "type", "subscription_id", "messages_behind", "dropped", "delivered",
        "event_queue_depth", "alert",
    }  # fmt: skip
    assert lags[0]["messages_behind"] > 100
    assert {item.members["type"] for item in silent.take(total, 30)} == {"event"}
    told.close()
    silent.close()


def test_the_end_of_a_stream_is_told_and_the_feed_ends(ns: Namespace) -> None:
    """felix-9"""
    stream = ns.create_stream()
    with ns.subscribe(stream) as feed:
        assert ns.broker.client.delete(ns.stream_path(stream)).status_code == 204
        (last,) = feed.wait_for_end()
        assert last.members["type"] == "error"
        assert last.members["error"] == "NOT_FOUND"
        assert last.members["subscription_id"] == feed.first["subscription_id"]
        assert feed.clean_end


def test_a_chronically_slow_reader_is_ended_if_so_set(ns: Namespace) -> None:
    """felix-117"""
    stream = ns.create_stream(event_queue_depth=10, disconnect_slow_ms=200)
    with (
        ns.subscribe(stream, receive_buffer=4096) as slow,
        ns.subscribe(stream, "event_queue_depth=4096") as fast,
    ):
        publish_numbered(ns, stream, 0, 1000, BIG)
        only = [fast.first["subscription_id"]]
        eventually(
            lambda: [each["subscription_id"] for each in ns.subscriptions(stream)],
            lambda found: found == only,
        )
        # At once: who does not take what it was sent is cut off soon.
        last = slow.wait_for_end()[-1].members
        assert (last["type"], last["reason"]) == ("error", "slow_subscriber")
        assert len(fast.take(1010, timeout_s=30)) == 1010


def test_a_reader_that_was_ended_and_never_reads_is_cut_off(ns: Namespace) -> None:
    """felix-42: its connection does not stay for ever with what it was sent."""
    stream = ns.create_stream(event_queue_depth=10, disconnect_slow_ms=100)
    slow = ns.subscribe(stream, receive_buffer=4096)
    publish_numbered(ns, stream, 0, 1000, BIG)
    eventually(lambda: ns.subscriptions(stream), lambda found: found == [])
    port = slow.socket.getsockname()[1]
    eventually(lambda: _is_connected(ns.broker.port, port), lambda there: not there)
    slow.close()


def _is_connected(broker_port: int, client_port: int) -> bool:
    """Does the broker's end of the connection still exist?"""
    wanted = (f":{broker_port:04X}", f":{client_port:04X}")
    with open("/proc/net/tcp", encoding="ascii") as table:
        rows = [line.split() for line in table.readlines()[1:]]
    return any(
        row[1].endswith(wanted[0]) and row[2].endswith(wanted[1]) and row[3] == "01" for row in rows
    )


def test_a_stopping_broker_ends_its_feeds(start_broker: StartBroker) -> None:
    """felix-49, felix-50"""
    broker = start_broker(memory=True)
    ns = Namespace(broker)
    feeds = [ns.subscribe("default"), ns.watch("default", "prefix=")]
    assert broker.terminate() == 0
    for feed in feeds:
        (last,) = feed.wait_for_end()
        assert (last.members["type"], last.members["error"]) == ("error", "UNAVAILABLE")
        assert feed.clean_end
        feed.close()


@pytest.mark.parametrize("query", ["event_queue_depth=0", "event_queue_depth=65537",
                                   "event_queue_depth=x", "lag=maybe", "heartbeat_ms=-1",
                                   "format=xml"])  # fmt: skip
def test_a_subscription_that_cannot_be_is_400(ns: Namespace, query: str) -> None:
    reply = ns.broker.client.get(f"{ns.stream_path('default')}/subscribe?{query}")
    assert_typed_error(reply, 400, "INVALID_ARGUMENT")


def test_what_is_pipelined_behind_a_feed_waits_and_does_not_disturb_it(ns: Namespace) -> None:
    stream = ns.create_stream()
    with ns.subscribe(stream) as feed:
        feed.socket.sendall(b"GET /v1/version HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        ns.publish(stream, b"x")
        assert feed.payloads(1) == [b"x"]


def test_heartbeats_are_blank_lines(ns: Namespace) -> None:
    with ns.subscribe(ns.create_stream(), "heartbeat_ms=100") as feed:
        feed.wait_for_blank_lines(2)


# -- server-sent events ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "headers"),
    [("", {"accept": "text/event-stream"}), ("format=sse", {}), ("format=sse", {"accept": "*/*"})],
)
def test_events_for_browsers(ns: Namespace, query: str, headers: dict[str, str]) -> None:
    """felix-9, felix-14"""
    stream = ns.create_stream()
    path = f"{ns.stream_path(stream)}/subscribe?{query}"
    with sse(ns, path, headers=headers) as events:
        name, first = next(events)
        assert (name, first["type"]) == ("subscribed", "subscribed")
        with ns.broker.new_client() as client:
            texts = [b64(b"1"), b64(b""), b64(b"\n3")]
            client.post(f"{ns.stream_path(stream)}/publish_batch", json={"payloads": texts})
            for text in texts:
                name, event = next(events)
                assert name == "event"
                assert event == first | {"type": "event", "payload": text}
            client.delete(ns.stream_path(stream))
            name, last = next(events)
            assert (name, last["error"]) == ("error", "NOT_FOUND")
            assert list(events) == []


def test_a_format_that_is_asked_for_wins_over_the_header(ns: Namespace) -> None:
    headers = [("accept", "text/event-stream")]
    with ns.subscribe(ns.create_stream(), "format=ndjson", headers=headers) as feed:
        assert feed.first["type"] == "subscribed"


def test_heartbeats_of_server_sent_events_are_comments(ns: Namespace) -> None:
    path = f"{ns.stream_path('default')}/subscribe?format=sse&heartbeat_ms=100"
    with sse(ns, path) as events:
        assert [next(events)[0] for _ in range(3)] == ["subscribed", "", ""]


# -- caches ----------------------------------------------------------------------------------------


def change(event: dict[str, Any]) -> tuple[Any, ...]:
    return event["event"], event.get("key"), event.get("value")


def test_a_watch_sees_each_change_of_its_key_and_no_other(ns: Namespace) -> None:
    """felix-80"""
    cache = ns.create_cache()
    ns.put(cache, "k", b"0")
    with ns.watch(cache, "key=k") as feed:
        version = ns.get(cache, "k")["version"]
        watch_id = feed.first["watch_id"]
        assert feed.first == {"type": "ok", "version": version, "watch_id": watch_id}
        versions = [ns.put(cache, "k", b"1").json()["version"]]
        ns.put(cache, "kk", b"other")
        ns.put(cache, "k", b"")
        ns.post(f"{ns.entry_path(cache, 'k')}/incr")  # refused: no number
        ns.broker.client.delete(ns.entry_path(cache, "k"))
        seen = [item.members for item in feed.take(3)]
        assert seen[0] == {
            "type": "cache_event", "watch_id": watch_id, "event": "put", "key": "k",
            "value": b64(b"1"), "version": versions[0],
        }  # fmt: skip
        assert [change(each) for each in seen[1:]] == [("put", "k", ""), ("delete", "k", None)]
        feed.expect_nothing()


def test_a_watch_of_a_prefix_sees_all_keys_that_begin_with_it(ns: Namespace) -> None:
    """felix-80"""
    cache = ns.create_cache()
    with ns.watch(cache, "prefix=user:") as feed, ns.watch(cache, "prefix=") as every:
        keys = ["user:1", "users", "user:", "xuser:1"]
        for key in keys:
            ns.put(cache, key, b"")
        assert [item.members["key"] for item in every.take(4)] == keys
        assert [item.members["key"] for item in feed.take(2)] == ["user:1", "user:"]
        feed.expect_nothing()


def test_expiry_and_eviction_are_sent_to_watchers_that_asked_for_them(ns: Namespace) -> None:
    """felix-80"""
    cache = ns.create_cache(max_entries=1)
    with (
        ns.watch(cache, "prefix=") as plain,
        ns.watch(cache, "prefix=&include=expire,evict") as all_,
    ):
        ns.put(cache, "a", b"")
        ns.put(cache, "b", b"", ttl_ms=0)
        ns.value(cache, "b")
        events = [item.members["event"] for item in all_.take(4)]
        assert sorted(events) == ["evict", "expire", "put", "put"]
        assert [item.members["event"] for item in plain.take(2)] == ["put", "put"]


def test_a_watch_from_an_earlier_version_begins_with_a_gap(ns: Namespace) -> None:
    cache = ns.create_cache()
    earlier = ns.put(cache, "k", b"1").json()["version"]
    now = ns.put(cache, "k", b"2").json()["version"]
    with ns.watch(cache, f"key=k&since_version={earlier}") as feed:
        gap = feed.next().members
        assert (gap["event"], gap["from_version"], gap["to_version"]) == ("gap", earlier, now)
    with ns.watch(cache, f"key=k&since_version={now}") as feed:
        ns.put(cache, "k", b"3")
        assert change(feed.next().members) == ("put", "k", b64(b"3"))


def test_a_watcher_that_stands_still_gets_a_gap_for_what_it_missed(ns: Namespace) -> None:
    """felix-80: and then goes on."""
    cache = ns.create_cache()
    value = b"x" * BIG
    feed = Feed(ns.broker.port, f"{ns.cache_path(cache)}/watch?key=k", receive_buffer=4096)
    put = {"type": "cache_put", **ns.scope, "cache": cache, "key": "k", "value": b64(value)}
    versions: list[int] = []
    for _ in range(20):
        answers = ns.broker.client.post("/v1/felix", json=[put] * 200).json()
        versions += [answer["version"] for answer in answers]
    seen: list[dict[str, Any]] = []
    while not seen or seen[-1]["version"] < versions[-1]:
        seen.append(feed.next().members)
    gaps = [event for event in seen if event["event"] == "gap"]
    assert gaps
    told = [event["version"] for event in seen if event["event"] == "put"]
    missed = [
        version
        for version in versions
        if any(gap["from_version"] < version <= gap["to_version"] for gap in gaps)
    ]
    assert sorted(told + missed) == versions
    ns.put(cache, "k", b"last")
    assert change(feed.next().members) == ("put", "k", b64(b"last"))
    feed.close()


def test_the_end_of_a_cache_ends_its_watches(ns: Namespace) -> None:
    cache = ns.create_cache()
    with ns.watch(cache, "key=k") as feed:
        ns.broker.client.delete(ns.cache_path(cache))
        (last,) = feed.wait_for_end()
        assert (last.members["error"], last.members["watch_id"]) == (
            "NOT_FOUND",
            feed.first["watch_id"],
        )


def test_a_watch_as_server_sent_events(ns: Namespace) -> None:
    cache = ns.create_cache()
    with sse(ns, f"{ns.cache_path(cache)}/watch?key=k&format=sse") as events:
        name, first = next(events)
        assert (name, first["type"]) == ("ok", "ok")
        with ns.broker.new_client() as client:
            client.put(ns.entry_path(cache, "k"), json={"value": b64(b"v")})
        name, event = next(events)
        assert (name, change(event)) == ("cache_event", ("put", "k", b64(b"v")))


@pytest.mark.parametrize(
    "query", ["", "key=a&prefix=b", "key=", "key=k&include=put", "key=k&since_version=-1"]
)
def test_a_watch_that_cannot_be_is_400(ns: Namespace, query: str) -> None:
    reply = ns.broker.client.get(f"{ns.cache_path('default')}/watch?{query}")
    assert_typed_error(reply, 400, "INVALID_ARGUMENT")
