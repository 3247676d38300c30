"""Section B: produce, driftq-9 to driftq-13, driftq-16 and driftq-17."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.broker_process import BrokerProcess, eventually
from tests.contract.checks import (
    assert_error,
    assert_invalid,
    assert_not_found,
    assert_nothing_stored,
    new_name,
)
from tests.contract.conftest import MakeTopic, StartBroker
from tests.ndjson import Item


def in_an_hour() -> datetime:
    return (datetime.now(UTC) + timedelta(hours=1)).replace(microsecond=0)


def rfc3339(moment: datetime) -> str:
    return moment.isoformat().replace("+00:00", "Z")


def only_item(broker: BrokerProcess, topic: str) -> Item:
    with broker.consume(topic, group=new_name("audit")) as stream:
        item = stream.next()
        stream.expect_nothing(100)
    return item


# -- driftq-9: both forms ----------------------------------------------------------------------


def test_a_json_produce_carries_every_envelope_field(
    broker: BrokerProcess, make_topic: MakeTopic
) -> None:
    """driftq-9"""
    topic = make_topic(2)
    envelope = {
        "run_id": "run_123",
        "step_id": "step_7",
        "parent_step_id": "step_3",
        "tenant_id": "tenant_a",
        "idempotency_key": "tenant_a:run_123:step_7",
        "target_topic": topic,
        "partition_override": 1,
        "deadline": rfc3339(in_an_hour()),
        "retry_policy": {"max_attempts": 5, "backoff_ms": 250, "max_backoff_ms": 5000},
    }
    body = {"topic": topic, "key": "k", "value": "payload", "envelope": envelope}
    reply = broker.client.post("/v1/produce", json=body)
    assert reply.status_code == 200
    assert reply.json() == {"status": "produced", "topic": topic}
    item = only_item(broker, topic)
    assert (item.key, item.value, item.partition) == ("k", "payload", 1)
    assert item.envelope == envelope


@pytest.mark.parametrize(
    ("tenant", "idempotency"), [("tenant_id", "idempotency_key"), ("tenant", "idem_key")]
)
def test_a_query_produce_carries_every_envelope_field(
    broker: BrokerProcess, make_topic: MakeTopic, tenant: str, idempotency: str
) -> None:
    """driftq-9"""
    topic = make_topic(2)
    deadline = rfc3339(in_an_hour())
    query = {
        "topic": topic,
        "key": "k",
        "value": "payload",
        "run_id": "run_123",
        "step_id": "step_7",
        "parent_step_id": "step_3",
        tenant: "tenant_a",
        idempotency: "idem",
        "target_topic": topic,
        "partition_override": "1",
        "deadline": deadline,
        "retry_max_attempts": "5",
        "retry_backoff_ms": "250",
        "retry_max_backoff_ms": "5000",
    }
    reply = broker.client.post("/v1/produce", params=query)
    assert reply.status_code == 200, reply.text
    assert reply.json() == {"status": "produced", "topic": topic}
    item = only_item(broker, topic)
    assert (item.key, item.value, item.partition) == ("k", "payload", 1)
    assert item.envelope == {
        "run_id": "run_123",
        "step_id": "step_7",
        "parent_step_id": "step_3",
        "tenant_id": "tenant_a",
        "idempotency_key": "idem",
        "target_topic": topic,
        "partition_override": 1,
        "deadline": deadline,
        "retry_policy": {"max_attempts": 5, "backoff_ms": 250, "max_backoff_ms": 5000},
    }


@pytest.mark.parametrize("parameter", ["deadline", "deadline_rfc3339", "deadline_ms"])
def test_a_deadline_in_the_query_has_two_aliases(
    broker: BrokerProcess, topic: str, parameter: str
) -> None:
    """driftq-9"""
    moment = in_an_hour()
    text = str(int(moment.timestamp() * 1000)) if parameter == "deadline_ms" else rfc3339(moment)
    query = {"topic": topic, "value": "v", parameter: text}
    assert broker.client.post("/v1/produce", params=query).status_code == 200
    envelope = only_item(broker, topic).envelope
    assert envelope is not None
    assert datetime.fromisoformat(envelope["deadline"]) == moment


def test_a_zero_offset_comes_back_as_z(broker: BrokerProcess, topic: str) -> None:
    """driftq-9"""
    moment = in_an_hour()
    broker.put(topic, "v", envelope={"deadline": moment.isoformat()})
    assert only_item(broker, topic).envelope == {"deadline": rfc3339(moment)}


@pytest.mark.parametrize("content_type", ["application/json", "text/plain", None])
def test_the_content_type_does_not_matter(
    broker: BrokerProcess, topic: str, content_type: str | None
) -> None:
    """driftq-9"""
    body = json.dumps({"topic": topic, "value": "v"}).encode()
    headers = {} if content_type is None else {"Content-Type": content_type}
    assert broker.client.post("/v1/produce", content=body, headers=headers).status_code == 200
    assert only_item(broker, topic).value == "v"


def test_with_a_body_the_query_is_not_read(broker: BrokerProcess, make_topic: MakeTopic) -> None:
    """driftq-9"""
    named_in_body, named_in_query = make_topic(), make_topic()
    query = {"topic": named_in_query, "value": "query", "run_id": "query"}
    body = {"topic": named_in_body, "value": "body"}
    reply = broker.client.post("/v1/produce", params=query, json=body)
    assert reply.json() == {"status": "produced", "topic": named_in_body}
    item = only_item(broker, named_in_body)
    assert (item.value, item.envelope) == ("body", None)
    assert_nothing_stored(broker, named_in_query)


# -- driftq-10: what is refused ----------------------------------------------------------------

TOPIC = "<topic>"

BAD_BODIES: dict[str, dict[str, Any]] = {
    "no topic": {"value": "v"},
    "blank topic": {"topic": "  ", "value": "v"},
    "topic of another type": {"topic": 1, "value": "v"},
    "no value": {"topic": TOPIC},
    "empty value": {"topic": TOPIC, "value": ""},
    "null value": {"topic": TOPIC, "value": None},
    "number for value": {"topic": TOPIC, "value": 1},
    "object for value": {"topic": TOPIC, "value": {"a": 1}},
    "number for key": {"topic": TOPIC, "value": "v", "key": 1},
    "unknown field": {"topic": TOPIC, "value": "v", "extra": 1},
    "envelope is text": {"topic": TOPIC, "value": "v", "envelope": "e"},
    "unknown field in envelope": {"topic": TOPIC, "value": "v", "envelope": {"extra": 1}},
    "labels in envelope": {"topic": TOPIC, "value": "v", "envelope": {"labels": {"a": "b"}}},
    "dlq in envelope": {"topic": TOPIC, "value": "v", "envelope": {"dlq": {"group": "g"}}},
    "run_id of another type": {"topic": TOPIC, "value": "v", "envelope": {"run_id": 7}},
    "unknown field in retry_policy": {
        "topic": TOPIC, "value": "v", "envelope": {"retry_policy": {"max_attempts": 1, "extra": 1}},
    },
    "deadline without a zone": {
        "topic": TOPIC, "value": "v", "envelope": {"deadline": "2099-01-01T00:00:00"},
    },
    "deadline that is no time": {
        "topic": TOPIC, "value": "v", "envelope": {"deadline": "tomorrow"},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_BODIES)
def test_a_wrong_body_is_400_and_stores_nothing(
    broker: BrokerProcess, topic: str, name: str
) -> None:
    """driftq-10"""
    body = {k: topic if v == TOPIC else v for k, v in BAD_BODIES[name].items()}
    assert_invalid(broker.client.post("/v1/produce", json=body))
    assert_nothing_stored(broker, topic)


BAD_BYTES = {
    "cut off": b'{"topic": "%s", "value": "v"',
    "trailing garbage": b'{"topic": "%s", "value": "v"} x',
    "two objects": b'{"topic": "%s", "value": "v"}{"topic": "%s", "value": "w"}',
    "an array": b'[{"topic": "%s", "value": "v"}]',
    "a string": b'"%s"',
    "not json": b"topic=%s&value=v",
    "single quotes": b"{'topic': '%s', 'value': 'v'}",
    "invalid utf-8": b'{"topic": "%s", "value": "\xff\xfe"}',
    "raw control character": b'{"topic": "%s", "value": "a\x00b"}',
    "lone surrogate": b'{"topic": "%s", "value": "\\ud800"}',
    "a name that is no string": b'{topic: "%s", "value": "v"}',
    "only blanks": b"   ",
}


@pytest.mark.parametrize("name", BAD_BYTES)
def test_malformed_json_is_400_and_stores_nothing(
    broker: BrokerProcess, topic: str, name: str
) -> None:
    """driftq-10"""
    body = BAD_BYTES[name].replace(b"%s", topic.encode())
    assert_invalid(broker.client.post("/v1/produce", content=body))
    assert_nothing_stored(broker, topic)


@pytest.mark.parametrize(
    "query", [{}, {"topic": "x"}, {"value": "v"}, {"topic": " ", "value": "v"}]
)
def test_topic_and_value_are_required_in_the_query(
    broker: BrokerProcess, query: dict[str, str]
) -> None:
    """driftq-10"""
    assert_invalid(broker.client.post("/v1/produce", params=query))


def test_unknown_query_parameters_are_ignored(broker: BrokerProcess, topic: str) -> None:
    """driftq-10"""
    query = {"topic": topic, "value": "v", "labels": "x", "debug": "1", "": "y"}
    assert broker.client.post("/v1/produce", params=query).status_code == 200
    assert only_item(broker, topic).value == "v"


# -- driftq-11: unknown topic, size, deadline --------------------------------------------------


def test_an_unknown_topic_is_404_and_is_not_made(broker: BrokerProcess) -> None:
    """driftq-11"""
    name = new_name("never-made")
    assert_not_found(broker.produce(name, "v"))
    assert_not_found(broker.client.post("/v1/produce", params={"topic": name, "value": "v"}))
    assert name not in broker.client.get("/v1/topics").json()["topics"]


def test_a_message_over_its_limit_is_413_and_one_at_it_is_not(start_broker: StartBroker) -> None:
    """driftq-11: key and value count together, in UTF-8 bytes."""
    broker = start_broker("--max-message-bytes", "64", memory=True)
    topic = broker.create_topic("t")
    for key, value in [("kkkk", "v" * 61), ("", "v" * 65), ("ключ", "v" * 57), ("", "鍵" * 22)]:
        assert_error(broker.produce(topic, value, key), 413, "INVALID_ARGUMENT")
    for n, (key, value) in enumerate([("kkkk", "v" * 60), ("ключ", "v" * 56), ("a", "鍵" * 21)]):
        broker.put(topic, value, key)
        with broker.consume(topic, group=f"g{n}") as stream:
            assert stream.take(n + 1)[-1].value == value


@pytest.mark.parametrize("past", ["2020-01-01T00:00:00Z", "2020-01-01T02:00:00+02:00"])
def test_an_expired_deadline_is_400_and_stores_nothing(
    broker: BrokerProcess, topic: str, past: str
) -> None:
    """driftq-11"""
    assert_invalid(broker.produce(topic, "v", envelope={"deadline": past}))
    query = {"topic": topic, "value": "v", "deadline": past}
    assert_invalid(broker.client.post("/v1/produce", params=query))
    assert_nothing_stored(broker, topic)


def test_a_deadline_that_passes_later_does_not_stop_delivery(
    broker: BrokerProcess, topic: str
) -> None:
    """driftq-11"""
    deadline = datetime.now(UTC) + timedelta(milliseconds=400)
    broker.put(topic, "late but here", envelope={"deadline": rfc3339(deadline)})
    eventually(lambda: datetime.now(UTC) > deadline)
    assert only_item(broker, topic).value == "late but here"


# -- driftq-12: bytes --------------------------------------------------------------------------

TEXTS = {
    "NUL": "a\x00b",
    "line separators": "a\u2028b\u2029c\x85d",
    "line ends": "a\nb\r\nc\rd\n",
    "every control character": "".join(map(chr, range(32))) + "\x7f",
    "quotes and slashes": '"\\/\b\f</script>',
    "astral": "🙂𝔸\U0010ffff",
    "combining": "e\u0301 \u202e rtl \u202c",
    "byte order mark": "\ufeffx\ufffe\uffff",
    "blanks around": "  v  ",
    "json in it": '{"partition":0,"offset":99}\n{"x":1}',
}


@pytest.mark.parametrize("name", TEXTS)
def test_any_text_comes_back_as_it_was_sent(broker: BrokerProcess, topic: str, name: str) -> None:
    """driftq-12"""
    text = TEXTS[name]
    broker.put(topic, text, text)
    item = only_item(broker, topic)
    assert (item.key, item.value) == (text, text)


@pytest.mark.parametrize("name", TEXTS)
def test_any_text_comes_back_from_the_query(broker: BrokerProcess, topic: str, name: str) -> None:
    """driftq-12"""
    text = TEXTS[name]
    query = {"topic": topic, "key": text, "value": text}
    assert broker.client.post("/v1/produce", params=query).status_code == 200
    item = only_item(broker, topic)
    assert (item.key, item.value) == (text, text)


def test_escapes_and_raw_characters_in_json_are_the_same(broker: BrokerProcess, topic: str) -> None:
    """driftq-12"""
    raw = f'{{"topic":"{topic}","value":"é🙂\u2028"}}'.encode()
    escaped = f'{{"topic":"{topic}","value":"\\u00e9\\ud83d\\ude42\\u2028"}}'.encode()
    for body in (raw, escaped):
        assert broker.client.post("/v1/produce", content=body).status_code == 200
    with broker.consume(topic) as stream:
        assert [item.value for item in stream.take(2)] == ["é🙂\u2028"] * 2


def test_a_chunked_body_is_read_whole(broker: BrokerProcess, topic: str) -> None:
    """driftq-12: cut everywhere, inside of characters too."""
    text = "ab\u2028🙂\x00" * 20
    body = json.dumps({"topic": topic, "value": text}, ensure_ascii=False).encode()

    def pieces() -> Iterator[bytes]:
        for start in range(0, len(body), 3):
            yield body[start : start + 3]

    reply = broker.client.post("/v1/produce", content=pieces())
    assert reply.request.headers["transfer-encoding"] == "chunked"
    assert reply.status_code == 200, reply.text
    assert only_item(broker, topic).value == text


def test_a_value_of_a_few_megabytes_comes_back(broker: BrokerProcess, topic: str) -> None:
    """driftq-12"""
    text = "0123456789abcdé\n" * (3 * 2**20 // 17)
    broker.put(topic, text)
    assert only_item(broker, topic).value == text


# -- driftq-13: target_topic -------------------------------------------------------------------


def test_target_topic_moves_the_message_and_the_reply_names_the_asked_for(
    broker: BrokerProcess, make_topic: MakeTopic
) -> None:
    """driftq-13"""
    asked, target = make_topic(), make_topic(4)
    envelope = {"target_topic": target, "partition_override": 3}
    reply = broker.produce(asked, "moved", envelope=envelope)
    assert reply.status_code == 200
    assert reply.json() == {"status": "produced", "topic": asked}
    item = only_item(broker, target)
    assert (item.value, item.partition, item.envelope) == ("moved", 3, envelope)
    assert_nothing_stored(broker, asked)


def test_the_asked_for_topic_need_not_exist(broker: BrokerProcess, topic: str) -> None:
    """driftq-13"""
    asked = new_name("nowhere")
    reply = broker.produce(asked, "moved", envelope={"target_topic": topic})
    assert reply.status_code == 200
    assert reply.json() == {"status": "produced", "topic": asked}
    assert only_item(broker, topic).value == "moved"
    assert asked not in broker.client.get("/v1/topics").json()["topics"]


def test_an_unknown_target_is_404(broker: BrokerProcess, topic: str) -> None:
    """driftq-13"""
    target = new_name("nowhere")
    assert_not_found(broker.produce(topic, "v", envelope={"target_topic": target}))
    assert target not in broker.client.get("/v1/topics").json()["topics"]
    assert_nothing_stored(broker, topic)


# -- driftq-16: retry fields -------------------------------------------------------------------

BAD_RETRIES: list[dict[str, Any]] = [
    {"max_attempts": -1},
    {"max_attempts": 1.5},
    {"max_attempts": "three"},
    {"max_attempts": 3, "backoff_ms": -1},
    {"max_attempts": 3, "backoff_ms": 0.5},
    {"max_attempts": 3, "backoff_ms": "soon"},
    {"max_attempts": 3, "backoff_ms": 1, "max_backoff_ms": -1},
    {"max_attempts": 3, "backoff_ms": 1, "max_backoff_ms": 2.5},
    {"max_attempts": 3, "backoff_ms": 1, "max_backoff_ms": "x"},
]


@pytest.mark.parametrize("policy", BAD_RETRIES, ids=str)
def test_wrong_retry_fields_in_json_are_400(
    broker: BrokerProcess, topic: str, policy: dict[str, Any]
) -> None:
    """driftq-16"""
    assert_invalid(broker.produce(topic, "v", envelope={"retry_policy": policy}))
    assert_nothing_stored(broker, topic)


@pytest.mark.parametrize("policy", BAD_RETRIES, ids=str)
def test_wrong_retry_fields_in_the_query_are_400(
    broker: BrokerProcess, topic: str, policy: dict[str, Any]
) -> None:
    """driftq-16"""
    fields = {f"retry_{name}": str(value) for name, value in policy.items()}
    query = {"topic": topic, "value": "v"} | fields
    assert_invalid(broker.client.post("/v1/produce", params=query))
    assert_nothing_stored(broker, topic)


@pytest.mark.parametrize("form", ["json", "query", "batch"])
@pytest.mark.parametrize("named", [{}, {"max_attempts": 0}])
def test_a_backoff_without_max_attempts_is_a_policy(
    broker: BrokerProcess, topic: str, form: str, named: dict[str, Any]
) -> None:
    """driftq-16: retries without end at that pace."""
    policy = named | {"backoff_ms": 10}
    message = {"topic": topic, "value": "v"}
    if form == "query":
        fields = {f"retry_{name}": value for name, value in policy.items()}
        reply = broker.client.post("/v1/produce", params=message | fields)
    elif form == "json":
        reply = broker.produce(topic, "v", envelope={"retry_policy": policy})
    else:
        batch = [message | {"envelope": {"retry_policy": policy}}]
        reply = broker.client.post("/v1/produce/batch", json=batch)
    assert reply.status_code == 200, reply.text
    with broker.consume(topic) as stream:
        assert stream.next().envelope == {"retry_policy": {"backoff_ms": 10}}


# -- driftq-17: durable or not -----------------------------------------------------------------


def test_a_200_survives_sigkill_the_moment_after(start_broker: StartBroker) -> None:
    """driftq-17"""
    broker = start_broker()
    topic = broker.create_topic("t")
    for n in range(2):
        broker.put(topic, f"round {n}")
        broker.restart(kill=True)
        with broker.consume(topic, group=f"g{n}") as stream:
            assert [item.value for item in stream.take(n + 1)] == [
                f"round {k}" for k in range(n + 1)
            ]
    assert broker.client.get("/v1/version").json()["wal_enabled"] is True


def test_without_a_wal_nothing_survives_and_version_says_so(start_broker: StartBroker) -> None:
    """driftq-17"""
    broker = start_broker(memory=True)
    topic = broker.create_topic("t")
    broker.put(topic, "v")
    assert broker.client.get("/v1/version").json()["wal_enabled"] is False
    broker.restart()
    assert broker.client.get("/v1/topics").json() == {"topics": []}
    assert_not_found(broker.produce(topic, "v"))
