"""The headers that name a tenant and a namespace, and the scope that a request has by them.

A sender that is bound to a tenant or namespace needs no headers, and may name nothing else. Must
not know which requests have topics, nor whether the scope exists.
"""

from __future__ import annotations

import msgspec

from penstock.model.errors import InvalidArgument, PenstockError, PermissionDenied
from penstock.model.names import clean_name
from penstock.model.principals import Principal
from penstock.model.scopes import DEFAULT_SCOPE, Scope
from penstock.model.tenancy import DEFAULT

SCOPE_HEADERS = {b"x-penstock-tenant": "X-Penstock-Tenant",
                 b"x-penstock-namespace": "X-Penstock-Namespace"}  # fmt: skip


class RequestScope(msgspec.Struct, frozen=True):
    """`scope` is where plain names of the request are. `tenant` and `namespace` are None unless the
    request, or its sender, names them."""

    scope: Scope = DEFAULT_SCOPE
    tenant: str | None = None
    namespace: str | None = None


NO_SCOPE = RequestScope()


def read_scope(
    found: list[tuple[bytes, bytes]], principal: Principal | None = None
) -> RequestScope | PenstockError:
    """Takes the headers among SCOPE_HEADERS, in lower case. Returns the refusal of a wrong one."""
    if not found and principal is None:
        return NO_SCOPE
    named: dict[bytes, str] = {}
    for header, value in found:
        if header in named:
            return InvalidArgument(f"the header {SCOPE_HEADERS[header]} is given twice")
        try:
            named[header] = clean_name(value.decode(), SCOPE_HEADERS[header])
        except UnicodeDecodeError:
            return InvalidArgument(f"the header {SCOPE_HEADERS[header]} is not UTF-8")
        except InvalidArgument as error:
            return error
    bound = (principal.tenant_id, principal.namespace) if principal is not None else (None, None)
    chosen: list[str | None] = []
    for (header, text), own in zip(SCOPE_HEADERS.items(), bound, strict=True):
        given = named.get(header)
        if own is not None and given not in (None, own):
            noun = text.rpartition("-")[2].lower()
            return PermissionDenied(
                f"{text} names {given!r}, and your credential is for {noun} {own!r}: name that, or "
                "leave it out"
            )
        chosen.append(own if given is None else given)
    tenant, namespace = chosen
    scope = (tenant or DEFAULT, namespace or DEFAULT)
    # The same object, which is quicker to compare.
    return RequestScope(DEFAULT_SCOPE if scope == DEFAULT_SCOPE else scope, tenant, namespace)
