"""Ranges over HTTP: Arrow streams and lines, offsets, refusals, readers that stop."""

from __future__ import annotations

import socket
import time
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import msgspec
import pyarrow as pa
import pytest

from tests.broker_process import BrokerProcess, eventually
from tests.contract.checks import assert_error
from tests.contract.wire import Wire, encode

COUNT = 3000
SMALL = {"PENSTOCK_SEGMENT_BYTES": "128KiB"}


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory):
    """Some thousands of messages over several sealed segments, and a tail that is not sealed."""
    broker = BrokerProcess(tmp_path_factory.mktemp("ranges"), env=SMALL).start()
    broker.create_topic("t", 2)
    for first in range(0, COUNT, 500):
        items = [
            {
                "topic": "t",
                "value": f"value {n} ".ljust(200, "."),
                "envelope": {"run_id": f"run-{n % 3}", "partition_override": n % 2},
            }
            for n in range(first, first + 500)
        ]
        reply = broker.client.post("/v1/produce/batch", json=items)
        assert reply.status_code == 200
    yield broker
    broker.close()


def rows(broker: BrokerProcess, query: str = "", partition: int = 0) -> pa.Table:
    reply = broker.client.get(f"/v1/topics/t/partitions/{partition}/records{query}")
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "application/vnd.apache.arrow.stream"
    return pa.ipc.open_stream(reply.content).read_all()


def test_a_partition_is_read_whole_and_again(filled: BrokerProcess):
    for partition in (0, 1):
        table = rows(filled, partition=partition)
        assert table.column("offset").to_pylist() == list(range(partition, COUNT, 2))
        assert table.equals(rows(filled, partition=partition))


def test_a_range_columns_and_rows_are_chosen_in_the_query(filled: BrokerProcess):
    table = rows(filled, "?start=100&end=200&columns=offset,run_id&run_id=run-1")
    assert table.column_names == ["offset", "run_id"]
    assert table.column("offset").to_pylist() == [n for n in range(100, 200, 2) if n % 3 == 1]


def test_columns_without_a_value_are_left_out_on_request(filled: BrokerProcess):
    """Of what is sealed; rows that are not may yet have any."""
    whole = rows(filled, "?start=0&end=100")
    filled_columns = ["offset", "timestamp", "value", "run_id", "partition_override"]
    some = eventually(
        lambda: rows(filled, "?start=0&end=100&nulls=omit"),
        lambda table: table.column_names == filled_columns,
        timeout_s=60,
    )
    assert some.equals(whole.select(filled_columns))
    assert all(
        whole.column(name).null_count == 50
        for name in set(whole.column_names) - set(some.column_names)
    )
    one = rows(filled, "?start=0&end=100&nulls=omit&columns=offset,key,value")
    assert one.column_names == ["offset", "value"]
    assert rows(filled, "?start=0&nulls=omit").equals(rows(filled))


def test_a_column_stays_if_one_sealed_batch_has_a_value(tmp_path: Path):
    with_key = {"topic": "t", "key": "k", "value": "v"}
    plain = {"topic": "t", "value": "v"}
    broker = BrokerProcess(tmp_path).start()
    try:
        broker.create_topic("t")
        for item in (plain, with_key, plain):
            assert broker.client.post("/v1/produce", json=item).status_code == 200
            broker.client.get("/v1/journal/offsets?fresh=true", timeout=90).raise_for_status()
        names = [rows(broker, f"?start={n}&end={n + 1}&nulls=omit").column_names for n in range(3)]
        assert ["key" in found for found in names] == [False, True, False]
        assert rows(broker, "?end=3&nulls=omit").column("key").to_pylist() == [None, "k", None]
    finally:
        broker.close()


def test_lines_of_json_are_the_same_rows(filled: BrokerProcess):
    reply = filled.client.get("/v1/topics/t/partitions/1/records?format=ndjson&start=0&end=20")
    assert reply.headers["content-type"].startswith("application/x-ndjson")
    lines = [msgspec.json.decode(line) for line in reply.content.splitlines()]
    assert [line["offset"] for line in lines] == list(range(1, 20, 2))
    assert lines[0]["value"].startswith("value 1 ")


def test_a_topic_that_is_made_again_is_another_and_nothing_is_taken_for_the_old_one(
    filled: BrokerProcess,
):
    ids = []
    for _ in range(2):
        name = filled.create_topic("passing")
        filled.put(name, "a")
        ids.append(filled.client.get("/v1/topics/passing/offsets").json()["topic_id"])
        assert filled.client.delete("/v1/topics/passing").status_code == 204
    filled.create_topic("passing")
    filled.put("passing", "a")
    ids.append(filled.client.get("/v1/topics/passing/offsets?time_ms=0").json()["topic_id"])
    assert len(set(ids)) == 3
    for query in ("records?format=ndjson&topic_id=", "splits?topic_id="):
        path = f"/v1/topics/passing/partitions/0/{query}"
        assert filled.client.get(f"{path}{ids[-1]}").status_code == 200
        assert_error(filled.client.get(f"{path}{ids[0]}"), 404, "NOT_FOUND")
        assert_error(filled.client.get(f"{path}-1"), 400, "INVALID_ARGUMENT")
    told = {"partitions": [{"partition": 0, "next": 1}], "topic_id": ids[0]}
    path = "/v1/topics/passing/groups/g/progress"
    assert_error(filled.client.post(path, json=told), 404, "NOT_FOUND")
    assert filled.client.get("/v1/topics/passing").json()["groups"] == []
    assert filled.client.post(path, json=told | {"topic_id": ids[-1]}).status_code == 200


