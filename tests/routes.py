"""Every route of the broker as (method, path), from the tables that find who answers it.

A name in a path is written as the documents write it: `{tenant_id}`. For tests that compare what
is said of the API with what there is.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.server.routes import felix_router as router
from penstock.server.routes import tenants
from penstock.server.routes.table import ROUTES, path_route
from penstock.server.websocket.upgrade import PATH

NAMESPACE = "/v1/tenants/{tenant_id}/namespaces/{namespace}"
STREAM = f"{NAMESPACE}/streams/{{stream}}"
CACHE = f"{NAMESPACE}/caches/{{cache}}"
TOPIC = "/v1/topics/{topic}"
WRITES = "/v1/writes/{producer}"

_NAMES = {"namespaces": "{namespace}", "streams": "{stream}", "caches": "{cache}"}


def all_routes() -> set[tuple[str, str]]:
    found = {(method.decode(), path.decode()) for path, row in ROUTES.items() for method in row}
    for path in _named_paths():
        methods = path_route(path.encode())
        assert methods is not None, path
        found |= {(method.decode(), path) for method in methods}
    return found


def _named_paths() -> Iterator[str]:
    """Paths with names in them are found by functions; their tables say what follows a name."""
    yield from (TOPIC, f"{TOPIC}/groups/{{group}}", f"{TOPIC}/offsets")
    yield f"{TOPIC}/groups/{{group}}/progress"
    yield from (f"{TOPIC}/partitions/{{partition}}/{part}" for part in ("records", "splits"))
    yield from ("/v1/felix", PATH.decode())
    yield from (WRITES, f"{WRITES}/{{batch}}", f"{WRITES}/{{batch}}/commit")
    yield f"{WRITES}/{{batch}}/{{part}}/{{piece}}"
    yield from (f"{STREAM}/{_joined(parts)}" for parts in router._STREAM)
    yield from (f"{CACHE}/{_joined(parts)}" for parts in router._CACHE)
    yield from (f"{CACHE}/entries/{{key}}", f"{CACHE}/entries/{{key}}/incr")
    for parts in tenants._METHODS:
        path = "/v1/tenants/{tenant_id}"
        for before, part in zip((b"", *parts), parts, strict=False):
            path += f"/{part.decode() or _NAMES[before.decode()]}"
        yield path


def _joined(parts: tuple[bytes, ...]) -> str:
    return b"/".join(parts).decode()
