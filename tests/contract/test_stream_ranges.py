"""Ranges of durable streams over HTTP: Arrow and lines, splits, offsets, refusals, progress."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest

from tests.broker_process import BrokerProcess, eventually
from tests.contract.checks import new_name
from tests.contract.namespaces import Namespace

COUNT = 1200
SMALL = {"PENSTOCK_SEGMENT_BYTES": "128KiB"}
COLUMNS = ["offset", "timestamp", "payload"]


def payload(number: int) -> bytes:
    return b"\xff\x00event %d" % number + b"." * 180


@pytest.fixture(scope="module")
def ns(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Namespace]:
    """Events over several sealed segments, and a tail that is not sealed."""
    directory = tmp_path_factory.mktemp("streams")
    broker = BrokerProcess(directory, env=SMALL)
    try:
        found = Namespace(broker.start())
        create(found, "orders")
        publish(found, "orders", range(COUNT))
        eventually(lambda: list(Path(directory).rglob("history-*.arrow")), timeout_s=60)
        yield found
    finally:
        broker.close()


def create(ns: Namespace, name: str) -> str:
    reply = ns.post(f"{ns.path}/streams", name=name, delivery="at_least_once")
    assert reply.status_code == 201, reply.text
    return name


def publish(ns: Namespace, stream: str, numbers: range) -> None:
    for first in range(numbers.start, numbers.stop, 300):
        some = range(first, min(first + 300, numbers.stop))
        encoded = [base64.b64encode(payload(n)).decode() for n in some]
        reply = ns.post(f"{ns.stream_path(stream)}/publish_batch", payloads=encoded)
        assert reply.status_code == 200, reply.text


def get(ns: Namespace, what: str, stream: str = "orders", **query: Any) -> httpx.Response:
    return ns.broker.client.get(f"{ns.stream_path(stream)}/{what}", params=query)


def events(ns: Namespace, **query: Any) -> pa.Table:
    reply = get(ns, "records", **query)
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "application/vnd.apache.arrow.stream"
    return pa.ipc.open_stream(reply.content).read_all()


def assert_refused(reply: httpx.Response, status: int, text: str) -> None:
    assert reply.status_code == status, reply.text
    assert text in reply.json()["message"]


def test_a_stream_is_read_whole_and_again(ns: Namespace) -> None:
    table = events(ns)
    assert table.column_names == COLUMNS
    assert table.schema.field("payload").type == pa.binary()
    assert table.column("offset").to_pylist() == list(range(COUNT))
    assert table.column("payload").to_pylist() == [payload(n) for n in range(COUNT)]
    assert table.equals(events(ns))


def test_a_range_and_its_columns_are_chosen(ns: Namespace) -> None:
    table = events(ns, start=10, end=14, columns="payload")
    assert table.to_pydict() == {"payload": [payload(n) for n in range(10, 14)]}
    first, last = events(ns).column("timestamp").cast(pa.int64()).to_pylist()[:: COUNT - 1]
    assert events(ns, from_ms=first // 1000, to_ms=last // 1000 + 1).num_rows == COUNT
    assert events(ns, from_ms=last // 1000 + 1).num_rows == 0


def test_lines_have_the_payload_as_base64(ns: Namespace) -> None:
    reply = get(ns, "records", start=COUNT - 2, format="ndjson")
    rows = [json.loads(line) for line in reply.text.splitlines()]
    assert [base64.b64decode(row["payload"]) for row in rows] == [
        payload(COUNT - 2),
        payload(COUNT - 1),
    ]
    assert list(rows[0]) == COLUMNS


def test_splits_cover_the_stream(ns: Namespace) -> None:
    found = get(ns, "splits", rows=500, start=100).json()
    parts = found["splits"]
    assert [each["start"] for each in parts] == [100, *(each["end"] for each in parts[:-1])]
    assert all(each["end"] - each["start"] == each["rows"] <= 500 for each in parts)
    assert found["next"] == parts[-1]["end"] == COUNT
    assert get(ns, "splits", max_rows=7).json()["next"] == 7


def test_offsets_say_where_the_stream_and_a_time_begin(ns: Namespace) -> None:
    found = get(ns, "offsets").json()
    assert (found["earliest"], found["next"]) == (0, COUNT)
    times = events(ns, columns="timestamp").column("timestamp").cast(pa.int64()).to_pylist()
    wanted = times[-1] // 1000
    first = next(n for n, time in enumerate(times) if time // 1000 >= wanted)
    assert get(ns, "offsets", time_ms=wanted).json()["at_time"] == first


@pytest.mark.parametrize(
    ("query", "status", "text"),
    [
        ({"end": COUNT + 1}, 416, f"readable offsets end at {COUNT}"),
        ({"start": 5, "end": 4}, 400, "start 5 is above end 4"),
        ({"columns": "key"}, 400, "unknown columns key; events have offset, timestamp, payload"),
        ({"format": "csv"}, 400, "unknown format"),
        ({"stream_id": 999_999}, 404, "stream 'orders'"),
    ],
)
def test_a_wrong_range_is_refused(
    ns: Namespace, query: dict[str, Any], status: int, text: str
) -> None:
    assert_refused(get(ns, "records", **query), status, text)


@pytest.mark.parametrize("what", ["records", "splits", "offsets"])
def test_a_stream_that_is_not_durable_is_refused(ns: Namespace, what: str) -> None:
    plain = ns.create_stream()
    assert_refused(get(ns, what, plain), 409, "only a durable stream has positions")
    assert_refused(get(ns, what, "nowhere"), 404, "nowhere")


def test_a_stream_that_is_created_again_is_another_one(ns: Namespace) -> None:
    name = new_name()
    ids = []
    for _ in range(2):
        create(ns, name)
        publish(ns, name, range(3))
        ids.append(get(ns, "offsets", name).json()["stream_id"])
        reply = get(ns, "records", name, stream_id=ids[-1])
        assert pa.ipc.open_stream(reply.content).read_all().num_rows == 3
        if len(ids) == 1:
            assert ns.broker.client.delete(ns.stream_path(name)).status_code == 204
    assert ids[0] != ids[1]
    for what in ("records", "splits"):
        text = f"{ids[0]} was deleted, or never was"
        assert_refused(get(ns, what, name, stream_id=ids[0]), 404, text)


def test_the_log_of_a_stream_is_no_topic(ns: Namespace) -> None:
    listed = ns.broker.client.get("/v1/offsets").json()["topics"]
    assert "orders" not in [each["topic"] for each in listed]
    assert ns.broker.client.get("/v1/topics/%1Edefault%1Fdefault%1Forders/offsets").status_code in (
        400,
        404,
    )


def test_progress_of_a_reader_is_that_of_a_named_subscription(ns: Namespace) -> None:
    name = ns.create_stream(delivery="at_least_once")
    publish(ns, name, range(10))

    def progress(at: int, **more: Any) -> httpx.Response:
        path = f"{ns.stream_path(name)}/subscriptions/archive/progress"
        return ns.broker.client.post(path, json={"next": at} | more)

    assert progress(7).json() == {"next": 7}
    assert progress(3).json() == {"next": 7}
    (named,) = get(ns, "subscriptions", name).json()["named"]
    assert (named["name"], named["messages_behind"]) == ("archive", 3)
    assert_refused(progress(11), 416, "11")
    assert_refused(progress(8, stream_id=999_999), 404, name)
    assert ns.post(f"{ns.stream_path(name)}/subscriptions/archive/progress").status_code == 400
    plain = ns.create_stream(durable=True)
    path = f"{ns.stream_path(plain)}/subscriptions/archive/progress"
    assert_refused(ns.post(path, next=0), 409, "needs a stream with delivery")
