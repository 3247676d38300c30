"""Liveness, readiness and version."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from penstock import __version__
from penstock.model.errors import Unavailable
from penstock.server.access import Open
from penstock.server.build import COMMIT
from penstock.server.http.dispatch import RequestDispatch
from penstock.server.http.requests import Request
from penstock.server.routes.endpoint import Answer, Endpoint

if TYPE_CHECKING:
    from penstock.server.http.response_order import Reply


PROBE = Open("probes have no token")


class Status(msgspec.Struct):
    status: str


class Readiness(msgspec.Struct, omit_defaults=True):
    """`warning` is absent when nothing needs an operator."""

    status: str
    warning: str = ""


class VersionAnswer(msgspec.Struct):
    """`durability` says in words what a success means, `max_message_bytes` what key and value of a
    message may have together."""

    version: str
    commit: str
    wal_enabled: bool
    fsync: str
    durability: str
    max_message_bytes: int


def healthz(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    reply.send_json(200, Status("ok"))


def readyz(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    if dispatch.is_draining:
        raise Unavailable("the broker is stopping")
    if dispatch.forwarder is not None and not dispatch.is_serving:
        dispatch.forwarder.check_ready()
        reply.send_json(200, Readiness("ready"))
        return
    health = dispatch.engine.health()
    if not health.ready:
        raise Unavailable(health.reason)
    reply.send_json(200, Readiness("ready", health.warning or ""))


def version(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    capabilities = dispatch.engine.capabilities
    answer = VersionAnswer(
        version=__version__,
        commit=COMMIT,
        wal_enabled=capabilities.wal_enabled,
        fsync=capabilities.fsync,
        durability=capabilities.durability,
        max_message_bytes=dispatch.engine.limits.max_message_bytes,
    )
    reply.send_json(200, answer)


ENDPOINTS = (
    Endpoint(
        route="GET /v1/version",
        handler=version,
        access=Open("says nothing about the data"),
        tag="Broker",
        summary="Version, durability and the largest message",
        answers={
            200: Answer(
                "The version and the limits of this broker.",
                VersionAnswer,
                {
                    "version": "0.1.0",
                    "commit": "unknown",
                    "wal_enabled": True,
                    "fsync": "commit",
                    "durability": "every answer waits until its data is synced to disk",
                    "max_message_bytes": 8388608,
                },
            )
        },
    ),
    Endpoint(
        route="GET /v1/healthz",
        handler=healthz,
        access=PROBE,
        tag="Broker",
        summary="Is it alive?",
        answers={200: Answer("It is.", Status, {"status": "ok"})},
    ),
    Endpoint(
        route="GET /v1/livez",
        handler=healthz,
        access=PROBE,
        tag="Broker",
        summary="Is it alive? (the usual name of the probe)",
        answers={200: Answer("It is.", Status, {"status": "ok"})},
    ),
    Endpoint(
        route="GET /v1/readyz",
        handler=readyz,
        access=PROBE,
        tag="Broker",
        summary="Is it ready for requests?",
        answers={
            200: Answer(
                "It is. A warning says what an operator should look at.",
                Readiness,
                {"status": "ready"},
            )
        },
        errors=(503,),
    ),
)
