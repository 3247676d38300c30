"""Named subscriptions of durable streams: ack, nack, release and extend events, delete a name.

Also tells a producer the number of its next publish, for a program that starts again."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import msgspec

from penstock.api.messages import Settle
from penstock.model.errors import PenstockError
from penstock.model.names import clean_name
from penstock.model.tenancy import Path
from penstock.server.access import Needs
from penstock.server.batches import BatchDecoder
from penstock.server.commands import clean_reason, delivery_of, lease_of
from penstock.server.http.dispatch import RequestDispatch
from penstock.server.http.requests import Request, decode_body
from penstock.server.members import Count, LeaseTime, Name, StrictBody, Wait, optional, required
from penstock.server.routes.deliveries import ReleasedItem, settle_batch
from penstock.server.routes.endpoint import (
    DONE,
    DURABLE_EXAMPLE,
    Answer,
    Endpoint,
    names_in_path,
)
from penstock.server.routes.streams import STREAM

if TYPE_CHECKING:
    from penstock.server.http.response_order import Reply


class EventAckBody(StrictBody):
    name: Annotated[Name | None, required("The subscription's name.")] = None
    owner: Annotated[
        Name | None, required("The owner, from the line that began the subscription.")
    ] = None
    offset: Annotated[Count | None, required("The event's offset.")] = None
    delivery_id: Annotated[
        str | None, optional("Names this delivery only; a later one of the event is refused.")
    ] = None


class EventNackBody(EventAckBody):
    reason: Annotated[
        str | None, optional("Why it failed; the next delivery has it as last_error.")
    ] = None
    delay_ms: Annotated[
        Wait | None, optional("How long the next delivery waits, up to a day; 0 is at once.")
    ] = None


class EventExtendBody(EventAckBody):
    lease_ms: LeaseTime = None


_acks = msgspec.json.Decoder(EventAckBody)
_batches = BatchDecoder(EventAckBody)
_nacks = msgspec.json.Decoder(EventNackBody)
_extends = msgspec.json.Decoder(EventExtendBody)


def ack_event(path: Path, dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    body = decode_body(_acks, request.body)
    dispatch.engine.ack(_settle_of(dispatch, path, body), reply.settle)


def release_event(path: Path, dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    body = decode_body(_acks, request.body)
    dispatch.engine.release(_settle_of(dispatch, path, body), reply.settle)


def release_events(path: Path, dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    bodies, settle = _batches.decode(request.body), partial(_settle_of, dispatch, path)
    settle_batch(reply, bodies, settle, dispatch.engine.release_many, ReleasedItem())


def nack_event(path: Path, dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    body = decode_body(_nacks, request.body)
    dispatch.engine.nack(
        _settle_of(dispatch, path, body),
        clean_reason(body.reason),
        reply.settle,
        delay_ms=body.delay_ms,
    )


def extend_event(path: Path, dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    body = decode_body(_extends, request.body)
    lease_ms = lease_of(body.lease_ms, dispatch.engine.limits.lease_ms)
    dispatch.engine.extend(_settle_of(dispatch, path, body), lease_ms, reply.settle)


def delete_subscription(
    path: Path, dispatch: RequestDispatch, request: Request, reply: Reply
) -> None:
    name = clean_name(names_in_path(request)[-1], "name")
    dispatch.engine.delete_group(dispatch.engine.streams.log_name(path), name, reply.settle)


class NextSequence(msgspec.Struct):
    """The number that the producer's next publish must have; 0 for one that is not known."""

    producer_id: str
    next_sequence: int


def describe_producer(
    path: Path, dispatch: RequestDispatch, request: Request, reply: Reply
) -> None:
    producer_id = clean_name(names_in_path(request)[-1], "producer_id")
    done = partial(_send_producer, reply, producer_id)
    dispatch.engine.streams.next_sequence(path, producer_id, done)


def _send_producer(reply: Reply, producer_id: str, outcome: int | PenstockError) -> None:
    if isinstance(outcome, PenstockError):
        reply.send_error(outcome)
    else:
        reply.send_json(200, NextSequence(producer_id, outcome))


