"""Declared resources: compare them with the broker, and create or change what is missing."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import msgspec

from penstock.model.access import BROKER_SCOPE
from penstock.model.errors import FailedPrecondition, PenstockError
from penstock.server.access import HandlerNeeds, Needs, actor_of, check_request
from penstock.server.declarations import DeclaredResources
from penstock.server.http.dispatch import RequestDispatch
from penstock.server.http.requests import Request, decode_body
from penstock.server.members import optional
from penstock.server.resources import (
    Plan,
    ResourceStep,
    SettingChange,
    carry_out,
    make_plan,
)
from penstock.server.routes.endpoint import Answer, Endpoint

if TYPE_CHECKING:
    from penstock.server.http.response_order import Reply


class ApplyBody(DeclaredResources):
    dry_run: Annotated[bool | None, optional("true: only shows the plan.")] = None
    changes: Annotated[
        bool | None,
        optional("true: changes resources that differ. Otherwise only missing ones are created."),
    ] = None


class ApplyAnswer(msgspec.Struct):
    """`applied`: the creations and, if they were asked for, the changes have been made."""

    applied: bool
    steps: list[ResourceStep]


_decoder = msgspec.json.Decoder(ApplyBody)
_REGISTRY = HandlerNeeds("registry", "broker")


def apply_resources(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    body = decode_body(_decoder, request.body)
    if body.tenants or body.quotas:
        check_request(dispatch, request, reply, _REGISTRY, BROKER_SCOPE, "")
    if dispatch.follower is not None and body.has_entries():
        raise FailedPrecondition(
            "this broker follows a control plane; declare tenants, streams and caches there"
        )

    actor = actor_of(request, reply)

    def planned(plan: Plan | PenstockError) -> None:
        if isinstance(plan, PenstockError):
            reply.send_error(plan)
            return
        steps = [each.step for each in plan]
        if body.dry_run:
            reply.send_json(200, ApplyAnswer(False, steps))
        else:
            # The plan may have waited for the disk, and so for others.
            with dispatch.engine.audit.acting(actor):
                carry_out(plan, changes=bool(body.changes), done=partial(applied, steps))

    def applied(steps: list[ResourceStep], taken: list[ResourceStep] | PenstockError) -> None:
        if isinstance(taken, PenstockError):
            reply.send_error(taken)
        else:
            reply.send_json(200, ApplyAnswer(True, steps))

    make_plan(dispatch.engine, body, planned)


_EXAMPLE = ApplyAnswer(
    True,
    [
        ResourceStep(action="create", kind="topic", name="orders"),
        ResourceStep(
            action="change",
            kind="cache",
            name="default/default/default",
            changes=[SettingChange("max_entries", 0, 1000)],
        ),
    ],
)

ENDPOINTS = (
    Endpoint(
        route="POST /v1/apply",
        handler=apply_resources,
        access=Needs("manage", "broker"),
        tag="Tenants",
        summary="Create and change declared resources",
        text="Compares the declaration with the broker. Only settings that are declared count, and "
        "nothing is deleted, so the same request can be repeated. A conflict is a resource whose "
        "setting cannot change, or whose namespace does not exist: with changes, nothing is done "
        "then and the answer is 409.",
        body=ApplyBody,
        example={
            "topics": [{"name": "orders", "partitions": 3}],
            "caches": [{"name": "default", "max_entries": 1000}],
            "changes": True,
        },
        answers={
            200: Answer("The plan, step by step.", ApplyAnswer, msgspec.to_builtins(_EXAMPLE))
        },
        errors=(400, 409, 429, 503),
    ),
)