def test_offsets_say_where_a_topic_begins_ends_and_is_at_a_time(filled: BrokerProcess):
    reply = filled.client.get("/v1/topics/t/offsets")
    found = reply.json()
    assert found == {
        "topic_id": found["topic_id"],
        "partitions": [
            {"partition": 0, "earliest": 0, "next": COUNT - 1},
            {"partition": 1, "earliest": 0, "next": COUNT},
        ],
    }
    reply = filled.client.get("/v1/topics/t/offsets?time_ms=0")
    assert [partition["at_time"] for partition in reply.json()["partitions"]] == [0, 1]
    later = int(time.time() * 1000) + 60_000
    reply = filled.client.get(f"/v1/topics/t/offsets?time_ms={later}")
    assert [p["at_time"] for p in reply.json()["partitions"]] == [COUNT - 1, COUNT]


def test_offsets_of_all_topics_come_in_pages(tmp_path: Path):
    with closing(BrokerProcess(tmp_path).start()) as broker:
        assert broker.client.get("/v1/offsets").json() == {"topics": []}
        counts = {"a": 1024, "b/é": 1024, "c": 1024, "d": 1023, "e": 2, "f": 1}
        for name, count in counts.items():
            broker.create_topic(name, count)
        broker.client.post("/v1/produce?topic=c&value=v")
        pages: list[dict[str, Any]] = []
        while not pages or "after" in pages[-1]:
            after = pages[-1]["after"] if pages else ""
            pages.append(broker.client.get("/v1/offsets", params={"after": after}).json())
        assert [[each["topic"] for each in page["topics"]] for page in pages] == [
            ["a", "b/é", "c", "d"],
            ["e", "f"],
        ]
        for each in (each for page in pages for each in page["topics"]):
            alone = broker.client.get(f"/v1/topics/{quote(each['topic'], safe='')}/offsets")
            assert each == {"topic": each["topic"]} | alone.json()
            assert len(each["partitions"]) == counts[each["topic"]]


def splits(broker: BrokerProcess, query: str = "", partition: int = 0) -> dict[str, Any]:
    reply = broker.client.get(f"/v1/topics/t/partitions/{partition}/splits{query}")
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    assert set(found) == {"splits", "next"}
    return found


def test_splits_are_neighbours_whose_rows_are_as_many_as_they_say(filled: BrokerProcess):
    for size in (100, 333, 100_000):
        found = splits(filled, f"?rows={size}&end={COUNT - 1}")
        at = 0
        for each in found["splits"]:
            assert (each["start"], each["rows"] <= size) == (at, True)
            at = each["end"]
            query = f"?start={each['start']}&end={each['end']}&columns=offset"
            assert rows(filled, query).num_rows == each["rows"]
        assert at == found["next"] == COUNT - 1
        assert sum(each["rows"] for each in found["splits"]) == COUNT // 2


