"""The journal over HTTP: what happened to messages, row by row, exactly."""

from __future__ import annotations

import time
from datetime import datetime
from itertools import chain
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from tests.broker_process import BrokerProcess, eventually
from tests.contract.checks import assert_error
from tests.contract.conftest import StartBroker

Row = dict[str, Any]


def offsets(broker: BrokerProcess, query: str = "fresh=true") -> dict[str, int]:
    reply = broker.client.get(f"/v1/journal/offsets?{query}")
    assert reply.status_code == 200, reply.text
    found: dict[str, int] = reply.json()
    return found


def rows(broker: BrokerProcess, query: str = "") -> list[Row]:
    """As lines and as columns, which must say the same."""
    lines = broker.client.get(f"/v1/journal?format=ndjson&{query}")
    assert lines.headers["content-type"].startswith("application/x-ndjson")
    found = [msgspec.json.decode(line) for line in lines.content.splitlines()]
    reply = broker.client.get(f"/v1/journal?{query}")
    assert reply.headers["content-type"] == "application/vnd.apache.arrow.stream"
    table = pa.ipc.open_stream(reply.content).read_all()
    assert table.num_rows == len(found)
    assert [row.get("position") for row in found] == [
        row.get("position") for row in table.to_pylist()
    ]
    return found


def told(row: Row) -> tuple[Any, ...]:
    names = [
        "kind",
        "topic",
        "offset",
        "group",
        "owner",
        "attempt",
        "reason",
        "run_id",
        "tenant_id",
    ]
    return tuple(row.get(name) for name in names)


def test_the_journal_has_the_life_of_messages_exactly(start_broker: StartBroker):
    broker = start_broker()
    broker.create_topic("jobs")
    envelope = {
        "run_id": "r1", "step_id": "s1", "parent_step_id": "s0", "tenant_id": "acme",
        "retry_policy": {"max_attempts": 2},
    }  # fmt: skip
    began = time.time()
    broker.put("jobs", "one", envelope=envelope)
    broker.put("jobs", "two")
    with broker.consume("jobs", "g", "ada", lease_ms=400) as stream:
        first, second = stream.take(2)
        assert broker.ack("jobs", second, owner="ada").status_code == 204
        assert broker.nack("jobs", first, owner="ada", reason="no").status_code == 204
        stream.take(1)
        eventually(lambda: broker.client.get("/v1/topics").json()["topics"], lambda t: len(t) == 2)
    offsets(broker)
    life = rows(broker, "topic=jobs")
    assert [told(row) for row in life] == [
        ("produced", "jobs", 0, None, None, None, None, "r1", "acme"),
        ("produced", "jobs", 1, None, None, None, None, None, None),
        ("delivered", "jobs", 0, "g", "ada", 1, None, "r1", "acme"),
        ("delivered", "jobs", 1, "g", "ada", 1, None, None, None),
        ("acked", "jobs", 1, "g", "ada", 1, None, None, None),
        ("nacked", "jobs", 0, "g", "ada", 1, "no", "r1", "acme"),
        ("delivered", "jobs", 0, "g", "ada", 2, None, "r1", "acme"),
        ("timed_out", "jobs", 0, "g", "ada", 2, "ack_timeout", "r1", "acme"),
        ("dead_lettered", "jobs", 0, "g", "ada", 2, "ack_timeout", "r1", "acme"),
    ]
    assert {row.get("step_id") for row in life if row["offset"] == 0} == {"s1"}
    assert {row.get("parent_step_id") for row in life if row["offset"] == 0} == {"s0"}
    seen = [row["position"] for row in life]
    assert seen == sorted(set(seen))
    times = [msgspec.convert(row["timestamp"], type=datetime) for row in life]
    assert times == sorted(times)
    assert began - 1 <= times[0].timestamp() <= time.time()
    stored = {row["offset"]: row["timestamp"] for row in life if row["kind"] == "produced"}
    assert [row["produced_at"] for row in life] == [stored[row["offset"]] for row in life]
    given = {
        (row["offset"], row.get("attempt")): row["timestamp"]
        for row in life
        if row["kind"] == "delivered"
    }
    assert [row.get("delivered_at") for row in life] == [
        given.get((row["offset"], row.get("attempt"))) for row in life
    ]
    [copy] = rows(broker, "topic=dlq.jobs")
    assert told(copy) == ("produced", "dlq.jobs", 0, None, None, None, None, "r1", "acme")
    assert (copy["produced_at"], "delivered_at" in copy) == (copy["timestamp"], False)

    broker.restart(kill=True)
    assert rows(broker, "topic=jobs") == life


def test_an_ack_after_a_kill_tells_when_the_delivery_was_made(start_broker: StartBroker):
    broker = start_broker()
    broker.create_topic("jobs")
    broker.put("jobs", "one")
    with broker.consume("jobs", "g", "ada", lease_ms=60_000) as stream:
        item = stream.next()
        offsets(broker)
        broker.restart(kill=True)
    assert broker.ack("jobs", item, owner="ada").status_code == 204
    offsets(broker)
    produced, delivered, *_, acked = rows(broker)
    assert acked["kind"] == "acked"
    assert acked["delivered_at"] == delivered["timestamp"] == delivered["delivered_at"]
    assert acked["produced_at"] == produced["timestamp"]
    assert acked["timestamp"] > acked["delivered_at"]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory):
    """Some thousand events over several segments."""
    small = {"PENSTOCK_SEGMENT_BYTES": "128KiB"}
    broker = BrokerProcess(tmp_path_factory.mktemp("journal"), env=small)
    try:
        broker.start().create_topic("t", 2)
        for first in range(0, 2000, 500):
            items = [
                {"topic": "t", "value": "v" * 200, "envelope": {"run_id": f"run-{n % 3}"}}
                for n in range(first, first + 500)
            ]
            assert broker.client.post("/v1/produce/batch", json=items).status_code == 200
        offsets(broker)
        yield broker
    finally:
        broker.close()