def _settle_of(dispatch: RequestDispatch, path: Path, body: EventAckBody) -> Settle:
    return delivery_of(dispatch.engine, path, body.name, body.owner, body.offset, body.delivery_id)


_EXAMPLE = {"name": "billing", "owner": "w1", "offset": 0}
_ERRORS = (400, 404, 409, 503)

ENDPOINTS = (
    Endpoint(
        route=f"POST {STREAM}/ack",
        handler=ack_event,
        access=Needs("subscribe", "stream"),
        scope="stream",
        tag="Streams",
        summary="Ack an event of a named subscription",
        text="The event is done for the subscription. Another ack changes nothing.",
        body=EventAckBody,
        example=_EXAMPLE,
        path_examples=DURABLE_EXAMPLE,
        answers=DONE,
        errors=_ERRORS,
    ),
    Endpoint(
        route=f"POST {STREAM}/release",
        handler=release_event,
        access=Needs("subscribe", "stream"),
        scope="stream",
        tag="Streams",
        summary="Release an event of a named subscription",
        text="Gives back an event that nobody began to handle. It is delivered again at once, at "
        "its old place in the order, and the attempt is not counted.",
        body=EventAckBody,
        example=_EXAMPLE,
        path_examples=DURABLE_EXAMPLE,
        answers=DONE,
        errors=_ERRORS,
    ),
    Endpoint(
        route=f"POST {STREAM}/release_batch",
        handler=release_events,
        access=Needs("subscribe", "stream"),
        scope="stream",
        tag="Streams",
        summary="Release several events of a named subscription",
        text="A JSON array, or NDJSON. Each release succeeds or fails by itself.",
        body=EventAckBody,
        batch=True,
        example=[_EXAMPLE],
        path_examples=DURABLE_EXAMPLE,
        answers={
            200: Answer(
                "A result per release, in order.",
                ReleasedItem,
                {"results": [{"status": "released"}]},
            )
        },
        errors=(400, 413, 503),
    ),
    Endpoint(
        route=f"POST {STREAM}/nack",
        handler=nack_event,
        access=Needs("subscribe", "stream"),
        scope="stream",
        tag="Streams",
        summary="Nack an event of a named subscription",
        text="The attempt failed. The event is delivered again after delay_ms, or else after the "
        "broker's backoff, which doubles. Attempts do not end: streams have no dead letters.",
        body=EventNackBody,
        example=_EXAMPLE | {"offset": 1, "reason": "timeout calling upstream"},
        path_examples=DURABLE_EXAMPLE,
        answers=DONE,
        errors=_ERRORS,
    ),
    Endpoint(
        route=f"POST {STREAM}/extend",
        handler=extend_event,
        access=Needs("subscribe", "stream"),
        scope="stream",
        tag="Streams",
        summary="Extend the lease of an event",
        text="The lease then ends lease_ms from now.",
        body=EventExtendBody,
        example=_EXAMPLE | {"lease_ms": 30000},
        path_examples=DURABLE_EXAMPLE,
        answers=DONE,
        errors=_ERRORS,
    ),
    Endpoint(
        route=f"GET {STREAM}/producers/{{producer}}",
        handler=describe_producer,
        access=Needs("publish", "stream"),
        scope="stream",
        tag="Streams",
        summary="Show the next number of a producer",
        text="The sequence that the producer's next publish must have. 0 if the stream does not "
        "know the producer, or has forgotten it. Every publish below it is on disk.",
        path_examples=DURABLE_EXAMPLE,
        answers={
            200: Answer("The number.", NextSequence, {"producer_id": "till-3", "next_sequence": 17})
        },
        errors=(400, 404, 409, 503),
    ),
    Endpoint(
        route=f"DELETE {STREAM}/subscriptions/{{subscription}}",
        handler=delete_subscription,
        access=Needs("manage", "stream"),
        scope="stream",
        tag="Streams",
        summary="Delete a named subscription",
        text="Deletes its position, and ends the feeds of those who joined it. Retention no "
        "longer waits for it.",
        path_examples=DURABLE_EXAMPLE,
        answers=DONE,
        errors=_ERRORS,
    ),
)
