"""Every endpoint of the API. A new module of endpoints is listed here."""

from __future__ import annotations

from penstock.server.http.dispatch import Handler, Routes
from penstock.server.routes import (
    consume,
    deliveries,
    effects,
    journal,
    messages,
    ranges,
    registry,
    system,
    tenants,
    topics,
)
from penstock.server.routes.felix_router import felix_route
from penstock.server.routes.router import PathRouter, plain_routes
from penstock.server.routes.writes import write_route

MODULES = (messages, consume, deliveries)

ENDPOINTS = tuple(endpoint for module in MODULES for endpoint in module.ENDPOINTS)

ROUTES: Routes = plain_routes(ENDPOINTS) | {
    b"/v1/healthz": {b"GET": system.healthz},
    b"/v1/livez": {b"GET": system.healthz},
    b"/v1/readyz": {b"GET": system.readyz},
    b"/v1/version": {b"GET": system.version},
    b"/v1/topics": {b"GET": topics.list_topics, b"POST": topics.create_topic},
    b"/v1/offsets": {b"GET": ranges.read_all_offsets},
    b"/v1/idempotency": {b"GET": effects.look_up},
    b"/v1/idempotency/begin": {b"POST": effects.begin},
    b"/v1/idempotency/renew": {b"POST": effects.renew},
    b"/v1/idempotency/commit": {b"POST": effects.commit},
    b"/v1/idempotency/fail": {b"POST": effects.fail},
    b"/v1/journal": {b"GET": journal.read_journal},
    b"/v1/journal/archived": {b"POST": journal.set_archived},
    b"/v1/journal/offsets": {b"GET": journal.read_positions},
    b"/v1/journal/splits": {b"GET": journal.read_splits},
    b"/v1/tenants": {b"GET": tenants.list_tenants, b"POST": tenants.create_tenant},
    b"/v1/registry": {b"GET": registry.status},
    b"/v1/registry/snapshot": {b"GET": registry.snapshot},
    b"/v1/registry/changes": {b"GET": registry.changes},
}


_paths = PathRouter(ENDPOINTS)


def path_route(path: bytes) -> dict[bytes, Handler] | None:
    """For paths with names in them."""
    return _paths.find(path) or felix_route(path) or topics.topic_route(path) or write_route(path)
