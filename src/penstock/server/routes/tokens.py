"""Bearer tokens: create, list, rotate and revoke them.

Invariant: the secret of a token is in the answer to its creation or rotation and in nothing else.
Nobody creates or sees a token that reaches further than their own credential.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from penstock.api.access import AccessPart
from penstock.model.access import ANY, AccessRule
from penstock.model.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PermissionDenied,
)
from penstock.model.limits import MAX_OFFSET, MAX_ROLES
from penstock.model.names import clean_name
from penstock.model.options import check_number
from penstock.model.permissions import ALL_PERMISSIONS
from penstock.model.principals import Principal, clean_principal
from penstock.model.tokens import Token, is_within
from penstock.server.access import Filtered, HandlerNeeds
from penstock.server.http.dispatch import RequestDispatch, send_outcome
from penstock.server.http.requests import Request, decode_body
from penstock.server.identity.credentials import new_secret, new_token_id
from penstock.server.members import Count, Name, StrictBody, limits, optional, required
from penstock.server.routes.endpoint import DONE, Answer, Endpoint, names_in_path

if TYPE_CHECKING:
    from penstock.server.http.response_order import Reply

MAX_GRACE_MS = 30 * 24 * 3600 * 1000
"""An old secret that is valid for longer was not rotated."""

_Roles = Annotated[list[Name], limits(maxItems=MAX_ROLES)]
_Grace = Annotated[int, limits(minimum=0, maximum=MAX_GRACE_MS)]


class TokenBody(StrictBody):
    principal: Annotated[Name | None, required("Who sends with this token.")] = None
    tenant_id: Annotated[
        Name | None, optional("The only tenant that the token may use; omitted: every tenant.")
    ] = None
    namespace: Annotated[
        Name | None, optional("The only namespace of the tenant; omitted: all of them.")
    ] = None
    roles: Annotated[_Roles | None, optional("Names of roles.")] = None
    admin: Annotated[
        bool | None,
        optional("Whether it may do everything in its tenant and namespace, without any rule."),
    ] = None
    expires_in_ms: Annotated[
        Count | None, optional("How long it is valid; 0 or omitted: until it is revoked.")
    ] = None


class RotateBody(StrictBody):
    grace_ms: Annotated[
        _Grace | None, optional("How long the old secret stays valid; 0 or omitted: no longer.")
    ] = None


class TokenAnswer(msgspec.Struct, omit_defaults=True):
    """A token without its secret. `expires_ms` is absent if it never expires, `old_until_ms` if no
    old secret is valid."""

    id: str
    principal: str
    roles: list[str]
    admin: bool
    created_ms: int
    tenant_id: str | None = None
    namespace: str | None = None
    expires_ms: int = 0
    old_until_ms: int = 0


class NewTokenAnswer(TokenAnswer, kw_only=True):
    """`token` is the text to send, shown this once."""

    token: str


class TokenList(msgspec.Struct):
    tokens: list[TokenAnswer]


_create_decoder = msgspec.json.Decoder(TokenBody)
_rotate_decoder = msgspec.json.Decoder(RotateBody)


def manager_of(request: Request) -> Principal:
    """Returns the principal that sent the request. Raises without access control."""
    principal = request.notes.principal
    if principal is None:
        raise FailedPrecondition("there are no tokens to manage while access_control is off")
    return principal


def _may_manage(
    access: AccessPart, manager: Principal, tenant_id: str | None, namespace: str | None
) -> bool:
    """Returns whether the sender may manage tokens of this reach: as an admin, or with the
    permission access on all of it. Tokens that reach every tenant are for admins."""
    if manager.is_admin:
        return is_within(manager, tenant_id, namespace)
    if tenant_id is None:
        return False
    everything = AccessRule(tenant_id=tenant_id, namespace=namespace or ANY)
    return "access" in access.permissions_over(manager, everything)


def _reach_of(manager: Principal, tenant: str) -> tuple[str | None, str | None]:
    """Returns the reach of the tokens to list: the sender's own or, if it has no bounds and is no
    admin, the request's tenant."""
    if manager.is_admin or manager.tenant_id is not None:
        return manager.tenant_id, manager.namespace
    return tenant, None


