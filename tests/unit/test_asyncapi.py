"""The WebSocket's document: complete, sound in itself, and true of the broker."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import msgspec
import pytest

from penstock.server.asyncapi import build_document
from penstock.server.message_actions import (
    MESSAGES,
    MESSAGES_WITHOUT_CONNECTION,
)
from penstock.server.message_description import MessageDescription
from penstock.server.schemas import required_members
from penstock.server.websocket import answers, messages
from tests.broker_process import BrokerProcess
from tests.websocket import WebSocket

DOCUMENT = build_document()


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    env = {"PENSTOCK_SEGMENT_BYTES": str(8 * 2**20)}
    with BrokerProcess(tmp_path_factory.mktemp("data"), env=env) as process:
        yield process


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for name, member in value.items():
            if name == "$ref":
                yield member
            else:
                yield from references(member)
    elif isinstance(value, list):
        for member in value:
            yield from references(member)


def test_every_message_that_can_be_decoded_is_described_and_no_other() -> None:
    assert {each.shape for each in MESSAGES} == set(get_args(messages.Message))
    for each in MESSAGES:
        message = DOCUMENT["components"]["messages"][each.shape.__name__]
        assert message["name"] == each.type
        assert DOCUMENT["operations"][each.type]["action"] == "receive"


def test_every_frame_that_is_sent_is_described() -> None:
    sent = {each.shape for each in answers.FRAMES}
    assert {*get_args(answers.Answer), answers.CacheEvent} <= sent
    assert {each.answer for each in MESSAGES} <= sent
    assert {shape for each in MESSAGES for shape in each.pushes} <= sent
    for each in answers.FRAMES:
        schema = DOCUMENT["components"]["schemas"][each.shape.__name__]
        assert each.type in schema["properties"]["type"].get("enum", ["error"])


def test_the_document_is_asyncapi_3_and_every_reference_leads_somewhere() -> None:
    assert DOCUMENT["asyncapi"] == "3.0.0"
    assert DOCUMENT["channels"]["socket"]["address"] == "/v1/felix/ws"
    assert msgspec.json.decode(msgspec.json.encode(DOCUMENT)) == DOCUMENT
    found = set(references(DOCUMENT))
    assert found
    for reference in found:
        node: Any = DOCUMENT
        for part in reference.removeprefix("#/").split("/"):
            node = node[part]
        assert node


def test_every_member_of_a_message_is_described() -> None:
    for each in MESSAGES:
        schema = DOCUMENT["components"]["schemas"][each.shape.__name__]
        assert schema["required"] == list(required_members(each.shape))
        for name, member in schema["properties"].items():
            assert name == "type" or member["description"], (each.type, name)
            assert set(member) - {"description"}, (each.type, name)


def test_what_a_list_holds_that_is_left_undecoded_is_known() -> None:
    for each in MESSAGES:
        members = DOCUMENT["components"]["schemas"][each.shape.__name__]["properties"]
        for field in msgspec.structs.fields(each.shape):
            if msgspec.Raw in (field.type, *get_args(field.type)):
                kinds = members[field.name].get("anyOf", [members[field.name]])
                assert any(kind.get("items") for kind in kinds), field.name


def named(message: MessageDescription) -> str:
    return message.type


def delivered_event(broker: BrokerProcess, socket: WebSocket, stream: str) -> dict[str, Any]:
    """An event of a new durable stream that this connection may ack."""
    here = {"tenant_id": "default", "namespace": "default"}
    path = "/v1/tenants/default/namespaces/default/streams"
    broker.client.post(path, json={"name": stream, "delivery": "at_least_once"})
    subscribed = socket.ask({"type": "subscribe", "stream": stream, "name": "n"} | here)
    socket.send({"type": "publish", "stream": stream, "payload": ""} | here)
    frames = socket.receive_all(2)
    event = next(frame for frame in frames if frame["type"] == "event")
    ids = {name: event[name] for name in ("offset", "delivery_id")}
    return {"subscription_id": subscribed["subscription_id"], **ids}


@pytest.mark.parametrize("only_required", [False, True], ids=["whole", "only required"])
@pytest.mark.parametrize("message", MESSAGES, ids=named)
def test_the_example_of_a_message_works_and_has_the_answer_that_is_documented(
    broker: BrokerProcess, message: MessageDescription, only_required: bool
) -> None:
    with WebSocket(broker.port) as socket:
        here = {"tenant_id": "default", "namespace": "default"}
        opened = [
            socket.ask({"type": "subscribe", "stream": "default"} | here),
            socket.ask({"type": "cache_watch", "cache": "default", "key": "unseen"} | here),
        ]
        ids = {
            "subscription_id": opened[0]["subscription_id"],
            "watch_id": opened[1]["watch_id"],
        }
        example = {"type": message.type} | message.example
        if message.type.startswith("event_"):
            ids |= delivered_event(broker, socket, message.type + str(only_required))
        example |= {name: ids[name] for name in ids if name in example}
        if only_required:
            # Of a watch, one of two is.
            names = {*required_members(message.shape), "prefix"}
            example = {name: text for name, text in example.items() if name in names}
        answer = socket.ask(example | {"request_id": 7})
        msgspec.convert(answer, message.answer, strict=True)
        assert answer["request_id"] == 7
        assert set(answer) <= {"type", *message.answer.__struct_fields__}


@pytest.mark.parametrize("message", MESSAGES, ids=named)
def test_what_is_said_to_be_required_of_a_message_is(
    broker: BrokerProcess, message: MessageDescription
) -> None:
    example = {"type": message.type} | message.example
    with WebSocket(broker.port) as socket:
        for member in required_members(message.shape):
            answer = socket.ask({name: text for name, text in example.items() if name != member})
            assert answer["error"] == "INVALID_ARGUMENT"
            assert f"{member} is required" in answer["message"], answer


@pytest.mark.parametrize("message", MESSAGES, ids=named)
def test_a_message_is_taken_over_http_if_the_api_says_so(
    broker: BrokerProcess, message: MessageDescription
) -> None:
    example = {"type": message.type} | message.example
    reply = broker.client.post("/v1/felix", json=example)
    is_taken = message.shape in get_args(MESSAGES_WITHOUT_CONNECTION)
    assert (reply.status_code == 200) == is_taken, reply.text


def test_the_document_is_served(broker: BrokerProcess) -> None:
    reply = broker.client.get("/docs/asyncapi.json")
    assert reply.json() == DOCUMENT
    assert reply.headers["content-type"] == "application/json"
