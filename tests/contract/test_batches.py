"""Batches of produces and acks: driftq-71."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.broker_process import BrokerProcess, settle_body
from tests.contract.checks import assert_invalid, assert_nothing_stored, new_name
from tests.contract.conftest import MakeTopic, StartBroker
from tests.ndjson import Item

FORMS = ["array", "ndjson", "ndjson without a last line end", "array after blanks"]


def encode(items: list[Any], form: str) -> bytes:
    if form == "array":
        return json.dumps(items).encode()
    if form == "array after blanks":
        return b" \n\t" + json.dumps(items, indent=1).encode() + b"\n"
    lines = "\n".join(json.dumps(item) for item in items)
    return (lines + ("\n" if form == "ndjson" else "")).encode()


def send(broker: BrokerProcess, route: str, items: list[Any], form: str = "array") -> list[Any]:
    reply = broker.client.post(f"/v1/{route}/batch", content=encode(items, form))
    assert reply.status_code == 200, reply.text
    body = reply.json()
    assert set(body) == {"results"}
    assert len(body["results"]) == len(items)
    results: list[Any] = body["results"]
    return results


def assert_failed(result: dict[str, Any], code: int, error: str) -> None:
    assert (result["code"], result["error"]) == (code, error), result
    assert result["message"], result


def stored(broker: BrokerProcess, topic: str, count: int) -> list[Item]:
    with broker.consume(topic, group=new_name("audit")) as stream:
        items = stream.take(count)
        stream.expect_nothing(100)
    return sorted(items, key=lambda item: item.offset)


@pytest.mark.parametrize("form", FORMS)
def test_produce_gives_a_result_per_item_in_order(
    broker: BrokerProcess, make_topic: MakeTopic, form: str
) -> None:
    """driftq-71"""
    topic, other = make_topic(2), make_topic()
    items = [
        {"topic": topic, "value": "0", "envelope": {"partition_override": 1}},
        {"topic": other, "value": "1", "key": "k"},
        {"topic": topic, "value": "2\n\u2028", "envelope": {"run_id": "r"}},
    ]
    assert send(broker, "produce", items, form) == [
        {"status": "produced", "topic": topic, "partition": 1, "offset": 0},
        {"status": "produced", "topic": other, "partition": 0, "offset": 0},
        {"status": "produced", "topic": topic, "partition": 0, "offset": 1},
    ]
    first, second = stored(broker, topic, 2)
    assert (first.value, first.partition) == ("0", 1)
    assert (second.value, second.envelope) == ("2\n\u2028", {"run_id": "r"})
    assert stored(broker, other, 1)[0].key == "k"


@pytest.mark.parametrize("form", FORMS)
def test_produces_stand_or_fall_alone(broker: BrokerProcess, topic: str, form: str) -> None:
    """driftq-71: each fault of driftq-10 and driftq-11, between two that are stored."""
    good = {"topic": topic, "value": "good"}
    bad: list[tuple[dict[str, Any], int, str]] = [
        ({"topic": topic}, 400, "INVALID_ARGUMENT"),
        ({"topic": topic, "value": 1}, 400, "INVALID_ARGUMENT"),
        ({"topic": topic, "value": "v", "extra": 1}, 400, "INVALID_ARGUMENT"),
        ({"topic": topic, "value": "v", "envelope": {"labels": {}}}, 400, "INVALID_ARGUMENT"),
        (
            {"topic": topic, "value": "v", "envelope": {"partition_override": 1}},
            400,
            "INVALID_ARGUMENT",
        ),
        ({"topic": "nowhere", "value": "v"}, 404, "NOT_FOUND"),
        (
            {"topic": topic, "value": "v", "envelope": {"deadline": "2020-01-01T00:00:00Z"}},
            400,
            "INVALID_ARGUMENT",
        ),
    ]
    items = [good, *[item for item, _, _ in bad], good]
    results = send(broker, "produce", items, form)
    assert [results[0]["offset"], results[-1]["offset"]] == [0, 1]
    for result, (_, code, error) in zip(results[1:-1], bad, strict=True):
        assert_failed(result, code, error)
    assert [item.value for item in stored(broker, topic, 2)] == ["good", "good"]


def test_limits_hold_within_a_batch(start_broker: StartBroker) -> None:
    """driftq-71: two fit, the third is told so, another partition is not concerned."""
    broker = start_broker("--profile", "contract", "--max-message-bytes", "10", memory=True)
    topic = broker.create_topic("t", 2)
    one = {"topic": topic, "value": "v"}
    elsewhere = one | {"envelope": {"partition_override": 1}}
    results = send(
        broker, "produce", [one, one, one, elsewhere, {"topic": topic, "value": "v" * 11}]
    )
    assert [r.get("status") for r in results] == ["produced", "produced", None, "produced", None]
    assert_failed(results[2], 429, "RESOURCE_EXHAUSTED")
    assert results[2]["limit"] == "partition_msgs"
    assert results[2]["retry_after_ms"] > 0
    assert_failed(results[4], 413, "INVALID_ARGUMENT")


MALFORMED = {
    "array cut off": b'[{"topic": "%s", "value": "v"}',
    "array with garbage after it": b'[{"topic": "%s", "value": "v"}] x',
    "array with a hole": b'[{"topic": "%s", "value": "v"},,]',
    "line that is not json": b'{"topic": "%s", "value": "v"}\nnonsense\n',
    "line cut off": b'{"topic": "%s", "value": "v"}\n{"topic": "%s", "val',
    "two objects on a line": b'{"topic": "%s", "value": "v"}{"topic": "%s", "value": "w"}\n',
    "invalid utf-8": b'{"topic": "%s", "value": "v"}\n{"topic": "%s", "value": "\xff"}\n',
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_body_is_400_and_stores_nothing(
    broker: BrokerProcess, topic: str, name: str
) -> None:
    """driftq-71"""
    body = MALFORMED[name].replace(b"%s", topic.encode())
    assert_invalid(broker.client.post("/v1/produce/batch", content=body))
    assert_nothing_stored(broker, topic)


def test_a_key_repeated_inside_a_batch_counts_as_committed(
    broker: BrokerProcess, topic: str
) -> None:
    """driftq-71"""
    keyed = {"envelope": {"idempotency_key": "k"}}
    items = [
        {"topic": topic, "value": "first"} | keyed,
        {"topic": topic, "value": "second"} | keyed,
        {"topic": topic, "value": "plain"},
    ]
    for _ in range(2):
        results = send(broker, "produce", items)
        assert {r["status"] for r in results} == {"produced"}
    assert [item.value for item in stored(broker, topic, 3)] == ["first", "plain", "plain"]


def test_a_key_whose_first_use_in_the_batch_was_refused_is_free(
    broker: BrokerProcess, topic: str
) -> None:
    """driftq-71"""
    keyed = {"idempotency_key": "k"}
    items = [
        {"topic": topic, "value": "v", "envelope": keyed | {"partition_override": 9}},
        {"topic": topic, "value": "stored", "envelope": keyed},
    ]
    results = send(broker, "produce", items)
    assert_failed(results[0], 400, "INVALID_ARGUMENT")
    assert results[1]["status"] == "produced"
    assert [item.value for item in stored(broker, topic, 1)] == ["stored"]


@pytest.mark.parametrize("form", FORMS)
def test_acks_have_a_result_each_and_stand_or_fall_alone(
    broker: BrokerProcess, make_topic: MakeTopic, form: str
) -> None:
    """driftq-71"""
    topic = make_topic(2)
    for n in range(6):
        broker.put(topic, str(n), envelope={"partition_override": n % 2})
    with broker.consume(topic, lease_ms=700) as stream:
        items = sorted(stream.take(6), key=lambda item: item.offset)
        good = [settle_body(topic, item, "g", "o") for item in items]
        results = send(
            broker,
            "ack",
            [
                good[3],
                good[0] | {"owner": "other"},
                good[1],
                good[1],
                good[0] | {"partition": 9},
                good[0] | {"offset": 77},
                good[0] | {"topic": "nowhere"},
                good[0] | {"extra": 1},
                good[5],
            ],
            form,
        )
        acked = {"status": "acked"}
        assert [results[n] for n in (0, 2, 3, 8)] == [acked] * 4
        assert_failed(results[1], 409, "FAILED_PRECONDITION")
        assert_failed(results[4], 400, "INVALID_ARGUMENT")
        assert_failed(results[5], 409, "FAILED_PRECONDITION")
        assert_failed(results[6], 404, "NOT_FOUND")
        assert_failed(results[7], 400, "INVALID_ARGUMENT")
        again = stream.take(3)
        assert sorted(item.offset for item in again) == [0, 2, 4]
        assert {item.attempts for item in again} == {2}


def test_a_malformed_ack_batch_is_400_and_acks_nothing(broker: BrokerProcess, topic: str) -> None:
    """driftq-71"""
    broker.put(topic, "v")
    with broker.consume(topic, lease_ms=300) as stream:
        body = settle_body(topic, stream.next(), "g", "o")
        text = json.dumps(body).encode()
        for malformed in (b"[" + text, text + b"\nx", b"[" + text + b"]]"):
            assert_invalid(broker.client.post("/v1/ack/batch", content=malformed))
        assert stream.next().attempts == 2


def test_a_batch_is_durable_when_it_is_answered(start_broker: StartBroker) -> None:
    """driftq-71"""
    broker = start_broker()
    topic = broker.create_topic("t")
    send(broker, "produce", [{"topic": topic, "value": str(n)} for n in range(500)])
    broker.restart(kill=True)
    with broker.consume(topic) as stream:
        items = stream.take(250)
        send(broker, "ack", [settle_body(topic, item, "g", "o") for item in items])
    broker.restart(kill=True)
    with broker.consume(topic, owner="next") as stream:
        left = stream.take(250)
        stream.expect_nothing()
    assert {i.offset for i in left} == set(range(500)) - {i.offset for i in items}


def commits(broker: BrokerProcess) -> float:
    """How often the log was made durable."""
    text = broker.client.get("/metrics").text
    lines = [
        line.split()[-1]
        for line in text.splitlines()
        if line.startswith("penstock_") and "commit" in line.split("{")[0].split()[0]
        and line.split("{")[0].split()[0].endswith("_count")
    ]  # fmt: skip
    assert lines, "no penstock_…commit…_count in /metrics"
    return sum(map(float, lines))


def test_a_batch_is_one_commit(start_broker: StartBroker) -> None:
    """driftq-71: nothing else writes meanwhile."""
    broker = start_broker()
    topic = broker.create_topic("t")
    before = commits(broker)
    send(broker, "produce", [{"topic": topic, "value": str(n)} for n in range(1000)])
    assert commits(broker) == before + 1
    stream = broker.open_consume(topic)
    items = stream.take(200)
    stream.close()
    before = commits(broker)
    send(broker, "ack", [settle_body(topic, item, "g", "o") for item in items])
    # Each ack frees a place, but nobody is connected to take it.
    assert commits(broker) == before + 1


def test_a_large_batch_goes_in_chunks_too(broker: BrokerProcess, topic: str) -> None:
    """driftq-71"""
    body = encode([{"topic": topic, "value": str(n)} for n in range(5000)], "ndjson")
    cut = [body[start : start + 7919] for start in range(0, len(body), 7919)]
    reply: httpx.Response = broker.client.post("/v1/produce/batch", content=iter(cut))
    assert reply.status_code == 200
    assert [r["offset"] for r in reply.json()["results"]] == list(range(5000))


def test_large_batches_in_a_row_are_stored_whole(start_broker: StartBroker) -> None:
    """driftq-71: and driftq-49 the other way round; produce is refused when the disk is full,
    not when the log has to begin its next segment."""
    broker = start_broker(env={"PENSTOCK_SEGMENT_BYTES": str(2**20)})
    topic = broker.create_topic("t")
    items = [{"topic": topic, "value": "x" * 3000} for _ in range(1000)]
    for round_ in range(5):
        results = send(broker, "produce", items)
        refused = [result for result in results if result.get("status") != "produced"]
        assert not refused, f"{len(refused)} in batch {round_}: {refused[0]}"
