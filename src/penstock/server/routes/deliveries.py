"""Deliveries: ack, nack and release them, and extend their leases."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec

from penstock.api.messages import Settle, SettleOutcome
from penstock.api.outcomes import Done
from penstock.model.errors import PenstockError
from penstock.model.names import clean_name, full_name_in
from penstock.model.scopes import Scope
from penstock.server.access import HandlerNeeds, consuming
from penstock.server.batches import BatchDecoder, read_commands, send_results
from penstock.server.commands import clean_reason, lease_of
from penstock.server.http.dispatch import RequestDispatch
from penstock.server.http.requests import Request, required_index
from penstock.server.http.responses import batch_error
from penstock.server.members import (
    Count,
    GroupName,
    LeaseTime,
    OwnerName,
    StrictBody,
    TopicName,
    Wait,
    optional,
    required,
)
from penstock.server.queries import BodyOrQuery
from penstock.server.routes.endpoint import DONE, Answer, Endpoint

if TYPE_CHECKING:
    from penstock.server.http.response_order import Reply


B = TypeVar("B")


class AckBody(StrictBody):
    topic: TopicName = None
    group: GroupName = None
    partition: Annotated[Count | None, required("The delivery's partition.")] = None
    offset: Annotated[Count | None, required("The delivery's offset.")] = None
    owner: OwnerName = None
    delivery_id: Annotated[
        str | None, optional("Names this delivery only; a later one of the message is refused.")
    ] = None


class NackBody(AckBody):
    reason: Annotated[
        str | None, optional("Why it failed; the next delivery has it as last_error.")
    ] = None
    delay_ms: Annotated[
        Wait | None,
        optional("How long the retry waits, up to a day, whatever the policy; 0 is at once."),
    ] = None
    dead: Annotated[
        bool | None,
        optional("true: no retry; the message goes to the dead letters now."),
    ] = None


class ExtendBody(AckBody):
    lease_ms: LeaseTime = None


class AckedItem(msgspec.Struct, gc=False):
    status: str = "acked"


class ReleasedItem(msgspec.Struct, gc=False):
    status: str = "released"


_acks = BodyOrQuery(AckBody)
_nacks = BodyOrQuery(NackBody)
_extends = BodyOrQuery(ExtendBody)
_batches = BatchDecoder(AckBody)


def ack(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    dispatch.engine.ack(_settle(dispatch, request)(_acks.read(request)), reply.settle)


def release(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    dispatch.engine.release(_settle(dispatch, request)(_acks.read(request)), reply.settle)


def nack(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    body = _nacks.read(request)
    dispatch.engine.nack(
        _settle(dispatch, request)(body),
        clean_reason(body.reason),
        reply.settle,
        delay_ms=body.delay_ms,
        dead=bool(body.dead),
    )


def extend(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    body = _extends.read(request)
    lease = lease_of(body.lease_ms, dispatch.engine.limits.lease_ms)
    dispatch.engine.extend(_settle(dispatch, request)(body), lease, reply.settle)


def ack_batch(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    bodies, settle = _batches.decode(request.body), _settle(dispatch, request)
    settle_batch(reply, bodies, settle, dispatch.engine.ack_many, AckedItem())


def release_batch(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    bodies, settle = _batches.decode(request.body), _settle(dispatch, request)
    settle_batch(reply, bodies, settle, dispatch.engine.release_many, ReleasedItem())


def settle_batch(
    reply: Reply,
    bodies: list[B | PenstockError],
    settle: Callable[[B], Settle],
    act: Callable[[list[Settle], Done[list[SettleOutcome]]], None],
    success: Any,
) -> None:
    """Settles the deliveries of a batch with `act`; each that succeeds has the result `success`."""
    commands, refused = read_commands(bodies, settle)
    results_of = partial(map, partial(_settled_item, success))
    act(commands, partial(send_results, reply, refused, results_of))


def _settled_item(success: Any, outcome: SettleOutcome) -> Any:
    """Returns the result of one item of a batch."""
    return success if outcome is None else batch_error(outcome)


def _settle(dispatch: RequestDispatch, request: Request) -> Callable[[AckBody], Settle]:
    """Returns the function that makes the command of a body, and checks that it is allowed."""
    return consuming(dispatch, request, partial(settle_of, request.notes.scope))


def settle_of(scope: Scope, body: AckBody) -> Settle:
    return Settle(
        full_name_in(scope, body.topic),
        clean_name(body.group, "group"),
        required_index(body.partition, "partition"),
        required_index(body.offset, "offset"),
        clean_name(body.owner, "owner"),
        body.delivery_id or "",
    )


_EXAMPLE = {"topic": "orders", "group": "billing", "partition": 0, "offset": 0, "owner": "w1"}
_ERRORS = (400, 404, 409, 503)

ENDPOINTS = (
    Endpoint(
        route="POST /v1/ack",
        handler=ack,
        access=HandlerNeeds("consume", "topic"),
        tag="Messages",
        summary="Ack a delivery",
        text="The message is done for the group. Another ack changes nothing.",
        body=AckBody,
        query=(AckBody,),
        example=_EXAMPLE,
        answers=DONE,
        errors=_ERRORS,
    ),
    Endpoint(
        route="POST /v1/ack/batch",
        handler=ack_batch,
        access=HandlerNeeds("consume", "topic"),
        tag="Messages",
        summary="Ack deliveries in one commit",
        text="A JSON array, or NDJSON. Each ack succeeds or fails by itself.",
        body=AckBody,
        batch=True,
        example=[_EXAMPLE],
        answers={
            200: Answer(
                "A result per ack, in order.", AckedItem, {"results": [{"status": "acked"}]}
            )
        },
        errors=(400, 413, 503),
    ),
    Endpoint(
        route="POST /v1/nack",
        handler=nack,
        access=HandlerNeeds("consume", "topic"),
        tag="Messages",
        summary="Nack a delivery",
        text="The attempt failed. The message is delivered again after delay_ms, else as its "
        "retry policy says, else after the default backoff of the topic or the broker. After "
        "its last attempt, or with dead, it is moved to dlq.<topic>.",
        body=NackBody,
        query=(NackBody,),
        example=_EXAMPLE | {"reason": "timeout calling upstream"},
        answers=DONE,
        errors=_ERRORS,
    ),
    Endpoint(
        route="POST /v1/release",
        handler=release,
        access=HandlerNeeds("consume", "topic"),
        tag="Messages",
        summary="Release a delivery that nobody began to handle",
        text="The owner gives the delivery back: the message is delivered again at once, in "
        "its old place, and the attempt does not count, so that releases never lead to a dead "
        "letter. Refused once the lease has ended.",
        body=AckBody,
        query=(AckBody,),
        example=_EXAMPLE,
        answers=DONE,
        errors=_ERRORS,
    ),
    Endpoint(
        route="POST /v1/release/batch",
        handler=release_batch,
        access=HandlerNeeds("consume", "topic"),
        tag="Messages",
        summary="Release deliveries in one commit",
        text="A JSON array, or NDJSON. Each release succeeds or fails by itself.",
        body=AckBody,
        batch=True,
        example=[_EXAMPLE],
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
        route="POST /v1/extend",
        handler=extend,
        access=HandlerNeeds("consume", "topic"),
        tag="Messages",
        summary="Extend a lease",
        text="The lease then ends lease_ms from now.",
        body=ExtendBody,
        query=(ExtendBody,),
        example=_EXAMPLE | {"lease_ms": 30000},
        answers=DONE,
        errors=_ERRORS,
    ),
)
