"""The table of the fast lane: every path under /v1, its methods and who answers them."""

from __future__ import annotations

from penstock.server import (
    consume,
    data_routes,
    effect_routes,
    journal_routes,
    range_routes,
    system_routes,
    topic_routes,
)
from penstock.server.felix import registry_feed, registry_routes
from penstock.server.felix.routes import felix_route
from penstock.server.hub import Handler, Routes
from penstock.server.write_routes import write_route

ROUTES: Routes = {
    b"/v1/healthz": {b"GET": system_routes.healthz},
    b"/v1/livez": {b"GET": system_routes.healthz},
    b"/v1/readyz": {b"GET": system_routes.readyz},
    b"/v1/version": {b"GET": system_routes.version},
    b"/v1/topics": {b"GET": topic_routes.list_topics, b"POST": topic_routes.create_topic},
    b"/v1/offsets": {b"GET": range_routes.read_all_offsets},
    b"/v1/produce": {b"POST": data_routes.produce},
    b"/v1/produce/batch": {b"POST": data_routes.produce_batch},
    b"/v1/consume": {b"GET": consume.consume},
    b"/v1/ack": {b"POST": data_routes.ack},
    b"/v1/ack/batch": {b"POST": data_routes.ack_batch},
    b"/v1/nack": {b"POST": data_routes.nack},
    b"/v1/extend": {b"POST": data_routes.extend},
    b"/v1/idempotency/begin": {b"POST": effect_routes.begin},
    b"/v1/idempotency/renew": {b"POST": effect_routes.renew},
    b"/v1/idempotency/commit": {b"POST": effect_routes.commit},
    b"/v1/idempotency/fail": {b"POST": effect_routes.fail},
    b"/v1/journal": {b"GET": journal_routes.read_journal},
    b"/v1/journal/archived": {b"POST": journal_routes.set_archived},
    b"/v1/journal/offsets": {b"GET": journal_routes.read_positions},
    b"/v1/journal/splits": {b"GET": journal_routes.read_splits},
    b"/v1/tenants": {b"GET": registry_routes.list_tenants, b"POST": registry_routes.create_tenant},
    b"/v1/registry": {b"GET": registry_feed.status},
    b"/v1/registry/snapshot": {b"GET": registry_feed.snapshot},
    b"/v1/registry/changes": {b"GET": registry_feed.changes},
}


def path_route(path: bytes) -> dict[bytes, Handler] | None:
    """For paths with names in them."""
    return felix_route(path) or topic_routes.topic_route(path) or write_route(path)
