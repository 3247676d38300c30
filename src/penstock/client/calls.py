"""A call of the API: the request, and how to read its answer. No IO.

Invariant: an answer that is no success raises the same error of `penstock.model.errors` that the
broker raised, found by code and status. Must not know which calls there are.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from penstock.model.errors import (
    AlreadyExists,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    MethodNotAllowed,
    NotFound,
    NotYet,
    OutOfRange,
    PenstockError,
    PermissionDenied,
    ResourceExhausted,
    TooLarge,
    Unauthenticated,
    Unavailable,
    VersionMismatch,
)

T = TypeVar("T")
M = TypeVar("M", bound=Callable[..., Any])

Payload = bytes | str
"""Data that is sent as bytes; text is sent as UTF-8."""

_KINDS: tuple[type[PenstockError], ...] = (
    InvalidArgument,
    TooLarge,
    Unauthenticated,
    PermissionDenied,
    NotFound,
    AlreadyExists,
    FailedPrecondition,
    VersionMismatch,
    OutOfRange,
    NotYet,
    Internal,
    Unavailable,
)
"""The order decides where kinds share a code or a status: the first with a code is the general one,
and the last with a status is the likely one."""

_BY_BOTH = {(kind.code, kind.http_status): kind for kind in _KINDS}
_BY_CODE = {kind.code: kind for kind in reversed(_KINDS)}
_BY_STATUS = {kind.http_status: kind for kind in _KINDS}
_PROXY_STATUS = frozenset({502, 503, 504})

_NO_HEADERS: Mapping[str, str] = {}

_encoder = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class SocketForm:
    """The same request as a message of the WebSocket, whose members are these and those of the
    body. `is_read`: it changes nothing, so it may be sent again when its outcome is unknown.
    `is_idempotent`: it changes something, but twice is as good as once. `refusal` makes the error
    more exact, because messages have no status."""

    type: str
    members: dict[str, Any]
    is_read: bool = False
    is_idempotent: bool = False
    refusal: Callable[[PenstockError], PenstockError] | None = None


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request, and how to read its answer.

    The broker may take `wait_s` to answer. `add_headers` adds to the result what the answer's
    headers say. JSON bodies need no `content_type`. `form` None: not a message of the WebSocket.
    """

    method: str
    path: str
    read: Callable[[bytes], T]
    body: bytes = b""
    wait_s: float = 0.0
    add_headers: Callable[[T, Mapping[str, str]], T] | None = None
    content_type: str = ""
    form: SocketForm | None = None

    @property
    def is_read(self) -> bool:
        """Tells whether it changes nothing, so that it may be sent again."""
        return self.method == "GET" or (self.form is not None and self.form.is_read)

    def answer(self, status: int, body: bytes, headers: Mapping[str, str] = _NO_HEADERS) -> T:
        """Returns the result, or raises the error that the answer means. The names in `headers` are
        in lower case, or found in any case, as with httpx."""
        if not 200 <= status < 300:
            raise error_of(status, body)
        try:
            result = self.read(body)
            return result if self.add_headers is None else self.add_headers(result, headers)
        except (msgspec.DecodeError, ValueError) as error:
            raise Internal(
                f"{self.method} {self.path} got an unexpected answer ({error}); "
                "is this a Penstock broker?"
            ) from error


def named_like(method: M, build: Callable[..., object], given: int = 0) -> M:
    """Gives a client's method the name, docstring and parameters of the function that builds its
    call. Leaves out the first `given` parameters, which the client supplies."""
    signature = inspect.signature(build)
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    answer = str(signature.return_annotation).removeprefix("Call[").removesuffix("]")
    signature = signature.replace(
        parameters=[own, *list(signature.parameters.values())[given:]], return_annotation=answer
    )
    method.__name__, method.__doc__ = build.__name__, build.__doc__
    setattr(method, "__signature__", signature)  # noqa: B010 - no attribute a type checker knows
    return method


# -- answers -------------------------------------------------------------------------------------


