"""Writes by the batch over HTTP, against a real broker, through kills too."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import pyarrow as pa
import pytest

from tests.broker_process import BrokerProcess, eventually
from tests.contract.checks import new_name
from tests.contract.conftest import MakeTopic, StartBroker

ARROW = {"content-type": "application/vnd.apache.arrow.stream"}


def stream(columns: dict[str, Any]) -> bytes:
    table = pa.table(columns)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def lines(*rows: dict[str, Any]) -> bytes:
    return b"\n".join(json.dumps(row).encode() for row in rows)


def numbered(count: int, text: str = "row") -> list[str]:
    return [f"{text} {n}" for n in range(count)]


class Producer:
    """A client that writes batches to one broker."""

    def __init__(self, broker: BrokerProcess, topic: str = "", name: str = "") -> None:
        self.broker = broker
        self.topic = topic
        self.name = name or new_name()

    def stage(
        self, body: bytes, batch: int = 0, part: int = 0, piece: int = 0, **query: str
    ) -> httpx.Response:
        query = {"attempt": "a"} | ({"topic": self.topic} if self.topic else {}) | query
        path = f"/v1/writes/{self.name}/{batch}/{part}/{piece}"
        return self.broker.client.put(path, params=query, content=body, headers=ARROW)

    def commit(
        self, rows: int, batch: int = 0, pieces: int = 1, attempt: str = "a", **more: Any
    ) -> httpx.Response:
        part = {"part": 0, "attempt": attempt, "pieces": pieces, "rows": rows}
        body = {"parts": [part]} | more
        return self.broker.client.post(f"/v1/writes/{self.name}/{batch}/commit", json=body)

    def look(self) -> httpx.Response:
        return self.broker.client.get(f"/v1/writes/{self.name}")

    def drop(self, batch: int = 0) -> httpx.Response:
        return self.broker.client.delete(f"/v1/writes/{self.name}/{batch}")


def contents(broker: BrokerProcess, topic: str, partition: int = 0) -> list[str]:
    reply = broker.client.get(f"/v1/topics/{topic}/partitions/{partition}/records?columns=value")
    assert reply.status_code == 200, reply.text
    found: list[str] = pa.ipc.open_stream(reply.content).read_all().column("value").to_pylist()
    return found


def assert_error(reply: httpx.Response, status: int, code: str, text: str) -> None:
    assert (reply.status_code, reply.json()["error"]) == (status, code), reply.text
    assert text in reply.json()["message"]


def test_a_batch_is_staged_and_committed(broker: BrokerProcess, topic: str):
    producer = Producer(broker, topic)
    staged = producer.stage(stream({"value": numbered(1000)}))
    assert staged.status_code == 200
    assert staged.json()["rows"] == 1000
    assert staged.json()["bytes"] > 0
    assert contents(broker, topic) == []
    committed = producer.commit(1000)
    assert (committed.status_code, committed.json()) == (200, {"status": "committed", "rows": 1000})
    assert contents(broker, topic) == numbered(1000)
    again = producer.commit(1000)
    assert again.json() == {"status": "already_committed", "rows": 1000}
    assert contents(broker, topic) == numbered(1000)
    seen = producer.look().json()
    assert seen.pop("committed_at_ms") > 0
    assert seen == {"producer": producer.name, "last_batch": 0, "rows": 1000, "storing": False}


def test_lines_of_json_are_rows_too(broker: BrokerProcess, topic: str):
    producer = Producer(broker, topic)
    body = lines({"value": "a", "key": "k"}, {"value": "b", "envelope": {"run_id": "r"}})
    assert producer.stage(body).json()["rows"] == 2
    assert producer.commit(2).status_code == 200
    with broker.consume(topic) as consumer:
        items = [consumer.next() for _ in range(2)]
    assert [(item.value, item.key) for item in items] == [("a", "k"), ("b", "")]
    assert items[1].envelope == {"run_id": "r"}


def test_rows_of_a_cache(broker: BrokerProcess):
    producer = Producer(broker)
    body = stream({"key": ["a", "b"], "value": pa.array([b"\x00\xff", None], pa.binary())})
    assert producer.stage(body, cache="default/default/default").status_code == 200
    assert producer.commit(2).json()["status"] == "committed"
    path = "/v1/tenants/default/namespaces/default/caches/default/entries"
    assert broker.client.get(f"{path}/a?raw=true").content == b"\x00\xff"
    assert broker.client.get(f"{path}/b?raw=true").status_code == 404
    body = lines({"key": "c", "value": "aGVsbG8="}, {"key": "a"})
    producer.stage(body, batch=1, cache="default/default/default")
    assert producer.commit(2, batch=1).status_code == 200
    assert broker.client.get(f"{path}/c?raw=true").content == b"hello"
    assert broker.client.get(f"{path}/a?raw=true").status_code == 404


def test_what_is_wrong_with_a_piece_is_said_by_row(broker: BrokerProcess, topic: str):
    producer = Producer(broker, topic)
    invalid = "INVALID_ARGUMENT"
    stage = producer.stage
    assert_error(stage(stream({"value": ["a", ""]})), 400, invalid, "row 1: value is empty")
    assert_error(stage(stream({"value": ["a"], "x": [1]})), 400, invalid, "unknown columns ['x']")
    assert_error(stage(lines({"value": "a", "labels": {}})), 400, invalid, "row 0: invalid JSON")
    assert_error(stage(b"\xff\xff\xff\xff"), 400, invalid, "not an Arrow IPC stream")
    large = lines({"value": "x" * 9_000_000})
    assert_error(stage(large), 413, invalid, "row 0: key and value are 9000000 bytes")
    unknown = stream({"value": ["a"], "topic": ["nowhere"]})
    assert_error(stage(unknown), 404, "NOT_FOUND", "row 0: unknown topic 'nowhere'")
    nameless = Producer(broker)
    assert_error(nameless.stage(stream({"value": ["a"]})), 400, invalid, "no topic")
    cache = nameless.stage(stream({"value": ["a"]}), cache="a/b/c")
    assert_error(cache, 404, "NOT_FOUND", "a")
    assert_error(stage(b"", cache="a/b/c"), 400, invalid, "both given")
    assert_error(nameless.stage(b"", cache="a/b"), 400, invalid, "cache is <tenant>")
    assert_error(producer.look(), 404, "NOT_FOUND", "has no commit that is remembered")


def test_what_is_wrong_with_a_commit_is_said_and_nothing_is_decided(
    broker: BrokerProcess, topic: str
):
    producer = Producer(broker, topic)
    producer.stage(stream({"value": numbered(3)}))
    failed = "FAILED_PRECONDITION"
    assert_error(producer.commit(4), 409, failed, "has 3 rows staged; the commit says 4")
    assert_error(producer.commit(3, pieces=2), 409, failed, "piece 1 of part 0")
    assert_error(producer.commit(3, attempt="b"), 409, failed, "attempt 'b', is not staged")
    for body in (b"", b"{}", b"[]", b'{"parts":[{}]}', b'{"parts":[],"x":1}', b'{"parts":null}'):
        reply = broker.client.post(f"/v1/writes/{producer.name}/0/commit", content=body)
        assert_error(reply, 400, "INVALID_ARGUMENT", "")
    many = {"parts": [{"part": n, "pieces": 0, "rows": 0} for n in range(10_001)]}
    reply = broker.client.post(f"/v1/writes/{producer.name}/0/commit", json=many)
    assert_error(reply, 413, "INVALID_ARGUMENT", "at most 10000 parts")
    assert contents(broker, topic) == []
    assert producer.commit(3).status_code == 200


def test_a_committed_batch_takes_no_more_pieces(broker: BrokerProcess, topic: str):
    producer = Producer(broker, topic)
    producer.stage(stream({"value": ["a"]}), batch=3)
    producer.commit(1, batch=3)
    for batch in (0, 3):
        reply = producer.stage(stream({"value": ["b"]}), batch=batch)
        assert_error(reply, 409, "FAILED_PRECONDITION", "already committed")
    assert producer.stage(stream({"value": ["b"]}), batch=4).status_code == 200


def test_a_dropped_batch_is_gone(broker: BrokerProcess, topic: str):
    producer = Producer(broker, topic)
    producer.stage(stream({"value": ["a"]}))
    assert producer.drop().status_code == 204
    assert producer.drop().status_code == 204
    assert producer.commit(1).status_code == 409


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/writes", 404),
        ("GET", "/v1/writes/", 404),
        ("POST", "/v1/writes/p/0/other", 404),
        ("PUT", "/v1/writes/p/x/0/0?topic=t", 400),
        ("PUT", "/v1/writes/p/0/-1/0?topic=t", 400),
        ("PUT", "/v1/writes/p/0/0/9999999999999999?topic=t", 400),
        ("PUT", f"/v1/writes/{'x' * 201}/0/0/0?topic=t", 400),
        ("PUT", "/v1/writes/a%00b/0/0/0?topic=t", 400),
        ("DELETE", "/v1/writes/p/x", 400),
        ("POST", "/v1/writes/p/0", 405),
        ("PUT", "/v1/writes/p", 405),
        ("GET", "/v1/writes/p/0/commit", 405),
        ("POST", "/v1/writes/p/0/0/0", 405),
    ],
)
def test_paths_and_methods_that_are_none(
    broker: BrokerProcess, method: str, path: str, status: int
):
    reply = broker.client.request(method, path)
    assert reply.status_code == status, reply.text
    assert set(reply.json()) == {"error", "message"}


def test_names_are_percent_encoded(broker: BrokerProcess, topic: str):
    producer = Producer(broker, topic, name="a%2Fb%20%C3%A4" + new_name())
    assert producer.stage(stream({"value": ["a"]})).status_code == 200
    assert producer.commit(1).status_code == 200
    assert producer.look().json()["producer"].startswith("a/b ä")


def test_a_full_partition_is_429_at_the_commit(start_broker: StartBroker):
    broker = start_broker(env={"PENSTOCK_MAX_PARTITION_MSGS": "2"})
    producer = Producer(broker, broker.create_topic("t"))
    producer.stage(stream({"value": numbered(5)}))
    assert producer.commit(5).status_code == 200
    producer.stage(stream({"value": ["more"]}), batch=1)
    reply = producer.commit(1, batch=1)
    assert reply.status_code == 429
    assert reply.headers["retry-after"]
    assert reply.json()["limit"] == "partition_msgs"
    assert contents(broker, "t") == numbered(5)


def test_what_is_staged_is_bounded(start_broker: StartBroker):
    broker = start_broker(env={"PENSTOCK_MAX_STAGED_BYTES": "100000"})
    producer = Producer(broker, broker.create_topic("t"))
    assert producer.stage(stream({"value": ["x" * 60_000]})).status_code == 200
    reply = producer.stage(stream({"value": ["x" * 60_000]}), piece=1)
    assert reply.status_code == 429
    assert reply.json()["limit"] == "staged_bytes"
    metrics = broker.client.get("/metrics").text
    assert "penstock_staged_pieces 1.0" in metrics


def test_a_body_that_is_too_long_is_413(start_broker: StartBroker):
    broker = start_broker(env={"PENSTOCK_MAX_BODY_BYTES": "1000"})
    producer = Producer(broker, broker.create_topic("t"))
    assert producer.stage(stream({"value": ["x" * 2000]})).status_code == 413


@pytest.mark.parametrize("memory", [True, False])
def test_partitions_are_those_of_a_produce(start_broker: StartBroker, memory: bool):
    broker = start_broker(memory=memory)
    topic = broker.create_topic("t", 3)
    keys = [f"key {n}" for n in range(50)]
    for key in keys:
        broker.put(topic, "produced", key)
    producer = Producer(broker, topic)
    producer.stage(stream({"value": ["written"] * 50, "key": keys}))
    producer.commit(50)
    for partition in range(3):
        path = f"/v1/topics/t/partitions/{partition}/records?columns=key,value"
        table = pa.ipc.open_stream(broker.client.get(path).content).read_all()
        by_value: dict[str, list[str]] = {"produced": [], "written": []}
        for key, value in zip(*(column.to_pylist() for column in table.columns), strict=True):
            by_value[value].append(key)
        assert by_value["produced"] == by_value["written"] != []


# -- kills -----------------------------------------------------------------------------------------

ROWS = 200_000
PIECE_ROWS = 50_000


def stage_many(producer: Producer, batch: int = 0) -> int:
    pieces = ROWS // PIECE_ROWS
    for piece in range(pieces):
        values = [f"{piece * PIECE_ROWS + n:07d}" for n in range(PIECE_ROWS)]
        reply = producer.stage(stream({"value": values}), batch=batch, piece=piece)
        assert reply.status_code == 200, reply.text
    return pieces


def test_a_broker_that_is_killed_between_stage_and_commit_has_what_was_staged(
    start_broker: StartBroker,
):
    broker = start_broker()
    producer = Producer(broker, broker.create_topic("t"))
    producer.stage(stream({"value": numbered(1000)}))
    broker.restart(kill=True)
    assert contents(broker, "t") == []
    assert producer.commit(1000).json() == {"status": "committed", "rows": 1000}
    assert contents(broker, "t") == numbered(1000)


@pytest.mark.parametrize("kills", [1, 3])
def test_a_broker_that_is_killed_while_it_stores_stores_the_rest_once(
    start_broker: StartBroker, kills: int
):
    broker = start_broker()
    topic = broker.create_topic("t")
    producer = Producer(broker, topic)
    pieces = stage_many(producer)
    for _ in range(kills):
        asking = start_asking(producer, pieces)
        broker.kill()
        asking.join()
        broker.start()
    reply = producer.commit(ROWS, pieces=pieces)
    assert reply.status_code == 200, reply.text
    assert reply.json()["rows"] == ROWS
    assert contents(broker, topic) == [f"{n:07d}" for n in range(ROWS)]
    assert producer.commit(ROWS, pieces=pieces).json()["status"] == "already_committed"
    assert contents(broker, topic) == [f"{n:07d}" for n in range(ROWS)]
    assert broker.data_dir is not None
    eventually(lambda: not list((broker.data_dir / "staged").iterdir()))  # type: ignore[operator]


def start_asking(producer: Producer, pieces: int) -> threading.Thread:
    """Returns when some rows are stored."""
    broker = producer.broker
    asking = threading.Thread(target=_ask, args=(broker, producer.name, pieces))
    asking.start()
    eventually(lambda: _stored(broker, producer.topic) > 0 or not asking.is_alive())
    return asking


def _ask(broker: BrokerProcess, producer: str, pieces: int) -> None:
    """A commit whose answer may never come."""
    part = {"part": 0, "attempt": "a", "pieces": pieces, "rows": ROWS}
    try:
        with broker.new_client() as client:
            client.post(f"/v1/writes/{producer}/0/commit", json={"parts": [part]})
    except httpx.HTTPError:
        return


def _stored(broker: BrokerProcess, topic: str) -> int:
    next_offset: int = broker.client.get(f"/v1/topics/{topic}/offsets").json()["partitions"][0][
        "next"
    ]
    return next_offset


def test_a_stop_while_a_batch_is_stored_is_orderly_and_a_start_goes_on(start_broker: StartBroker):
    broker = start_broker()
    topic = broker.create_topic("t")
    producer = Producer(broker, topic)
    pieces = stage_many(producer)
    asking = start_asking(producer, pieces)
    broker.restart()
    asking.join()
    assert producer.commit(ROWS, pieces=pieces).json()["rows"] == ROWS
    assert contents(broker, topic) == [f"{n:07d}" for n in range(ROWS)]


def test_a_commit_that_is_not_done_when_the_broker_stops_is_202_and_done_after_the_start(
    start_broker: StartBroker,
):
    """A damaged piece holds it up until it is restored."""
    broker = start_broker()
    producer = Producer(broker, broker.create_topic("t"))
    producer.stage(stream({"value": numbered(100)}))
    assert broker.data_dir is not None
    [path] = (broker.data_dir / "staged").iterdir()
    sound = path.read_bytes()
    path.write_bytes(sound[:-1] + b"?")
    replies: list[httpx.Response] = []
    client = broker.new_client()
    target = f"/v1/writes/{producer.name}/0/commit"
    parts = {"parts": [{"part": 0, "attempt": "a", "pieces": 1, "rows": 100}]}
    asking = threading.Thread(target=lambda: replies.append(client.post(target, json=parts)))
    asking.start()
    eventually(lambda: producer.look().status_code == 200)
    assert producer.look().json()["storing"] is True
    assert broker.terminate() == 0
    asking.join()
    client.close()
    assert (replies[0].status_code, replies[0].json()) == (
        202,
        {"status": "storing", "rows": 100, "done": 0},
    )
    path.write_bytes(sound)
    broker.start()
    assert producer.commit(100).json()["rows"] == 100
    assert contents(broker, "t") == numbered(100)


def test_others_are_answered_while_a_batch_is_stored(broker: BrokerProcess, make_topic: MakeTopic):
    topic = make_topic()
    producer = Producer(broker, topic)
    pieces = stage_many(producer)
    asking = start_asking(producer, pieces)
    beside = make_topic()
    count = 0
    while asking.is_alive() or not count:
        broker.put(beside, f"beside {count}")
        count += 1
    asking.join()
    assert count > 10
    assert contents(broker, beside) == [f"beside {n}" for n in range(count)]
    assert contents(broker, topic) == [f"{n:07d}" for n in range(ROWS)]
