"""A socket of the SDK and servers that are no broker, or a broken one: no hang, no silence."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from penstock.client import Client
from penstock.client.socket_connection import MAX_FRAME_BYTES
from penstock.client.sync_socket import Socket
from penstock.model.errors import Internal, OutcomeUnknown, PenstockError, Unavailable
from tests.broker_process import eventually

WAIT_S = 10.0
SALT = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"

Behave = Callable[["Peer"], None]


class Peer:
    """The server's side of one connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        connection.settimeout(WAIT_S)
        self.reader = connection.makefile("rb")

    def accept(self, **headers: str) -> None:
        """Reads the request and makes it a WebSocket."""
        head = self.read_head()
        key = re.search(rb"(?i)sec-websocket-key: *(\S+)", head)
        assert key is not None
        accept = base64.b64encode(hashlib.sha1(key[1] + SALT).digest()).decode()
        lines = {
            "Upgrade": "websocket",
            "Connection": "Upgrade",
            "Sec-WebSocket-Accept": accept,
            "Sec-WebSocket-Protocol": "felix.v1+binary",
        }
        lines |= {name.replace("_", "-"): value for name, value in headers.items()}
        text = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value)
        self.send(f"HTTP/1.1 101 Switching Protocols\r\n{text}\r\n".encode())

    def read_head(self) -> bytes:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += self.reader.readline()
        return head

    def send(self, data: bytes) -> None:
        self._connection.sendall(data)

    def text(self, message: object) -> None:
        self.send(frame(1, json.dumps(message).encode()))

    def request(self) -> dict[str, object]:
        """Reads the next text or binary message of the client."""
        while True:
            first, second = self.reader.read(2)
            size = second & 0x7F
            if size == 126:
                (size,) = struct.unpack(">H", self.reader.read(2))
            mask = self.reader.read(4)
            body = bytes(b ^ mask[n % 4] for n, b in enumerate(self.reader.read(size)))
            if first & 0x0F == 8:
                raise ValueError("the client has closed the connection")
            if first & 0x0F == 1:
                found: dict[str, object] = json.loads(body)
                return found

    def wait_for_end(self) -> None:
        with suppress(OSError):
            self.reader.read()


def frame(opcode: int, payload: bytes, first: int = 0x80) -> bytes:
    size = len(payload)
    if size < 126:
        return bytes([first | opcode, size]) + payload
    return bytes([first | opcode, 126]) + struct.pack(">H", size) + payload


