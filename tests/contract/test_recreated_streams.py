"""The id of a durable stream on the wire: a stream that is created again has another one."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.broker_process import BrokerProcess
from tests.contract.namespaces import Namespace, assert_typed_error
from tests.websocket import WebSocket

SCOPE = {"tenant_id": "default", "namespace": "default"}
WAYS: list[dict[str, Any]] = [{}, {"start": "earliest"}, {"name": "n", "owner": "o"}]
"""Members of subscribe: plain, from a start, and by name."""


@pytest.fixture
def ns(broker: BrokerProcess) -> Namespace:
    return Namespace(broker)


@pytest.fixture
def stream(ns: Namespace) -> str:
    stream = ns.create_stream(delivery="at_least_once")
    ns.publish(stream, b"old0", b"old1")
    return stream


def id_of(ns: Namespace, stream: str) -> int:
    found: int = ns.broker.client.get(f"{ns.stream_path(stream)}/offsets").json()["stream_id"]
    return found


def create_again(ns: Namespace, stream: str) -> None:
    assert ns.broker.client.delete(ns.stream_path(stream)).status_code == 204
    reply = ns.post(f"{ns.path}/streams", name=stream, delivery="at_least_once")
    assert reply.status_code == 201, reply.text
    ns.publish(stream, b"new0", b"new1")


def lines(ns: Namespace, stream: str, count: int, *, last: str = "", **query: Any) -> list[str]:
    """The first lines of a subscription that are not blank."""
    path = f"{ns.stream_path(stream)}/subscribe"
    headers = {"Last-Event-ID": last} if last else {}
    found = []
    with ns.broker.client.stream("GET", path, params=query, headers=headers) as reply:
        assert reply.status_code == 200, reply.read()
        for line in reply.iter_lines():
            found += [line] if line else []
            if len(found) == count:
                break
    return found


def refusal(ns: Namespace, stream: str, last: str = "", **query: Any) -> httpx.Response:
    """The answer to a subscription that is refused. One that is not would have no end."""
    path = f"{ns.stream_path(stream)}/subscribe"
    headers = {"Last-Event-ID": last} if last else {}
    with ns.broker.client.stream("GET", path, params=query, headers=headers) as reply:
        assert reply.status_code != 200, f"{query} with Last-Event-ID {last!r} was accepted"
        reply.read()
    return reply


@pytest.mark.parametrize("way", WAYS)
def test_a_subscription_says_which_stream_it_has(
    ns: Namespace, stream: str, way: dict[str, Any]
) -> None:
    stream_id = id_of(ns, stream)
    [line] = lines(ns, stream, 1, **way)
    assert json.loads(line)["stream_id"] == stream_id
    [_, data] = lines(ns, stream, 2, format="sse", **way)
    assert json.loads(data.removeprefix("data: "))["stream_id"] == stream_id
    requests: list[dict[str, Any]] = [way, way | {"stream_id": stream_id}]
    for request in requests:
        with WebSocket(ns.broker.port) as ws:
            reply = ws.ask({"type": "subscribe", **SCOPE, "stream": stream, **request})
            assert (reply["type"], reply["stream_id"]) == ("subscribed", stream_id)
        [line] = lines(ns, stream, 1, **request)
        assert json.loads(line)["stream_id"] == stream_id


def test_a_stream_that_keeps_nothing_has_no_id(ns: Namespace) -> None:
    stream = ns.create_stream()
    [line] = lines(ns, stream, 1)
    assert "stream_id" not in json.loads(line)
    refused = refusal(ns, stream, stream_id=1)
    assert_typed_error(refused, 409, "FAILED_PRECONDITION")


@pytest.mark.parametrize("way", WAYS)
def test_the_id_of_a_deleted_stream_is_410(ns: Namespace, stream: str, way: dict[str, Any]) -> None:
    stream_id = id_of(ns, stream)
    create_again(ns, stream)
    refused = refusal(ns, stream, stream_id=stream_id, **way)
    assert_typed_error(refused, 410, "OUT_OF_RANGE")
    assert "was deleted and created again" in refused.json()["message"]
    with WebSocket(ns.broker.port) as ws:
        message = {"type": "subscribe", **SCOPE, "stream": stream, "stream_id": stream_id, **way}
        reply = ws.ask(message | {"request_id": 7})
        assert (reply["type"], reply["code"], reply["error"], reply["request_id"]) == (
            "subscribe_cursor_error",
            410,
            "OUT_OF_RANGE",
            7,
        )
        found = ws.ask(message | {"stream_id": None})
        assert (found["type"], found["stream_id"]) == ("subscribed", id_of(ns, stream))


@pytest.mark.parametrize("name", [{}, {"name": "n", "owner": "o", "start": "earliest"}])
def test_a_browser_does_not_resume_in_a_stream_that_was_created_again(
    ns: Namespace, stream: str, name: dict[str, Any]
) -> None:
    """`id` has the stream's id. Without one, as older brokers sent it, nothing can be noticed."""
    stream_id = id_of(ns, stream)
    query = {"format": "sse", **({"start": 0} | name)}
    found = lines(ns, stream, 7, **query)
    ids = [line.removeprefix("id: ") for line in found if line.startswith("id: ")]
    assert ids == [f"{stream_id}-0", f"{stream_id}-1"]
    if not name:
        resumed = lines(ns, stream, 3, format="sse", last=ids[0])
        assert resumed[2] == f"id: {ids[1]}"
    create_again(ns, stream)
    refused = refusal(ns, stream, ids[0], **query)
    assert_typed_error(refused, 410, "OUT_OF_RANGE")
    assert lines(ns, stream, 3, format="sse", last="0")[2] == f"id: {id_of(ns, stream)}-1"


@pytest.mark.parametrize("bad", ["x", "-1", "1-", "-", "1-2-3", "1--2", "9" * 20, "1-" + "9" * 19])
def test_a_wrong_id_of_an_event_is_400(ns: Namespace, stream: str, bad: str) -> None:
    refused = refusal(ns, stream, bad)
    assert_typed_error(refused, 400, "INVALID_ARGUMENT")
    assert "Last-Event-ID" in refused.json()["message"]


def test_an_event_of_another_stream_than_the_one_that_is_named_is_400(
    ns: Namespace, stream: str
) -> None:
    stream_id = id_of(ns, stream)
    refused = refusal(ns, stream, f"{stream_id + 1}-0", stream_id=stream_id)
    assert_typed_error(refused, 400, "INVALID_ARGUMENT")


@pytest.mark.parametrize("stream_id", [-1, 2**63])
def test_a_stream_id_out_of_bounds_is_400(ns: Namespace, stream: str, stream_id: int) -> None:
    refused = refusal(ns, stream, stream_id=stream_id)
    assert_typed_error(refused, 400, "INVALID_ARGUMENT")
    with WebSocket(ns.broker.port) as ws:
        message = {"type": "subscribe", **SCOPE, "stream": stream, "stream_id": stream_id}
        assert ws.ask(message)["error"] == "INVALID_ARGUMENT"
