"""A TCP proxy that a test can cut: the broker stays up while its connections break.

`cut` closes all connections and lets none through until `allow`. `hold` keeps what clients send
until `release`, so that a request has left and is not answered. `hold_answers` keeps what the
broker sends, so that a request is executed and not answered. A cut ends both.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class TcpProxy:
    def __init__(self, behind: int) -> None:
        self._behind = behind
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._is_cut = False
        self._flows = threading.Event()
        self._flows.set()
        self._answers_flow = threading.Event()
        self._answers_flow.set()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def cut(self) -> None:
        with self._lock:
            self._is_cut = True
            connections, self._open = self._open, set()
        for each in connections:
            _hang_up(each)
        self._flows.set()
        self._answers_flow.set()

    def allow(self) -> None:
        self._is_cut = False

    def hold(self) -> None:
        self._flows.clear()

    def hold_answers(self) -> None:
        self._answers_flow.clear()

    def release(self) -> None:
        self._flows.set()

    def close(self) -> None:
        self.cut()
        _hang_up(self._listener)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    if self._is_cut:
                        raise ConnectionRefusedError
                    broker = socket.create_connection(("127.0.0.1", self._behind))
                except OSError:
                    # Also while the broker is down.
                    client.close()
                else:
                    self._join(client, broker)

    def _join(self, client: socket.socket, broker: socket.socket) -> None:
        with self._lock:
            self._open |= {client, broker}
        for pair in ((client, broker), (broker, client)):
            threading.Thread(
                target=self._pump,
                args=(*pair, self._flows if pair[0] is client else self._answers_flow),
                daemon=True,
            ).start()

    def _pump(self, source: socket.socket, target: socket.socket, flows: threading.Event) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                flows.wait()
                target.sendall(data)
        for each in (source, target):
            _hang_up(each)


def _hang_up(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


@contextmanager
def tcp_proxy(behind: int) -> Iterator[TcpProxy]:
    proxy = TcpProxy(behind)
    try:
        yield proxy
    finally:
        proxy.close()
