"""The cache, sentence by sentence, between real clients: time, scopes, room, many at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.broker_process import BrokerProcess, wait_until
from tests.contract.checks import new_name
from tests.contract.conftest import StartBroker
from tests.contract.namespaces import Namespace, assert_typed_error, b64, unb64
from tests.contract.stream_clients import Session, at_once, make_namespace

MISS = {"type": "cache_value", "value": None, "version": 0}


@pytest.fixture
def ns(broker: BrokerProcess) -> Namespace:
    return Namespace(broker)


@pytest.fixture(params=[False, True], ids=["ephemeral", "durable"])
def cache(ns: Namespace, request: pytest.FixtureRequest) -> str:
    return ns.create_cache(durable=request.param)


def held(ns: Namespace, cache: str) -> int:
    return int(ns.broker.client.get(ns.cache_path(cache)).json()["entries"])


# -- time to live ------------------------------------------------------------------------------


def test_a_value_lives_for_its_time_and_not_a_moment_longer(ns: Namespace, cache: str) -> None:
    """felix-58, 60, 62, 63, 64: read all the time, counted from the answer of the put."""
    with Session(ns) as client:
        began = time.monotonic()
        assert client.call("cache_put", cache=cache, key="k", value="", ttl_ms=400)["type"] == "ok"
        answered = time.monotonic()
        while True:
            asked = time.monotonic()
            found = client.call("cache_get", cache=cache, key="k")
            if found["value"] is None:
                break
            assert 0 < found["ttl_ms"] <= 400
            assert asked - answered < 0.4 + 0.002
        gone = time.monotonic()
    assert found == MISS
    assert gone - began >= 0.4 - 0.002


def test_an_expired_value_is_not_returned_under_load(ns: Namespace, cache: str) -> None:
    """felix-64: of hundreds with their times all over, none is read after its end."""
    with Session(ns) as client:
        ends: dict[str, float] = {}
        for number in range(300):
            client.call("cache_put", cache=cache, key=f"k{number}", value="", ttl_ms=number + 1)
            # Later than its end can be, since the answer came after it was counted from.
            ends[f"k{number}"] = time.monotonic() + (number + 2) / 1000
        for key, end in list(ends.items()):
            asked = time.monotonic()
            found = client.call("cache_get", cache=cache, key=key)
            assert found["value"] is None or asked < end, key


def test_a_value_without_a_ttl_stays_and_a_new_put_replaces_the_ttl(
    ns: Namespace, cache: str
) -> None:
    """felix-59, 65"""
    ns.put(cache, "stays", b"v")
    ns.put(cache, "null", b"v", ttl_ms=None)
    ns.put(cache, "cleared", b"v", ttl_ms=150)
    ns.put(cache, "cleared", b"v")
    ns.put(cache, "longer", b"v", ttl_ms=150)
    ns.put(cache, "longer", b"v", ttl_ms=60_000)
    ns.put(cache, "shorter", b"v", ttl_ms=60_000)
    ns.put(cache, "shorter", b"v", ttl_ms=150)
    ns.put(cache, "at once", b"v", ttl_ms=0)
    assert ns.get(cache, "at once") == MISS
    wait_until(time.monotonic() + 0.25)
    there = {key: ns.value(cache, key) is not None for key in ("stays", "null", "cleared")}
    assert all(there.values()), there
    assert ns.value(cache, "longer") == b"v"
    assert ns.get(cache, "shorter") == MISS
    assert "ttl_ms" not in ns.get(cache, "cleared")


def test_what_has_expired_is_removed_when_it_is_looked_for(ns: Namespace, cache: str) -> None:
    """felix-61: until then it may be counted."""
    for key in ("a", "b"):
        ns.put(cache, key, b"v", ttl_ms=50)
    wait_until(time.monotonic() + 0.15)
    assert held(ns, cache) == 2
    assert ns.get(cache, "a") == MISS
    assert held(ns, cache) == 1
    # To whoever asks for it, it is not there, whichever way that is asked.
    many = ns.post(f"{ns.cache_path(cache)}/get_many", keys=["b"]).json()["values"]
    assert many == [{"key": "b", "value": None, "version": 0}]
    ns.put(cache, "c", b"5", ttl_ms=1)
    wait_until(time.monotonic() + 0.05)
    assert ns.post(f"{ns.entry_path(cache, 'c')}/incr").json()["number"] == 1
    ns.put(cache, "d", b"v", ttl_ms=1)
    wait_until(time.monotonic() + 0.05)
    assert ns.broker.client.delete(ns.entry_path(cache, "d")).json()["deleted"] is False
    assert ns.put(cache, "d", b"v", if_not_exists=True).status_code == 200


# -- scopes ------------------------------------------------------------------------------------


def test_the_same_key_of_other_scopes_is_another_entry(broker: BrokerProcess) -> None:
    """felix-66, 67, 68, 69: nothing done in one is seen in the others, whatever it is."""
    one, two = new_name("tenant"), new_name("tenant")
    places = [make_namespace(broker, one, "prod"), make_namespace(broker, one, "staging"),
              make_namespace(broker, two, "prod")]  # fmt: skip
    scopes = [(ns, name) for ns in places for name in ("sessions", "other")]
    for ns, name in scopes:
        assert ns.post(f"{ns.path}/caches", name=name).status_code == 201
    for number, (ns, name) in enumerate(scopes):
        ns.put(name, "user123", b"%d" % number)
    watches = [ns.watch(name, "prefix=") for ns, name in scopes[1:]]
    mine, cache = scopes[0]
    mine.post(f"{mine.path}/streams", name="s")
    changes: list[Callable[[], Any]] = [
        partial(mine.put, cache, "user123", b"7"),
        partial(mine.put, cache, "user123", b"7", ttl_ms=0),
        partial(mine.post, f"{mine.entry_path(cache, 'user123')}/incr", delta=5),
        partial(mine.publish, "s", b"", invalidate=[f"cache:{cache}:user123"]),
        partial(mine.post, f"{mine.cache_path(cache)}/txn", ops=[{"op": "put", "key": "user123",
                                                                  "value": ""}]),
        partial(broker.client.delete, mine.entry_path(cache, "user123")),
        partial(broker.client.delete, mine.cache_path(cache)),
    ]  # fmt: skip
    for change in changes:
        assert change().status_code in (200, 204)
        for number, (ns, name) in enumerate(scopes[1:], 1):
            assert ns.value(name, "user123") == b"%d" % number
    for number, (ns, name) in enumerate(scopes[1:], 1):
        # The first that its watch is told of is its own.
        ns.put(name, "own", b"%d" % number)
        assert watches[number - 1].next().members["key"] == "own"
        watches[number - 1].close()


def test_a_transaction_and_an_invalidation_stay_in_their_namespace(broker: BrokerProcess) -> None:
    """felix-67, 68, 84: a cache is named within the namespace; a path is no name."""
    mine = make_namespace(broker, new_name("tenant"), "prod")
    other = make_namespace(broker, new_name("tenant"), "prod")
    for ns in (mine, other):
        ns.post(f"{ns.path}/caches", name="c")
        ns.post(f"{ns.path}/streams", name="s")
        ns.put("c", "k", b"v")
    foreign = f"{other.scope['tenant_id']}/prod/c"
    ops = [{"op": "put", "key": "k", "value": ""}, {"op": "delete", "cache": foreign, "key": "k"}]
    reply = mine.post(f"{mine.cache_path('c')}/txn", ops=ops)
    assert_typed_error(reply, 404, "NOT_FOUND")
    with mine.subscribe("s") as feed:
        reply = mine.publish("s", b"no", invalidate=["cache:c:k", f"cache:{foreign}:k"])
        assert_typed_error(reply, 404, "NOT_FOUND")
        assert (mine.value("c", "k"), other.value("c", "k")) == (b"v", b"v")
        mine.publish("s", b"yes")
        assert feed.payloads(1) == [b"yes"]


# -- room ----------------------------------------------------------------------------------------


def test_bounds_of_a_cache_hold_after_every_put(ns: Namespace) -> None:
    """felix-70, 72, 73, 74: the least recently used goes first where that is asked for."""
    cache = ns.create_cache(max_entries=10, eviction_policy="lru")
    for number in range(10):
        ns.put(cache, f"k{number}", b"v")
    ns.value(cache, "k0")
    for number in range(10, 14):
        assert ns.put(cache, f"k{number}", b"v").status_code == 200
        assert held(ns, cache) == 10
    there = [n for n in range(14) if ns.value(cache, f"k{n}") is not None]
    assert there == [0, 5, 6, 7, 8, 9, 10, 11, 12, 13]
    small = ns.create_cache(max_bytes="64KB")
    for number in range(100):
        assert ns.put(small, f"k{number}", b"x" * 2000).status_code == 200
        assert ns.broker.client.get(ns.cache_path(small)).json()["bytes"] <= 64 * 1024
        assert ns.value(small, f"k{number}") == b"x" * 2000
    assert_typed_error(ns.put(small, "huge", b"x" * 70_000), 413, "INVALID_ARGUMENT")


def test_under_memory_pressure_puts_go_on_and_memory_does_not(start_broker: StartBroker) -> None:
    """felix-70, 71: 250 MB through 16; what is evicted reads null."""
    broker = start_broker(memory=True, env={"PENSTOCK_CACHE_MEMORY_BYTES": str(16 * 2**20)})
    ns = Namespace(broker)
    other = ns.create_cache()
    value = b"x" * 2**20
    for number in range(40):
        broker.client.put(f"{ns.entry_path('default', f'w{number}')}?raw=1", content=value)
    before = broker.rss_bytes()
    for number in range(250):
        cache = other if number % 3 else "default"
        path = f"{ns.entry_path(cache, f'k{number}')}?raw=true"
        assert broker.client.put(path, content=value).status_code == 200
        assert broker.client.get(path).content == value
    assert broker.rss_bytes() - before < 48 * 2**20
    assert held(ns, other) + held(ns, "default") <= 16
    assert ns.get("default", "k0") == MISS


# -- many clients at once ------------------------------------------------------------------------


def test_clients_that_write_at_once_lose_nothing(ns: Namespace, cache: str) -> None:
    """felix-52, 53, 75, 77, 78, 79: counters, creators and swappers, eight of each."""

    def work(name: int) -> tuple[list[int], int]:
        with Session(ns) as client:
            numbers = []
            for step in range(25):
                numbers.append(client.call("cache_incr", cache=cache, key="n")["number"])
                put = client.call("cache_put", cache=cache, key="last", value=b64(b"%d" % name))
                seen = client.call("cache_get", cache=cache, key="last")
                assert seen["version"] >= put["version"]
                swap(client, step)
            won = client.call("cache_put", cache=cache, key="one", value=b64(b"%d" % name),
                              if_not_exists=True)  # fmt: skip
            assert won.get("error") in (None, "ALREADY_EXISTS"), won
            return numbers, won["type"] == "ok"

    def swap(client: Session, step: int) -> None:
        while True:
            found = client.call("cache_get", cache=cache, key="sum")
            number = int(unb64(found["value"])) if found["value"] else 0
            value = b64(b"%d" % (number + step))
            done = client.call(
                "cache_put", cache=cache, key="sum", value=value, if_version=found["version"]
            )
            if done["type"] == "ok":
                return
            assert done["error"] == "FAILED_PRECONDITION", done

    outcomes = at_once([partial(work, name) for name in range(8)])
    numbers = [number for own, _ in outcomes for number in own]
    assert sorted(numbers) == list(range(1, 201))
    assert all(own == sorted(own) for own, _ in outcomes)
    assert ns.value(cache, "n") == b"200"
    assert ns.value(cache, "sum") == b"%d" % (8 * sum(range(25)))
    [winner] = [name for name, (_, won) in enumerate(outcomes) if won]
    assert ns.value(cache, "one") == b"%d" % winner
    last = {ns.value(cache, "last") for _ in range(3)}
    assert len(last) == 1
    assert last <= {b"%d" % name for name in range(8)}


def test_no_reader_sees_half_of_a_transaction(ns: Namespace, cache: str) -> None:
    """felix-54, 81: money moves between accounts, and all who look count the same sum."""
    keys = [f"a{n}" for n in range(5)]
    ops = [{"op": "put", "key": key, "value": b64(b"100")} for key in keys]
    assert ns.post(f"{ns.cache_path(cache)}/txn", ops=ops).status_code == 200

    def move(name: int) -> None:
        with Session(ns) as client:
            for step in range(40):
                give, take = keys[(name + step) % 5], keys[(name + 2 * step + 1) % 5]
                moved = [{"op": "incr", "key": give, "delta": -step},
                         {"op": "incr", "key": take, "delta": step}]  # fmt: skip
                assert client.call("cache_txn", cache=cache, ops=moved)["type"] == "ok"

    def look(_: int) -> None:
        with Session(ns) as client:
            for _ in range(60):
                found = client.call("cache_get_many", cache=cache, keys=keys)["values"]
                assert sum(int(unb64(each["value"])) for each in found) == 500

    with Session(ns) as watcher:
        begun = watcher.call("cache_watch", cache=cache, prefix="a")
        at_once([partial(move, n) for n in range(3)] + [partial(look, n) for n in range(3)])
        events = watcher.receive_all(3 * 40 * 2)
    versions = [event["version"] for event in events]
    assert versions == list(range(begun["version"] + 1, begun["version"] + 241))


def test_every_watcher_is_told_of_every_change_of_its_key_in_order(
    ns: Namespace, cache: str
) -> None:
    """felix-80: one notification each, with the version that its writer was given."""
    watchers = [Session(ns) for _ in range(3)]
    for watcher in watchers:
        watcher.call("cache_watch", cache=cache, key="k")

    def write(name: int) -> list[int]:
        with Session(ns) as client:
            versions = []
            for step in range(30):
                client.call("cache_put", cache=cache, key=f"other {name}", value="")
                if step % 3:
                    done = client.call("cache_put", cache=cache, key="k", value="")
                else:
                    done = client.call("cache_incr", cache=cache, key=f"n {name}")
                    done = client.call("cache_put", cache=cache, key="k", value="", ttl_ms=9999)
                versions.append(done["version"])
            return versions

    written = at_once([partial(write, name) for name in range(3)])
    every = sorted(version for own in written for version in own)
    for watcher in watchers:
        events = watcher.receive_all(len(every))
        assert [event["version"] for event in events] == every
        assert {event["key"] for event in events} == {"k"}
        watcher.expect_nothing(20)
        watcher.socket.close()


def test_after_the_event_nobody_reads_what_it_invalidated(ns: Namespace, cache: str) -> None:
    """felix-82, 83: neither the publisher after its ack nor a subscriber after the event."""
    stream = ns.create_stream()
    target = f"cache:{cache}:user123"
    with Session(ns) as publisher, Session(ns) as subscriber, Session(ns) as reader:
        subscriber.subscribe(stream)
        watch = publisher.call("cache_watch", cache=cache, key="user123", request_id=1)
        assert watch["type"] == "ok"
        for number in range(40):
            reader.call("cache_put", cache=cache, key="user123", value=b64(b"%d" % number))
            assert publisher.receive()["event"] == "put"
            publisher.send(
                publisher.message("publish", stream=stream, payload="", invalidate=[target])
            )
            assert subscriber.events(1) == [b""]
            assert reader.call("cache_get", cache=cache, key="user123") == MISS
            kinds = {publisher.receive().get("event", "ack") for _ in range(2)}
            assert kinds == {"ack", "delete"}
