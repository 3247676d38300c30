"""Connections leave open files to the log and to sealing, however many clients connect."""

from __future__ import annotations

import resource
import socket
from collections.abc import Callable
from contextlib import ExitStack

from tests.broker_process import BrokerProcess, eventually

FILES = 260
TRIES = FILES + 40


def test_connections_that_say_nothing_do_not_stop_the_log(
    start_broker: Callable[..., BrokerProcess],
) -> None:
    """Those beyond the limit are closed; an open connection stores on, into new segments."""
    broker = start_broker(env={"PENSTOCK_SEGMENT_BYTES": "65536"})
    assert broker.process is not None
    resource.prlimit(broker.process.pid, resource.RLIMIT_NOFILE, (FILES, FILES))
    client = broker.client
    assert client.post("/v1/topics", json={"name": "q"}).status_code == 201
    with ExitStack() as stack:
        refused = 0
        for _ in range(TRIES):
            silent = stack.enter_context(socket.create_connection(("127.0.0.1", broker.port), 30))
            try:
                silent.sendall(b"GET /v1/livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
                refused += not silent.recv(1)
            except ConnectionError:
                refused += 1
        assert TRIES - FILES < refused < TRIES - 16
        for _ in range(20):
            stored = client.post("/v1/produce", json={"topic": "q", "value": "v" * 30_000})
            assert stored.status_code == 200, stored.text
    assert broker.stderr().count("connections are open") == 1
    eventually(lambda: connects(broker.port))


def connects(port: int) -> bool:
    with socket.create_connection(("127.0.0.1", port), 30) as client:
        try:
            client.sendall(b"GET /v1/livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
            return client.recv(12) == b"HTTP/1.1 200"
        except ConnectionError:
            return False
