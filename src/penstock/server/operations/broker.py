"""Probes and version, described."""

from __future__ import annotations

from penstock.server.answers import Readiness, Status, VersionAnswer
from penstock.server.operations.endpoint import Answer, Operation

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        method="GET",
        path="/v1/version",
        tag="Broker",
        summary="Version, durability and the largest message",
        answers={
            200: Answer(
                "Which broker this is.",
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
    Operation(
        method="GET",
        path="/v1/healthz",
        tag="Broker",
        summary="Is it alive?",
        answers={200: Answer("It is.", Status, {"status": "ok"})},
    ),
    Operation(
        method="GET",
        path="/v1/livez",
        tag="Broker",
        summary="Is it alive? (the probe's usual name)",
        answers={200: Answer("It is.", Status, {"status": "ok"})},
    ),
    Operation(
        method="GET",
        path="/v1/readyz",
        tag="Broker",
        summary="Does it take work?",
        answers={
            200: Answer(
                "It does. A warning says what an operator should look at.",
                Readiness,
                {"status": "ready"},
            )
        },
        errors=(503,),
    ),
)
