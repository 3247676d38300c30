"""The headers of a client's request that go to another broker with it.

Invariants: headers about one connection stay behind, and so do those that say where the body ends:
whoever writes the request adds its own. No line can hold the beginning of another. What only the
broker that the client reached can judge, such as Host and Origin, stays behind too: it has judged.
Must not know where the request goes.
"""

from __future__ import annotations

VIA_HEADER = b"x-penstock-via"
"""Names the broker that forwarded a request. It makes a request less trusted, never more."""

_STAY = frozenset(
    {
        # About the connection (RFC 9110, 7.6.1), and the end of the body.
        b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"upgrade",
        b"transfer-encoding", b"content-length", b"expect", b"http2-settings",
        b"proxy-authorization",
        # Judged already.
        b"host", b"origin", b"sec-fetch-site", b"sec-fetch-mode", b"sec-fetch-dest",
        b"sec-fetch-user", b"access-control-request-method", b"access-control-request-headers",
        # No broker reads them, and without them more requests look the same.
        b"user-agent", b"accept-encoding", b"accept-language", b"cookie", b"referer",
        VIA_HEADER,
    }
)  # fmt: skip

_MEANT = frozenset(
    {
        b"authorization", b"accept", b"if-match", b"if-none-match", b"last-event-id",
        b"x-penstock-tenant", b"x-penstock-namespace", b"x-request-id",
    }
)  # fmt: skip
"""Headers that a broker acts on, even if `Connection` names them; so they go along."""


def forwarded_head(headers: list[tuple[bytes, bytes]]) -> bytes:
    """Returns the lines of the headers that go along. Names are in lower case."""
    named = _named_by_connection(headers)
    return b"".join(
        [
            b"%b: %b\r\n" % (name, value.strip(b" \t"))
            for name, value in headers
            if name not in _STAY and name not in named and not _breaks_line(value)
        ]
    )


def _named_by_connection(headers: list[tuple[bytes, bytes]]) -> set[bytes]:
    """Returns the headers that the client's Connection header declares to be about it."""
    return {
        option.strip().lower()
        for name, value in headers
        if name == b"connection"
        for option in value.split(b",")
    } - _MEANT


def _breaks_line(value: bytes) -> bool:
    """The parser lets no such value through; this is the second lock."""
    return b"\r" in value or b"\n" in value or b"\0" in value
