"""Requests, streams and sockets through a broker that is not the owner, with nothing broken.

What happens when the owner goes is in test_owner_gone.py, and access control in
test_standby_access.py.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from tests.broker_process import PROMPT_S, BrokerProcess, eventually
from tests.cluster.cluster_process import ClusterProcess, MemberProcess, shared_nats
from tests.contract.checks import new_name
from tests.contract.namespaces import Namespace
from tests.contract.stream_clients import Session, SseFeed
from tests.contract.wire import Closed, Wire, encode
from tests.ndjson import ConsumeStream

KIB, MIB = 1024, 1024 * 1024


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcess]:
    # Long enough for an owner that a test pauses to stay the owner.
    env = {"PENSTOCK_CLUSTER_LEASE_MS": "60000"}
    with ClusterProcess(shared_nats(), tmp_path_factory.mktemp("cluster"), env=env) as cluster:
        yield cluster
        for broker in cluster.brokers:
            assert "Traceback" not in broker.stderr(), broker.stderr()[-5000:]


@pytest.fixture(scope="module")
def owner(cluster: ClusterProcess) -> MemberProcess:
    return cluster.owner()


@pytest.fixture(scope="module")
def standby(cluster: ClusterProcess) -> MemberProcess:
    return cluster.standby()


@pytest.fixture
def topic(owner: MemberProcess) -> str:
    return owner.create_topic(new_name())


@pytest.fixture
def ns(standby: MemberProcess) -> Namespace:
    return Namespace(standby)


def message(topic: str, value: str) -> bytes:
    return json.dumps({"topic": topic, "value": value}).encode()


def stored(broker: BrokerProcess, topic: str) -> list[str]:
    reply = broker.client.get(f"/v1/topics/{topic}/partitions/0/records?format=ndjson")
    assert reply.status_code == 200, reply.text
    return [str(json.loads(line)["value"]) for line in reply.text.splitlines()]


def metric(broker: BrokerProcess, name: str) -> float:
    lines = broker.client.get("/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith(f"{name} ")).split()[1])


# -- what both brokers say -----------------------------------------------------------------------


def test_both_brokers_tell_the_same_map_and_version(
    owner: MemberProcess, standby: MemberProcess
) -> None:
    seen, told = owner.map(), standby.map()
    assert (seen["name"], told["name"]) == (owner.name, standby.name)
    # How far each is, and how long ago it said so, changes between two requests.
    facts = [
        [(each["name"], each["url"], each["version"], each["state"]) for each in shown["brokers"]]
        for shown in (seen, told)
    ]
    assert facts[0] == facts[1]
    assert seen["shards"] == told["shards"] == [
        {"shard": 0, "owner": owner.name, "url": owner.url, "epoch": seen["shards"][0]["epoch"]}
    ]  # fmt: skip
    versions = [each.client.get("/v1/version").json() for each in (owner, standby)]
    assert versions[0] == versions[1]
    assert "2 of 3 NATS servers" in versions[0]["durability"]


def test_the_probes_of_a_standby_are_its_own(standby: MemberProcess) -> None:
    before = metric(standby, "penstock_forwarded_total")
    for path in ("/v1/healthz", "/v1/livez", "/v1/readyz", "/metrics", "/v1/cluster", "/docs"):
        assert standby.client.get(path).status_code == 200
    assert metric(standby, "penstock_forwarded_total") == before
    standby.client.get("/v1/version")
    assert metric(standby, "penstock_forwarded_total") == before + 1


# -- bodies --------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_chunked", [False, True])
def test_bodies_of_all_sizes_arrive_whole(
    standby: MemberProcess, owner: MemberProcess, topic: str, is_chunked: bool
) -> None:
    sizes = (1, 1000, 16 * KIB, 64 * KIB - 60, 64 * KIB, MIB, 7 * MIB)
    values = [chr(97 + number) * size for number, size in enumerate(sizes)]
    for value in values:
        body = message(topic, value)
        content = iter([body[:7], body[7:]]) if is_chunked else body
        headers = {"Content-Type": "application/json"}
        reply = standby.client.post("/v1/produce", content=content, headers=headers)
        assert reply.status_code == 200, reply.text
    for reader in (owner, standby):
        with reader.consume(topic, group=new_name()) as stream:
            assert [stream.next(30).value for _ in values] == values


def test_a_body_that_comes_slowly_is_forwarded_when_it_is_whole(
    standby: MemberProcess, owner: MemberProcess, topic: str
) -> None:
    body = message(topic, "slow")
    with Wire(standby.port) as wire:
        wire.send(encode(standby.port, "POST", "/v1/produce", None, f"Content-Length: {len(body)}",
                         "Expect: 100-continue"))  # fmt: skip
        assert wire.read().status == 100
        for at in range(len(body)):
            assert at or stored(owner, topic) == []
            wire.send(body[at : at + 1])
        assert wire.read().status == 200
    assert stored(owner, topic) == ["slow"]


def test_a_slow_reader_of_a_large_answer_costs_the_standby_little(
    standby: MemberProcess, topic: str
) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: standby.put(topic, f"{n}" + "x" * 4 * MIB), range(16)))
    path = f"/v1/topics/{topic}/partitions/0/records?format=ndjson"
    before = standby.rss_bytes()
    with Wire(standby.port, receive_buffer=4096) as wire:
        wire.send(encode(standby.port, "GET", path))
        time.sleep(1)  # all that can flow without a reader has flowed by then
        assert standby.rss_bytes() - before < 24 * MIB
        assert wire.read().body.count(b"\n") == 16
    assert standby.rss_bytes() - before < 32 * MIB


def test_what_waits_for_an_owner_that_stands_still_is_bounded(
    owner: MemberProcess, standby: MemberProcess, topic: str
) -> None:
    """Requests wait while the owner's process is paused, and are answered after that."""
    before = standby.rss_bytes()
    body = message(topic, "x" * MIB)
    wires = [Wire(standby.port) for _ in range(16)]
    owner.pause()
    try:
        for wire in wires:
            wire.send(encode(standby.port, "POST", "/v1/produce", body))
        with Wire(standby.port) as other:
            assert other.request("GET", "/v1/livez").status == 200
        assert standby.rss_bytes() - before < 3 * 16 * MIB
    finally:
        owner.resume()
    assert [wire.read().status for wire in wires] == [200] * 16
    for wire in wires:
        wire.socket.close()


