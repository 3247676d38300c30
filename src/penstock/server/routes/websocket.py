"""The WebSocket, and the messages that may also be posted: those that need no connection."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.api.engine import Engine
from penstock.model.errors import PenstockError
from penstock.model.principals import Principal
from penstock.server.access import Open
from penstock.server.http.dispatch import RequestDispatch
from penstock.server.http.requests import Request
from penstock.server.http.responses import encode_json, typed_error
from penstock.server.message_access import check_message
from penstock.server.message_actions import MESSAGES_WITHOUT_CONNECTION, Done, Outcome, perform
from penstock.server.routes.endpoint import Answer, Endpoint
from penstock.server.websocket.answers import Ok, PublishOk, Value, Values
from penstock.server.websocket.arrays import answer_bytes, encode_outcomes, perform_all
from penstock.server.websocket.decoding import decode_many, decode_one, is_array
from penstock.server.websocket.messages import Message, RefusedMessage, RequestId
from penstock.server.websocket.upgrade import get_socket

if TYPE_CHECKING:
    from penstock.server.http.response_order import Reply


def post_message(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    principal = request.notes.principal
    if is_array(request.body):
        messages = decode_many(request.body)
        done = partial(_send_all, reply, messages, dispatch.max_body_bytes)
        perform_all(messages, partial(_perform, dispatch.engine, principal), done)
    else:
        message = decode_one(request.body)
        _perform(
            dispatch.engine, principal, message, partial(send_answer, reply, message.request_id)
        )


def _perform(
    engine: Engine, principal: Principal | None, message: Message | RefusedMessage, done: Done
) -> None:
    try:
        if principal is not None:
            check_message(engine.access, principal, message)
    except PenstockError as error:
        done(error)
    else:
        perform(engine, message, done)


def send_answer(reply: Reply, request_id: RequestId, outcome: Outcome) -> None:
    """Sends the answer; over HTTP every request has one, even if none is due."""
    if isinstance(outcome, PenstockError):
        reply.send_error(outcome, request_id)
    elif isinstance(outcome, Value | Values):
        nbytes = answer_bytes([outcome])
        reply.when_room(nbytes, lambda: reply.send(200, encode_json(outcome)))
    else:
        answer = Ok(request_id=request_id) if outcome is None else outcome
        reply.send(200, encode_json(answer))


def _send_all(
    reply: Reply, messages: list[Message | RefusedMessage], max_bytes: int, outcomes: list[Outcome]
) -> None:
    reply.when_room(
        answer_bytes(outcomes),
        lambda: reply.send(200, encode_outcomes(messages, outcomes, _error_of, max_bytes)),
    )


def _error_of(message: Message | RefusedMessage, error: PenstockError) -> Any:
    return typed_error(error, request_id=message.request_id)


ENDPOINTS = (
    Endpoint(
        route="POST /v1/felix",
        handler=post_message,
        access=Open("each message is checked by itself"),
        tag="Streams",
        summary="Any message of the WebSocket that needs no open connection",
        text="publish, publish_batch, ping, and every cache message except the watches; or an "
        "array of up to 10,000 of them, counting the items of their lists, which is answered "
        "by an array. All messages are in /docs/asyncapi.json.",
        body=MESSAGES_WITHOUT_CONNECTION,
        or_array=True,
        example={
            "type": "publish",
            "tenant_id": "default",
            "namespace": "default",
            "stream": "default",
            "payload": "aGVsbG8=",
        },
        answers={
            200: Answer(
                "The answer to the message.",
                Ok | PublishOk | Value | Values,
                {"type": "publish_ok"},
            )
        },
        errors=(400, 404, 413, 429, 503, 409, 412),
    ),
    Endpoint(
        route="GET /v1/felix/ws",
        handler=get_socket,
        access=Open("each message is checked by itself"),
        tag="Streams",
        summary="The WebSocket",
        text="Ask for an upgrade, version 13, with subprotocol felix.v1 or felix.v1+binary. "
        "The messages are described in /docs/asyncapi.json.",
        answers={101: Answer("The connection is now a WebSocket.")},
        errors=(400, 426),
    ),
)
