"""The tenant and the namespace of a client, and the headers that name them.

An argument wins over the environment variables PENSTOCK_TENANT and PENSTOCK_NAMESPACE. An empty
text means that none is named: then the broker uses the default one. Must not know how requests are
sent.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from penstock.model.names import clean_name
from penstock.model.scopes import Scope
from penstock.model.tenancy import DEFAULT


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

    def path_scope(self, tenant_id: str | None, namespace: str | None) -> Scope:
        """Returns the tenant and namespace of a stream or cache, of which None means the client's
        own."""
        return (
            tenant_id or self.tenant or DEFAULT,
            namespace or self.namespace or DEFAULT,
        )


def _chosen(given: str | None, variable: str, what: str) -> str:
    name = os.environ.get(variable, "") if given is None else given
    return clean_name(name, what) if name.strip() else ""