class ErrorAnswer(msgspec.Struct):
    """The body of an error. As an item of a batch it has a `code`: its HTTP status. The refusal of
    a transaction has the index of an `operation`."""

    error: str = ""
    message: str = ""
    reason: str = ""
    limit: str = ""
    retry_after_ms: int = 1000
    code: int = 0
    operation: int | None = None


read_error_answer = msgspec.json.Decoder(ErrorAnswer).decode


def error_of(status: int, body: bytes) -> PenstockError:
    """Returns the error that an answer means, found by its code, else by its status."""
    try:
        failure = read_error_answer(body)
    except (msgspec.DecodeError, ValueError):
        failure = ErrorAnswer()
    if failure.error:
        return error_from(status, failure)
    text = f"the answer was HTTP {status} without the body of a Penstock error"
    if status in _PROXY_STATUS:
        return Unavailable(f"{text}: a proxy answered, or the broker is not up")
    return Internal(f"{text}; is this a Penstock broker?")


def error_from(status: int, failure: ErrorAnswer) -> PenstockError:
    error = _error_from(status, failure)
    error.operation = failure.operation
    return error


def _error_from(status: int, failure: ErrorAnswer) -> PenstockError:
    message = failure.message or failure.error
    if failure.error == ResourceExhausted.code:
        return ResourceExhausted(
            message,
            limit=failure.limit,
            retry_after_ms=failure.retry_after_ms,
            reason=failure.reason,
        )
    if failure.error == MethodNotAllowed.code:
        error = MethodNotAllowed("")
        error.message, error.args = message, (message,)
        return error
    code = failure.error
    kind = _BY_BOTH.get((code, status)) or _BY_CODE.get(code) or _BY_STATUS.get(status)
    if kind is None:
        return Internal(f"{failure.error}: {message}")
    return kind(message)


@functools.cache
def reader(kind: type[T]) -> Callable[[bytes], T]:
    return msgspec.json.Decoder(kind).decode


def nothing(_: bytes) -> None:
    """Reads the empty body of a 204."""


# -- requests ------------------------------------------------------------------------------------


def segment(name: str) -> str:
    if not name.strip():
        raise InvalidArgument("a name is required")
    return escaped(name)


def escaped(text: str) -> str:
    """Escapes a text so that it is one segment of a path."""
    if text in (".", ".."):
        # HTTP libraries would resolve these: `..` would name the parent.
        return text.replace(".", "%2E")
    try:
        return quote(text, safe="")
    except UnicodeEncodeError as error:
        raise wrong_unicode(error) from error


def wrong_unicode(error: UnicodeEncodeError) -> InvalidArgument:
    return InvalidArgument(f"not valid Unicode: {error.reason}")


def query_of(**parameters: str | int | None) -> str:
    """Encodes the parameters of a query. Leaves out those that are None."""
    try:
        return urlencode({name: value for name, value in parameters.items() if value is not None})
    except UnicodeEncodeError as error:
        raise wrong_unicode(error) from error


def bytes_of(payload: Payload) -> bytes:
    try:
        return payload.encode() if isinstance(payload, str) else payload
    except UnicodeEncodeError as error:
        raise wrong_unicode(error) from error


def list_of(values: Iterable[T], what: str) -> list[T]:
    """Returns a list. Refuses a single text, which would count as a list of its characters."""
    if isinstance(values, str | bytes):
        raise InvalidArgument(f"{what} must be a list, not a single text")
    return list(values)


def require_text(name: str, value: object) -> None:
    """Raises TypeError unless the value is text. The JSON encoder would write bytes as base64, and
    every reader would take that for the value."""
    if isinstance(value, str):
        return
    kind = type(value).__name__
    if isinstance(value, bytes | bytearray | memoryview):
        cure = "; decode it to str, or turn binary data into text yourself, for example with base64"
    else:
        cure = ""
    raise TypeError(f"{name} must be str, not {kind}{cure}")


def encode(body: Any) -> bytes:
    try:
        return _encoder.encode(body)
    except UnicodeEncodeError as error:
        raise wrong_unicode(error) from error
