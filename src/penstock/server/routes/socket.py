"""POST /v1/felix: any message that needs no connection of its own, or an array of them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.model.errors import PenstockError
from penstock.server.http.dispatch import RequestDispatch
from penstock.server.http.requests import Request
from penstock.server.http.responses import encode_json, typed_error
from penstock.server.message_actions import Outcome, perform
from penstock.server.websocket.answers import Ok, Value, Values
from penstock.server.websocket.arrays import answer_bytes, encode_outcomes, perform_all
from penstock.server.websocket.messages import (
    Message,
    Refused,
    RequestId,
    decode_many,
    decode_one,
    is_array,
)

if TYPE_CHECKING:
    from penstock.server.http.response_order import Reply


def post_message(hub: RequestDispatch, request: Request, reply: Reply) -> None:
    if is_array(request.body):
        messages = decode_many(request.body)
        done = partial(_send_all, reply, messages, hub.max_body_bytes)
        perform_all(messages, partial(perform, hub.engine), done)
    else:
        message = decode_one(request.body)
        perform(hub.engine, message, partial(send_answer, reply, message.request_id))


def send_answer(reply: Reply, request_id: RequestId, outcome: Outcome) -> None:
    """Over HTTP a request has an answer, even if none is due."""
    if isinstance(outcome, PenstockError):
        reply.send_error(outcome, request_id)
    elif isinstance(outcome, Value | Values):
        nbytes = answer_bytes([outcome])
        reply.when_room(nbytes, lambda: reply.send(200, encode_json(outcome)))
    else:
        answer = Ok(request_id=request_id) if outcome is None else outcome
        reply.send(200, encode_json(answer))


def _send_all(
    reply: Reply, messages: list[Message | Refused], max_bytes: int, outcomes: list[Outcome]
) -> None:
    reply.when_room(
        answer_bytes(outcomes),
        lambda: reply.send(200, encode_outcomes(messages, outcomes, _error_of, max_bytes)),
    )


def _error_of(message: Message | Refused, error: PenstockError) -> Any:
    return typed_error(error, request_id=message.request_id)
