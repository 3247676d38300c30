"""The ASGI side of the port: metrics and documentation. The API itself is on the fast connection.

Invariant: whatever is asked here, an error has the common shape and the answer an X-Request-Id,
as on the connection.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.model.errors import Internal, MethodNotAllowed, NotFound, PenstockError
from penstock.server import asyncapi, sign_in
from penstock.server.docs_page import render_page
from penstock.server.http.dispatch import RequestDispatch
from penstock.server.http.requests import REQUEST_ID
from penstock.server.http.responses import encode_json, error_body
from penstock.server.metrics import Metrics
from penstock.server.openapi import build_document

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'",
    "x-content-type-options": "nosniff",
}

_TOKEN_REFUSAL = "penstock.token_refusal"


def make_app(dispatch: RequestDispatch) -> ASGIApp:
    metrics = Metrics(dispatch)
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
        refusal: PenstockError | None = request.scope[_TOKEN_REFUSAL]
        if refusal is not None:
            return _ask_for_token(request, refusal)
        page = render_page(document, f"http://{request.url.netloc}")
        return Response(page, media_type="text/html", headers=_PAGE_HEADERS)

    async def show_script(_: Request) -> Response:
        return Response(
            sign_in.SCRIPT, media_type="text/javascript", headers=sign_in.SCRIPT_HEADERS
        )

    app = Starlette(
        routes=[
            Route("/metrics", show_metrics),
            Route("/docs", show_page),
            Route(sign_in.SCRIPT_PATH, show_script),
            Route("/docs/openapi.json", show_openapi),
            Route("/docs/asyncapi.json", show_asyncapi),
        ],
        exception_handlers={HTTPException: _refused, Exception: _broken},
    )
    app.router.redirect_slashes = False
    return _WithRequestId(app, dispatch)


def _ask_for_token(request: Request, refusal: PenstockError) -> Response:
    """A browser gets the page that asks for the token, a program the error."""
    if "text/html" in request.headers.get("accept", "").lower():
        return Response(sign_in.PAGE, media_type="text/html", headers=sign_in.PAGE_HEADERS)
    return _error(refusal, {"WWW-Authenticate": "Bearer", "Vary": "Accept, Authorization"})


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
    """Adds the request's id, which the connection has read or made up, to the answer; notes whether
    the token is missing, for the page that is shown without it."""

    def __init__(self, app: ASGIApp, dispatch: RequestDispatch) -> None:
        self._app = app
        self._dispatch = dispatch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id: bytes = scope["state"][REQUEST_ID]
        verdict = self._dispatch.admission.judge(list(scope["headers"]), scope["http_version"])
        scope[_TOKEN_REFUSAL] = verdict.token_refusal

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id.decode("latin-1")
            await send(message)

        await self._app(scope, receive, send_with_id)
