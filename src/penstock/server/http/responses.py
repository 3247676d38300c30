"""The bytes of responses: status lines, headers and error bodies. Knows no connection."""

from __future__ import annotations

import http
import math
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from penstock.model.errors import (
    MethodNotAllowed,
    OutOfRange,
    PenstockError,
    ResourceExhausted,
    Unavailable,
)

JSON_TYPE = b"content-type: application/json\r\n"
NDJSON_TYPE = b"content-type: application/x-ndjson; charset=utf-8\r\n"
CLOSE = b"connection: close\r\n"

STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode()
    for status in http.HTTPStatus
}

TYPED_PATHS = (b"/v1/felix", b"/v1/tenants", b"/v1/registry")
"""Errors below these paths have a `type`, as every other answer there."""

encode_json = msgspec.json.Encoder().encode


class ErrorBody(msgspec.Struct):
    """`operation` is the index of the operation that a transaction was refused for."""

    error: str
    message: str
    operation: int | UnsetType = UNSET


class OverloadBody(msgspec.Struct):
    error: str
    message: str
    reason: str
    retry_after_ms: int
    limit: str
    operation: int | UnsetType = UNSET


class TypedErrorBody(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The error of a stream, cache or registry: an answer, or a frame by itself. The ids say which
    request, subscription or watch it ends."""

    type: str
    error: str
    message: str
    reason: str | None = None
    retry_after_ms: int | None = None
    limit: str | None = None
    request_id: str | int | None = None
    subscription_id: str | None = None
    watch_id: str | None = None


class CursorErrorBody(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The error of a subscription whose position the stream does not have. `code` is 410 if it is
    no longer kept or of a deleted stream, 416 if it does not exist yet."""

    type: Literal["subscribe_cursor_error"]
    error: str
    message: str
    code: int
    request_id: str | int | None = None
    subscription_id: str | None = None


def subscribe_error(error: PenstockError, **ids: Any) -> TypedErrorBody | CursorErrorBody:
    """Returns the error of a subscription. One about its position has a type of its own."""
    if not isinstance(error, OutOfRange):
        return typed_error(error, **ids)
    _release(error)
    return CursorErrorBody(
        type="subscribe_cursor_error",
        error=error.code,
        message=error.message,
        code=error.http_status,
        **ids,
    )


def typed_error(error: PenstockError, **ids: Any) -> TypedErrorBody:
    _release(error)
    body = TypedErrorBody(type="error", error=error.code, message=error.message, **ids)
    if isinstance(error, ResourceExhausted):
        body.reason, body.limit = error.reason, error.limit
        body.retry_after_ms = error.retry_after_ms
    return body


def error_body(error: PenstockError) -> ErrorBody | OverloadBody:
    _release(error)
    operation = UNSET if error.operation is None else error.operation
    if isinstance(error, ResourceExhausted):
        return OverloadBody(
            error.code, error.message, error.reason, error.retry_after_ms, error.limit, operation
        )
    return ErrorBody(error.code, error.message, operation)


def _release(error: PenstockError) -> None:
    """Drops the traceback of an error that was sent. Its frames hold the request's body, and often
    the error itself, which only the garbage collector would free."""
    error.__traceback__ = error.__cause__ = error.__context__ = None


def error_head(error: PenstockError) -> bytes:
    """Returns the headers that only this error has."""
    if isinstance(error, ResourceExhausted):
        return _retry_after(error.retry_after_ms)
    if isinstance(error, Unavailable) and error.retry_after_ms:
        return _retry_after(error.retry_after_ms)
    if isinstance(error, MethodNotAllowed):
        return b"allow: " + error.allow.encode() + b"\r\n"
    if error.http_status == 401:
        return b"www-authenticate: Bearer\r\n"
    if error.http_status == 426:
        return b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
    return b""


def _retry_after(wait_ms: int) -> bytes:
    return b"retry-after: %d\r\n" % max(1, math.ceil(wait_ms / 1000))


def batch_error(error: PenstockError) -> dict[str, Any]:
    """Returns an error as one item of a batch's results."""
    body: dict[str, Any] = msgspec.structs.asdict(error_body(error))
    if body["operation"] is UNSET:
        del body["operation"]
    body["code"] = error.http_status
    return body
