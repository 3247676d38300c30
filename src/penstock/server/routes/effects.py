"""Effects: idempotency on the consumer's side. Begin, renew, commit, fail, and look one up."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import UNSET, UnsetType

from penstock.api.effects import BegunEffect, EffectCommand, EffectReport
from penstock.model.errors import InvalidArgument
from penstock.model.limits import MAX_ENVELOPE_FIELD_BYTES, MAX_RESULT_BYTES
from penstock.model.names import clean_name, full_name_in
from penstock.model.scopes import Scope
from penstock.server.access import HandlerNeeds, consuming
from penstock.server.commands import clean_reason, lease_of
from penstock.server.envelopes import check_length
from penstock.server.http.dispatch import RequestDispatch, send_outcome
from penstock.server.http.requests import Request
from penstock.server.members import (
    GroupName,
    Identifier,
    LeaseTime,
    OwnerName,
    StrictBody,
    TopicName,
    limits,
    optional,
    required,
)
from penstock.server.queries import BodyOrQuery, body_of_query
from penstock.server.routes.endpoint import DONE, Answer, Endpoint

if TYPE_CHECKING:
    from penstock.server.http.response_order import Reply

_EffectKey = Annotated[str, limits(minLength=1, maxLength=MAX_ENVELOPE_FIELD_BYTES)]
_Result = Annotated[str, limits(maxLength=MAX_RESULT_BYTES)]


class EffectQuery(StrictBody):
    """The members that name an effect."""

    tenant_id: Annotated[
        Identifier | None, optional("The tenant. Each tenant has its own idempotency keys.")
    ] = None
    topic: TopicName = None
    group: GroupName = None
    key: Annotated[_EffectKey | None, required("The idempotency key of the effect.")] = None


class EffectBody(EffectQuery):
    owner: OwnerName = None


class LeasedEffectBody(EffectBody):
    lease_ms: LeaseTime = None


class CommitEffectBody(EffectBody):
    result: Annotated[
        _Result | None, optional("The result of the effect, kept for later requests.")
    ] = None


class FailEffectBody(EffectBody):
    reason: Annotated[
        str | None, optional("Why it failed; the next delivery has it as last_error.")
    ] = None


class Begun(msgspec.Struct):
    """`RUN`: run the effect, which failed before if there is a `last_error`. `COMMITTED`: it was
    run, with this result."""

    status: str
    result: str | UnsetType = UNSET
    last_error: str | UnsetType = UNSET


_leased = BodyOrQuery(LeasedEffectBody)
_commits = BodyOrQuery(CommitEffectBody)
_failures = BodyOrQuery(FailEffectBody)
_ANYBODY = "anybody"


def begin(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    body = _leased.read(request)
    dispatch.engine.effects.begin(
        _allowed(dispatch, request, body),
        lease_of(body.lease_ms, dispatch.engine.limits.lease_ms),
        lambda outcome: send_outcome(reply, outcome, 200, _begun),
    )


def _begun(effect: BegunEffect) -> Begun:
    if effect.is_committed:
        return Begun("COMMITTED", result=effect.text)
    return Begun("RUN", last_error=effect.text or UNSET)


def look_up(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    body = body_of_query(request.params(), EffectBody, owner=_ANYBODY)
    command = _allowed(dispatch, request, body)
    dispatch.engine.effects.look_up(
        command, lambda outcome: send_outcome(reply, outcome, 200, lambda report: report)
    )


def renew(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    body = _leased.read(request)
    lease_ms = lease_of(body.lease_ms, dispatch.engine.limits.lease_ms)
    dispatch.engine.effects.renew(_allowed(dispatch, request, body), lease_ms, reply.settle)


def commit(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    body = _commits.read(request)
    dispatch.engine.effects.commit(
        _allowed(dispatch, request, body), body.result or "", reply.settle
    )


def fail(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    body = _failures.read(request)
    command = _allowed(dispatch, request, body)
    dispatch.engine.effects.fail(command, clean_reason(body.reason), reply.settle)


def _allowed(dispatch: RequestDispatch, request: Request, body: EffectBody) -> EffectCommand:
    return consuming(dispatch, request, partial(effect_of, request.notes.scope))(body)


def effect_of(scope: Scope, body: EffectBody) -> EffectCommand:
    check_length(body.tenant_id, "tenant_id")
    check_length(body.key, "key")
    if not body.key:
        raise InvalidArgument("key is required")
    return EffectCommand(
        body.tenant_id or "",
        full_name_in(scope, body.topic),
        clean_name(body.group, "group"),
        body.key,
        clean_name(body.owner, "owner"),
    )


_EXAMPLE = {
    "tenant_id": "acme",
    "topic": "orders",
    "group": "billing",
    "key": "charge-17",
    "owner": "w1",
}
_ERRORS = (400, 404, 409, 503)

ENDPOINTS = (
    Endpoint(
        route="GET /v1/idempotency",
        handler=look_up,
        access=HandlerNeeds("consume", "topic"),
        tag="Effects",
        summary="Look up an effect",
        text="Its status (PENDING, COMMITTED or FAILED), its owner, the rest of the owner's "
        "lease, its result and its last error. 404 if it was never begun or is forgotten.",
        query=(EffectQuery,),
        example=_EXAMPLE,
        answers={
            200: Answer(
                "The effect.",
                EffectReport,
                {
                    "status": "FAILED",
                    "owner": "w1",
                    "lease_ms": 0,
                    "result": "",
                    "last_error": "card declined",
                },
            )
        },
        errors=(400, 404, 503),
    ),
    Endpoint(
        route="POST /v1/idempotency/begin",
        handler=begin,
        access=HandlerNeeds("consume", "topic"),
        tag="Effects",
        summary="Begin an effect",
        text="Asks whether to run the effect of a message for a group. After a failure the "
        "answer has last_error. If the consumer crashes between the effect and its commit, the "
        "effect runs again.",
        body=LeasedEffectBody,
        query=(LeasedEffectBody,),
        example=_EXAMPLE | {"lease_ms": 30000},
        answers={200: Answer("Whether to run it, or its result.", Begun, {"status": "RUN"})},
        errors=(400, 404, 409, 429, 503),
    ),
    Endpoint(
        route="POST /v1/idempotency/renew",
        handler=renew,
        access=HandlerNeeds("consume", "topic"),
        tag="Effects",
        summary="Renew an effect's lease",
        body=LeasedEffectBody,
        query=(LeasedEffectBody,),
        example=_EXAMPLE | {"lease_ms": 30000},
        answers=DONE,
        errors=_ERRORS,
    ),
    Endpoint(
        route="POST /v1/idempotency/commit",
        handler=commit,
        access=HandlerNeeds("consume", "topic"),
        tag="Effects",
        summary="Commit an effect with its result",
        text="Later messages with this key are finished for the group without delivery.",
        body=CommitEffectBody,
        query=(CommitEffectBody,),
        example=_EXAMPLE | {"result": "charged 17 EUR"},
        answers=DONE,
        errors=(400, 404, 409, 413, 429, 503),
    ),
    Endpoint(
        route="POST /v1/idempotency/fail",
        handler=fail,
        access=HandlerNeeds("consume", "topic"),
        tag="Effects",
        summary="Say that an effect failed",
        body=FailEffectBody,
        query=(FailEffectBody,),
        example=_EXAMPLE | {"reason": "card declined"},
        answers=DONE,
        errors=_ERRORS,
    ),
)
