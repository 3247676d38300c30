"""The request bodies that one connection holds in memory.

Invariant: `dispatch.body_bytes` counts every byte that is held here, over all connections: of the
bodies being received and of those whose requests wait to start. Must not know what a body means.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.model.errors import PenstockError
from penstock.model.limits import MIB

if TYPE_CHECKING:
    from penstock.server.http.dispatch import RequestDispatch
    from penstock.server.http.response_order import Reply


MAX_WAITING_BYTES = MIB
"""Bodies of one connection that wait for their requests to start; beyond it, reading stops."""


class RequestBodies:
    """`nbytes` have come of the body being received; `waiting_bytes` are those of requests that
    wait to start."""

    __slots__ = ("_dispatch", "_parts", "nbytes", "waiting_bytes")

    def __init__(self, dispatch: RequestDispatch) -> None:
        self._dispatch = dispatch
        self._parts: list[bytes] = []
        self.nbytes = 0
        self.waiting_bytes = 0

    def add(self, part: bytes) -> PenstockError | None:
        """Adds a part of the body being received; returns a refusal if that is too much."""
        dispatch = self._dispatch
        self._parts.append(part)
        self.nbytes += len(part)
        dispatch.body_bytes += len(part)
        if self.nbytes > dispatch.max_body_bytes:
            return dispatch.too_large(self.nbytes)
        if dispatch.body_bytes > dispatch.max_bodies_bytes and len(self._parts) > 1:
            return dispatch.too_many_bodies()
        return None

    def whole(self) -> bytes:
        """Returns the body that was received."""
        parts = self._parts
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def drop(self) -> None:
        """Forgets the body being received."""
        self._dispatch.body_bytes -= self.nbytes
        self._parts = []
        self.nbytes = 0

    def hold(self, reply: Reply) -> None:
        """Keeps the body that was received until its request starts."""
        reply.held_bytes = self.nbytes
        self.waiting_bytes += self.nbytes
        self._parts = []
        self.nbytes = 0

    def release(self, reply: Reply) -> None:
        """Stops counting the body of a request that starts, or never will."""
        self._dispatch.body_bytes -= reply.held_bytes
        self.waiting_bytes -= reply.held_bytes
        reply.held_bytes = 0
