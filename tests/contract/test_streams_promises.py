"""What streams and caches never do: send again, make up for what was missed, write two at once."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest

from tests.broker_process import BrokerProcess, eventually
from tests.contract.namespaces import Namespace, b64
from tests.websocket import NoFrame, WebSocket

SILENCE_S = 0.5
"""Long enough for what would come again at once, or at the next turn."""


@pytest.fixture
def ns(broker: BrokerProcess) -> Namespace:
    return Namespace(broker)


def subscribe(ws: WebSocket, ns: Namespace, stream: str) -> None:
    answer = ws.ask({"type": "subscribe", "stream": stream, **ns.scope})
    assert answer["type"] == "subscribed", answer


def next_payload(ws: WebSocket) -> Any:
    event = ws.receive()
    assert event["type"] == "event", event
    return event["payload"]


def test_an_event_that_was_delivered_never_comes_again(ns: Namespace) -> None:
    """felix-2: the subscriber does nothing, and nothing more happens."""
    stream = ns.create_stream()
    with WebSocket(ns.broker.port) as ws:
        subscribe(ws, ns, stream)
        ns.publish(stream, b"once")
        assert next_payload(ws) == b64(b"once")
        with pytest.raises(NoFrame):
            ws.receive(SILENCE_S)
        ns.publish(stream, b"next")
        assert next_payload(ws) == b64(b"next")


def test_what_is_published_while_the_network_is_cut_reaches_nobody_later(ns: Namespace) -> None:
    """felix-6, 43"""
    stream = ns.create_stream()
    with WebSocket(ns.broker.port) as cut:
        subscribe(cut, ns, stream)
        cut.cut()
        ns.publish(stream, *[b"missed %d" % number for number in range(10)])
    eventually(lambda: ns.subscriptions(stream) == [])
    with WebSocket(ns.broker.port) as replacement:
        subscribe(replacement, ns, stream)
        ns.publish(stream, b"live")
        assert next_payload(replacement) == b64(b"live")


def test_a_publish_that_was_not_sent_whole_is_neither_kept_nor_retried(ns: Namespace) -> None:
    """felix-47"""
    stream = ns.create_stream()
    body = b'{"payload":"' + b64(b"never").encode() + b'"}'
    head = (
        f"POST {ns.stream_path(stream)}/publish HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    with WebSocket(ns.broker.port) as ws:
        subscribe(ws, ns, stream)
        with socket.create_connection(("127.0.0.1", ns.broker.port)) as publisher:
            publisher.sendall(head.encode() + body[:-1])
        with pytest.raises(NoFrame):
            ws.receive(SILENCE_S)
        ns.publish(stream, b"whole")
        assert next_payload(ws) == b64(b"whole")


def test_a_key_has_one_writer_at_a_time(ns: Namespace) -> None:
    """felix-76: every put has a version of its own, and what is there is that of the last."""
    cache = ns.create_cache()
    written: dict[int, bytes] = {}

    def write(writer: int) -> None:
        with ns.broker.new_client() as client:
            for number in range(50):
                value = b"%d of %d" % (number, writer)
                reply = client.put(ns.entry_path(cache, "k"), json={"value": b64(value)})
                written[reply.json()["version"]] = value

    writers = [threading.Thread(target=write, args=(writer,)) for writer in range(4)]
    for thread in writers:
        thread.start()
    for thread in writers:
        thread.join()
    assert len(written) == 200
    found = ns.get(cache, "k")
    assert found["version"] == max(written)
    assert found["value"] == b64(written[max(written)])
