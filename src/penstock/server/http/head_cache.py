"""A cache of request heads: a request that begins with the same bytes again needs no parser.

A busy client sends one head over and over, and parsing it costs more than answering it.
Invariant: a cached head means exactly what the parser made of these bytes. A head is kept only if
it is written in the one plain way (see `_is_plain`), so that it ends where the parser saw its end,
and if its whole body, as announced, came in the same read. Everything else, and every request that
comes in parts, goes to the parser. A head with a credential that has expired is no longer known;
whoever revokes a credential empties the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from penstock.model.limits import KIB
from penstock.server.http.request_headers import Headers
from penstock.server.http.requests import Request
from penstock.server.identity.credentials import wall_ms

MAX_HEADS = 4096
MAX_HEAD_BYTES = 2 * KIB
"""Together they bound the memory of the cache: 8 MiB."""

_END = b"\r\n\r\n"


class CacheableRequest(NamedTuple):
    """A request as the parser reported it, body included: HTTP/1.1, admitted on any connection,
    kept alive, not chunked and without a request id of its own."""

    target: bytes
    headers: Headers
    request: Request


class _Known(NamedTuple):
    request: Request
    body_bytes: int
    until_ms: int


class HeadCache:
    def __init__(self, max_heads: int = MAX_HEADS, now_ms: Callable[[], int] = wall_ms) -> None:
        self._now_ms = now_ms
        self._heads: dict[bytes, _Known] = {}
        self._max_heads = max_heads

    def __len__(self) -> int:
        return len(self._heads)

    def request_at(self, data: bytes, start: int) -> tuple[Request, int] | None:
        """Returns the request that begins at `start`, and its end, if it is whole and its head is
        known."""
        body = data.find(_END, start) + len(_END)
        known = self._heads.get(data[start:body])
        if known is None or len(data) < (end := body + known[1]):
            return None
        if known[2] and known[2] <= self._now_ms():
            return None
        return known[0].with_body(data[body:end]), end

    def keep(self, data: bytes, first: CacheableRequest | None) -> None:
        """Keeps the head that `data` begins with, if it is plain and its whole body follows.
        `first` is the request that the parser found there; None if it cannot be cached."""
        end = data.find(_END) + len(_END)
        if first is None or end > MAX_HEAD_BYTES or not self._max_heads:
            return
        request = first.request
        body_bytes = len(request.body)
        is_whole = data[end : end + body_bytes] == request.body
        if not is_whole or not _is_plain(data[:end], first) or not _is_announced(first):
            return
        if len(self._heads) >= self._max_heads:
            self._heads.clear()
        principal = request.notes.principal
        until_ms = 0 if principal is None else principal.expires_ms
        self._heads[data[:end]] = _Known(request.with_body(b""), body_bytes, until_ms)


def _is_plain(head: bytes, first: CacheableRequest) -> bool:
    """Returns whether the head is exactly what the parser reported, line by line. Header names are
    reported in lower case."""
    line = b"%b %b HTTP/1.1\r\n" % (first.request.method, first.target)
    lines = b"".join([b"%b: %b\r\n" % header for header in first.headers])
    return head.startswith(line) and head[len(line) :].lower() == lines.lower() + b"\r\n"


def _is_announced(first: CacheableRequest) -> bool:
    """Returns whether the head gives the length of the body in the one unambiguous way."""
    lengths = [value for name, value in first.headers if name == b"content-length"]
    if any(name == b"transfer-encoding" for name, _ in first.headers):
        return False
    nbytes = len(first.request.body)
    return lengths == [b"%d" % nbytes] or (not lengths and not nbytes)
