"""The ASGI side of the port: metrics and documentation. The API itself is on the fast lane."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from penstock.server.hub import Hub
from penstock.server.metrics import Metrics


def make_app(hub: Hub) -> Starlette:
    metrics = Metrics(hub)

    async def show_metrics(_: Request) -> Response:
        return Response(metrics.render(), media_type="text/plain; version=0.0.4")

    return Starlette(routes=[Route("/metrics", show_metrics)])
