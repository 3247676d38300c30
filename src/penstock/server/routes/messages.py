"""Messages: produce one, or many in one commit."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from penstock.api.messages import Produce, ProduceOutcome
from penstock.model.errors import InvalidArgument, PenstockError
from penstock.model.names import full_name_in
from penstock.model.records import Message
from penstock.model.scopes import Scope, plain_name
from penstock.server.access import HandlerNeeds, check_produce
from penstock.server.batches import BatchDecoder, read_commands, send_results
from penstock.server.envelopes import (
    EnvelopeBody,
    RetryPolicyBody,
    deadline_from_ms,
    envelope_of,
)
from penstock.server.http.dispatch import RequestDispatch
from penstock.server.http.requests import Notes, Request, decode_body, whole_number
from penstock.server.http.responses import JSON_TYPE, batch_error, encode_json
from penstock.server.members import StrictBody, TopicName, limits, optional, required
from penstock.server.queries import body_of_query
from penstock.server.routes.endpoint import Answer, Endpoint

if TYPE_CHECKING:
    from penstock.server.http.response_order import Reply

_Value = Annotated[str, limits(minLength=1)]


class ProduceBody(StrictBody):
    topic: TopicName = None
    key: Annotated[str | None, optional("Messages with one key go to one partition.")] = None
    value: Annotated[_Value | None, required("The payload: a string that is not empty.")] = None
    envelope: EnvelopeBody | None = None


class ProduceQuery(msgspec.Struct):
    """Query parameters of a produce that neither the body nor its envelope has."""

    tenant: Annotated[str | None, optional("The same as tenant_id.")] = None
    idem_key: Annotated[str | None, optional("The same as idempotency_key.")] = None
    deadline_rfc3339: Annotated[str | None, optional("The same as deadline.")] = None
    deadline_ms: Annotated[int | None, optional("The same in milliseconds since 1970.")] = None
    retry_max_attempts: Annotated[int | None, optional("retry_policy.max_attempts.")] = None
    retry_backoff_ms: Annotated[int | None, optional("retry_policy.backoff_ms.")] = None
    retry_max_backoff_ms: Annotated[int | None, optional("retry_policy.max_backoff_ms.")] = None


class Produced(msgspec.Struct, gc=False):
    status: str
    topic: str


class ProducedItem(msgspec.Struct, omit_defaults=True, gc=False):
    """A duplicate was not stored again, so it has no partition and no offset."""

    status: str
    topic: str
    partition: int = -1
    offset: int = -1
    duplicate: bool = False


_decoder = msgspec.json.Decoder(ProduceBody)
_batches = BatchDecoder(ProduceBody)

# Clients of the contract compare the whole body of a produce, so its place is told in headers.
_PLACE = JSON_TYPE + b"penstock-partition: %d\r\npenstock-offset: %d\r\n"
_DUPLICATE = JSON_TYPE + b"penstock-duplicate: true\r\n"


def produce(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    if request.body:
        body = decode_body(_decoder, request.body)
    else:
        body = _body_of_query(request.params())
    command = produce_of(request.notes.scope, body)
    if request.notes.principal is not None:
        check_produce(dispatch.engine.access, request.notes, command)
    dispatch.engine.produce(command, partial(_send_produced, reply, command.topic))


def _send_produced(reply: Reply, topic: str, outcome: ProduceOutcome) -> None:
    if isinstance(outcome, PenstockError):
        reply.send_error(outcome)
    elif outcome is None:
        reply.send(200, _produced_body(topic), _DUPLICATE)
    else:
        reply.send(200, _produced_body(topic), _PLACE % (outcome.partition, outcome.offset))


@lru_cache(1024)
def _produced_body(topic: str) -> bytes:
    """Takes the full name of the topic."""
    return encode_json(Produced("produced", plain_name(topic)))


def produce_batch(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    notes = request.notes
    command_of: Callable[[ProduceBody], Produce] = partial(produce_of, notes.scope)
    if notes.principal is not None:
        command_of = partial(_allowed, dispatch, notes)
    commands, refused = read_commands(_batches.decode(request.body), command_of)
    results_of = partial(map, _produced_item, commands)
    dispatch.engine.produce_many(commands, partial(send_results, reply, refused, results_of))


def _allowed(dispatch: RequestDispatch, notes: Notes, body: ProduceBody) -> Produce:
    return check_produce(dispatch.engine.access, notes, produce_of(notes.scope, body))


def _produced_item(command: Produce, outcome: ProduceOutcome) -> Any:
    if isinstance(outcome, Message):
        topic = plain_name(command.topic)
        return ProducedItem("produced", topic, outcome.partition, outcome.offset)
    if outcome is None:
        return ProducedItem("produced", plain_name(command.topic), duplicate=True)
    return batch_error(outcome)


def produce_of(scope: Scope, body: ProduceBody) -> Produce:
    topic = full_name_in(scope, body.topic)
    if not body.value:
        raise InvalidArgument("value is required and must be a non-empty string")
    if body.envelope is None:
        return Produce(topic, body.key or "", body.value)
    envelope, deadline_ms = envelope_of(body.envelope)
    return Produce(topic, body.key or "", body.value, envelope, None, deadline_ms)


def _body_of_query(params: dict[str, str]) -> ProduceBody:
    envelope = body_of_query(
        params,
        EnvelopeBody,
        tenant_id=params.get("tenant_id") or params.get("tenant"),
        idempotency_key=params.get("idempotency_key") or params.get("idem_key"),
        deadline=_deadline_of_query(params),
        retry_policy=RetryPolicyBody(
            max_attempts=whole_number(params, "retry_max_attempts"),
            backoff_ms=whole_number(params, "retry_backoff_ms"),
            max_backoff_ms=whole_number(params, "retry_max_backoff_ms"),
        ),
    )
    return body_of_query(params, ProduceBody, envelope=envelope)


def _deadline_of_query(params: dict[str, str]) -> str | None:
    for name in ("deadline", "deadline_rfc3339"):
        if params.get(name):
            # An unescaped '+' of a zone arrives as a space.
            return re.sub(r" (\d{2}:\d{2})$", r"+\1", params[name])
    deadline_ms = whole_number(params, "deadline_ms")
    return None if deadline_ms is None else deadline_from_ms(deadline_ms)


_EXAMPLE = {
    "topic": "orders",
    "key": "user-7",
    "value": "hello",
    "envelope": {
        "run_id": "run-1",
        "tenant_id": "acme",
        "idempotency_key": "acme:run-1:step-7",
        "retry_policy": {"max_attempts": 5, "backoff_ms": 250, "max_backoff_ms": 5000},
    },
}
_PRODUCED = {"status": "produced", "topic": "orders"}
_REFUSED = {"error": "NOT_FOUND", "message": "no such topic: 'order'", "code": 404}

ENDPOINTS = (
    Endpoint(
        route="POST /v1/produce",
        handler=produce,
        access=HandlerNeeds("produce", "topic"),
        tag="Messages",
        summary="Produce a message",
        text="The answer comes when the message is as durable as the broker promises (see "
        "/v1/version). A second message with the same idempotency_key, tenant and topic is "
        "answered like the first, and not stored.",
        body=ProduceBody,
        query=(ProduceBody, EnvelopeBody, ProduceQuery),
        example=_EXAMPLE,
        answers={
            200: Answer(
                "Stored. The topic is the one of the request.",
                Produced,
                _PRODUCED,
                headers={
                    "Penstock-Partition": (
                        "The partition in which the message was stored.",
                        "integer",
                    ),
                    "Penstock-Offset": (
                        "The offset of the message. A duplicate has none.",
                        "integer",
                    ),
                    "Penstock-Duplicate": (
                        "true: the idempotency_key is known; nothing was stored.",
                        "string",
                    ),
                },
            )
        },
        errors=(400, 404, 409, 413, 429, 503),
    ),
    Endpoint(
        route="POST /v1/produce/batch",
        handler=produce_batch,
        access=HandlerNeeds("produce", "topic"),
        tag="Messages",
        summary="Produce messages in one commit",
        text="A JSON array, or NDJSON. Each message succeeds or fails by itself.",
        body=ProduceBody,
        batch=True,
        example=[{"topic": "orders", "value": "one"}, {"topic": "order", "value": "two"}],
        answers={
            200: Answer(
                "A result per message, in order.",
                ProducedItem,
                {"results": [{**_PRODUCED, "partition": 0, "offset": 13}, _REFUSED]},
            )
        },
        errors=(400, 413, 429, 503),
    ),
)
