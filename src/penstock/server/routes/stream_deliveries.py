"""Named subscriptions of durable streams: ack, nack and extend events, and delete a name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec

from penstock.api.messages import Settle
from penstock.model.names import clean_name
from penstock.model.tenancy import Path
from penstock.server.access import Needs
from penstock.server.commands import clean_reason, delivery_of, lease_of
from penstock.server.http.dispatch import RequestDispatch
from penstock.server.http.requests import Request, decode_body
from penstock.server.members import Count, LeaseTime, Name, StrictBody, Wait, optional, required
from penstock.server.routes.endpoint import DONE, Endpoint, names_in_path
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
_nacks = msgspec.json.Decoder(EventNackBody)
_extends = msgspec.json.Decoder(EventExtendBody)


def ack_event(path: Path, dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    body = decode_body(_acks, request.body)
    dispatch.engine.ack(_settle_of(dispatch, path, body), reply.settle)


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


def _settle_of(dispatch: RequestDispatch, path: Path, body: EventAckBody) -> Settle:
    return delivery_of(dispatch.engine, path, body.name, body.owner, body.offset, body.delivery_id)


_EXAMPLE = {"name": "billing", "owner": "w1", "offset": 12, "delivery_id": "1-1"}
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
        answers=DONE,
        errors=_ERRORS,
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
        example=_EXAMPLE | {"reason": "timeout calling upstream"},
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
        answers=DONE,
        errors=_ERRORS,
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
        answers=DONE,
        errors=_ERRORS,
    ),
)
