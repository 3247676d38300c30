"""Clients of streams and caches that the tests of the numbered sentences share: messages on a
socket, readers of every kind, and a network that can be cut in the middle."""

from __future__ import annotations

import base64
import json
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from tests.broker_process import BrokerProcess
from tests.contract.namespaces import Feed, Namespace, b64
from tests.websocket import WebSocket, drop_incoming

T = TypeVar("T")


class Session(WebSocket):
    """A WebSocket that speaks for one namespace."""

    def __init__(self, ns: Namespace, port: int = 0, **options: Any) -> None:
        super().__init__(port or ns.broker.port, **options)
        self.scope = ns.scope

    def message(self, kind: str, **members: Any) -> dict[str, Any]:
        return {"type": kind, **self.scope, **members}

    def call(self, kind: str, **members: Any) -> dict[str, Any]:
        answer: dict[str, Any] = self.ask(self.message(kind, **members))
        return answer

    def subscribe(self, stream: str, **members: Any) -> str:
        answer = self.call("subscribe", stream=stream, **members)
        assert answer["type"] == "subscribed", answer
        return str(answer["subscription_id"])

    def publish(self, stream: str, *payloads: bytes, **members: Any) -> dict[str, Any]:
        if len(payloads) == 1:
            return self.call("publish", stream=stream, payload=b64(payloads[0]), **members)
        texts = [b64(payload) for payload in payloads]
        return self.call("publish_batch", stream=stream, payloads=texts, **members)

    def __enter__(self) -> Session:
        return self


class BinarySession(Session):
    """One whose events are bytes."""

    def __init__(self, ns: Namespace, **options: Any) -> None:
        super().__init__(ns, subprotocol="felix.v1+binary", **options)

    def events(self, count: int, timeout_s: float = 10.0) -> list[bytes]:
        found: list[bytes] = []
        while len(found) < count:
            _, frame = self.receive_frame(timeout_s)
            _, _, events = struct.unpack_from("<BII", frame)
            at = 9
            for _ in range(events):
                (size,) = struct.unpack_from("<I", frame, at)
                found.append(frame[at + 4 : at + 4 + size])
                at += 4 + size
        return found


class SseFeed(Feed):
    """Server-sent events; every second line is data."""

    def __init__(self, ns: Namespace, stream: str) -> None:
        path = f"{ns.stream_path(stream)}/subscribe?format=sse"
        super(Feed, self).__init__(ns.broker.port, path)
        assert self.status == 200
        assert self._line().startswith(b"event: subscribed")
        self.first = json.loads(self._line().removeprefix(b"data: "))

    def payloads(self, count: int, timeout_s: float = 10.0) -> list[bytes]:
        found = []
        for _ in range(count):
            assert self._line() == b"event: event"
            event = json.loads(self._line().removeprefix(b"data: "))
            found.append(base64.b64decode(event["payload"]))
        return found

    def _line(self) -> bytes:
        deadline = time.monotonic() + 10
        while not self._lines:
            assert self._wait(deadline), "no line in time"
        return self._lines.popleft()[0]


@contextmanager
def every_kind_of_reader(
    ns: Namespace, stream: str
) -> Iterator[dict[str, Callable[[int], list[bytes]]]]:
    """By name, how to read its next so many payloads."""
    text, binary, single = Session(ns), BinarySession(ns), Session(ns)
    ndjson, sse = ns.subscribe(stream), SseFeed(ns, stream)
    text.subscribe(stream)
    binary.subscribe(stream)
    single.subscribe(stream, batch=False)
    try:
        yield {
            "text": text.events,
            "binary": binary.events,
            "single": single.events,
            "ndjson": ndjson.payloads,
            "sse": sse.payloads,
        }
    finally:
        for each in (text, binary, single, ndjson, sse):
            each.socket.close()


def at_once(works: Sequence[Callable[[], T]]) -> list[T]:
    """Runs all of them in threads that begin together."""
    barrier = threading.Barrier(len(works))

    def run(work: Callable[[], T]) -> T:
        barrier.wait(10)
        return work()

    with ThreadPoolExecutor(len(works)) as pool:
        return list(pool.map(run, works))


def make_namespace(broker: BrokerProcess, tenant_id: str, namespace: str) -> Namespace:
    """One that may be there already."""
    client = broker.client
    made = client.post("/v1/tenants", json={"tenant_id": tenant_id})
    assert made.status_code in (200, 201), made.text
    ns = Namespace(broker, tenant_id, namespace)
    made = client.post(ns.path.rpartition("/")[0], json={"namespace": namespace})
    assert made.status_code in (200, 201), made.text
    return ns


def gauges(broker: BrokerProcess) -> dict[str, float]:
    """Every gauge that counts something of streams, caches or sockets, summed over its labels."""
    names = ("penstock_websockets", "penstock_stream_subscribers", "penstock_stream_lagging",
             "penstock_stream_queued", "penstock_stream_waiting",
             "penstock_cache_watches")  # fmt: skip
    found = dict.fromkeys(names, 0.0)
    for line in broker.client.get("/metrics").text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in found:
            found[name] += float(line.rpartition(" ")[2])
    return found


class Network:
    """A proxy to a broker. Once it is `cut`, packets of both sides are lost and not acknowledged,
    as with a cable that is pulled; nobody is told, and the connections stay open."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._sockets = [self._listener]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._is_over = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def cut(self) -> None:
        """For the connections that there are; those that are made later work."""
        for each in self._sockets[1:]:
            drop_incoming(each)

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._thread.join()
        self._selector.close()
        for each in self._sockets:
            each.close()

    def _run(self) -> None:
        while not self._is_over:
            for key, _ in self._selector.select(0.05):
                if key.fileobj is self._listener:
                    self._connect()
                else:
                    self._pass_on(key.fileobj, key.data)

    def _connect(self) -> None:
        near, _ = self._listener.accept()
        far = socket.create_connection(("127.0.0.1", self._target))
        self._sockets += [near, far]
        self._selector.register(near, selectors.EVENT_READ, far)
        self._selector.register(far, selectors.EVENT_READ, near)

    def _pass_on(self, source: Any, other: socket.socket) -> None:
        try:
            data = source.recv(65536)
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(source)
        try:
            if data:
                other.sendall(data)
            else:
                other.shutdown(socket.SHUT_WR)
        except OSError:
            return
