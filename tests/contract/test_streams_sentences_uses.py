"""What streams and caches are for, from one end to the other; and values of any size."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from tests.broker_process import BrokerProcess, wait_until
from tests.contract.conftest import StartBroker
from tests.contract.namespaces import Namespace, b64, unb64
from tests.contract.stream_clients import BinarySession, Session, at_once

MIB = 2**20


@pytest.fixture
def ns(broker: BrokerProcess) -> Namespace:
    return Namespace(broker)


@pytest.mark.parametrize("size", [MIB, 5 * MIB + 1, 8 * MIB])
def test_a_large_value_or_event_comes_back_byte_for_byte(ns: Namespace, size: int) -> None:
    """felix-132: up to max_message_bytes, whichever way it goes in and out."""
    value = os.urandom(size)
    cache, stream = ns.create_cache(), ns.create_stream()
    path = ns.entry_path(cache, "k")
    with (
        Session(ns) as ws,
        BinarySession(ns) as binary,
        ns.subscribe(stream) as feed,
        ns.watch(cache, "key=k") as watch,
    ):
        binary.subscribe(stream)
        assert ws.call("cache_put", cache=cache, key="k", value=b64(value))["type"] == "ok"
        assert ns.broker.client.get(f"{path}?raw=true").content == value
        assert ns.value(cache, "k") == value
        assert unb64(watch.next().members["value"]) == value
        assert ws.publish(stream, value)["type"] == "publish_ok"
        assert binary.events(1) == feed.payloads(1) == [value]


def test_sessions_end_with_their_time_unless_they_are_used(ns: Namespace) -> None:
    """felix-133: session data with TTL; each request puts it again."""
    cache = ns.create_cache()
    with Session(ns) as app:
        for user in ("active", "away"):
            app.call("cache_put", cache=cache, key=user, value=b64(b"cart"), ttl_ms=300)
        ends = time.monotonic() + 0.3
        app.call("cache_put", cache=cache, key="active", value=b64(b"cart"), ttl_ms=60_000)
        wait_until(ends)
        assert app.call("cache_get", cache=cache, key="active")["value"] == b64(b"cart")
        assert app.call("cache_get", cache=cache, key="away")["value"] is None


def test_configuration_is_watched_by_all_who_use_it(start_broker: StartBroker) -> None:
    """felix-133: changed seldom, durable, and everybody knows at once."""
    broker = start_broker()
    ns = Namespace(broker)
    cache = ns.create_cache(durable=True)
    ns.put(cache, "limits/upload", b"10")
    services = [ns.watch(cache, "prefix=limits/") for _ in range(3)]
    operator = ns.put(cache, "limits/upload", b"20", if_version=ns.get(cache, "limits/upload")
                      ["version"])  # fmt: skip
    assert operator.status_code == 200
    for service in services:
        event = service.next().members
        assert (event["key"], unb64(event["value"])) == ("limits/upload", b"20")
        service.close()
    broker.restart(kill=True)
    assert ns.value(cache, "limits/upload") == b"20"


def test_a_rate_limit_lets_through_as_many_as_it_says_and_then_a_new_window(
    ns: Namespace,
) -> None:
    """felix-79, 133: counters that expire, counted by six clients at once."""
    cache = ns.create_cache()
    limit = 50

    def ask() -> int:
        allowed = 0
        with Session(ns) as client:
            for _ in range(20):
                counted = client.call("cache_incr", cache=cache, key="user", ttl_ms=600_000)
                allowed += counted["number"] <= limit
        return allowed

    assert sum(at_once([ask] * 6)) == limit
    with Session(ns) as client:
        assert client.call("cache_incr", cache=cache, key="other", ttl_ms=200)["number"] == 1
        wait_until(time.monotonic() + 0.2)
        assert client.call("cache_incr", cache=cache, key="other", ttl_ms=200)["number"] == 1


def test_the_latest_message_can_be_looked_up_by_who_comes_late(ns: Namespace) -> None:
    """felix-133: recently published message lookup; late is no reason to know nothing."""
    stream, cache = ns.create_stream(), ns.create_cache(max_entries=100)
    with Session(ns) as sensor, Session(ns) as dashboard:
        for reading in range(20):
            payload = b64(b"%d" % reading)
            sensor.ask(
                [
                    sensor.message("cache_put", cache=cache, key="temperature", value=payload),
                    sensor.message("publish", stream=stream, payload=payload),
                ]
            )
        dashboard.subscribe(stream)
        latest = dashboard.call("cache_get", cache=cache, key="temperature")
        assert unb64(latest["value"]) == b"19"
        sensor.publish(stream, b"20")
        assert dashboard.events(1) == [b"20"]


def test_a_cache_beside_a_database_is_invalidated_by_the_event_of_the_change(
    ns: Namespace,
) -> None:
    """felix-82, 83: readers fill it, the writer's event empties it; nobody keeps an old value."""
    stream, cache = ns.create_stream(), ns.create_cache()
    database = {"user123": b"v0"}

    def read(client: Session) -> Any:
        found = client.call("cache_get", cache=cache, key="user123")
        if found["value"] is not None:
            return unb64(found["value"])
        value = database["user123"]
        client.call("cache_put", cache=cache, key="user123", value=b64(value))
        return value

    with Session(ns) as writer, Session(ns) as one, Session(ns) as two:
        one.subscribe(stream)
        for number in range(1, 20):
            assert read(one) == read(two) == b"v%d" % (number - 1)
            database["user123"] = b"v%d" % number
            writer.publish(stream, b"changed", invalidate=[f"cache:{cache}:user123"])
            assert one.events(1) == [b"changed"]
            assert read(one) == b"v%d" % number


def test_a_client_that_breaks_the_protocol_loses_its_connection_and_nothing_else(
    ns: Namespace,
) -> None:
    """felix-22, 41: the others neither wait nor lose anything."""
    stream = ns.create_stream()
    with Session(ns) as good:
        good.subscribe(stream)
        for number in range(20):
            bad = Session(ns)
            bad.subscribe(stream)
            bad.send_raw(b"\xff" * 100)
            ns.publish(stream, b"%d" % number)
            assert good.events(1) == [b"%d" % number]
            assert bad.close_code() == 1002
            bad.socket.close()
