"""Clients of a standby while the owner is killed, stopped or paused, and while NATS is away."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.broker_process import BrokerProcess, eventually
from tests.cluster.cluster_process import ClusterProcess, MemberProcess, shared_nats
from tests.cluster.nats_servers import nats_servers
from tests.contract.checks import new_name
from tests.contract.namespaces import Namespace
from tests.contract.stream_clients import Session
from tests.contract.wire import Wire, encode
from tests.websocket import Closed

LEASE_MS = 1500


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcess]:
    env = {"PENSTOCK_CLUSTER_LEASE_MS": str(LEASE_MS), "PENSTOCK_FORWARD_WAIT_MS": "20000"}
    with ClusterProcess(shared_nats(), tmp_path_factory.mktemp("cluster"), env=env) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared: ClusterProcess) -> Iterator[ClusterProcess]:
    """The cluster of the module, whole again for each test."""
    for broker in shared.brokers:
        if not broker.is_running():
            broker.start()
    shared.wait_until_whole()
    yield shared
    for broker in shared.brokers:
        assert "Traceback" not in broker.stderr(), broker.stderr()[-5000:]


def message(topic: str, value: str) -> bytes:
    return json.dumps({"topic": topic, "value": value}).encode()


def stored(broker: BrokerProcess, topic: str) -> list[str]:
    reply = broker.client.get(f"/v1/topics/{topic}/partitions/0/records?format=ndjson")
    assert reply.status_code == 200, reply.text
    return [str(json.loads(line)["value"]) for line in reply.text.splitlines()]


def metric(broker: BrokerProcess, name: str) -> float:
    lines = broker.client.get("/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith(f"{name} ")).split()[1])


def test_a_change_under_way_when_the_owner_is_killed_is_unknown_and_never_sent_twice(
    cluster: ClusterProcess,
) -> None:
    owner, standby = cluster.owner(), cluster.standby()
    topic = owner.create_topic(new_name())
    owner.pause()
    with ThreadPoolExecutor(9) as pool:
        changes = [pool.submit(standby.produce, topic, f"{n}") for n in range(8)]
        read = pool.submit(standby.client.get, "/v1/topics")
        eventually(lambda: metric(standby, "penstock_forwarding") >= 9)
        before = metric(standby, "penstock_forwarded_unknown_total")
        owner.kill()
        for change in changes:
            reply = change.result()
            assert reply.status_code == 503
            assert "outcome is not known" in reply.json()["message"]
            assert "retry-after" in reply.headers
        # A read is sent again, to the next owner.
        assert topic in read.result().json()["topics"]
    assert metric(standby, "penstock_forwarded_unknown_total") - before == 8
    assert cluster.owner() is standby
    found = stored(standby, topic)
    assert len(set(found)) == len(found)


def test_a_request_that_was_not_sent_yet_waits_for_the_next_owner(
    cluster: ClusterProcess,
) -> None:
    owner, standby = cluster.owner(), cluster.standby()
    topic = owner.create_topic(new_name())
    standby.put(topic, "before")
    owner.kill()
    values = [f"{n}" for n in range(8)]
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda value: standby.produce(topic, value), values))
    # Some were written to a connection before its end was known.
    for reply in replies:
        assert reply.status_code == 200 or "outcome is not known" in reply.text
    done = [value for value, reply in zip(values, replies, strict=True) if reply.is_success]
    assert standby.produce(topic, "after").status_code == 200
    assert sorted(stored(standby, topic)) == sorted(["before", "after", *done])


class Load:
    """Produces through one broker until it is stopped, with a key for each value, and repeats
    nothing."""

    def __init__(self, broker: MemberProcess, topic: str, name: str) -> None:
        self.acknowledged: list[str] = []
        self.refused: list[str] = []
        self.longest_s = 0.0
        self._stop = threading.Event()
        self._url = f"{broker.url}/v1/produce"
        self._thread = threading.Thread(target=self._run, args=(topic, name))
        self._thread.start()

    def _run(self, topic: str, name: str) -> None:
        with httpx.Client(timeout=60, trust_env=False) as client:
            number = 0
            while not self._stop.is_set():
                value = f"{name}-{number}"
                began = time.monotonic()
                reply = client.post(self._url, content=message(topic, value))
                self.longest_s = max(self.longest_s, time.monotonic() - began)
                (self.acknowledged if reply.is_success else self.refused).append(
                    value if reply.is_success else reply.text
                )
                number += 1

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def goes_on(load: Load, acknowledged: int) -> bool:
    """Whether more was acknowledged than when this was counted."""
    return len(load.acknowledged) > acknowledged + 10


def test_an_owner_that_is_stopped_under_load_hands_over_without_an_error(
    cluster: ClusterProcess, record_property: Any
) -> None:
    owner, standby = cluster.owner(), cluster.standby()
    topic = owner.create_topic(new_name())
    loads = [Load(standby, topic, f"c{number}") for number in range(8)]
    try:
        eventually(lambda: min(len(load.acknowledged) for load in loads) > 20)
        assert owner.terminate() == 0
        seen = [len(load.acknowledged) for load in loads]
        eventually(
            lambda: all(
                len(load.acknowledged) > n + 20 for load, n in zip(loads, seen, strict=True)
            )
        )
    finally:
        for load in loads:
            load.stop()
    assert [load.refused for load in loads] == [[]] * 8
    record_property("hand_over_s", max(load.longest_s for load in loads))
    assert max(load.longest_s for load in loads) < 10
    sent = [value for load in loads for value in load.acknowledged]
    assert sorted(stored(standby, topic)) == sorted(sent)


def test_an_owner_that_was_paused_acknowledges_nothing_and_shows_nothing_old(
    cluster: ClusterProcess,
) -> None:
    owner, other = cluster.owner(), cluster.standby()
    ns, new = Namespace(owner), Namespace(other)
    topic = owner.create_topic(new_name())
    stream, durable, cache = ns.create_stream(), ns.create_cache(), ns.create_cache(durable=False)
    for each in (durable, cache):
        assert ns.put(each, "k", b"old").status_code == 200
    reads = [f"/v1/topics/{topic}", *(ns.entry_path(each, "k") for each in (durable, cache))]
    changes = [
        encode(owner.port, "POST", "/v1/produce", message(topic, "while paused")),
        encode(owner.port, "PUT", ns.entry_path(cache, "k"), b'{"value": "bGF0ZQ=="}'),
        encode(owner.port, "PUT", ns.entry_path(durable, "k"), b'{"value": "bGF0ZQ=="}'),
        encode(owner.port, "POST", f"{ns.stream_path(stream)}/publish", b'{"payload": "bGF0ZQ=="}'),
    ]
    consumer = owner.open_consume(topic)
    feed, socket = ns.subscribe(stream), Session(ns)
    socket.subscribe(stream)
    wires = [Wire(owner.port) for _ in range(len(reads) + len(changes))]
    for wire in wires:
        assert wire.request("GET", "/v1/healthz").status == 200
    owner.pause()
    try:
        for wire, path in zip(wires, reads, strict=False):
            wire.send(encode(owner.port, "GET", path))
        for wire, change in zip(wires[len(reads) :], changes, strict=True):
            wire.send(change)
        eventually(lambda: other.names_owner() == other.name, timeout_s=60)
        for each in (durable, cache):
            assert new.put(each, "k", b"new").status_code == 200
        other.put(topic, "after the takeover")
    finally:
        owner.resume()
    answers = [wire.read() for wire in wires]
    # Read through a broker that has lost the shard: what is new, or no answer.
    for answer in answers[1 : len(reads)]:
        assert answer.status == 503 or answer.json()["value"] == "bmV3", answer
    assert {answer.status for answer in answers[len(reads) :]} == {503}
    found = stored(other, topic)
    assert "after the takeover" in found
    assert consumer.wait_for_end() is not None
    assert feed.wait_for_end()[-1].members["type"] == "error"
    assert socket.receive()["type"] == "error"
    with pytest.raises(Closed) as ended:
        socket.receive()
    assert (ended.value.code, bool(ended.value.reason)) == (1001, True)
    eventually(lambda: owner.names_owner() == other.name)
    assert stored(owner, topic) == found
    for plain in (consumer.socket, feed.socket, socket.socket, *(wire.socket for wire in wires)):
        plain.close()


def test_streams_through_a_standby_end_with_a_reason_when_the_owner_is_killed(
    cluster: ClusterProcess,
) -> None:
    owner, standby = cluster.owner(), cluster.standby()
    ns = Namespace(standby)
    topic, stream = owner.create_topic(new_name()), ns.create_stream()
    with standby.consume(topic) as consumer, ns.subscribe(stream) as feed, Session(ns) as socket:
        socket.subscribe(stream)
        owner.kill()
        assert consumer.wait_for_end() == []
        assert consumer.clean_end
        last = feed.wait_for_end()[-1].members
        assert (last["type"], "owner" in last["message"]) == ("error", True)
        with pytest.raises(Closed) as ended:
            socket.receive()
        assert (ended.value.code, "connect again" in ended.value.reason) == (1001, True)
    with standby.consume(topic) as again:
        standby.put(topic, "v")
        assert again.next(30).value == "v"


def test_while_nats_is_away_nothing_is_lost_and_all_goes_on_by_itself(tmp_path: Path) -> None:
    """Two of three servers are killed, so that the stream has no quorum."""
    env = {"PENSTOCK_FORWARD_WAIT_MS": "3000"}
    with (
        nats_servers(tmp_path / "nats", max_file_store="20GB") as servers,
        ClusterProcess(servers, tmp_path / "brokers", env=env) as cluster,
    ):
        broker = cluster.standby()
        topic = broker.create_topic("t")
        loads = [Load(each, topic, each.name) for each in cluster.brokers]
        try:
            eventually(lambda: min(len(load.acknowledged) for load in loads) > 10)
            for node in servers.nodes[:2]:
                node.kill()
            time.sleep(10)  # the outage is the subject
            seen = [len(load.acknowledged) for load in loads]
            for number in range(2):
                servers.restart(number)
            eventually(lambda: all(map(goes_on, loads, seen)), timeout_s=90)
        finally:
            for load in loads:
                load.stop()
        for text in {text for load in loads for text in load.refused}:
            assert json.loads(text)["error"] == "UNAVAILABLE"
        found = stored(cluster.owner(), topic)
        assert len(set(found)) == len(found)
        assert {value for load in loads for value in load.acknowledged} <= set(found)