def _check_power(access: AccessPart, manager: Principal, wanted: Token) -> None:
    """Raises if the token is more powerful than who manages it. Rules for the token's principal
    count too: a token for somebody's name has what they have."""
    if manager.is_admin:
        return
    if wanted.admin:
        raise PermissionDenied("only an admin manages an admin's token")
    rule = AccessRule(
        tenant_id=wanted.tenant_id or "",
        namespace=wanted.namespace or ANY,
        principal=wanted.principal,
        permissions=wanted.roles,
    )
    access.check_grant(rule, manager)
    access.check_name(rule.tenant_id, wanted.principal, manager)


def create_token(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    manager = manager_of(request)
    body = decode_body(_create_decoder, request.body)
    token_id = new_token_id()
    secret = new_secret(token_id)
    wanted = _wanted(body, token_id, secret.digest, dispatch.admission.now_ms())
    access = dispatch.engine.access
    if not _may_manage(access, manager, wanted.tenant_id, wanted.namespace):
        raise PermissionDenied(
            "a token must not reach further than the one that creates it, and who creates it "
            "needs the permission access there"
        )
    _check_power(access, manager, wanted)
    if wanted.tenant_id is not None:
        access.check_token_roles(wanted.tenant_id, wanted.roles)
    dispatch.engine.tokens.create(
        wanted,
        lambda outcome: send_outcome(reply, outcome, 201, lambda made: _new(made, secret.text)),
    )


def list_tokens(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    manager = manager_of(request)
    tenant = request.notes.scope[0]
    if not _may_manage(dispatch.engine.access, manager, *_reach_of(manager, tenant)):
        raise PermissionDenied("who manages tokens needs the permission access in a whole tenant")

    def body(found: list[Token]) -> TokenList:
        return TokenList(
            [_answer(token) for token in found if _is_in_reach(dispatch, manager, token)]
        )

    dispatch.engine.tokens.list(
        lambda outcome: send_outcome(reply, outcome, 200, body, lambda found: 400 * len(found))
    )


def describe_token(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    token = _find(dispatch, request)
    # Waits for the log, as every answer does: what is shown is durable.
    dispatch.engine.tokens.list(
        lambda outcome: send_outcome(reply, outcome, 200, lambda _: _answer(token))
    )


def rotate_token(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    token = _find(dispatch, request)
    body = decode_body(_rotate_decoder, request.body or b"{}")
    grace_ms = check_number("grace_ms", body.grace_ms or 0, 0, MAX_GRACE_MS)
    old_until_ms = dispatch.admission.now_ms() + grace_ms if grace_ms else 0
    secret = new_secret(token.id)
    dispatch.engine.tokens.rotate(
        token.id,
        secret.digest,
        old_until_ms,
        lambda outcome: send_outcome(reply, outcome, 200, lambda made: _new(made, secret.text)),
    )


def revoke_token(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    dispatch.engine.tokens.revoke(_find(dispatch, request).id, reply.settle)


def _find(dispatch: RequestDispatch, request: Request) -> Token:
    """Returns the token that the path names. One out of the sender's reach is not there."""
    manager = manager_of(request)
    token_id = names_in_path(request)[1]
    token = dispatch.engine.tokens.find(token_id)
    if token is not None and _is_in_reach(dispatch, manager, token):
        _check_power(dispatch.engine.access, manager, token)
        return token
    if manager.is_admin:
        raise NotFound(f"no token has the id {token_id[:40]!r}")
    raise PermissionDenied("who manages tokens needs the permission access in all of their reach")


def _is_in_reach(dispatch: RequestDispatch, manager: Principal, token: Token) -> bool:
    return _may_manage(dispatch.engine.access, manager, token.tenant_id, token.namespace)


def _wanted(body: TokenBody, token_id: str, digest: bytes, now_ms: int) -> Token:
    roles = body.roles or []
    if len(roles) > MAX_ROLES:
        raise InvalidArgument(f"a token has at most {MAX_ROLES} roles")
    for role in roles:
        if role in ALL_PERMISSIONS:
            raise InvalidArgument(
                f"{role!r} is a permission and no role: grant it to the principal with a rule, or "
                "name a role that has it"
            )
    tenant_id = None if body.tenant_id is None else clean_name(body.tenant_id, "tenant_id")
    namespace = None if body.namespace is None else clean_name(body.namespace, "namespace")
    if namespace is not None and tenant_id is None:
        raise InvalidArgument("namespace needs tenant_id")
    principal = clean_principal(body.principal)
    expires_in_ms = check_number("expires_in_ms", body.expires_in_ms or 0)
    return Token(
        token_id,
        principal,
        tenant_id,
        namespace,
        tuple(sorted({clean_name(role, "role") for role in roles})),
        bool(body.admin),
        0,
        min(now_ms + expires_in_ms, MAX_OFFSET) if expires_in_ms else 0,
        digest,
    )


def _answer(token: Token) -> TokenAnswer:
    return TokenAnswer(**_shown(token))


def _new(token: Token, text: str) -> NewTokenAnswer:
    return NewTokenAnswer(**_shown(token), token=text)


def _shown(token: Token) -> dict[str, Any]:
    return {
        "id": token.id,
        "principal": token.principal,
        "roles": list(token.roles),
        "admin": token.admin,
        "created_ms": token.created_ms,
        "tenant_id": token.tenant_id,
        "namespace": token.namespace,
        "expires_ms": token.expires_ms,
        "old_until_ms": token.old_until_ms,
    }


_EXAMPLE = {
    "id": "0b7d3f2a9c1e4d58",
    "principal": "billing-service",
    "roles": ["producer"],
    "admin": False,
    "created_ms": 1767225600000,
    "tenant_id": "acme",
    "expires_ms": 1798761600000,
}
_NEW_EXAMPLE = {**_EXAMPLE, "token": "pst_0b7d3f2a9c1e4d58_…"}
_CHANGE = HandlerNeeds("access", "tenant")
_ERRORS = (400, 403, 404, 409, 503)

ENDPOINTS = (
    Endpoint(
        route="POST /v1/tokens",
        handler=create_token,
        access=_CHANGE,
        tag="Tokens",
        summary="Create a token",
        text="Its text is in this answer and is never shown again. It cannot reach further than "
        "the credential that creates it.",
        body=TokenBody,
        example={"principal": "billing-service", "roles": ["producer"]},
        answers={201: Answer("The new token.", NewTokenAnswer, _NEW_EXAMPLE)},
        errors=(*_ERRORS, 429),
    ),
    Endpoint(
        route="GET /v1/tokens",
        handler=list_tokens,
        access=Filtered("tenant"),
        reads_scope=("tenant",),
        tag="Tokens",
        summary="List the tokens",
        text="Those in the sender's reach, in the order of their creation, without secrets.",
        answers={200: Answer("The tokens.", TokenList, {"tokens": [_EXAMPLE]})},
        errors=(403, 409, 503),
    ),
    Endpoint(
        route="GET /v1/tokens/{token_id}",
        handler=describe_token,
        access=_CHANGE,
        tag="Tokens",
        summary="Describe a token",
        answers={200: Answer("The token, without its secret.", TokenAnswer, _EXAMPLE)},
        errors=_ERRORS,
    ),
    Endpoint(
        route="POST /v1/tokens/{token_id}/rotate",
        handler=rotate_token,
        access=_CHANGE,
        tag="Tokens",
        summary="Give a token another secret",
        text="The old secret ends at once or, with grace_ms, after that time. Connections that "
        "used it are then closed.",
        body=RotateBody,
        example={"grace_ms": 60000},
        answers={200: Answer("The token with its new secret.", NewTokenAnswer, _NEW_EXAMPLE)},
        errors=_ERRORS,
    ),
    Endpoint(
        route="DELETE /v1/tokens/{token_id}",
        handler=revoke_token,
        access=_CHANGE,
        tag="Tokens",
        summary="Revoke a token",
        text="It ends at once, and connections that used it are closed.",
        answers=DONE,
        errors=_ERRORS,
    ),
)
