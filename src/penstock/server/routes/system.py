"""Liveness, readiness and version."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock import __version__
from penstock.model.errors import Unavailable
from penstock.server.build import COMMIT
from penstock.server.http.dispatch import RequestDispatch
from penstock.server.http.requests import Request

if TYPE_CHECKING:
    from penstock.server.http.response_order import Reply


def healthz(hub: RequestDispatch, request: Request, reply: Reply) -> None:
    reply.send_json(200, {"status": "ok"})


def readyz(hub: RequestDispatch, request: Request, reply: Reply) -> None:
    if hub.is_draining:
        raise Unavailable("the broker is stopping")
    health = hub.engine.health()
    if not health.ready:
        raise Unavailable(health.reason)
    warning = {"warning": health.warning} if health.warning else {}
    reply.send_json(200, {"status": "ready"} | warning)


def version(hub: RequestDispatch, request: Request, reply: Reply) -> None:
    capabilities = hub.engine.capabilities
    reply.send_json(
        200,
        {
            "version": __version__,
            "commit": COMMIT,
            "wal_enabled": capabilities.wal_enabled,
            "fsync": capabilities.fsync,
            "durability": capabilities.durability,
            "max_message_bytes": hub.engine.limits.max_message_bytes,
        },
    )
