"""Section I: limits, driftq-69."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import quote

import pytest

from tests.broker_process import BrokerProcess
from tests.contract.checks import (
    assert_done,
    assert_error,
    assert_invalid,
    new_name,
)
from tests.contract.conftest import StartBroker


@pytest.mark.parametrize("name", ["n" * 200, "é" * 100, "a b/c?d#e%f", "…", "a.b-c_d:e@f"])
def test_a_name_at_its_limit_works_everywhere(broker: BrokerProcess, name: str) -> None:
    """driftq-69: topic, group and owner, in bodies, queries and paths."""
    broker.create_topic(name)
    broker.put(name, "v")
    with broker.consume(name, group=name, owner=name) as stream:
        item = stream.next()
        assert_done(broker.ack(name, item, name, name))
    path = f"/v1/topics/{quote(name, safe='')}"
    described = broker.client.get(path)
    assert (described.status_code, described.json()["name"]) == (200, name)
    assert_done(broker.client.delete(f"{path}/groups/{quote(name, safe='')}"))
    assert_done(broker.client.delete(path))
    assert name not in broker.client.get("/v1/topics").json()["topics"]


@pytest.mark.parametrize("name", ["n" * 201, "é" * 101, "a\x00b", "a\nb", "a\x7fb", "a\x1bb"])
def test_a_name_past_its_limit_is_400(broker: BrokerProcess, topic: str, name: str) -> None:
    """driftq-69"""
    assert_invalid(broker.client.post("/v1/topics", json={"name": name}))
    assert_invalid(broker.client.post("/v1/topics", params={"name": name}))
    for field in ("topic", "group", "owner"):
        parameters = {"topic": topic, "group": "g", "owner": "o"} | {field: name}
        assert_invalid(broker.client.get("/v1/consume", params=parameters, timeout=5))
        body = parameters | {"partition": 0, "offset": 0}
        assert_invalid(broker.client.post("/v1/ack", json=body))
    assert_invalid(broker.produce(name, "v"))
    assert_invalid(broker.produce(topic, "v", envelope={"target_topic": name}))


def test_partitions_have_a_limit(broker: BrokerProcess) -> None:
    """driftq-69"""
    name = new_name()
    for count in (1025, 10**6, 10**18):
        assert_invalid(broker.client.post("/v1/topics", json={"name": name, "partitions": count}))
    broker.create_topic(name, 1024)
    broker.put(name, "v", envelope={"partition_override": 1023})
    assert broker.client.delete(f"/v1/topics/{name}").status_code == 204


def test_a_body_past_its_limit_is_413(start_broker: StartBroker) -> None:
    """driftq-69: with a length and in chunks, on every kind of route."""
    broker = start_broker(memory=True, env={"PENSTOCK_MAX_BODY_BYTES": "10000"})
    topic = broker.create_topic("t")
    large = b'{"topic":"t","value":"' + b"x" * 10_000 + b'"}'

    def pieces() -> Iterator[bytes]:
        for start in range(0, len(large), 500):
            yield large[start : start + 500]

    for path in ("/v1/produce", "/v1/produce/batch", "/v1/topics", "/v1/ack", "/v1/extend"):
        with broker.new_client() as client:
            assert_error(client.post(path, content=large), 413, "INVALID_ARGUMENT")
        with broker.new_client() as client:
            assert_error(client.post(path, content=pieces()), 413, "INVALID_ARGUMENT")
    broker.put(topic, "x" * 9_900)
    with broker.consume(topic) as stream:
        assert stream.next().offset == 0


def test_a_batch_past_its_limit_is_refused_whole(broker: BrokerProcess, topic: str) -> None:
    """driftq-69"""
    item = b'{"topic":"%s","value":"v"}' % topic.encode()
    array = b"[" + b",".join([item] * 10_001) + b"]"
    lines = b"\n".join([item] * 10_001)
    for body in (array, lines):
        reply = broker.client.post("/v1/produce/batch", content=body)
        assert reply.status_code in (400, 413)
        assert_error(reply, reply.status_code, "INVALID_ARGUMENT")
    reply = broker.client.post("/v1/produce/batch", content=b"\n".join([item] * 10_000))
    assert reply.status_code == 200
    assert [r["offset"] for r in reply.json()["results"]] == list(range(10_000))


def test_a_long_reason_is_cut_and_not_refused(broker: BrokerProcess, topic: str) -> None:
    """driftq-69: a worker must always be able to say that it failed."""
    broker.put(topic, "v")
    with broker.consume(topic) as stream:
        assert_done(broker.nack(topic, stream.next(), reason="é" * 100_000))
        again = stream.next()
    assert again.attempts == 2
    assert 0 < len(again.last_error) < 100_000
    assert set(again.last_error) == {"é"}
