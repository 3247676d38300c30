"""Every route of the broker as (method, path), each checked to be found by its path.

A name in a path is written as the documents write it: `{tenant_id}`. For tests that compare what
is said of the API with what there is.
"""

from __future__ import annotations

from penstock.server.routes.table import ENDPOINTS, ROUTES, path_route

NAMESPACE = "/v1/tenants/{tenant_id}/namespaces/{namespace}"


def all_routes() -> set[tuple[str, str]]:
    found = {(method.decode(), path.decode()) for path, row in ROUTES.items() for method in row}
    for path in {endpoint.path for endpoint in ENDPOINTS if "{" in endpoint.path}:
        methods = path_route(path.encode())
        assert methods is not None, path
        found |= {(method.decode(), path) for method in methods}
    return found
