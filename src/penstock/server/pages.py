"""The paths beside the API: metrics, documentation and the page that asks for the token.

Invariant: a path here answers errors and has an X-Request-Id as every path under /v1 has. /docs is
reachable without the token, and then shows nothing but the page that asks for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.model.access import BROKER_SCOPE
from penstock.model.errors import PenstockError, Unauthenticated
from penstock.model.principals import Principal
from penstock.server import asyncapi, openapi
from penstock.server.access import check
from penstock.server.docs_page import (
    SIGN_IN_PAGE,
    SIGN_IN_PAGE_HEAD,
    SIGN_IN_SCRIPT,
    SIGN_IN_SCRIPT_HEAD,
    SIGN_IN_SCRIPT_PATH,
    render_page,
)
from penstock.server.http.dispatch import RequestDispatch, Routes
from penstock.server.http.requests import Request
from penstock.server.http.responses import JSON_TYPE, encode_json, error_body, error_head
from penstock.server.metrics import render_metrics

if TYPE_CHECKING:
    from penstock.server.http.response_order import Reply

_METRICS_TYPE = b"content-type: text/plain; version=0.0.4; charset=utf-8\r\n"
_PAGE_HEAD = (
    b"content-type: text/html; charset=utf-8\r\n"
    b"content-security-policy: default-src 'none'; style-src 'unsafe-inline'\r\n"
    b"x-content-type-options: nosniff\r\n"
)


class WebPages:
    """Makes the documents once, at the start. `address` is where the examples of the documentation
    point for a client that sends no Host."""

    def __init__(self, address: str = "http://localhost") -> None:
        self._address = address
        self._document = openapi.build_document()
        self._openapi = encode_json(self._document)
        self._asyncapi = encode_json(asyncapi.build_document())
        self._script = SIGN_IN_SCRIPT.encode()

    def routes(self) -> Routes:
        return {
            b"/metrics": {b"GET": self._get_metrics},
            b"/docs": {b"GET": self._get_docs},
            b"/docs/openapi.json": {b"GET": self._get_openapi},
            b"/docs/asyncapi.json": {b"GET": self._get_asyncapi},
            SIGN_IN_SCRIPT_PATH.encode(): {b"GET": self._get_script},
        }

    def _get_metrics(self, dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
        _check_metrics(dispatch, request.notes.principal)
        # Whatever their size, they need no room in the budget for answers: an operator needs them
        # most when there is none.
        reply.when_room(0, lambda: reply.send(200, render_metrics(dispatch), _METRICS_TYPE))

    def _get_docs(self, dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
        if request.notes.token_refusal is not None:
            _ask_for_token(request, reply, request.notes.token_refusal)
            return
        host = request.notes.host.decode("latin-1").strip()
        scheme = self._address.partition("://")[0]
        url = f"{scheme}://{host}" if host else self._address
        reply.when_room(
            len(self._openapi),
            lambda: reply.send(200, self._page(dispatch, url), _PAGE_HEAD),
        )

    def _page(self, dispatch: RequestDispatch, url: str) -> bytes:
        has_token = dispatch.admission.needs_token
        return render_page(self._document, url, has_token=has_token).encode()

    def _get_openapi(self, dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
        reply.when_room(len(self._openapi), lambda: reply.send(200, self._openapi))

    def _get_asyncapi(self, dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
        reply.when_room(len(self._asyncapi), lambda: reply.send(200, self._asyncapi))

    def _get_script(self, dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
        reply.send(200, self._script, SIGN_IN_SCRIPT_HEAD)


def _check_metrics(dispatch: RequestDispatch, principal: Principal | None) -> None:
    if dispatch.is_serving:
        check(dispatch.engine.access, principal, "metrics", "broker", BROKER_SCOPE, "")
    elif principal is not None and not principal.is_admin:
        raise Unauthenticated(
            "a broker of a cluster that serves no data can check no tokens: it shows its metrics "
            "to the static token only"
        )


def _ask_for_token(request: Request, reply: Reply, refusal: PenstockError) -> None:
    """Sends the page that asks for the token to a browser, the error to a program."""
    if request.notes.wants_html:
        reply.send(200, SIGN_IN_PAGE.encode(), SIGN_IN_PAGE_HEAD)
        return
    head = JSON_TYPE + error_head(refusal) + b"vary: Accept, Authorization\r\n"
    reply.send(refusal.http_status, encode_json(error_body(refusal)), head)
