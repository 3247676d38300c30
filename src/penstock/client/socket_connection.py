"""One WebSocket connection to a broker: handshake, frames in both directions, pings, the end.

Uses the sans-IO protocol of the library `websockets`, so that all requests of one turn of the loop
leave with one write. Must not know what a frame says.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, cast
from urllib.parse import urlsplit

from penstock.client.addresses import AddressBook
from penstock.client.aio_transport import AsyncTransport
from penstock.client.calls import error_of
from penstock.client.connection import CONNECT_S, lost_socket
from penstock.client.credentials import Credentials
from penstock.client.socket_frames import SOCKET_PATH, SUBPROTOCOL
from penstock.client.tls import context_for, with_scheme
from penstock.model.errors import Internal, InvalidArgument, PenstockError, Unavailable
from penstock.model.limits import KIB, MIB

if TYPE_CHECKING:
    from websockets.client import ClientProtocol
    from websockets.http11 import Response

MAX_FRAME_BYTES = 128 * MIB
"""The largest message that is read. The largest answer is that to a `get_many`, in base64."""
WRITE_BUFFER_BYTES = 256 * KIB
"""Bytes in the transport beyond which nothing more is given to it."""
CLOSE_S = 1.0
"""How long the broker may take to answer the close frame."""
_PROTOCOL_ERROR, _NORMAL = 1002, 1000


class SocketReceiver(Protocol):
    """Gets the frames of a connection, and hears when it can write again."""

    def receive_text(self, frame: bytes) -> None: ...

    def receive_binary(self, frame: bytes) -> None: ...

    def writable(self) -> None: ...


@dataclass(frozen=True, slots=True)
class SocketEndpoint:
    """The broker to connect to. After `ping_s` of silence the connection is checked with a ping.
    `certificate` are the client's certificate and key, None for those of the environment. If `book`
    has several addresses, `url` is the text that names them, and the best of them is connected to.
    `options` are those of the HTTP client that reads the map of the cluster."""

    url: str
    credentials: Credentials
    timeout_s: float
    user_agent: str
    ping_s: float
    certificate: tuple[str | None, str | None] = (None, None)
    book: AddressBook | None = None
    options: dict[str, Any] = field(default_factory=dict)


async def connect(endpoint: SocketEndpoint, receiver: SocketReceiver) -> SocketConnection:
    """Returns an open connection. Raises the error with which the broker refuses it. If it refuses
    the token, tries once more with a token that has changed."""
    used = endpoint.credentials.token
    try:
        return await _connect_any(endpoint, receiver)
    except PenstockError as error:
        if error.http_status != 401 or not endpoint.credentials.has_changed(used):
            raise
    return await _connect_any(endpoint, receiver)


async def _connect_any(endpoint: SocketEndpoint, receiver: SocketReceiver) -> SocketConnection:
    """Tries one address after another, the owner's first."""
    book = endpoint.book
    if book is None or not book.has_several:
        return await _connect_once(endpoint, receiver, endpoint.timeout_s)
    transport = AsyncTransport(book, endpoint.credentials, endpoint.options)
    try:
        await transport.read_map()
    finally:
        await transport.close()
    tried: list[str] = []
    failure: PenstockError = Unavailable("there is no address left to try")
    while (address := book.next(tried)) is not None:
        tried.append(address)
        try:
            chosen = replace(endpoint, url=address)
            connection = await _connect_once(chosen, receiver, CONNECT_S)
        except (Unavailable, InvalidArgument) as error:
            # Not that of a token that is refused: all brokers take the same ones.
            book.failed(address)
            failure = error
        else:
            book.answered(address)
            return connection
    raise failure


