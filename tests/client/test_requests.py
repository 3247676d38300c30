"""The sans-IO half of the SDK: answers become types and errors, bytes become deliveries."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.client import registry, requests
from penstock.client.calls import error_of
from penstock.client.deliveries import Delivery, DeliveryBuffer, DeliveryRef
from penstock.client.requests import EffectRef, NewMessage
from penstock.client.results import Produced
from penstock.model.envelope import Envelope, RetryPolicy
from penstock.model.errors import (
    AlreadyExists,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    MethodNotAllowed,
    NotFound,
    NotYet,
    OutOfRange,
    PenstockError,
    PermissionDenied,
    ResourceExhausted,
    TooLarge,
    Unauthenticated,
    Unavailable,
    VersionMismatch,
)

REF = DeliveryRef(topic="t", group="g", partition=1, offset=2, owner="o", delivery_id="7-1")


def body(code: str, **more: Any) -> bytes:
    return json.dumps({"error": code, "message": "why"} | more).encode()


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "INVALID_ARGUMENT", InvalidArgument),
        (413, "INVALID_ARGUMENT", TooLarge),
        (401, "UNAUTHENTICATED", Unauthenticated),
        (403, "PERMISSION_DENIED", PermissionDenied),
        (404, "NOT_FOUND", NotFound),
        (405, "METHOD_NOT_ALLOWED", MethodNotAllowed),
        (409, "FAILED_PRECONDITION", FailedPrecondition),
        (409, "ALREADY_EXISTS", AlreadyExists),
        (412, "FAILED_PRECONDITION", VersionMismatch),
        (410, "OUT_OF_RANGE", OutOfRange),
        (416, "OUT_OF_RANGE", NotYet),
        (412, "A_CODE_OF_THE_FUTURE", VersionMismatch),
        (416, "A_CODE_OF_THE_FUTURE", NotYet),
        (429, "RESOURCE_EXHAUSTED", ResourceExhausted),
        (500, "INTERNAL", Internal),
        (503, "UNAVAILABLE", Unavailable),
        (409, "A_CODE_OF_THE_FUTURE", FailedPrecondition),
        (418, "A_CODE_OF_THE_FUTURE", Internal),
    ],
)
def test_an_error_is_raised_by_its_code(status: int, code: str, kind: type[PenstockError]) -> None:
    error = error_of(status, body(code))
    assert type(error) is kind
    assert "why" in error.message


def test_an_overload_says_what_is_full_and_when_to_come_back() -> None:
    error = error_of(429, body("RESOURCE_EXHAUSTED", limit="partition_msgs", retry_after_ms=250))
    assert isinstance(error, ResourceExhausted)
    assert (error.limit, error.retry_after_ms, error.retryable) == ("partition_msgs", 250, True)


@pytest.mark.parametrize("answer", [b"", b"<html>", b"[]", b"{}", b'{"error": 7}', b"\xff"])
def test_an_answer_that_is_no_penstock_error_is_not_taken_for_one(answer: bytes) -> None:
    assert type(error_of(404, answer)) is Internal
    assert type(error_of(502, answer)) is Unavailable


def test_a_success_that_is_not_understood_is_an_error_not_a_crash() -> None:
    for answer in (b"", b"<html>", b'{"topics": 5}', b"\xff"):
        with pytest.raises(Internal, match="Penstock broker"):
            requests.list_topics().answer(200, answer)


def test_names_are_percent_encoded_in_paths() -> None:
    assert requests.describe_topic("a/b ?").path == "/v1/topics/a%2Fb%20%3F"
    assert requests.delete_group("t", "ü").path == "/v1/topics/t/groups/%C3%BC"
    for name in ("", " "):
        with pytest.raises(InvalidArgument):
            requests.describe_topic(name)


def test_text_that_is_no_unicode_is_the_callers_mistake() -> None:
    with pytest.raises(InvalidArgument):
        requests.produce("t", "\udcff")
    with pytest.raises(InvalidArgument):
        requests.delete_topic("\udcff")


@pytest.mark.parametrize("data", [b"bytes", bytearray(b"bytes"), memoryview(b"bytes"), 5, None])
def test_a_value_that_is_no_text_is_a_type_error(data: Any) -> None:
    """Bytes would be stored as base64, which nobody asked for."""
    with pytest.raises(TypeError, match="value must be str, not"):
        requests.produce("t", data)
    with pytest.raises(TypeError, match="value must be str, not"):
        NewMessage("t", data)
    with pytest.raises(TypeError, match="key must be str, not"):
        requests.produce("t", "v", key=data)
    with pytest.raises(TypeError, match="key must be str, not"):
        requests.produce_batch([NewMessage("t", "v", key=data)])
    with pytest.raises(TypeError, match="idempotency_key must be str, not"):
        requests.produce("t", "v", envelope=Envelope(idempotency_key=data))


def test_the_type_error_of_bytes_says_what_to_do() -> None:
    with pytest.raises(TypeError, match=r"decode it to str.*base64"):
        requests.produce("t", b"\xff\x00")  # type: ignore[arg-type]


def test_an_effect_takes_text_only() -> None:
    data: Any = b"bytes"
    effect = EffectRef(topic="t", group="g", key="k", owner="o")
    with pytest.raises(TypeError, match="result must be str, not bytes"):
        requests.commit_effect(effect, data)
    with pytest.raises(TypeError, match="reason must be str, not bytes"):
        requests.fail_effect(effect, data)
    with pytest.raises(TypeError, match="key must be str, not bytes"):
        EffectRef(topic="t", group="g", key=data, owner="o")


def test_empty_members_of_an_envelope_are_not_sent() -> None:
    envelope = Envelope(run_id="r", partition_override=0, retry_policy=RetryPolicy(max_attempts=3))
    call = requests.produce("t", "v", envelope=envelope)
    assert json.loads(call.body) == {
        "topic": "t",
        "value": "v",
        "envelope": {
            "run_id": "r",
            "partition_override": 0,
            "retry_policy": {"max_attempts": 3},
        },
    }
    assert json.loads(requests.produce("t", "v").body) == {"topic": "t", "value": "v"}


def test_a_delivery_is_named_and_not_sent_back_whole() -> None:
    delivery = Delivery(
        topic="t", group="g", partition=1, offset=2, owner="o", delivery_id="7-1",
        attempts=1, key="k", value="v",
    )  # fmt: skip
    named = {"topic": "t", "group": "g", "partition": 1, "offset": 2, "owner": "o"}
    assert json.loads(requests.ack(delivery).body) == named | {"delivery_id": "7-1"}
    assert requests.ack(delivery).body == requests.ack(REF).body


def test_the_outcomes_of_a_batch_are_results_and_errors_in_order() -> None:
    call = requests.produce_batch([NewMessage("t", "v")] * 3)
    results = [
        {"status": "produced", "topic": "t", "partition": 1, "offset": 5},
        {"error": "INVALID_ARGUMENT", "message": "too big", "code": 413},
        {"status": "produced", "topic": "t", "duplicate": True},
    ]
    first, second, third = call.answer(200, json.dumps({"results": results}).encode())
    assert first == Produced("t", 1, 5)
    assert isinstance(second, TooLarge)
    assert third == Produced("t", duplicate=True)


def test_an_older_broker_does_not_say_where_a_message_is() -> None:
    answer = b'{"status":"produced","topic":"t"}'
    assert requests.produce("t", "v").answer(200, answer) == Produced("t")
    place = {"penstock-partition": "x", "penstock-offset": "1"}
    with pytest.raises(Internal, match="Penstock broker"):
        requests.produce("t", "v").answer(200, answer, place)


def test_settings_that_are_none_are_left_out_of_a_creation_and_sent_as_a_change() -> None:
    path = ("t", "n", "s")
    created = registry.create_stream(*path, retention="7d", pub_queue_depth=None)
    assert json.loads(created.body) == {"name": "s", "retention": "7d"}
    changed = registry.change_stream(*path, retention="7d", pub_queue_depth=None)
    assert json.loads(changed.body) == {"retention": "7d", "pub_queue_depth": None}
    assert changed.path == "/v1/tenants/t/namespaces/n/streams/s"


def test_names_in_a_path_are_encoded() -> None:
    call = registry.delete_namespace("a/b", "c d?", cascade=True)
    assert call.path == "/v1/tenants/a%2Fb/namespaces/c%20d%3F?cascade=true"
    assert registry.delete_namespace("a", "b").path == "/v1/tenants/a/namespaces/b"


def line(offset: int, value: str = "v") -> bytes:
    item = {"partition": 0, "offset": offset, "attempts": 1, "key": "", "value": value}
    return json.dumps(item | {"last_error": ""}, ensure_ascii=False).encode() + b"\n"


def taken(buffer: DeliveryBuffer) -> list[Delivery]:
    found = []
    while (delivery := buffer.take(0.0)) is not None:
        found.append(delivery)
    return found


@pytest.mark.parametrize("size", [1, 2, 7, 64, 10_000])
def test_a_stream_is_read_the_same_however_it_is_cut(size: int) -> None:
    data = b"\n" + line(0) + b"\n\n" + line(1, "a\u2028b\u0085c") + line(2) + b"\n"
    buffer = DeliveryBuffer("t", "g", "o")
    for start in range(0, len(data), size):
        buffer.feed(data[start : start + size])
    found = taken(buffer)
    assert [each.offset for each in found] == [0, 1, 2]
    assert found[1].value == "a\u2028b\u0085c"
    assert {(each.topic, each.group, each.owner) for each in found} == {("t", "g", "o")}


def test_half_a_line_is_no_delivery() -> None:
    buffer = DeliveryBuffer("t", "g", "o")
    buffer.feed(line(0)[:-1])
    assert taken(buffer) == []
    buffer.feed(b"\n")
    assert len(taken(buffer)) == 1


def test_a_line_that_is_no_item_is_an_error() -> None:
    with pytest.raises(Internal):
        DeliveryBuffer("t", "g", "o").feed(b'{"offset": "x"}\n')


def test_members_of_the_future_are_ignored() -> None:
    buffer = DeliveryBuffer("t", "g", "o")
    buffer.feed(line(0).replace(b"{", b'{"priority": 7, ', 1))
    assert taken(buffer)[0].offset == 0


def test_waiting_is_counted_from_the_first_empty_take() -> None:
    buffer = DeliveryBuffer("t", "g", "o")
    assert buffer.take(10.0) is None
    assert buffer.waited_s(12.0) == 2.0
    buffer.feed(line(0))
    assert buffer.take(13.0) is not None
    assert buffer.waited_s(99.0) == 0.0
