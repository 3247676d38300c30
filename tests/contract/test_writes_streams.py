"""Batches that are published to a durable stream, over HTTP and through kills."""

from __future__ import annotations

import base64
import contextlib
import threading
from typing import Any

import httpx
import pyarrow as pa
import pytest

from tests.broker_process import BrokerProcess, eventually
from tests.contract.checks import new_name
from tests.contract.conftest import StartBroker
from tests.contract.namespaces import Namespace, unb64
from tests.contract.test_writes import Producer, assert_error, lines
from tests.contract.test_writes import stream as arrow

ODD = [b"", b"\xff\x00", b"plain"]


def full(stream: str) -> str:
    return f"default/default/{stream}"


def kept(ns: Namespace, stream: str) -> list[bytes]:
    reply = ns.broker.client.get(f"{ns.stream_path(stream)}/records")
    assert reply.status_code == 200, reply.text
    table = pa.ipc.open_stream(reply.content).read_all()
    assert table.column("offset").to_pylist() == list(range(table.num_rows))
    found: list[bytes] = table.column("payload").to_pylist()
    return found


def payloads(*values: bytes) -> bytes:
    return arrow({"payload": pa.array(values, pa.binary())})


@pytest.fixture
def ns(broker: BrokerProcess) -> Namespace:
    return Namespace(broker)


def test_rows_reach_subscribers_and_named_subscriptions_once(ns: Namespace) -> None:
    stream = ns.create_stream(delivery="at_least_once")
    producer = Producer(ns.broker)
    with ns.subscribe(stream, "name=billing") as named, ns.subscribe(stream) as live:
        assert producer.stage(payloads(*ODD), stream=full(stream)).json()["rows"] == 3
        assert kept(ns, stream) == []
        assert producer.commit(3).json() == {"status": "committed", "rows": 3}
        for feed in (named, live):
            items: list[dict[str, Any]] = [item.members for item in feed.take(3)]
            assert [unb64(item["payload"]) for item in items] == ODD
    assert producer.commit(3).json() == {"status": "already_committed", "rows": 3}
    assert kept(ns, stream) == ODD


def test_lines_of_json_are_events_too(ns: Namespace) -> None:
    stream = ns.create_stream(delivery="exactly_once")
    producer = Producer(ns.broker)
    body = lines(*({"payload": base64.b64encode(each).decode()} for each in ODD))
    assert producer.stage(body, stream=full(stream)).status_code == 200
    assert producer.commit(3).status_code == 200
    assert kept(ns, stream) == ODD


def test_a_piece_that_cannot_be_published_is_refused(ns: Namespace) -> None:
    stream = full(ns.create_stream(delivery="at_least_once"))
    stage = Producer(ns.broker).stage
    plain = full(ns.create_stream())
    refused = stage(payloads(b"x"), stream=plain)
    assert_error(refused, 409, "FAILED_PRECONDITION", "only a durable stream has positions, and")
    assert stage(payloads(b"x"), stream=full("nowhere")).status_code == 404
    invalid = "INVALID_ARGUMENT"
    elsewhere = stage(payloads(b"x"), stream="acme/prod/orders")
    assert_error(elsewhere, 400, invalid, "is not in the producer's namespace, default/default")
    assert_error(stage(b"", stream="orders"), 400, invalid, "stream is <tenant>/<namespace>")
    both = stage(b"", stream=stream, cache=stream)
    assert_error(both, 400, invalid, "cache and stream are both given; a piece goes to one of them")
    text = lines({"payload": "eA=="}, {"value": "x"})
    assert_error(stage(text, stream=stream), 400, invalid, "row 1: invalid JSON")
    nulls = arrow({"payload": pa.array([b"x", None], pa.binary())})
    assert_error(stage(nulls, stream=stream), 400, invalid, "row 1: payload is null")
    assert_error(stage(lines({}), stream=stream), 400, invalid, "row 0: payload is null")


def ask(producer: Producer, rows: int, pieces: int) -> None:
    """Sends a commit whose answer may never come."""
    part = {"part": 0, "attempt": "a", "pieces": pieces, "rows": rows}
    with contextlib.suppress(httpx.HTTPError), producer.broker.new_client() as client:
        client.post(f"/v1/writes/{producer.name}/0/commit", json={"parts": [part]})


def test_a_batch_is_whole_and_stored_once_through_a_kill(start_broker: StartBroker) -> None:
    """Killed while it stores the batch, and once more when the batch is done."""
    broker = start_broker()
    ns = Namespace(broker)
    stream = ns.create_stream(delivery="at_least_once")
    producer, name = Producer(broker, name=new_name()), full(stream)
    rows = [b"event %d" % n for n in range(150_000)]
    for piece in range(3):
        some = rows[piece * 50_000 : (piece + 1) * 50_000]
        assert producer.stage(payloads(*some), piece=piece, stream=name).status_code == 200
    asking = threading.Thread(target=ask, args=(producer, len(rows), 3))
    asking.start()
    path = f"{ns.stream_path(stream)}/offsets"
    eventually(lambda: broker.client.get(path).json()["next"] > 0 or not asking.is_alive())
    broker.kill()
    asking.join()
    broker.start()
    assert producer.commit(len(rows), pieces=3).json()["rows"] == len(rows)
    assert kept(ns, stream) == rows
    broker.restart(kill=True)
    assert producer.commit(len(rows), pieces=3).json()["status"] == "already_committed"
    assert kept(ns, stream) == rows
