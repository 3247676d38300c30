"""Checks on the driver that what a query names exists.

A failing task prints pages of Java's stack, repeatedly, so a wrong name is refused before a task
begins. Must not know what is read or written.
"""

from __future__ import annotations

from typing import Literal

from penstock.client.calls import segment
from penstock.model.errors import NotFound, PermissionDenied
from penstock.spark.broker import BrokerConnection
from penstock.spark.options import BrokerSettings

Target = Literal["topic", "stream", "cache"]


def check_exists(settings: BrokerSettings, kind: Target, name: str) -> None:
    """Raises NotFound if there is no such target. `name` is tenant/namespace/name unless it is that
    of a topic; an empty one is not checked. A principal that may not read it is told by its
    tasks."""
    if not name:
        return
    path = f"/v1/topics/{segment(name)}/offsets"
    if kind != "topic":
        tenant, namespace, plain = map(segment, name.split("/"))
        path = f"/v1/tenants/{tenant}/namespaces/{namespace}/{kind}s/{plain}"
    with BrokerConnection(settings) as broker:
        try:
            broker.call("GET", path)
        except NotFound:
            raise NotFound(f"{kind} {name!r} does not exist at {broker.url}") from None
        except PermissionDenied:
            return
