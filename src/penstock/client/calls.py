"""A call of the API: what to send, and how its answer is read. No IO.

Invariant: an answer that is no success raises the error of `penstock.model.errors` which the
broker raised, by its code and status. Must not know which calls there are.
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
"""What is sent as bytes; of text, its UTF-8."""

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
"""Of a code the general before the particular; of a status the one that is meant comes last."""

_BY_BOTH = {(kind.code, kind.http_status): kind for kind in _KINDS}
_BY_CODE = {kind.code: kind for kind in reversed(_KINDS)}
_BY_STATUS = {kind.http_status: kind for kind in _KINDS}
_PROXY_STATUS = frozenset({502, 503, 504})

_NO_HEADERS: Mapping[str, str] = {}

_encoder = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request, and how to read its answer.

    The broker may take `wait_s` to answer. `add_headers` adds to the result what the answer's
    headers say. JSON bodies need no `content_type`.
    """

    method: str
    path: str
    read: Callable[[bytes], T]
    body: bytes = b""
    wait_s: float = 0.0
    add_headers: Callable[[T, Mapping[str, str]], T] | None = None
    content_type: str = ""

    def answer(self, status: int, body: bytes, headers: Mapping[str, str] = _NO_HEADERS) -> T:
        """The result, or raises the error that the answer means. The names of `headers` are in
        lower case, or found in any case, as httpx's are."""
        if not 200 <= status < 300:
            raise error_of(status, body)
        try:
            result = self.read(body)
            return result if self.add_headers is None else self.add_headers(result, headers)
        except (msgspec.DecodeError, ValueError) as error:
            raise Internal(
                f"{self.method} {self.path} was answered with something unexpected "
                f"({error}); is this a Penstock broker?"
            ) from error


def named_like(method: M, build: Callable[..., object], given: int = 0) -> M:
    """The method of a client, with the name, the text and the parameters of its call; the first
    `given` of these are not its caller's."""
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
    """The common error body; as one item of a batch it says its status too."""

    error: str = ""
    message: str = ""
    reason: str = ""
    limit: str = ""
    retry_after_ms: int = 1000
    code: int = 0


read_error_answer = msgspec.json.Decoder(ErrorAnswer).decode


def error_of(status: int, body: bytes) -> PenstockError:
    """The error that an answer means; by its code, else by its status."""
    try:
        failure = read_error_answer(body)
    except (msgspec.DecodeError, ValueError):
        failure = ErrorAnswer()
    if failure.error:
        return error_from(status, failure)
    text = f"the answer was HTTP {status} without the body of a Penstock error"
    if status in _PROXY_STATUS:
        return Unavailable(f"{text}: a proxy in between, or the broker is not up")
    return Internal(f"{text}; is this a Penstock broker?")


def error_from(status: int, failure: ErrorAnswer) -> PenstockError:
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
    """For a 204."""


# -- requests ------------------------------------------------------------------------------------


def segment(name: str) -> str:
    if not name.strip():
        raise InvalidArgument("a name is required")
    return escaped(name)


def escaped(text: str) -> str:
    """As one segment of a path, whatever it is."""
    if text in (".", ".."):
        # Plain, these would be taken for steps in the path: `..` would name what is above.
        return text.replace(".", "%2E")
    try:
        return quote(text, safe="")
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"not valid Unicode: {error.reason}") from error


def query_of(**parameters: str | int | None) -> str:
    """What is None was not said."""
    try:
        return urlencode({name: value for name, value in parameters.items() if value is not None})
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"not valid Unicode: {error.reason}") from error


def bytes_of(payload: Payload) -> bytes:
    try:
        return payload.encode() if isinstance(payload, str) else payload
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"not valid Unicode: {error.reason}") from error


def list_of(values: Iterable[T], what: str) -> list[T]:
    """A text in the place of texts is a slip that would pass: each of its characters is one."""
    if isinstance(values, str | bytes):
        raise InvalidArgument(f"{what} are several, as a list; this is one")
    return list(values)


def require_text(name: str, value: object) -> None:
    """Raises TypeError for what is no text. The JSON encoder would take bytes and write base64,
    which every reader would then take for the value."""
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
        raise InvalidArgument(f"not valid Unicode: {error.reason}") from error