# -- order ---------------------------------------------------------------------------------------


def test_pipelined_requests_take_effect_and_are_answered_in_order(
    standby: MemberProcess, owner: MemberProcess, topic: str
) -> None:
    """Quick ones share a connection to the owner, and others have one of their own."""
    requests = []
    for number in range(40):
        name = f"X-Request-Id: r{number}"
        if number % 4 == 3:
            path = f"/v1/topics/{topic}/partitions/0/records?format=ndjson"
            requests.append(encode(standby.port, "GET", path, None, name))
        else:
            value = str(number) * (30_000 if number % 4 == 1 else 1)
            body = message(topic, value)
            requests.append(encode(standby.port, "POST", "/v1/produce", body, name))
    with Wire(standby.port) as wire:
        wire.send(b"".join(requests))
        answers = [wire.read() for _ in requests]
    assert [answer.headers["x-request-id"] for answer in answers] == [f"r{n}" for n in range(40)]
    assert {answer.status for answer in answers} == {200}
    for number in range(3, 40, 4):
        # The read sees every produce before it, and none behind it.
        assert answers[number].body.count(b"\n") == 3 * (number // 4 + 1)
    firsts = [value[: len(str(n))] for n, value in enumerate_produced(stored(owner, topic))]
    assert firsts == [str(n) for n in range(40) if n % 4 != 3]


def enumerate_produced(values: list[str]) -> list[tuple[int, str]]:
    return list(zip((n for n in range(40) if n % 4 != 3), values, strict=True))


# -- streams and sockets -------------------------------------------------------------------------


def test_a_consumer_through_a_standby_is_acked_through_either_and_leaves_the_owner(
    standby: MemberProcess, owner: MemberProcess, topic: str
) -> None:
    with standby.consume(topic) as stream:
        for number, broker in enumerate((owner, standby)):
            owner.put(topic, str(number))
            item = stream.next()
            assert item.value == str(number)
            assert broker.ack(topic, item).status_code == 204
    # The stream has gone at the owner too: otherwise it would be given every second message.
    with owner.consume(topic, owner="other") as other:
        eventually(lambda: _gets_all(owner, other, topic))


def _gets_all(broker: BrokerProcess, stream: ConsumeStream, topic: str) -> bool:
    """Whether this consumer is given four messages in a row."""
    for _ in range(4):
        broker.put(topic, "v")
    with suppress(AssertionError):
        for item in stream.take(4, 1):
            broker.ack(topic, item, owner="other")
        return True
    return False


def test_feeds_watches_and_sockets_pass_events_at_once_and_end_with_their_client(
    ns: Namespace, standby: MemberProcess
) -> None:
    stream, cache = ns.create_stream(), ns.create_cache()
    with ns.subscribe(stream) as lines, Session(ns) as socket, ns.watch(cache, "key=k") as watch:
        sse = SseFeed(ns, stream)
        socket.subscribe(stream)
        assert len(ns.subscriptions(stream)) == 3
        for text in (b"one", b"two"):
            ns.publish(stream, text)
            assert lines.payloads(1) == sse.payloads(1) == socket.events(1) == [text]
        ns.put(cache, "k", b"v")
        assert watch.next().members["type"] == "cache_event"
        assert metric(standby, "penstock_forwarding") >= 3
        sse.socket.close()
    eventually(lambda: ns.subscriptions(stream), lambda left: left == [])
    eventually(lambda: metric(standby, "penstock_forwarding") == 0)


def test_what_is_sent_behind_a_handshake_reaches_the_owner(ns: Namespace) -> None:
    cache = ns.create_cache()
    with Session(ns) as socket:
        for number in range(200):
            socket.send(socket.message("cache_put", cache=cache, key=f"{number}", value="dg=="))
        for _ in range(200):
            assert socket.receive()["type"] == "ok"


def test_a_reader_that_reads_nothing_is_cut_off_when_the_owner_has_ended_its_feed(
    ns: Namespace, standby: MemberProcess
) -> None:
    stream = ns.create_stream(event_queue_depth=10, disconnect_slow_ms=100)
    slow = ns.subscribe(stream, receive_buffer=4096)
    for _ in range(50):
        ns.publish(stream, *[b"x" * 30_000] * 20)
    eventually(lambda: ns.subscriptions(stream), lambda left: left == [])
    eventually(lambda: metric(standby, "penstock_forwarding"), lambda left: left == 0)
    slow.close()


# -- loops and headers ---------------------------------------------------------------------------


def test_what_was_forwarded_once_is_never_forwarded_again(
    standby: MemberProcess, owner: MemberProcess, topic: str
) -> None:
    body = message(topic, "looped")
    before = metric(standby, "penstock_forwarded_total")
    with Wire(standby.port) as wire:
        refused = wire.request("POST", "/v1/produce", body, "X-Penstock-Via: b9")
        assert (refused.status, refused.headers["x-penstock-owner"]) == (503, owner.name)
        assert "retry-after" in refused.headers
    upgrade = ("Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13",
               "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==", "X-Penstock-Via: b9",
               "Sec-WebSocket-Protocol: felix.v1")  # fmt: skip
    with Wire(standby.port) as wire:
        assert wire.request("GET", "/v1/felix/ws", None, *upgrade).status == 503
    assert metric(standby, "penstock_forwarded_total") == before
    assert stored(owner, topic) == []
    with Wire(owner.port) as wire:
        assert wire.request("POST", "/v1/produce", body, "X-Penstock-Via: b9").status == 200


def test_the_standby_judges_host_and_origin_and_the_request_id_goes_along(
    standby: MemberProcess,
) -> None:
    def status(*headers: str) -> int:
        with Wire(standby.port) as wire:
            return wire.request("GET", "/v1/topics", None, *headers).status

    assert status("Origin: http://evil.example") == 403
    assert status(f"Origin: http://127.0.0.1:{standby.port}") == 200
    assert status("Host: again.example") == 400
    with Wire(standby.port) as wire:
        wire.send(b"GET /v1/topics HTTP/1.1\r\nHost: evil.example\r\n\r\n")
        assert wire.read().status == 403
    with Wire(standby.port) as wire:
        answer = wire.request("GET", "/v1/nothing", None, "X-Request-Id: mine-7")
        assert (answer.status, answer.headers["x-request-id"]) == (404, "mine-7")
        other = wire.request("GET", "/v1/topics", None)
        assert other.headers["x-request-id"] != "mine-7"


def test_headers_about_the_connection_stay_there(standby: MemberProcess, topic: str) -> None:
    """A client cannot take out what the owner acts on, nor add to what ends a body."""
    standby.client.post("/v1/tenants", json={"tenant_id": "acme"})
    scope = {"tenant_id": "acme", "namespace": "default"}
    standby.client.post("/v1/tenants/acme/namespaces", json={"namespace": "default"})
    asked = ("X-Penstock-Tenant: acme", "Connection: close, x-penstock-tenant, x-request-id",
             "Keep-Alive: timeout=1", "TE: trailers", "Proxy-Connection: close")  # fmt: skip
    with Wire(standby.port) as wire:
        answer = wire.request("GET", "/v1/topics", None, *asked)
        assert (answer.status, answer.json()["topics"]) == (200, []), scope
        assert answer.headers["connection"] == "close"
        with pytest.raises(Closed):
            wire.read()


@pytest.mark.parametrize(
    "head",
    [
        "Content-Length: 5\r\nContent-Length: 50",
        "Content-Length: 5, 50",
        "Content-Length: 5\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
        "Transfer-Encoding: xchunked",
        "Transfer-Encoding : chunked",
        "X-A: b\r\n Transfer-Encoding: chunked",
        "Content-Length: +5",
        "Content-Length: 0x5",
    ],
)
def test_no_second_request_is_smuggled_to_the_owner(
    standby: MemberProcess, owner: MemberProcess, topic: str, head: str
) -> None:
    hidden = encode(owner.port, "POST", "/v1/produce", message(topic, "smuggled"))
    with Wire(standby.port) as wire:
        first = f"POST /v1/produce HTTP/1.1\r\nHost: 127.0.0.1:{standby.port}\r\n{head}\r\n\r\n"
        wire.send(first.encode() + b"0\r\n\r\n" + hidden)
        with suppress(Closed):
            assert wire.read().status == 400
            wire.read()
            pytest.fail("the connection goes on behind a body whose end is not clear")
    assert stored(owner, topic) == []


def test_a_target_with_a_line_end_in_it_is_one_line_at_the_owner(standby: MemberProcess) -> None:
    for target in ("/v1/topics/%0d%0aX-Penstock-Via:%20b1", "/v1/topics?a=%0d%0a%0d%0aGET%20/"):
        with Wire(standby.port) as wire:
            assert wire.request("GET", target).status in (200, 400, 404)
            assert wire.request("GET", "/v1/topics").status == 200


# -- connections between brokers -----------------------------------------------------------------


def test_many_clients_share_few_connections_to_the_owner(
    standby: MemberProcess, topic: str
) -> None:
    def produce(number: int) -> None:
        with Wire(standby.port) as wire:
            for _ in range(20):
                assert wire.request("POST", "/v1/produce", message(topic, "v")).status == 200

    with ThreadPoolExecutor(32) as pool:
        list(pool.map(produce, range(32)))
    assert metric(standby, "penstock_forwarding_connections") < 64
    assert metric(standby, "penstock_forwarding") == 0


def test_a_client_that_leaves_early_ends_its_read_and_not_its_change(
    standby: MemberProcess, owner: MemberProcess, topic: str
) -> None:
    produce = encode(standby.port, "POST", "/v1/produce", message(topic, "left early"))
    owner.pause()
    try:
        for number, request in enumerate((produce, encode(standby.port, "GET", "/v1/topics"))):
            with Wire(standby.port) as wire:
                wire.send(request)
                eventually(lambda: metric(standby, "penstock_forwarding") >= 1)
                reset = struct.pack("ii", 1, 0)
                wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
            eventually(lambda: metric(standby, "penstock_forwarding") == 0)
            assert number or metric(standby, "penstock_forwarding_connections") >= 1
    finally:
        owner.resume()
    eventually(lambda: stored(owner, topic) == ["left early"])


def test_both_brokers_serve_many_kinds_of_clients_at_once(
    standby: MemberProcess, owner: MemberProcess, topic: str
) -> None:
    """Everything that one broker stores is seen through the other."""
    stop = threading.Event()
    sent: list[str] = []

    def write(broker: MemberProcess) -> None:
        number = 0
        while not stop.is_set():
            value = f"{broker.name}-{number}"
            broker.put(topic, value)
            sent.append(value)
            number += 1

    threads = [threading.Thread(target=write, args=(each,)) for each in (owner, standby)]
    with standby.consume(topic) as stream:
        for thread in threads:
            thread.start()
        seen = [stream.next(PROMPT_S) for _ in range(100)]
        stop.set()
        for thread in threads:
            thread.join()
        for item in seen:
            assert owner.ack(topic, item).status_code == 204
        while len(seen) < len(sent):
            item = stream.next()
            seen.append(item)
            assert owner.ack(topic, item).status_code == 204
    assert sorted(item.value for item in seen) == sorted(sent)
