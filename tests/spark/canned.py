"""A server that gives fixed answers, broken ones too, for tests of the connection."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

import pyarrow as pa

from penstock.spark.options import BrokerSettings


class CannedServer:
    """Gives the answers in turn, one a request, and closes the connection after each."""

    def __init__(self, answers: list[bytes]) -> None:
        self._answers = answers
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.requests: list[bytes] = []
        self._thread = Thread(target=self._serve)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def settings(self, retry_s: float = 0.0, token: str = "") -> BrokerSettings:
        return BrokerSettings(url=self.url, token=token, retry_s=retry_s)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _serve(self) -> None:
        for answer in self._answers:
            try:
                connected, _ = self._listener.accept()
            except OSError:
                return
            with connected:
                self.requests.append(connected.recv(65536))
                connected.sendall(answer)


@contextmanager
def canned(*answers: bytes) -> Iterator[CannedServer]:
    server = CannedServer(list(answers))
    try:
        yield server
    finally:
        server.close()


def json_answer(status: int, body: bytes) -> bytes:
    head = f"HTTP/1.1 {status} Whatever\r\ncontent-length: {len(body)}\r\n"
    return head.encode() + b"connection: close\r\n\r\n" + body


def rows_answer(stream: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + stream


def offsets_stream(*batches: list[int]) -> bytes:
    """An Arrow stream with a column `offset`."""
    schema = pa.schema([("offset", pa.int64())])
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, schema) as stream:
        for offsets in batches:
            stream.write_batch(pa.record_batch([pa.array(offsets, pa.int64())], schema=schema))
    return bytes(out.getvalue())
