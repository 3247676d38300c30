"""Stands in for the engine while a broker of a cluster serves nothing itself.

Requests do not get here: they are forwarded. But a handler that began before may ask once more, and
is answered 503 through the same path as any refusal of an engine. Must not know who owns what.
"""

from __future__ import annotations

from typing import Any, cast

from penstock.api.engine import Engine
from penstock.model.errors import Unavailable
from penstock.model.limits import Limits

RETRY_AFTER_MS = 1000


class AbsentEngine:
    def __init__(self, limits: Limits) -> None:
        self.limits = limits

    def __getattr__(self, name: str) -> Any:
        raise Unavailable(
            "this broker no longer serves these data; send the request again",
            retry_after_ms=RETRY_AFTER_MS,
        )


def absent_engine(limits: Limits) -> Engine:
    """Returns an engine that refuses everything but to tell its limits."""
    return cast(Engine, AbsentEngine(limits))