def test_max_rows_is_exact_wherever_it_ends(filled: BrokerProcess):
    for most in (1, 7, 999, COUNT // 2):
        found = splits(filled, f"?start=2&end={COUNT - 1}&max_rows={most}&rows=200")
        assert sum(each["rows"] for each in found["splits"]) == min(most, COUNT // 2 - 1)
        assert rows(filled, f"?start=2&end={found['next']}").num_rows == min(most, COUNT // 2 - 1)


def test_an_answer_has_at_most_10000_splits(tmp_path: Path):
    broker = BrokerProcess(tmp_path / "data").start()
    broker.create_topic("t")
    for _ in range(2):
        items = [{"topic": "t", "value": "v"}] * 6000
        assert broker.client.post("/v1/produce/batch", json=items).status_code == 200
    found = splits(broker, "?rows=1")
    assert (len(found["splits"]), found["next"]) == (10_000, 10_000)
    rest = splits(broker, f"?rows=1&start={found['next']}")
    assert (len(rest["splits"]), rest["next"]) == (2000, 12_000)
    assert splits(broker, "?start=12000") == {"splits": [], "next": 12_000}
    broker.close()


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("/v1/topics/nobody/partitions/0/splits", 404, "NOT_FOUND"),
        ("/v1/topics/t/partitions/9/splits", 400, "INVALID_ARGUMENT"),
        ("/v1/topics/t/partitions/0/splits?start=9&end=8", 400, "INVALID_ARGUMENT"),
        ("/v1/topics/t/partitions/0/splits?start=-1", 400, "INVALID_ARGUMENT"),
        ("/v1/topics/t/partitions/0/splits?end=99999", 416, "OUT_OF_RANGE"),
        ("/v1/topics/t/partitions/0/splits?rows=0", 400, "INVALID_ARGUMENT"),
        ("/v1/topics/t/partitions/0/splits?rows=10000001", 400, "INVALID_ARGUMENT"),
        ("/v1/topics/t/partitions/0/splits?rows=many", 400, "INVALID_ARGUMENT"),
        ("/v1/topics/t/partitions/0/splits?max_rows=0", 400, "INVALID_ARGUMENT"),
        ("/v1/topics/t/partitions/0/splits?max_rows=-1", 400, "INVALID_ARGUMENT"),
        ("/v1/topics/nobody/partitions/0/records", 404, "NOT_FOUND"),
        ("/v1/topics/nobody/offsets", 404, "NOT_FOUND"),
        ("/v1/topics/t/partitions/9/records", 400, "INVALID_ARGUMENT"),
        ("/v1/topics/t/partitions/x/records", 400, "INVALID_ARGUMENT"),
        ("/v1/topics/t/partitions/0/records?start=-1", 400, "INVALID_ARGUMENT"),
        ("/v1/topics/t/partitions/0/records?start=9&end=8", 400, "INVALID_ARGUMENT"),
        ("/v1/topics/t/partitions/0/records?columns=colour", 400, "INVALID_ARGUMENT"),
        ("/v1/topics/t/partitions/0/records?format=xml", 400, "INVALID_ARGUMENT"),
        ("/v1/topics/t/partitions/0/records?nulls=none", 400, "INVALID_ARGUMENT"),
        ("/v1/topics/t/partitions/0/records?end=99999", 416, "OUT_OF_RANGE"),
        ("/v1/topics/t/offsets?time_ms=soon", 400, "INVALID_ARGUMENT"),
    ],
)
def test_what_cannot_be_read_is_refused(filled: BrokerProcess, path: str, status: int, code: str):
    assert_error(filled.client.get(path), status, code)


def test_splits_below_what_is_kept_are_410(tmp_path: Path):
    broker = BrokerProcess(tmp_path / "data").start()
    broker.create_topic("t")
    for n in range(3):
        broker.put("t", f"v{n}")
    progress = {"partitions": [{"partition": 0, "next": 2}]}
    broker.client.post("/v1/topics/t/groups/g/progress", json=progress)
    broker.client.patch("/v1/topics/t", json={"retention_ms": 1})
    eventually(lambda: splits(broker)["splits"][0]["start"] == 2)
    reply = broker.client.get("/v1/topics/t/partitions/0/splits?start=1")
    assert_error(reply, 410, "OUT_OF_RANGE")
    broker.close()


def test_other_methods_are_405(filled: BrokerProcess):
    path = "/v1/topics/t/partitions/0/records"
    for method in ("POST", "HEAD", "DELETE"):
        assert filled.client.request(method, path).status_code == 405


def test_a_reader_that_stops_holds_up_nobody(filled: BrokerProcess):
    stopped = socket.create_connection(("127.0.0.1", filled.port))
    stopped.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    stopped.sendall(b"GET /v1/topics/t/partitions/0/records HTTP/1.1\r\nhost: localhost\r\n\r\n")
    for n in range(20):
        filled.put("t", f"later {n}")
    assert filled.client.get("/v1/healthz").status_code == 200
    stopped.close()


def test_the_connection_goes_on_after_a_range(filled: BrokerProcess):
    """Closed unannounced, it met the next request of a client that keeps its connections."""
    path = "/v1/topics/t/partitions/0/records?format=ndjson&end=20"
    with Wire(filled.port) as wire:
        first = wire.request("GET", path)
        assert "connection" not in first.headers
        assert len(first.body.splitlines()) == 10
        assert wire.request("GET", path).body == first.body
        wire.send(encode(filled.port, "GET", path) * 2 + encode(filled.port, "GET", "/v1/healthz"))
        assert [wire.read().body for _ in range(2)] == [first.body] * 2
        assert wire.read().json()["status"] == "ok"


def test_a_range_is_the_last_answer_when_the_client_says_so(filled: BrokerProcess):
    path = "/v1/topics/t/partitions/0/records?end=20"
    with Wire(filled.port) as wire:
        reply = wire.request("GET", path, None, "connection: close")
        assert reply.headers["connection"] == "close"
        assert pa.ipc.open_stream(reply.body).read_all().num_rows == 10
        assert wire.is_closed_within(5)


def test_a_read_that_a_crash_cuts_short_does_not_look_complete(tmp_path: Path):
    broker = BrokerProcess(tmp_path / "data").start()
    broker.create_topic("t")
    for _ in range(40):
        broker.put("t", "x" * 1_000_000)
    with (
        broker.new_client() as client,
        client.stream("GET", "/v1/topics/t/partitions/0/records") as reply,
    ):
        parts = reply.iter_raw(65536)
        next(parts)
        broker.kill()
        with pytest.raises(httpx.HTTPError):
            list(parts)
    broker.close()
