"""Section I: the surface, driftq-63 to driftq-67."""

from __future__ import annotations

import re
import signal
import socket
import threading
import time

import httpx
import pytest

from tests.broker_process import BrokerProcess
from tests.contract.checks import (
    assert_done,
    assert_error,
    assert_not_found,
    new_name,
)
from tests.contract.conftest import MakeTopic, StartBroker
from tests.contract.wire import Wire

# -- driftq-63: health and version -------------------------------------------------------------


def test_healthz(broker: BrokerProcess) -> None:
    """driftq-63"""
    reply = broker.client.get("/v1/healthz")
    assert (reply.status_code, reply.json()) == (200, {"status": "ok"})


def test_version(broker: BrokerProcess) -> None:
    """driftq-63"""
    reply = broker.client.get("/v1/version")
    assert reply.status_code == 200
    body = reply.json()
    assert body["version"]
    assert isinstance(body["version"], str)
    assert body["commit"]
    assert isinstance(body["commit"], str)
    assert body["wal_enabled"] is True
    assert "commit" in [v for k, v in body.items() if "fsync" in k], body
    assert body["max_message_bytes"] == 8 * 2**20


@pytest.mark.parametrize("probe", ["/v1/livez", "/v1/readyz"])
def test_probes(broker: BrokerProcess, probe: str) -> None:
    """driftq-63"""
    assert broker.client.get(probe).status_code == 200


def test_openapi_describes_every_route_of_the_documents(broker: BrokerProcess) -> None:
    """driftq-63"""
    reply = broker.client.get("/docs/openapi.json")
    assert reply.status_code == 200
    paths = reply.json()["paths"]
    for route in ("healthz", "version", "topics", "produce", "consume", "ack", "nack", "extend"):
        assert f"/v1/{route}" in paths
    assert {"get", "post"} <= set(paths["/v1/topics"])


# -- driftq-64, driftq-65: errors --------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/produce", {"POST"}),
        ("DELETE", "/v1/produce", {"POST"}),
        ("PUT", "/v1/ack", {"POST"}),
        ("GET", "/v1/nack", {"POST"}),
        ("GET", "/v1/extend", {"POST"}),
        ("POST", "/v1/consume", {"GET"}),
        ("PUT", "/v1/topics", {"GET", "POST"}),
        ("POST", "/v1/healthz", {"GET"}),
        ("DELETE", "/v1/version", {"GET"}),
        ("GET", "/v1/produce/batch", {"POST"}),
        ("GET", "/v1/ack/batch", {"POST"}),
        ("GET", "/v1/release", {"POST"}),
        ("GET", "/v1/release/batch", {"POST"}),
        ("PUT", "/v1/topics/some", {"GET", "PATCH", "DELETE"}),
        ("GET", "/v1/idempotency/begin", {"POST"}),
        ("GET", "/v1/transactions", {"POST"}),
    ],
)
def test_a_wrong_method_is_405_with_allow(
    broker: BrokerProcess, method: str, path: str, allowed: set[str]
) -> None:
    """driftq-64"""
    reply = broker.client.request(method, path)
    assert_error(reply, 405, "METHOD_NOT_ALLOWED")
    named = {word.strip() for word in reply.headers["allow"].split(",")}
    assert allowed <= named <= allowed | {"HEAD", "OPTIONS"}


