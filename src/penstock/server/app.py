"""The ASGI side of the port: metrics and documentation. The API itself is on the fast lane.

Invariant: whatever is asked here, an error has the common shape and the answer an X-Request-Id,
as on the lane.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.model.errors import Internal, MethodNotAllowed, NotFound, PenstockError
from penstock.server.docs_page import render_page
from penstock.server.felix import asyncapi
from penstock.server.hub import Hub
from penstock.server.metrics import Metrics
from penstock.server.openapi import build_document
from penstock.server.replies import encode_json, error_body

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'",
    "x-content-type-options": "nosniff",
}


def make_app(hub: Hub) -> ASGIApp:
    metrics = Metrics(hub)
    document = build_document()
    encoded = encode_json(document)
    encoded_socket = encode_json(asyncapi.build_document())

    async def show_metrics(_: Request) -> Response:
        return Response(metrics.render(), media_type="text/plain; version=0.0.4")

    async def show_openapi(_: Request) -> Response:
        return Response(encoded, media_type="application/json")

    async def show_asyncapi(_: Request) -> Response:
        return Response(encoded_socket, media_type="application/json")

    async def show_page(request: Request) -> Response:
        page = render_page(document, f"http://{request.url.netloc}")
        return Response(page, media_type="text/html", headers=_PAGE_HEADERS)

    app = Starlette(
        routes=[
            Route("/metrics", show_metrics),
            Route("/docs", show_page),
            Route("/docs/openapi.json", show_openapi),
            Route("/docs/asyncapi.json", show_asyncapi),
        ],
        exception_handlers={HTTPException: _refused, Exception: _broken},
    )
    app.router.redirect_slashes = False
    return _WithRequestId(app, hub)


async def _refused(request: Request, error: Exception) -> Response:
    headers = error.headers if isinstance(error, HTTPException) else None
    if headers and "Allow" in headers:
        return _error(MethodNotAllowed(headers["Allow"]), headers)
    return _error(NotFound(f"no such path: {request.url.path[:200]}"))


async def _broken(request: Request, error: Exception) -> Response:
    # The server logs the error: starlette raises it again when this is answered.
    return _error(Internal("internal error; the broker's log says more"))


def _error(error: PenstockError, headers: Mapping[str, str] | None = None) -> Response:
    body = encode_json(error_body(error))
    return Response(
        body, status_code=error.http_status, media_type="application/json", headers=headers
    )


class _WithRequestId:
    """Echoes a request's id, or makes one up, by the rules of the lane."""

    def __init__(self, app: ASGIApp, hub: Hub) -> None:
        self._app = app
        self._hub = hub

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        verdict = self._hub.gate.judge(list(scope["headers"]), scope["http_version"])
        request_id = verdict.request_id.decode("latin-1") or secrets.token_hex(8)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)
