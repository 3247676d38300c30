"""What both clients share of a connection: its options, and what a failure of it means.

A failed connection is `Unavailable`, with a text that says what to do; whether the broker did
what was asked is then unknown, and asking again is safe where an idempotency key is used. Where
asking again can never help, for a wrong address or certificate, it is `InvalidArgument`.
"""

from __future__ import annotations

import contextlib
import re
import socket
from typing import Any
from urllib.parse import urlsplit

import httpx

from penstock import __version__
from penstock.client.credentials import DEFAULT_URL
from penstock.client.tls import context_for, refusal_of
from penstock.model.errors import InvalidArgument, PenstockError, Unavailable

DEFAULT_TIMEOUT_S = 10.0

HEARTBEAT_MS = 5000
"""How often a stream without items shows that it is alive."""

MIN_HEARTBEAT_MS = 100

_CLOSED = re.compile(r"peer closed connection|server disconnected", re.IGNORECASE)
"""How the HTTP library words a connection that was closed before the end of an answer."""


def http_options(url: str, timeout_s: float) -> dict[str, Any]:
    """Arguments of httpx's clients. Proxies of the environment are left out: a broker is near."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise InvalidArgument(f"{url!r} is no broker's address; it looks like {DEFAULT_URL}")
    return {
        "base_url": url.rstrip("/"),
        "headers": {"User-Agent": f"penstock/{__version__}"},
        "timeout": timeout_s,
        # A stream keeps its connection: their number is the caller's business.
        "limits": httpx.Limits(max_connections=None, max_keepalive_connections=20),
        "trust_env": False,
        "verify": context_for(parts.scheme),
    }


def heartbeat_of(wait_s: float | None) -> int:
    """Often enough to notice the end of `wait_s` in time."""
    if wait_s is None:
        return HEARTBEAT_MS
    return int(min(max(wait_s * 1000 / 4, MIN_HEARTBEAT_MS), HEARTBEAT_MS))


def stream_timeout(timeout_s: float, heartbeat_ms: int) -> httpx.Timeout:
    """A stream that is silent for several heartbeats is dead."""
    return answer_timeout(timeout_s, 3 * heartbeat_ms / 1000)


def answer_timeout(timeout_s: float, wait_s: float) -> httpx.Timeout:
    """Of an answer for which the broker may take so long by itself."""
    return httpx.Timeout(timeout_s, read=max(timeout_s, wait_s))


def hang_up(response: httpx.Response) -> None:
    """Wakes whoever reads from the connection of an open stream; closing alone would not."""
    stream = response.extensions.get("network_stream")
    connected = stream and stream.get_extra_info("socket")
    if connected is not None:
        with contextlib.suppress(OSError):
            connected.shutdown(socket.SHUT_RDWR)


def half_close(response: httpx.Response) -> bool:
    """Tells the broker that nothing more is wanted of an open stream: it closes the connection
    when what it has written is sent, all of which can still be read. False where one side cannot
    be closed alone: with TLS, or without a socket."""
    stream = response.extensions.get("network_stream")
    if stream is None or stream.get_extra_info("ssl_object") is not None:
        return False
    connected = stream.get_extra_info("socket")
    if connected is None:
        return False
    try:
        connected.shutdown(socket.SHUT_WR)
    except OSError:
        return False
    return True


def lost(url: str, error: Exception) -> PenstockError:
    """The error to raise for a failure of the transport."""
    refusal = refusal_of(url, error)
    if refusal is not None:
        return refusal
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return Unavailable(f"no broker answers at {url} ({error}); `penstock serve` starts one")
    if isinstance(error, httpx.TimeoutException):
        return Unavailable(f"the broker at {url} did not answer in time")
    if isinstance(error, httpx.UnsupportedProtocol | httpx.InvalidURL):
        return InvalidArgument(f"{url!r} is no broker's address; it looks like {DEFAULT_URL}")
    if isinstance(error, httpx.RemoteProtocolError) and _CLOSED.search(str(error)):
        return Unavailable(f"the broker at {url} closed the connection")
    return Unavailable(f"the connection to {url} broke: {str(error) or type(error).__name__}")