@pytest.mark.parametrize("path", ["/healthz", "/topics", "/produce", "/consume", "/ack", "/nack"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_unversioned_routes_are_404_and_point_to_v1(
    broker: BrokerProcess, method: str, path: str
) -> None:
    """driftq-64"""
    reply = broker.client.request(method, path)
    assert_not_found(reply)
    assert "/v1" in reply.json()["message"]


@pytest.mark.parametrize(
    "path", ["/v1", "/v1/", "/v1/nothing", "/v2/topics", "/v1/produce/", "/v1/topics/a/b/c", "/%00"]
)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_unknown_paths_are_404(broker: BrokerProcess, method: str, path: str) -> None:
    """driftq-64"""
    assert_not_found(broker.client.request(method, path))


DEEP = b"[" * 200_000
WRONG: list[tuple[str, str, bytes]] = [
    ("POST", "/v1/produce", DEEP),
    ("POST", "/v1/produce", b'{"a":' * 100_000),
    ("POST", "/v1/produce", b'{"topic":"t","value":"v","envelope":' + b"[" * 50_000),
    ("POST", "/v1/topics", DEEP),
    ("POST", "/v1/topics", b'{"name":"x","partitions":' + b"9" * 400 + b"}"),
    ("POST", "/v1/topics", b'{"name":"x","partitions":1e999}'),
    ("POST", "/v1/topics", b'{"name":"\\ud800"}'),
    ("POST", "/v1/ack", b'{"topic":"t","group":"g","owner":"o","partition":0,"offset":1e400}'),
    ("POST", "/v1/ack", b"\x00"),
    ("POST", "/v1/nack", b"[]"),
    ("POST", "/v1/extend", b"null"),
    ("GET", "/v1/consume", b"{"),
    ("POST", "/v1/topics?name=%ff%fe", b""),
    ("POST", "/v1/produce?topic=%ff&value=%ff", b""),
    ("POST", "/v1/ack?topic=t&group=g&owner=o&partition=0&offset=" + "9" * 300, b""),
    ("POST", "/v1/ack?topic=t&group=g&owner=o&partition=%D9%A3&offset=0", b""),
    ("GET", "/v1/consume?topic=%00&group=g&owner=o", b""),
    ("POST", "/v1/idempotency/begin", b"7"),
    ("POST", "/v1/idempotency/commit", DEEP),
]


@pytest.mark.parametrize(("method", "target", "body"), WRONG)
def test_every_wrong_request_has_the_common_error_body(
    broker: BrokerProcess, method: str, target: str, body: bytes
) -> None:
    """driftq-65: none is a 500, and the broker lives."""
    reply = broker.client.request(method, target, content=body, timeout=5)
    assert reply.status_code in (400, 404), (reply.status_code, reply.text)
    codes = {400: "INVALID_ARGUMENT", 404: "NOT_FOUND"}
    assert_error(reply, reply.status_code, codes[reply.status_code])
    assert broker.client.get("/v1/healthz").status_code == 200


@pytest.mark.parametrize("path", ["/v1/topics", "/v1/produce", "/v1/nothing", "/v1/healthz"])
def test_a_request_id_is_echoed_or_made_up(broker: BrokerProcess, path: str) -> None:
    """driftq-65: on answers of every kind."""
    sent = "req-42/äö".encode("ascii", "ignore").decode()
    reply = broker.client.get(path, headers={"X-Request-Id": sent})
    assert reply.headers["x-request-id"] == sent
    first = broker.client.get(path).headers["x-request-id"]
    second = broker.client.get(path).headers["x-request-id"]
    assert first
    assert second
    assert first != second


def test_made_up_request_ids_differ(broker: BrokerProcess) -> None:
    """driftq-65: also those of refused requests, and of two that arrive side by side."""
    foreign = {"Origin": "https://evil.example"}
    ids = [broker.client.get("/v1/topics", headers=foreign).headers["x-request-id"]]
    ids += [broker.client.get("/v1/topics", headers=foreign).headers["x-request-id"]]
    head = b"POST /v1/produce HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 2\r\n\r\n"
    with Wire(broker.port) as one, Wire(broker.port) as two:
        for wire in (one, two):
            wire.send(head)
        assert broker.client.get("/v1/healthz").status_code == 200
        for wire in (one, two):
            wire.send(b"{}")
            ids.append(wire.read().headers["x-request-id"])
    assert len(set(ids)) == 4, ids


@pytest.mark.parametrize("sent", [b"x" * 129, b"caf\xc3\xa9", b"a\tb"])
@pytest.mark.parametrize("path", ["/v1/topics", "/v1/produce"])
def test_an_unfit_request_id_is_replaced(broker: BrokerProcess, path: str, sent: bytes) -> None:
    """driftq-69"""
    reply = broker.client.post(path, headers=[(b"X-Request-Id", sent)], content=b"{}")
    made = dict(reply.headers.raw)[b"x-request-id"]
    assert made != sent
    assert 0 < len(made) <= 128


def test_a_request_id_of_128_characters_is_kept(broker: BrokerProcess) -> None:
    """driftq-69"""
    sent = "x" * 128
    reply = broker.client.post("/v1/produce", headers={"X-Request-Id": sent}, content=b"{}")
    assert reply.headers["x-request-id"] == sent


# -- driftq-66: SIGTERM ------------------------------------------------------------------------


def test_sigterm_ends_streams_loses_nothing_and_exits_0(start_broker: StartBroker) -> None:
    """driftq-66: with producers at work, a reader, and one that does not read."""
    broker = start_broker()
    assert broker.process is not None
    topic = broker.create_topic("t")
    produced: set[str] = set()
    stop = threading.Event()

    def produce(writer: int) -> None:
        with broker.new_client() as client:
            for n in range(100_000):
                value = f"{writer}:{n}"
                try:
                    reply = client.post("/v1/produce", json={"topic": topic, "value": value})
                except httpx.HTTPError:
                    return
                if reply.status_code != 200:
                    assert_error(reply, 503, "UNAVAILABLE")
                    return
                produced.add(value)
                if stop.is_set():
                    return

    stalled = broker.open_consume(topic, "stalled", receive_buffer=4096)
    reader = broker.open_consume(topic, "reader")
    threads = [threading.Thread(target=produce, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    reader.take(50)
    started = time.monotonic()
    broker.process.send_signal(signal.SIGTERM)
    reader.wait_for_end(5)
    assert broker.process.wait(10) == 0
    took = time.monotonic() - started
    stop.set()
    for thread in threads:
        thread.join()
    assert took < 3, took
    assert reader.clean_end, "the stream was cut off, not ended"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", broker.port), 1).close()
    reader.close()
    stalled.close()
    broker.kill()
    broker.start()
    with broker.consume(topic, "audit") as stream:
        stored = {item.value for item in stream.take(len(produced))}
        while stream.has_item:
            stored.add(stream.next().value)
    assert produced <= stored


def test_sigterm_without_any_client_exits_0_quickly(start_broker: StartBroker) -> None:
    """driftq-66"""
    broker = start_broker(memory=True)
    started = time.monotonic()
    assert broker.terminate() == 0
    assert time.monotonic() - started < 3


# -- driftq-67: metrics ------------------------------------------------------------------------

Samples = list[tuple[str, dict[str, str], float]]


def samples(broker: BrokerProcess) -> Samples:
    reply = broker.client.get("/metrics")
    assert reply.status_code == 200
    assert reply.headers["content-type"].startswith("text/plain")
    found: Samples = []
    for line in reply.text.splitlines():
        match = re.match(r"^(\w+)(?:\{(.*)\})? (\S+)(?: \d+)?$", line)
        if match:
            labels = dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', match.group(2) or ""))
            found.append((match.group(1), labels, float(match.group(3))))
    assert found
    return found


def metric(broker: BrokerProcess, words: str, **labels: str) -> float:
    """The sum of the penstock_ samples whose name matches and whose labels include these."""
    chosen = [
        value
        for name, seen, value in samples(broker)
        if name.startswith("penstock_")
        and re.search(words, name)
        and not name.endswith("_created")
        and labels.items() <= seen.items()
    ]
    return sum(chosen) if chosen else float("nan")


def test_metrics_count_in_flight_and_lag_by_group_and_partition(
    broker: BrokerProcess, make_topic: MakeTopic
) -> None:
    """driftq-67"""
    topic = make_topic(2)
    for n in range(5):
        broker.put(topic, str(n), envelope={"partition_override": n % 2})
    where = {"topic": topic, "group": "g"}
    with broker.consume(topic) as stream:
        items = stream.take(5)
        assert metric(broker, "in_?flight", **where, partition="0") == 3
        assert metric(broker, "in_?flight", **where, partition="1") == 2
        assert metric(broker, "lag", **where, partition="0") == 3
        for item in items:
            if item.partition == 0:
                assert_done(broker.ack(topic, item))
    assert metric(broker, "in_?flight", **where, partition="0") == 0
    assert metric(broker, "lag", **where, partition="0") == 0
    assert metric(broker, "lag", **where, partition="1") == 2


def test_metrics_count_dead_letters_and_rejections(start_broker: StartBroker) -> None:
    """driftq-67"""
    broker = start_broker("--profile", "contract", memory=True)
    topic = broker.create_topic("t")
    broker.put(topic, "poison", envelope={"retry_policy": {"max_attempts": 1}})
    with broker.consume(topic) as stream:
        assert_done(broker.nack(topic, stream.next()))
    assert metric(broker, "dlq|dead_letter", topic=topic, group="g") == 1
    broker.put(topic, "a")
    broker.put(topic, "b")
    for _ in range(3):
        assert broker.produce(topic, "c").status_code == 429
    assert metric(broker, "reject", topic=topic, reason="partition_msgs") == 3


@pytest.mark.parametrize("what", ["produce", "commit", "deliver"])
def test_metrics_time_produce_commit_and_delivery(
    broker: BrokerProcess, topic: str, what: str
) -> None:
    """driftq-67"""
    name = rf"{what}\w*_(seconds|ms|duration)\w*_count$"
    broker.put(topic, "v")
    with broker.consume(topic) as stream:
        stream.next()
        before = metric(broker, name)
        broker.put(topic, "v")
        stream.next()
    assert metric(broker, name) > before


def test_metric_labels_are_escaped(broker: BrokerProcess) -> None:
    """driftq-67"""
    topic = broker.create_topic(new_name('quoted"\\'))
    broker.put(topic, "v")
    with broker.consume(topic) as stream:
        stream.next()
        escaped = topic.replace("\\", "\\\\").replace('"', '\\"')
        assert metric(broker, "in_?flight", topic=escaped, group="g") == 1