async def _connect_once(
    endpoint: SocketEndpoint, receiver: SocketReceiver, connect_s: float
) -> SocketConnection:
    parts = urlsplit(endpoint.url)
    is_tls, host = parts.scheme == "https", parts.hostname or ""
    port = parts.port or (443 if is_tls else 80)
    tls: dict[str, Any] = {}
    if is_tls:
        tls = {"ssl": context_for("https", *endpoint.certificate), "server_hostname": host}
    loop = asyncio.get_running_loop()
    connection = SocketConnection(endpoint, receiver, loop)
    try:
        async with asyncio.timeout(endpoint.timeout_s):
            async with asyncio.timeout(connect_s):
                await loop.create_connection(lambda: connection, host, port, **tls)
            await connection.opened
    except (OSError, ssl.SSLError, TimeoutError) as error:
        connection.abort("the connection was not opened in time")
        raise lost_socket(endpoint.url, error) from error
    except BaseException:
        connection.abort("the connection was not opened")
        raise
    return connection


def new_protocol(url: str) -> ClientProtocol:
    """Returns the protocol of a connection. Raises InvalidArgument if its library is missing."""
    try:
        from websockets.client import ClientProtocol
        from websockets.uri import parse_uri
    except ImportError as error:
        raise InvalidArgument(
            "connect() needs the library websockets: pip install 'penstock[websocket]'"
        ) from error
    scheme = "wss" if url.startswith("https:") else "ws"
    uri = parse_uri(with_scheme(scheme, url.rstrip("/")) + SOCKET_PATH)
    return ClientProtocol(uri, subprotocols=[SUBPROTOCOL], max_size=MAX_FRAME_BYTES)  # type: ignore[list-item]


