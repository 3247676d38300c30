"""A subscriber that has stopped reading, so that the broker already drops events for it."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from bench.lean_socket import JSON, upgrade_request
from bench.processes import Broker
from bench.pubsub import EVENT_TEXT, STREAM_PATH, SUBSCRIBE, Report, subscriptions
from bench.rows import BenchFailed

_RECEIVE_BYTES = 4096
"""Small, so that the system buffers little of what the subscriber does not read."""
_EVENTS = 1000
_TIMEOUT_S = 60.0


class StalledSubscriber:
    def __init__(self, broker: Broker, subscription_id: str) -> None:
        self._broker = broker
        self._id = subscription_id

    def report(self) -> Report:
        for report in subscriptions(self._broker):
            if report.subscription_id == self._id:
                return report
        raise BenchFailed("the broker has closed the stalled subscription")


@contextmanager
def stalled_subscriber(broker: Broker) -> Iterator[StalledSubscriber]:
    """Opens a stalled subscription; its buffer is full while the block runs."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
        connection.settimeout(_TIMEOUT_S)
        connection.connect(("127.0.0.1", broker.port))
        connection.sendall(upgrade_request(JSON))
        _read_until(connection, b"\r\n\r\n")
        connection.sendall(SUBSCRIBE)
        frame = _read_until(connection, b"}")
        answer = msgspec.json.decode(frame[frame.index(b"{") :])
        subscriber = StalledSubscriber(broker, answer["subscription_id"])
        _fill(broker, subscriber)
        yield subscriber


def _read_until(connection: socket.socket, end: bytes) -> bytes:
    data = b""
    while not data.endswith(end):
        more = connection.recv(_RECEIVE_BYTES)
        if not more:
            raise BenchFailed(f"the broker closed the connection after {data.decode()}")
        data += more
    return data


def _fill(broker: Broker, subscriber: StalledSubscriber) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    payloads = [EVENT_TEXT] * _EVENTS
    while not subscriber.report().dropped:
        if time.monotonic() > deadline:
            raise BenchFailed("the broker drops nothing for a subscriber that does not read")
        broker.ask("POST", f"{STREAM_PATH}/publish_batch", {"payloads": payloads})