@contextmanager
def server(behave: Behave) -> Iterator[str]:
    """The address of a server that behaves so with each connection."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(connection: socket.socket) -> None:
        peer = Peer(connection)
        with connection, peer.reader, suppress(OSError, ValueError, struct.error):
            behave(peer)

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


@contextmanager
def connected(behave: Behave, timeout_s: float = WAIT_S) -> Iterator[Socket]:
    with server(behave) as url, Client(url, timeout_s=timeout_s) as client:
        socket = client.connect().open()
        try:
            yield socket
        finally:
            with suppress(PenstockError):
                socket._runner.run(socket._core.abort())
            socket._runner.stop()


@pytest.mark.parametrize(
    ("answer", "kind", "told"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", Internal, "Penstock broker"),
        (b"HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n", Unavailable, "a proxy answered"),
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", Internal, "the handshake with"),
        (b"\x00" * 100 + b"\r\n", Internal, "the handshake with"),
        (b"HTTP/1.1 101 Switching Protocols\r\n\r\n", Internal, "the handshake with"),
        (b"", Unavailable, "ended the connection"),
    ],
    ids=["http", "proxy", "ssh", "zeros", "no-headers", "hang-up"],
)
def test_a_server_that_is_no_broker_is_named(
    answer: bytes, kind: type[PenstockError], told: str
) -> None:
    def behave(peer: Peer) -> None:
        peer.read_head()
        peer.send(answer)

    with server(behave) as url, Client(url, timeout_s=WAIT_S) as client:  # noqa: SIM117
        with pytest.raises(kind, match=told):
            client.connect().open()


@pytest.mark.parametrize("headers", [{"Sec_WebSocket_Protocol": ""}, {"Sec_WebSocket_Accept": "x"}])
def test_a_handshake_that_is_not_the_brokers_is_refused(headers: dict[str, str]) -> None:
    with server(lambda peer: peer.accept(**headers)) as url, Client(url) as client:  # noqa: SIM117
        with pytest.raises(Internal, match="is this a Penstock broker"):
            client.connect().open()


def test_a_server_that_never_answers_is_given_up() -> None:
    with server(Peer.wait_for_end) as url, Client(url, timeout_s=0.2) as client:  # noqa: SIM117
        with pytest.raises(Unavailable, match="did not answer in time"):
            client.connect().open()


GARBAGE = {
    "not JSON": frame(1, b"not JSON"),
    "not UTF-8": frame(1, b'{"type":"\xff"}'),
    "an array": frame(1, b"[1, 2]"),
    "a number": frame(1, b"7"),
    "wrong members": frame(1, b'{"type":"ok","request_id":{}}'),
    "an unknown binary kind": frame(2, b"\x09rest"),
    "an empty binary frame": frame(2, b""),
    "a count without payloads": frame(2, struct.pack("<BII", 1, 1, 2**32 - 1)),
    "a payload beyond the end": frame(2, struct.pack("<BIII", 1, 1, 1, 2**32 - 1) + b"x"),
    "bytes after the payloads": frame(2, struct.pack("<BIII", 1, 1, 1, 1) + b"xyz"),
    "a wrong event": frame(1, b'{"type":"cache_event","watch_id":"w1","event":"boom"}'),
    "a masked frame": b"\x81\x81\x00\x00\x00\x00x",
    "a reserved bit": frame(1, b"{}", first=0xC0),
    "an unknown opcode": frame(3, b"{}"),
    "a continuation of nothing": frame(0, b"{}"),
    "a frame beyond all limits": b"\x82\x7f" + struct.pack(">Q", MAX_FRAME_BYTES + 1),
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
def test_garbage_ends_the_connection_and_no_request_hangs(garbage: bytes) -> None:
    """The next connection works: the subscription and the read are served there."""
    connections: list[Peer] = []

    def behave(peer: Peer) -> None:
        peer.accept()
        connections.append(peer)
        while True:
            request = peer.request()
            number, kind = request["request_id"], request["type"]
            if kind == "cache_watch":
                answer = {"type": "ok", "watch_id": "w1", "version": 1, "request_id": number}
                peer.text(answer)
            elif len(connections) == 1:
                peer.send(garbage)
                peer.wait_for_end()
                return
            elif kind == "cache_put":
                peer.text({"type": "ok", "version": 8, "request_id": number})

    with connected(behave) as socket:
        cache = socket.cache("default")
        watch = cache.watch(prefix="").open()
        with pytest.raises(OutcomeUnknown, match="unknown whether the broker executed cache_put"):
            cache.put("k", "v")
        assert cache.put("k", "v") == 8
        assert len(connections) == 2
        eventually(lambda: watch.watch_id == "w1")


def test_what_is_unknown_but_well_formed_is_ignored() -> None:
    def behave(peer: Peer) -> None:
        peer.accept()
        peer.text({"type": "news", "of": "a newer broker"})
        peer.text({"type": "event", "subscription_id": "s9", "payload": "eA=="})
        peer.text({"type": "ok", "request_id": 10**9})
        peer.send(frame(2, struct.pack("<BIII", 1, 9, 1, 1) + b"x"))
        request = peer.request()
        half = json.dumps({"type": "cache_value", "value": None, "version": 0, "extra": [1],
                           "request_id": request["request_id"]}).encode()  # fmt: skip
        # In pieces, as a proxy may send it, with a ping in between.
        peer.send(frame(1, half[:9], first=0) + frame(9, b"hi") + frame(0, half[9:]))
        peer.wait_for_end()

    with connected(behave) as socket:
        assert socket.cache("default").get("k") is None
        assert socket.reconnects == 0


def test_an_answer_of_the_wrong_shape_is_an_error_of_its_request_only() -> None:
    def behave(peer: Peer) -> None:
        peer.accept()
        peer.text({"type": "ok", "version": "eight", "request_id": peer.request()["request_id"]})
        peer.text({"type": "ok", "version": 8, "request_id": peer.request()["request_id"]})
        peer.wait_for_end()

    with connected(behave) as socket:
        with pytest.raises(Internal, match="unexpected answer"):
            socket.cache("default").put("k", "v")
        assert socket.cache("default").put("k", "v") == 8


def test_a_read_that_breaks_every_connection_is_given_up() -> None:
    connections: list[Peer] = []

    def behave(peer: Peer) -> None:
        peer.accept()
        connections.append(peer)
        peer.request()
        error = {"type": "error", "error": "INVALID_ARGUMENT", "message": "a message is too large"}
        peer.text(error)
        peer.send(frame(8, struct.pack(">H", 1009)))
        peer.wait_for_end()

    with connected(behave) as socket:
        with pytest.raises(Unavailable, match=r"1009.*a message is too large.*tried 3 times"):
            socket.cache("default").get("k")
        assert len(connections) == 3


def test_a_channel_that_the_broker_cannot_serve_now_is_opened_again() -> None:
    """First the broker ends it for a while, then it refuses it for a while."""
    requests: list[object] = []

    def behave(peer: Peer) -> None:
        peer.accept()
        while True:
            request = peer.request()
            assert request["type"] == "cache_watch"
            requests.append(request["since_version"])
            number = request["request_id"]
            if len(requests) == 2:
                refusal = {"type": "error", "error": "RESOURCE_EXHAUSTED", "message": "busy"}
                peer.text(refusal | {"retry_after_ms": 10, "request_id": number})
                continue
            peer.text({"type": "ok", "watch_id": "w1", "version": 7, "request_id": number})
            if len(requests) == 1:
                ended = {"type": "error", "error": "UNAVAILABLE", "message": "not now"}
                peer.text(ended | {"watch_id": "w1"})
            else:
                event = {"type": "cache_event", "watch_id": "w1", "event": "delete"}
                peer.text(event | {"version": 8, "key": "k"})

    with connected(behave) as socket:
        watch = socket.cache("default").watch(prefix="", wait_s=WAIT_S).open()
        assert next(watch).version == 8
        assert requests == [None, 7, 7]
        assert socket.reconnects == 0
