"""Consumer-side idempotency over HTTP: begin, renew, commit, fail, look up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from penstock.api.effects import BegunEffect
from penstock.server.forms import effect_of
from penstock.server.http.dispatch import RequestDispatch, send_outcome
from penstock.server.http.requests import Request, decode_body, whole_number
from penstock.server.routes.deliveries import clean_reason, lease_of
from penstock.server.wire import (
    CommitEffectBody,
    EffectBody,
    FailEffectBody,
    LeasedEffectBody,
    LookedUpEffectBody,
)

if TYPE_CHECKING:
    from penstock.server.http.response_order import Reply

_leased_decoder = msgspec.json.Decoder(LeasedEffectBody)
_commit_decoder = msgspec.json.Decoder(CommitEffectBody)
_fail_decoder = msgspec.json.Decoder(FailEffectBody)
_ANYBODY = "anybody"
_NAMES = ("tenant_id", "topic", "group", "key", "owner")


def begin(hub: RequestDispatch, request: Request, reply: Reply) -> None:
    body = _leased(request)
    hub.engine.begin_effect(
        effect_of(body),
        lease_of(body.lease_ms, hub.engine.limits.lease_ms),
        lambda outcome: send_outcome(reply, outcome, 200, _begun),
    )


def _begun(effect: BegunEffect) -> dict[str, Any]:
    if effect.is_committed:
        return {"status": "COMMITTED", "result": effect.text}
    return {"status": "RUN", "last_error": effect.text} if effect.text else {"status": "RUN"}


def look_up(hub: RequestDispatch, request: Request, reply: Reply) -> None:
    params = request.params()
    named = LookedUpEffectBody(*(params.get(name) for name in LookedUpEffectBody.__struct_fields__))
    command = effect_of(EffectBody(**msgspec.structs.asdict(named), owner=_ANYBODY))
    hub.engine.look_up_effect(
        command, lambda outcome: send_outcome(reply, outcome, 200, lambda report: report)
    )


def renew(hub: RequestDispatch, request: Request, reply: Reply) -> None:
    body = _leased(request)
    lease_ms = lease_of(body.lease_ms, hub.engine.limits.lease_ms)
    hub.engine.renew_effect(effect_of(body), lease_ms, reply.settle)


def commit(hub: RequestDispatch, request: Request, reply: Reply) -> None:
    if request.body:
        body = decode_body(_commit_decoder, request.body)
    else:
        body = CommitEffectBody(**_params(request, "result"))
    hub.engine.commit_effect(effect_of(body), body.result or "", reply.settle)


def fail(hub: RequestDispatch, request: Request, reply: Reply) -> None:
    if request.body:
        body = decode_body(_fail_decoder, request.body)
    else:
        body = FailEffectBody(**_params(request, "reason"))
    hub.engine.fail_effect(effect_of(body), clean_reason(body.reason), reply.settle)


def _leased(request: Request) -> LeasedEffectBody:
    if request.body:
        return decode_body(_leased_decoder, request.body)
    params = request.params()
    names = {name: params.get(name) for name in _NAMES}
    return LeasedEffectBody(**names, lease_ms=whole_number(params, "lease_ms"))


def _params(request: Request, last: str) -> dict[str, str | None]:
    params = request.params()
    return {name: params.get(name) for name in (*_NAMES, last)}
