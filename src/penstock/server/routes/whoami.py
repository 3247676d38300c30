"""The sender of a request, as the broker sees it: principal, reach and roles.

Must not know access rules: `GET /v1/access/check` explains what the sender may do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from penstock.server.access import Open
from penstock.server.http.dispatch import RequestDispatch
from penstock.server.http.requests import Request
from penstock.server.routes.endpoint import Answer, Endpoint

if TYPE_CHECKING:
    from penstock.server.http.response_order import Reply


class SenderAnswer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`tenant_id` and `namespace` are where a request without headers goes. `is_bound`: the
    credential reaches no other tenant. `principal` is absent without access control, `expires_ms`
    if the credential does not expire."""

    access_control: bool
    tenant_id: str
    namespace: str
    is_bound: bool
    admin: bool
    roles: list[str]
    principal: str = ""
    expires_ms: int = 0


def describe_sender(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    principal = request.notes.principal
    tenant_id, namespace = request.notes.scope
    answer = SenderAnswer(
        access_control=principal is not None,
        tenant_id=tenant_id,
        namespace=namespace,
        is_bound=principal is not None and principal.tenant_id is not None,
        admin=principal is None or principal.is_admin,
        roles=[] if principal is None else sorted(principal.roles),
        principal="" if principal is None else principal.name,
        expires_ms=0 if principal is None else principal.expires_ms,
    )
    reply.send_json(200, answer)


ENDPOINTS = (
    Endpoint(
        route="GET /v1/access/self",
        handler=describe_sender,
        access=Open("everybody may know their own name and reach"),
        reads_scope=("tenant", "namespace"),
        tag="Access",
        summary="Who am I?",
        text="Says which principal sends the request, with which roles, and in which tenant and "
        "namespace names without one are looked up. Without access control there is no principal, "
        "and everybody may do everything.",
        answers={
            200: Answer(
                "The sender.",
                SenderAnswer,
                {
                    "access_control": True,
                    "tenant_id": "acme",
                    "namespace": "default",
                    "is_bound": True,
                    "admin": False,
                    "roles": ["writer"],
                    "principal": "billing",
                },
            )
        },
    ),
)
