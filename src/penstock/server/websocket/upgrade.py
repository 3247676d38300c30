"""The upgrade from HTTP to WebSocket: checks the handshake and hands the connection over.

The request has passed the admission like every other. A handshake that is not valid is refused and
the connection closed, because it is not clear what its next bytes mean.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from typing import TYPE_CHECKING

import httptools
import msgspec

from penstock.model.errors import InvalidArgument, MethodNotAllowed, UpgradeRequired
from penstock.server.http.dispatch import RequestDispatch
from penstock.server.http.request_headers import Headers, RequestVerdict
from penstock.server.http.requests import Request
from penstock.server.websocket.connection import WebSocketConnection

if TYPE_CHECKING:
    from penstock.server.http.connection import HttpConnection
    from penstock.server.http.response_order import Reply

PATH = b"/v1/felix/ws"
VERSION = b"13"
SUBPROTOCOLS = {b"felix.v1": False, b"felix.v1+binary": True}
"""The subprotocols, and whether they have binary frames."""

_SALT = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"

_UPGRADE_HEADERS = frozenset({b"upgrade", b"http2-settings"})
"""Headers that ask for an upgrade; the header Connection names them too."""


class Handshake(msgspec.Struct, frozen=True):
    """The valid handshake of a client."""

    key: bytes
    subprotocol: bytes

    def answer(self, request_id: bytes) -> bytes:
        accept = base64.b64encode(hashlib.sha1(self.key + _SALT, usedforsecurity=False).digest())
        return (
            b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
            b"sec-websocket-accept: %b\r\nsec-websocket-protocol: %b\r\nx-request-id: %b\r\n\r\n"
            % (accept, self.subprotocol, request_id)
        )


def is_socket_wanted(method: bytes, path: bytes, headers: Headers) -> bool:
    """Returns whether a request for an upgrade is for the broker's WebSocket."""
    is_websocket = any(
        name == b"upgrade" and value.strip().lower() == b"websocket" for name, value in headers
    )
    return is_websocket and method == b"GET" and path == PATH


def read_handshake(headers: Headers, verdict: RequestVerdict) -> Handshake:
    keys = [value.strip() for name, value in headers if name == b"sec-websocket-key"]
    versions = [value.strip() for name, value in headers if name == b"sec-websocket-version"]
    if versions != [VERSION]:
        raise UpgradeRequired("Sec-WebSocket-Version must be 13")
    if len(keys) != 1 or not _is_key(keys[0]):
        raise InvalidArgument("Sec-WebSocket-Key must be 16 bytes in base64")
    if verdict.has_body():
        raise InvalidArgument("a request for a WebSocket has no body")
    return Handshake(keys[0], _choose(headers))


def _is_key(key: bytes) -> bool:
    try:
        return len(base64.b64decode(key, validate=True)) == 16
    except binascii.Error:
        return False


def _choose(headers: Headers) -> bytes:
    """Returns the first subprotocol that the client offers and the broker has."""
    for name, value in headers:
        if name == b"sec-websocket-protocol":
            for offered in value.split(b","):
                if offered.strip() in SUBPROTOCOLS:
                    return offered.strip()
    names = " or ".join(name.decode() for name in SUBPROTOCOLS)
    raise InvalidArgument(f"Sec-WebSocket-Protocol must offer {names}")


def new_parser(connection: HttpConnection) -> httptools.HttpRequestParser:
    """Returns a parser that reports to `connection`. It ignores bytes after the last request,
    which the connection ignores too."""
    parser = httptools.HttpRequestParser(connection)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser


def without_upgrade(parser: httptools.HttpRequestParser, target: bytes, headers: Headers) -> bytes:
    """Returns the head that the parser has read, without the headers that ask for an upgrade."""
    version = parser.get_http_version().encode()
    head = [b"%b %b HTTP/%b\r\n" % (parser.get_method(), target, version)]
    for name, value in headers:
        if name == b"connection":
            options = [option.strip() for option in value.split(b",")]
            value = b", ".join(o for o in options if o.lower() not in _UPGRADE_HEADERS)
        if name not in _UPGRADE_HEADERS:
            head.append(b"%b: %b\r\n" % (name, value))
    return b"".join(head) + b"\r\n"


class HandOver:
    """A request for a WebSocket whose handshake is valid, on its way through the order of
    responses. `rest` are the bytes that the client sent behind it."""

    def __init__(
        self,
        connection: HttpConnection,
        reply: Reply,
        request: Request,
        handshake: Handshake,
        rest: bytes,
    ) -> None:
        self.connection = connection
        self.reply = reply
        self.request = request
        self.rest = rest
        self._handshake = handshake

    def run(self) -> None:
        """Called when all responses before it have left."""
        forwarder = self.connection.dispatch.forwarder
        if forwarder is not None and forwarder.takes(self.request):
            forwarder.forward_socket(self)
        else:
            self.grant()

    def grant(self) -> None:
        """Makes the connection a WebSocket."""
        connection, notes = self.connection, self.request.notes
        transport, is_write_paused = connection.transport, connection.flow.write_paused
        connection.retire()
        if connection.is_half_closed or transport.is_closing():
            # Nothing else would ever tell that this client is gone.
            transport.close()
            return
        transport.write(self._handshake.answer(self.reply.request_id))
        WebSocketConnection(
            connection.dispatch,
            connection.connections,
            transport,
            is_binary=SUBPROTOCOLS[self._handshake.subprotocol],
            is_write_paused=is_write_paused,
            notes=notes,
            slot=connection.slot,
        ).start(self.rest)


def plan(
    connection: HttpConnection,
    reply: Reply,
    headers: Headers,
    verdict: RequestVerdict,
    rest: bytes,
) -> HandOver:
    """Returns the request of a valid handshake. Raises if it is not valid."""
    handshake = read_handshake(headers, verdict)
    request = Request(b"GET", PATH, b"", verdict.notes)
    return HandOver(connection, reply, request, handshake, rest)


def get_socket(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    """Answers a request for this path that asks for no upgrade."""
    if request.method == b"HEAD":
        raise MethodNotAllowed("GET")
    raise UpgradeRequired("this path speaks WebSocket; ask for an upgrade, version 13")