class SocketConnection(asyncio.Protocol):
    """`opened` is done when the broker has accepted the handshake, `closed` with the reason of the
    end."""

    def __init__(
        self,
        endpoint: SocketEndpoint,
        receiver: SocketReceiver,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.opened: asyncio.Future[None] = loop.create_future()
        self.closed: asyncio.Future[str] = loop.create_future()
        self.is_writable = False
        self._endpoint = endpoint
        self._receiver = receiver
        self._loop = loop
        self._protocol = new_protocol(endpoint.url)
        self._transport: asyncio.Transport | None = None
        self._heard_at = loop.time()
        self._watchdog: asyncio.TimerHandle | None = None
        self._fragments: list[bytes] = []
        self._is_text = False
        self._reason = ""

    # -- the transport -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not checked: the transports of uvloop are of no class of asyncio.
        self._transport = stream = cast(asyncio.Transport, transport)
        if self.closed.done():
            stream.abort()
            return
        stream.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        request = self._protocol.connect()
        request.headers["User-Agent"] = self._endpoint.user_agent
        for name, value in self._endpoint.credentials.headers().items():
            request.headers[name] = value
        self._protocol.send_request(request)
        self._write()

    def data_received(self, data: bytes) -> None:
        self._heard_at = self._loop.time()
        self._protocol.receive_data(data)
        try:
            for event in self._protocol.events_received():
                self._receive(event)
        except PenstockError as error:
            self._fail(error.message)
        self._after_input()

    def eof_received(self) -> None:
        self._protocol.receive_eof()
        self._after_input()

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None and not self._reason:
            self._reason = f"the connection broke: {exc}"
        self._finish()

    def pause_writing(self) -> None:
        self.is_writable = False

    def resume_writing(self) -> None:
        if not self.closed.done() and self.opened.done():
            self.is_writable = True
            self._receiver.writable()

    # -- input ---------------------------------------------------------------------------------

    def _receive(self, event: Any) -> None:
        if not self.opened.done():
            self._receive_response(event)
            return
        if event.opcode in (1, 2):
            self._is_text = event.opcode == 1
            self._fragments = [bytes(event.data)]
        elif event.opcode == 0:
            self._fragments.append(bytes(event.data))
        else:
            return
        if event.fin:
            whole, self._fragments = b"".join(self._fragments), []
            if self._is_text:
                self._receiver.receive_text(whole)
            else:
                self._receiver.receive_binary(whole)

    def _receive_response(self, response: Response) -> None:
        if response.status_code != 101:
            self.opened.set_exception(error_of(response.status_code, bytes(response.body or b"")))
        elif self._protocol.handshake_exc is not None:
            self._refuse_handshake(self._protocol.handshake_exc)
        elif self._protocol.subprotocol != SUBPROTOCOL:
            self._refuse_handshake(f"it does not speak {SUBPROTOCOL}")
        else:
            self.is_writable = True
            self.opened.set_result(None)
            self._watchdog = self._loop.call_later(self._endpoint.ping_s, self._check)

    def _refuse_handshake(self, reason: object) -> None:
        text = f"the handshake with {self._endpoint.url} failed ({reason})"
        self.opened.set_exception(Internal(f"{text}; is this a Penstock broker?"))

    def _after_input(self) -> None:
        self._write()
        protocol = self._protocol
        failure = protocol.handshake_exc
        is_eof = failure is not None and isinstance(failure.__cause__, EOFError)
        if failure is not None and not is_eof and not self.opened.done():
            # There was no response: the server does not speak HTTP.
            self._refuse_handshake(failure)
        cause = protocol.parser_exc
        if cause is not None and not isinstance(cause, EOFError) and not self._reason:
            self._reason = f"the broker sent an invalid frame: {cause}"
        if protocol.close_rcvd is not None and not self._reason:
            code, why = protocol.close_rcvd.code, protocol.close_rcvd.reason
            self._reason = f"the broker closed the connection ({code} {why})".replace(" )", ")")
        if protocol.close_expected() or protocol.handshake_exc is not None:
            self.is_writable = False
            self._finish()

    def _fail(self, reason: str) -> None:
        """Closes the connection because the broker has sent something that cannot be read."""
        self._reason = reason
        self._protocol.fail(_PROTOCOL_ERROR, "unreadable")

    # -- output --------------------------------------------------------------------------------

    def send(self, frames: Iterable[tuple[bool, bytes]]) -> None:
        """Writes messages, each with whether it is binary, with one call."""
        protocol = self._protocol
        for is_binary, frame in frames:
            if is_binary:
                protocol.send_binary(frame)
            else:
                protocol.send_text(frame)
        self._write()

    def _write(self) -> None:
        transport, data = self._transport, b"".join(self._protocol.data_to_send())
        if data and transport is not None and not transport.is_closing():
            transport.write(data)

    # -- the end -------------------------------------------------------------------------------

    def _check(self) -> None:
        """Pings a silent broker. Gives it up if it does not answer in time."""
        endpoint = self._endpoint
        silent_s = self._loop.time() - self._heard_at
        if silent_s >= endpoint.ping_s + endpoint.timeout_s:
            self.abort(f"the broker at {endpoint.url} has been silent for {silent_s:.0f} s")
            return
        if silent_s >= endpoint.ping_s:
            self._protocol.send_ping(b"")
            self._write()
        wait_s = min(endpoint.ping_s, endpoint.timeout_s)
        self._watchdog = self._loop.call_later(wait_s, self._check)

    async def close(self) -> None:
        """Closes the connection in order, or at once if the broker does not take part."""
        if not self.closed.done() and self.is_writable:
            self._reason = "the client closed the connection"
            self.is_writable = False
            self._protocol.send_close(_NORMAL)
            self._write()
            await asyncio.wait([self.closed], timeout=CLOSE_S)
        self.abort("the client closed the connection")

    def abort(self, reason: str) -> None:
        self._reason = self._reason or reason
        if self._transport is not None:
            self._transport.abort()
        self._finish()

    def _finish(self) -> None:
        """Reports the end, once, and hangs up when all is written."""
        self.is_writable = False
        if self._watchdog is not None:
            self._watchdog.cancel()
        if self._transport is not None:
            self._transport.close()
        reason = self._reason or "the broker ended the connection; it may be restarting"
        if not self.closed.done():
            self.closed.set_result(reason)
        if not self.opened.done():
            self.opened.set_exception(Unavailable(f"{self._endpoint.url}: {reason}"))
        if not self.opened.cancelled():
            # Marks the error as seen: perhaps nobody waits for it any more.
            self.opened.exception()
