"""The options of a connection, and what its failures mean, for both clients.

A failed connection is `Unavailable`, with a text that says what to do. It is then unknown whether
the broker has executed the request; sending it again is safe with an idempotency key. If sending it
again can never help, as with a wrong address or certificate, the error is `InvalidArgument`.
"""

from __future__ import annotations

import re
import socket
from typing import Any
from urllib.parse import urlsplit

import httpx

from penstock import __version__
from penstock.client.addresses import no_address
from penstock.client.scope import ClientScope
from penstock.client.tls import context_for, refusal_of
from penstock.model.errors import PenstockError, Unavailable

DEFAULT_TIMEOUT_S = 10.0

CONNECT_S = 2.0
"""How long connecting may take while there is another address to try."""

USER_AGENT = f"penstock/{__version__}"

HEARTBEAT_MS = 5000
"""How often the broker sends a heartbeat on a stream without items."""

MIN_HEARTBEAT_MS = 100

PING_S = 10.0
"""How long the broker may be silent before a WebSocket sends it a ping."""

_CLOSED = re.compile(r"peer closed connection|server disconnected", re.IGNORECASE)
"""The HTTP library's words for a connection that was closed before the end of an answer."""


def http_options(
    url: str,
    timeout_s: float,
    user_agent: str,
    scope: ClientScope,
    client_cert: str | None = None,
    client_key: str | None = None,
) -> dict[str, Any]:
    """Returns the arguments of httpx's clients for the first address. Ignores proxy settings of the
    environment, because a broker is on the same network."""
    return {
        "base_url": url,
        "headers": {"User-Agent": user_agent, **scope.headers()},
        "timeout": timeout_s,
        # Each open stream needs a connection of its own; the caller decides how many there are.
        "limits": httpx.Limits(max_connections=None, max_keepalive_connections=20),
        "trust_env": False,
        "verify": context_for(urlsplit(url).scheme, client_cert, client_key),
    }


def heartbeat_of(wait_s: float | None) -> int:
    """Returns a heartbeat that is short enough to notice the end of `wait_s` in time."""
    if wait_s is None:
        return HEARTBEAT_MS
    return int(min(max(wait_s * 1000 / 4, MIN_HEARTBEAT_MS), HEARTBEAT_MS))


def silence_limit(heartbeat_ms: int) -> float:
    """Returns after how many seconds without a heartbeat a stream counts as broken."""
    return 3 * heartbeat_ms / 1000


def answer_timeout(timeout_s: float, wait_s: float) -> httpx.Timeout:
    """Returns the timeouts of a request for which the broker itself may take `wait_s`."""
    return httpx.Timeout(max(timeout_s, wait_s), connect=timeout_s)


def quick_connect(timeout: httpx.Timeout) -> httpx.Timeout:
    """Returns the timeouts of a request that can go to another address."""
    connect_s = CONNECT_S if timeout.connect is None else min(timeout.connect, CONNECT_S)
    return httpx.Timeout(**timeout.as_dict() | {"connect": connect_s})


def half_close(response: httpx.Response) -> bool:
    """Tells the broker to end an open stream. The broker closes the connection after the bytes that
    it has already written, and these can still be read. Returns False where one direction cannot be
    closed alone: with TLS, or without a socket."""
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


def is_unsent(error: Exception) -> bool:
    """Tells whether no byte of a request has left when the transport fails so."""
    kinds = httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout
    return isinstance(error, kinds)


def is_cut_off(error: PenstockError) -> bool:
    """Tells whether an error of a client means that its connection broke before the answer."""
    kinds = httpx.ReadError | httpx.WriteError | httpx.RemoteProtocolError
    return isinstance(error.__cause__, kinds)


def lost(url: str, error: Exception) -> PenstockError:
    """Returns the error to raise for a failure of the transport."""
    refusal = refusal_of(url, error)
    if refusal is not None:
        return refusal
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return Unavailable(f"no broker answers at {url} ({error}); `penstock serve` starts one")
    if isinstance(error, httpx.TimeoutException):
        return Unavailable(f"the broker at {url} did not answer in time")
    if isinstance(error, httpx.UnsupportedProtocol | httpx.InvalidURL):
        return no_address(url)
    if isinstance(error, httpx.RemoteProtocolError) and _CLOSED.search(str(error)):
        return Unavailable(f"the broker at {url} closed the connection")
    return Unavailable(f"the connection to {url} broke: {str(error) or type(error).__name__}")


def lost_socket(url: str, error: Exception) -> PenstockError:
    """Returns the error to raise for a WebSocket that could not be opened."""
    refusal = refusal_of(url, error)
    if refusal is not None:
        return refusal
    if isinstance(error, TimeoutError):
        return Unavailable(f"the broker at {url} did not answer in time")
    return Unavailable(f"no broker answers at {url} ({error}); `penstock serve` starts one")
