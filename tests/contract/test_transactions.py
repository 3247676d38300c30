"""Transactions over HTTP: all or nothing, one error with the operation that it is about."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.broker_process import BrokerProcess, settle_body
from tests.contract.checks import new_name
from tests.contract.conftest import MakeTopic
from tests.contract.namespaces import Feed, Namespace, b64
from tests.contract.scoped import ACME, GLOBEX, ScopedBroker, create_namespaces
from tests.ndjson import Item


def commit(broker: BrokerProcess, *operations: Any, **members: Any) -> httpx.Response:
    body = {"operations": list(operations), **members}
    return broker.client.post("/v1/transactions", json=body)


def produce(topic: str, value: str, **members: Any) -> dict[str, Any]:
    return {"op": "produce", "topic": topic, "value": value, **members}


def ack(topic: str, item: Item, owner: str = "o") -> dict[str, Any]:
    delivery = {"delivery_id": item.members["delivery_id"]}
    return {"op": "ack", **settle_body(topic, item, "g", owner), **delivery}


def refusal(response: httpx.Response) -> tuple[int, str, int]:
    error = response.json()
    return response.status_code, error["error"], error["operation"]


@pytest.fixture
def cache(broker: BrokerProcess) -> str:
    return Namespace(broker).create_cache(durable=True)


def test_consume_transform_produce_happens_at_once(
    broker: BrokerProcess, make_topic: MakeTopic, cache: str
) -> None:
    source, target = make_topic(), make_topic()
    broker.put(source, "in")
    broker.put(source, "later")
    with broker.consume(source, lease_ms=60_000) as stream:
        first, second = stream.take(2)
        effect = {"topic": source, "group": "g", "key": "k", "owner": "o"}
        begun = broker.client.post("/v1/idempotency/begin", json=effect)
        assert begun.json()["status"] == "RUN"
        answer = commit(
            broker,
            produce(target, "out", key="x"),
            ack(source, first),
            {"op": "nack", **settle_body(source, second, "g", "o"), "reason": "later"},
            {"op": "effect_commit", **effect, "result": "r"},
            {"op": "cache_put", "cache": cache, "key": "last", "value": b64(b"in")},
            {"op": "cache_incr", "cache": cache, "key": "n", "delta": 2, "ttl_ms": 60_000},
            {"op": "cache_delete", "cache": cache, "key": "none"},
            produce(target, "out again", key="x"),
        )
        assert answer.status_code == 200, answer.text
        body = answer.json()
        versions = [result.pop("version") for result in body["results"][4:6]]
        assert versions[1] == versions[0] + 1
        assert body == {
            "status": "committed",
            "results": [
                {"status": "produced", "topic": target, "partition": 0, "offset": 0},
                {"status": "acked"},
                {"status": "nacked"},
                {"status": "committed"},
                {"status": "put"},
                {"status": "incremented", "number": 2},
                {"status": "deleted", "version": 0, "deleted": False},
                {"status": "produced", "topic": target, "partition": 0, "offset": 1},
            ],
        }
        again = stream.next()
        assert (again.offset, again.members["last_error"]) == (second.offset, "later")
    with broker.consume(target) as results:
        assert [item.members["value"] for item in results.take(2)] == ["out", "out again"]


def test_a_refusal_has_the_status_of_its_operation_and_changes_nothing(
    broker: BrokerProcess, make_topic: MakeTopic, cache: str
) -> None:
    source, target = make_topic(), make_topic()
    memory = Namespace(broker).create_cache()
    broker.put(source, "in")
    with broker.consume(source, lease_ms=60_000) as stream:
        item = stream.next()
        wrongs: list[tuple[Any, int, str]] = [
            (produce(new_name(), "v"), 404, "NOT_FOUND"),
            (produce(target, ""), 400, "INVALID_ARGUMENT"),
            (produce(target, "v", color="red"), 400, "INVALID_ARGUMENT"),
            ({"op": "publish", "stream": "s", "payload": ""}, 400, "INVALID_ARGUMENT"),
            ({"topic": target, "value": "v"}, 400, "INVALID_ARGUMENT"),
            (17, 400, "INVALID_ARGUMENT"),
            (ack(source, item, owner="p"), 409, "FAILED_PRECONDITION"),
            (
                {"op": "cache_put", "cache": cache, "key": "k", "value": "", "if_version": 7},
                412,
                "FAILED_PRECONDITION",
            ),
            ({"op": "cache_put", "cache": cache, "key": "k"}, 400, "INVALID_ARGUMENT"),
            (
                {"op": "cache_put", "cache": memory, "key": "k", "value": ""},
                409,
                "FAILED_PRECONDITION",
            ),
            ({"op": "cache_incr", "cache": new_name(), "key": "k"}, 404, "NOT_FOUND"),
        ]
        for wrong, status, code in wrongs:
            answer = commit(broker, produce(target, "v"), wrong, ack(source, item))
            assert refusal(answer) == (status, code, 1), (wrong, answer.text)
            assert answer.json()["message"].startswith("operation 1: ")
        answer = commit(broker, ack(source, item), produce(target, "v"))
        assert answer.json()["results"][1]["offset"] == 0, "nothing was stored before"


def test_a_full_partition_refuses_all_of_it_with_the_limit(
    start_broker: Callable[..., BrokerProcess],
) -> None:
    broker = start_broker(memory=True, env={"PENSTOCK_MAX_PARTITION_MSGS": "3"})
    topic = broker.create_topic("t")
    answer = commit(broker, *[produce(topic, "v")] * 4)
    assert refusal(answer) == (429, "RESOURCE_EXHAUSTED", 3)
    assert answer.json()["limit"] == "partition_msgs"
    assert "retry-after" in answer.headers
    assert commit(broker, *[produce(topic, "v")] * 3).status_code == 200


def test_a_message_that_another_worker_finished_is_not_produced_again(
    broker: BrokerProcess, make_topic: MakeTopic
) -> None:
    source, target = make_topic(), make_topic()
    broker.put(source, "in")
    with broker.consume(source, lease_ms=60_000) as stream:
        late = stream.next()
        nack = settle_body(source, late, "g", "o") | {"delay_ms": 0}
        assert broker.client.post("/v1/nack", json=nack).status_code == 204
        again = stream.next()
        assert (late.offset, again.attempts) == (again.offset, 2)
        stale = commit(broker, produce(target, "out"), ack(source, late))
        assert refusal(stale) == (409, "FAILED_PRECONDITION", 1)
        assert commit(broker, produce(target, "out"), ack(source, again)).status_code == 200
        twice = commit(broker, produce(target, "out"), ack(source, again))
        assert refusal(twice) == (409, "FAILED_PRECONDITION", 1)
        assert "already done" in twice.json()["message"]
    ends = broker.client.get(f"/v1/topics/{target}").json()
    assert ends["next_offset"] == 1


def test_a_repeat_is_answered_like_the_first_also_by_a_restarted_broker(
    start_broker: Callable[..., BrokerProcess],
) -> None:
    broker = start_broker()
    topic = broker.create_topic("t")
    operations = [produce(topic, "v", key="k"), produce(topic, "w")]
    first = commit(broker, *operations, transaction_id="tx 1")
    assert first.status_code == 200
    assert commit(broker, *operations, transaction_id="tx 1").json() == first.json()
    broker.restart(kill=True)
    assert commit(broker, *operations, transaction_id="tx 1").json() == first.json()
    other = commit(broker, *operations[:1], transaction_id="tx 1")
    assert other.status_code == 409
    assert "operation" not in other.json()
    assert broker.client.get(f"/v1/topics/{topic}").json()["next_offset"] == 2


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"operations": None},
        {"operations": []},
        {"operations": {}},
        {"operations": [], "color": "red"},
        {"operations": [{"op": "produce", "topic": "t", "value": "v"}], "transaction_id": " "},
        {
            "operations": [{"op": "produce", "topic": "t", "value": "v"}],
            "transaction_id": "a\u0001",
        },
        [],
    ],
)
def test_a_wrong_body_is_400(broker: BrokerProcess, body: Any) -> None:
    answer = broker.client.post("/v1/transactions", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"] == "INVALID_ARGUMENT"


def test_more_than_a_thousand_operations_are_too_many(broker: BrokerProcess, topic: str) -> None:
    answer = commit(broker, *[produce(topic, "v")] * 1001)
    assert answer.status_code == 413
    assert commit(broker, *[produce(topic, "v")] * 1000).status_code == 200


def test_a_transaction_belongs_to_the_namespace_of_its_request(broker: BrokerProcess) -> None:
    """Topics, caches and ids of others have the same names and are not touched."""
    create_namespaces(broker)
    for tenant, namespace in (ACME, GLOBEX):
        scope = ScopedBroker(broker, (tenant, namespace))
        scope.must("POST", "/v1/topics", json={"name": "same"})
        caches = f"/v1/tenants/{tenant}/namespaces/{namespace}/caches"
        scope.must("POST", caches, json={"name": "same", "durable": True})
    incr = {"op": "cache_incr", "cache": "same", "key": "n"}
    body = {"transaction_id": "same", "operations": [produce("same", "v"), incr]}
    acme = ScopedBroker(broker, ACME).must("POST", "/v1/transactions", json=body).json()
    globex = ScopedBroker(broker, GLOBEX).must("POST", "/v1/transactions", json=body).json()
    for answer in (acme, globex):
        assert [answer["results"][0]["topic"], answer["results"][0]["offset"]] == ["same", 0]
        assert answer["results"][1]["number"] == 1
    nowhere = broker.client.post("/v1/transactions", json=body)
    assert refusal(nowhere) == (404, "NOT_FOUND", 0)


def test_publishes_to_a_durable_stream_happen_with_the_ack(
    broker: BrokerProcess, make_topic: MakeTopic
) -> None:
    """felix-123."""
    source = make_topic()
    namespace = Namespace(broker)
    stream = namespace.create_stream(delivery="at_least_once")
    broker.put(source, "in")
    publish = {"op": "publish", "stream": stream, "payloads": [b64(b"a"), b64(b"b")]}
    with broker.consume(source, lease_ms=60_000) as deliveries:
        (item,) = deliveries.take(1)
        answer = commit(broker, publish, ack(source, item)).json()
        assert answer["results"][0] == {"status": "published", "offset": 0}
        again = commit(broker, publish, ack(source, item))
        assert refusal(again) == (409, "FAILED_PRECONDITION", 1)
    with namespace.subscribe(stream, "start=earliest") as feed:
        assert feed.payloads(2) == [b"a", b"b"]


def event_operation(op: str, stream: str, feed: Feed, item: Item, **members: Any) -> dict[str, Any]:
    delivery = {"offset": item.offset, "delivery_id": item.members["delivery_id"]}
    who = {"name": feed.first["name"], "owner": feed.first["owner"]}
    return {"op": op, "stream": stream, **who, **delivery, **members}


def test_consume_transform_publish_happens_at_once(broker: BrokerProcess) -> None:
    """felix-123: from a named subscription to another stream."""
    namespace = Namespace(broker)
    source = namespace.create_stream(delivery="at_least_once")
    target = namespace.create_stream(delivery="exactly_once")
    namespace.publish(source, b"a", b"b")
    publish = {"op": "publish", "stream": target, "payloads": [b64(b"A")]}
    numbered = publish | {"producer_id": "p", "sequence": 0}
    with namespace.subscribe(source, "name=n&start=earliest&lease_ms=60000") as feed:
        first, second = feed.take(2)
        gap = commit(
            broker, event_operation("event_ack", source, feed, first), numbered | {"sequence": 1}
        )
        assert refusal(gap) == (409, "FAILED_PRECONDITION", 1)
        answer = commit(
            broker,
            numbered,
            event_operation("event_ack", source, feed, first),
            event_operation("event_nack", source, feed, second, reason="later", delay_ms=0),
        )
        assert answer.json() == {
            "status": "committed",
            "results": [
                {"status": "published", "offset": 0},
                {"status": "acked"},
                {"status": "nacked"},
            ],
        }
        again = feed.next()
        assert (again.offset, again.members["last_error"]) == (second.offset, "later")
        repeat = commit(broker, numbered, event_operation("event_ack", source, feed, first))
        assert refusal(repeat) == (409, "FAILED_PRECONDITION", 1)
        answer = commit(broker, numbered, event_operation("event_ack", source, feed, again))
        known = {"status": "published", "offset": 0, "duplicate": True}
        assert answer.json()["results"] == [known, {"status": "acked"}]
    with namespace.subscribe(target, "start=earliest") as results:
        assert results.payloads(1) == [b"A"]
    state = broker.client.get(f"{namespace.stream_path(source)}/subscriptions").json()
    assert [each["messages_behind"] for each in state["named"]] == [0]


def test_an_operation_on_an_event_has_the_members_of_the_request_for_it(
    broker: BrokerProcess,
) -> None:
    namespace = Namespace(broker)
    stream = namespace.create_stream(delivery="at_least_once")
    plain = namespace.create_stream()
    right = {"op": "event_ack", "stream": stream, "name": "n", "owner": "o", "offset": 0}
    wrongs: list[tuple[dict[str, Any], int, str]] = [
        (right | {"stream": None}, 400, "INVALID_ARGUMENT"),
        (right | {"name": " "}, 400, "INVALID_ARGUMENT"),
        (right | {"owner": ""}, 400, "INVALID_ARGUMENT"),
        (right | {"offset": None}, 400, "INVALID_ARGUMENT"),
        (right | {"offset": -1}, 400, "INVALID_ARGUMENT"),
        (right | {"reason": "of a nack"}, 400, "INVALID_ARGUMENT"),
        (right | {"op": "event_nack", "dead": True}, 400, "INVALID_ARGUMENT"),
        (right | {"op": "event_nack", "delay_ms": -1}, 400, "INVALID_ARGUMENT"),
        (right | {"stream": new_name()}, 404, "NOT_FOUND"),
        (right | {"stream": plain}, 409, "FAILED_PRECONDITION"),
        (right, 409, "FAILED_PRECONDITION"),
    ]
    for wrong, status, code in wrongs:
        answer = commit(broker, wrong)
        assert refusal(answer) == (status, code, 0), (wrong, answer.text)


def test_a_transaction_refuses_a_stream_that_keeps_no_events(broker: BrokerProcess) -> None:
    stream = Namespace(broker).create_stream()
    refused = commit(broker, {"op": "publish", "stream": stream, "payloads": [b64(b"a")]})
    assert refusal(refused) == (409, "FAILED_PRECONDITION", 0)
    empty = commit(broker, {"op": "publish", "stream": stream, "payloads": []})
    assert empty.status_code in (400, 409)


def test_an_unknown_operation_is_answered_with_the_known_ones(broker: BrokerProcess) -> None:
    body = {"operations": [{"op": "ack"}, {"op": "prodcue", "topic": "t", "value": "v"}]}
    reply = broker.client.post("/v1/transactions", json=body)
    assert reply.status_code == 400
    assert "op must be one of produce, ack, nack" in reply.json()["message"]
