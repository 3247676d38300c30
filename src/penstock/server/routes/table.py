"""Every endpoint of the API. A new module of endpoints is listed here."""

from __future__ import annotations

from penstock.server.http.dispatch import Handler, Routes
from penstock.server.routes import (
    consume,
    deliveries,
    effects,
    groups,
    journal,
    messages,
    ranges,
    registry,
    system,
    tenants,
    topics,
    writes,
)
from penstock.server.routes.felix_router import felix_route
from penstock.server.routes.router import PathRouter, plain_routes

MODULES = (
    topics,
    messages,
    consume,
    deliveries,
    groups,
    ranges,
    writes,
    journal,
    effects,
    system,
)

ENDPOINTS = tuple(endpoint for module in MODULES for endpoint in module.ENDPOINTS)

ROUTES: Routes = plain_routes(ENDPOINTS) | {
    b"/v1/tenants": {b"GET": tenants.list_tenants, b"POST": tenants.create_tenant},
    b"/v1/registry": {b"GET": registry.status},
    b"/v1/registry/snapshot": {b"GET": registry.snapshot},
    b"/v1/registry/changes": {b"GET": registry.changes},
}


_paths = PathRouter(ENDPOINTS)


def path_route(path: bytes) -> dict[bytes, Handler] | None:
    """For paths with names in them."""
    return _paths.find(path) or felix_route(path)