def test_a_range_columns_and_rows_are_chosen_in_the_query(filled: BrokerProcess):
    all_rows = rows(filled, "kind=produced")
    assert [row["offset"] for row in all_rows] == list(range(2000))
    start, end = all_rows[100]["position"], all_rows[200]["position"]
    some = rows(filled, f"from={start}&to={end}&columns=offset,run_id&run_id=run-1")
    assert some == [{"offset": n, "run_id": "run-1"} for n in range(100, 200) if n % 3 == 1]
    assert rows(filled, "kind=acked") == []
    assert rows(filled, "group=nobody") == []
    assert rows(filled, "to_ms=1000") == []


def test_offsets_say_where_the_journal_begins_and_ends_and_is_at_a_time(filled: BrokerProcess):
    found = offsets(filled, "time_ms=0")
    assert found["earliest"] <= found["at_time"] == rows(filled)[0]["position"] < found["next"]
    later = int(time.time() * 1000) + 60_000
    assert offsets(filled, f"time_ms={later}")["at_time"] == found["next"]
    assert set(offsets(filled, "")) - {"archived"} == {"earliest", "next"}


def test_what_was_acknowledged_before_a_fresh_look_is_in_it(filled: BrokerProcess):
    filled.create_topic("late")
    for n in range(3):
        filled.put("late", f"{n}")
        offsets(filled)
        assert [row["offset"] for row in rows(filled, "topic=late")] == list(range(n + 1))


def test_splits_share_out_the_journal(filled: BrokerProcess):
    reply = filled.client.get("/v1/journal/splits?rows=700")
    found = reply.json()
    assert all(0 < split["rows"] <= 700 for split in found["splits"])
    parts = [rows(filled, f"from={s['start']}&to={s['end']}") for s in found["splits"]]
    assert [len(part) for part in parts] == [split["rows"] for split in found["splits"]]
    assert list(chain(*parts)) == rows(filled, f"to={found['next']}")
    reply = filled.client.get("/v1/journal/splits?max_rows=10")
    assert sum(split["rows"] for split in reply.json()["splits"]) == 10


def test_how_far_the_journal_is_archived_is_kept_and_told(filled: BrokerProcess):
    end = offsets(filled)["next"]
    reply = filled.client.post("/v1/journal/archived", json={"next": end})
    assert (reply.status_code, reply.json()) == (200, {"next": end})
    assert filled.client.post("/v1/journal/archived", json={"next": 1}).json() == {"next": end}
    assert offsets(filled)["archived"] == end


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({}, 400, "INVALID_ARGUMENT"),
        ({"next": -1}, 400, "INVALID_ARGUMENT"),
        ({"next": "all"}, 400, "INVALID_ARGUMENT"),
        ({"next": 5, "group": "g"}, 400, "INVALID_ARGUMENT"),
        ({"next": 2**63 - 1}, 416, "OUT_OF_RANGE"),
    ],
)
def test_what_cannot_be_archived_is_refused(
    filled: BrokerProcess, body: dict[str, Any], status: int, code: str
):
    assert_error(filled.client.post("/v1/journal/archived", json=body), status, code)


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("/v1/journal?from=0", 410, "OUT_OF_RANGE"),
        ("/v1/journal?to=9000000000000000000", 416, "OUT_OF_RANGE"),
        ("/v1/journal?from=-1", 400, "INVALID_ARGUMENT"),
        ("/v1/journal?from=x", 400, "INVALID_ARGUMENT"),
        ("/v1/journal?kind=exploded", 400, "INVALID_ARGUMENT"),
        ("/v1/journal?resource_kind=cache", 400, "INVALID_ARGUMENT"),
        ("/v1/journal?topic=t&stream=t", 400, "INVALID_ARGUMENT"),
        ("/v1/journal?topic=t&resource_kind=stream", 400, "INVALID_ARGUMENT"),
        ("/v1/journal?columns=colour", 400, "INVALID_ARGUMENT"),
        ("/v1/journal?format=xml", 400, "INVALID_ARGUMENT"),
        ("/v1/journal/offsets?fresh=maybe", 400, "INVALID_ARGUMENT"),
        ("/v1/journal/offsets?time_ms=soon", 400, "INVALID_ARGUMENT"),
        ("/v1/journal/splits?rows=0", 400, "INVALID_ARGUMENT"),
        ("/v1/journal/splits?from=0", 410, "OUT_OF_RANGE"),
    ],
)
def test_what_cannot_be_read_is_refused(filled: BrokerProcess, path: str, status: int, code: str):
    assert_error(filled.client.get(path), status, code)


def test_other_methods_are_405(filled: BrokerProcess):
    for method in ("POST", "HEAD", "DELETE"):
        assert filled.client.request(method, "/v1/journal").status_code == 405


@pytest.mark.parametrize("is_in_memory", [True, False])
def test_without_a_journal_all_of_it_is_409(start_broker: StartBroker, is_in_memory: bool):
    env = {} if is_in_memory else {"PENSTOCK_JOURNAL_RETENTION_MS": "0"}
    broker = start_broker(memory=is_in_memory, env=env)
    for path in ("/v1/journal", "/v1/journal/offsets?fresh=true", "/v1/journal/splits"):
        assert_error(broker.client.get(path), 409, "FAILED_PRECONDITION")
    reply = broker.client.post("/v1/journal/archived", json={"next": 0})
    assert_error(reply, 409, "FAILED_PRECONDITION")
