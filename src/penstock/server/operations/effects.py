"""Idempotency on the consumer's side, described."""

from __future__ import annotations

from penstock.api.effects import EffectReport
from penstock.server.answers import Begun
from penstock.server.operations.endpoint import DONE, Answer, Operation
from penstock.server.wire import (
    CommitEffectBody,
    FailEffectBody,
    LeasedEffectBody,
    LookedUpEffectBody,
)

_EFFECT = {
    "tenant_id": "acme",
    "topic": "orders",
    "group": "billing",
    "key": "charge-17",
    "owner": "w1",
}
_NAMES_EFFECT = ("topic", "group", "key", "owner")
_ERRORS = (400, 404, 409, 503)

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        method="GET",
        path="/v1/idempotency",
        tag="Effects",
        summary="Look up an effect",
        text="Its status (PENDING, COMMITTED or FAILED), its owner, what is left of the owner's "
        "lease, its result and why it failed last. 404 when it was never begun or is forgotten.",
        query=tuple(LookedUpEffectBody.__struct_fields__),
        required=("topic", "group", "key"),
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
    Operation(
        method="POST",
        path="/v1/idempotency/begin",
        tag="Effects",
        summary="Begin an effect",
        text="Asks whether to run the effect of a message, for a group. After a failure the "
        "answer has last_error. A crash between the effect and its commit repeats it.",
        body=LeasedEffectBody,
        required=_NAMES_EFFECT,
        example=_EFFECT | {"lease_ms": 30000},
        answers={200: Answer("Run it, or its result.", Begun, {"status": "RUN"})},
        errors=(400, 404, 409, 429, 503),
    ),
    Operation(
        method="POST",
        path="/v1/idempotency/renew",
        tag="Effects",
        summary="Renew an effect's lease",
        body=LeasedEffectBody,
        required=_NAMES_EFFECT,
        example=_EFFECT | {"lease_ms": 30000},
        answers=DONE,
        errors=_ERRORS,
    ),
    Operation(
        method="POST",
        path="/v1/idempotency/commit",
        tag="Effects",
        summary="Commit an effect with its result",
        text="Messages of the key are from now on finished for the group without delivery.",
        body=CommitEffectBody,
        required=_NAMES_EFFECT,
        example=_EFFECT | {"result": "charged 17 EUR"},
        answers=DONE,
        errors=(400, 404, 409, 413, 429, 503),
    ),
    Operation(
        method="POST",
        path="/v1/idempotency/fail",
        tag="Effects",
        summary="Let go of an effect that failed",
        body=FailEffectBody,
        required=_NAMES_EFFECT,
        example=_EFFECT | {"reason": "card declined"},
        answers=DONE,
        errors=_ERRORS,
    ),
)
