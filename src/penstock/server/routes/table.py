"""Every endpoint of the API. A new module of endpoints is listed here."""

from __future__ import annotations

from penstock.server.routes import (
    access,
    apply,
    cache_entries,
    cache_settings,
    caches,
    cluster,
    consume,
    deliveries,
    effects,
    groups,
    journal,
    messages,
    quotas,
    ranges,
    registry,
    stream_deliveries,
    stream_ranges,
    stream_settings,
    streams,
    system,
    tenants,
    tokens,
    topics,
    transactions,
    websocket,
    whoami,
    writes,
)
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
    transactions,
    streams,
    stream_deliveries,
    stream_ranges,
    websocket,
    caches,
    cache_entries,
    tenants,
    quotas,
    stream_settings,
    cache_settings,
    apply,
    access,
    whoami,
    registry,
    tokens,
    cluster,
    system,
)
"""All endpoints, in the order of the documentation."""

ENDPOINTS = tuple(endpoint for module in MODULES for endpoint in module.ENDPOINTS)

ROUTES = plain_routes(ENDPOINTS)

path_router = PathRouter(ENDPOINTS)
path_route = path_router.find
