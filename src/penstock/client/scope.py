"""The tenant and the namespace of a client, and the headers that name them.

An argument wins over the environment variables PENSTOCK_TENANT and PENSTOCK_NAMESPACE. An empty
text means that none is named: then the broker uses that of the credential, else the default one.
Paths of streams and caches need names. Where only the broker knows them, a path has a mark, which
is replaced before the path is sent. Must not know how requests are sent.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from penstock.client.calls import escaped
from penstock.model.names import clean_name
from penstock.model.scopes import DEFAULT_SCOPE, Scope
from penstock.model.tenancy import DEFAULT

_MARK = "\x1c"
"""No name has it, so the broker refuses a mark that was not replaced."""

UNKNOWN: Scope = (f"{_MARK}tenant", f"{_MARK}namespace")
"""The tenant and namespace of a credential, until the broker was asked for them."""

_ESCAPED = "%1C"


class ClientScope(NamedTuple):
    """The names that a client sends; empty for one that it does not."""

    tenant: str = ""
    namespace: str = ""

    @classmethod
    def of(cls, tenant: str | None, namespace: str | None) -> ClientScope:
        """Takes what is None from the environment. Raises InvalidArgument for a wrong name."""
        return cls(
            _chosen(tenant, "PENSTOCK_TENANT", "tenant"),
            _chosen(namespace, "PENSTOCK_NAMESPACE", "namespace"),
        )

    def headers(self) -> dict[str, bytes]:
        named = {"X-Penstock-Tenant": self.tenant, "X-Penstock-Namespace": self.namespace}
        return {header: name.encode() for header, name in named.items() if name}

    def path_scope(
        self, tenant_id: str | None, namespace: str | None, own: Scope = DEFAULT_SCOPE
    ) -> Scope:
        """Returns the tenant and namespace of a stream or cache, of which None means the client's.
        If that names no tenant, they are those of the credential, `own`."""
        tenant = tenant_id or self.tenant
        other = namespace or self.namespace
        return (tenant, other or DEFAULT) if tenant else (own[0], other or own[1])


def is_located(path: str) -> bool:
    """Returns whether the path of a request has all its names."""
    return _ESCAPED not in path


def located(path: str, own: Scope) -> str:
    """Returns the path of a request with names instead of marks."""
    for mark, name in zip(UNKNOWN, own, strict=True):
        path = path.replace(f"/{_ESCAPED}{mark[1:]}/", f"/{escaped(name)}/")
    return path


def is_known(scope: Scope) -> bool:
    return not any(name.startswith(_MARK) for name in scope)


def may_be_equal(one: Scope, other: Scope) -> bool:
    """Returns whether two scopes are the same, as far as they are known."""
    pairs = zip(one, other, strict=True)
    return all(a == b or _MARK in (a[:1], b[:1]) for a, b in pairs)


def _chosen(given: str | None, variable: str, what: str) -> str:
    name = os.environ.get(variable, "") if given is None else given
    return clean_name(name, what) if name.strip() else ""
