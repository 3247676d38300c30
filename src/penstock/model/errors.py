"""Every error a caller can see, in one tree.

PenstockError
├── InvalidArgument          400  the request is wrong; sending it again will not help
│   ├── TooLarge             413  ... because something in it is over a limit
│   └── UpgradeRequired      426  ... because the path speaks WebSocket, version 13
├── Unauthenticated          401  no token, or not the right one
├── PermissionDenied         403  a permission is missing, or the origin or host is not welcome
├── NotFound                 404  no such topic, group, tenant, stream, cache or path
├── MethodNotAllowed         405  the path exists, the method does not
├── FailedPrecondition       409  the state does not allow it: not owner, never delivered, exists
│   └── VersionMismatch      412  ... because it has changed since it was read
├── AlreadyExists            409  it exists, and the request requires that it does not
├── OutOfRange               410  the position is older than what is kept
│   └── NotYet               416  ... or newer than what exists
├── ResourceExhausted        429  a limit is reached; try again later
├── Internal                 500  a bug in the broker
└── Unavailable              503  the log cannot be written, or the broker is stopping
    └── OutcomeUnknown            ... the connection broke before the answer

`code` and `http_status` go onto the wire; `retryable` says whether the same request may succeed
later. The message is for a person and says what to do where that is known.
"""

from __future__ import annotations

from typing import ClassVar


class PenstockError(Exception):
    """The root of the tree; never raised itself. `operation` is the index of the operation that a
    transaction was refused for, None otherwise."""

    code: ClassVar[str] = "INTERNAL"
    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False
    operation: int | None = None

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def at_operation(self, index: int) -> PenstockError:
        """Notes which operation of a transaction was refused, and returns the error."""
        self.operation = index
        self.message = f"operation {index}: {self.message}"
        self.args = (self.message,)
        return self


class InvalidArgument(PenstockError):
    code = "INVALID_ARGUMENT"
    http_status = 400


class TooLarge(InvalidArgument):
    http_status = 413


class UpgradeRequired(InvalidArgument):
    http_status = 426


class Unauthenticated(PenstockError):
    code = "UNAUTHENTICATED"
    http_status = 401


class PermissionDenied(PenstockError):
    code = "PERMISSION_DENIED"
    http_status = 403


class NotFound(PenstockError):
    code = "NOT_FOUND"
    http_status = 404


class MethodNotAllowed(PenstockError):
    code = "METHOD_NOT_ALLOWED"
    http_status = 405

    def __init__(self, allow: str) -> None:
        super().__init__(f"method not allowed; this path takes {allow}")
        self.allow = allow


class FailedPrecondition(PenstockError):
    code = "FAILED_PRECONDITION"
    http_status = 409


class VersionMismatch(FailedPrecondition):
    http_status = 412


class AlreadyExists(PenstockError):
    code = "ALREADY_EXISTS"
    http_status = 409


class OutOfRange(PenstockError):
    code = "OUT_OF_RANGE"
    http_status = 410


class NotYet(OutOfRange):
    http_status = 416


class ResourceExhausted(PenstockError):
    """`limit` names the limit that is reached, and `partition` the partition, if the limit is per
    partition. Try again after `retry_after_ms`."""

    code = "RESOURCE_EXHAUSTED"
    http_status = 429
    retryable = True

    def __init__(
        self,
        message: str,
        *,
        limit: str,
        retry_after_ms: int = 1000,
        partition: int | None = None,
        reason: str = "overloaded",
    ) -> None:
        super().__init__(message)
        self.limit = limit
        self.reason = reason
        self.partition = partition
        self.retry_after_ms = retry_after_ms


class Internal(PenstockError):
    code = "INTERNAL"
    http_status = 500


class Unavailable(PenstockError):
    """The broker cannot do this now. `retry_after_ms` says when to try again, 0 if that is not
    known."""

    code = "UNAVAILABLE"
    http_status = 503
    retryable = True

    def __init__(self, message: str, *, retry_after_ms: int = 0) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class OutcomeUnknown(Unavailable):
    """The connection broke after a request that changes something was sent. The broker may have
    executed it or not. Raised by clients, and by a broker that forwarded the request."""
