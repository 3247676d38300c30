"""The table of the fast lane: every path under /v1, its methods and who answers them."""

from __future__ import annotations

from penstock.server import (
    consume,
    data_routes,
    effect_routes,
    system_routes,
    topic_routes,
)
from penstock.server.hub import Routes

ROUTES: Routes = {
    b"/v1/healthz": {b"GET": system_routes.healthz},
    b"/v1/livez": {b"GET": system_routes.healthz},
    b"/v1/readyz": {b"GET": system_routes.readyz},
    b"/v1/version": {b"GET": system_routes.version},
    b"/v1/topics": {b"GET": topic_routes.list_topics, b"POST": topic_routes.create_topic},
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
}
