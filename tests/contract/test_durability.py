"""Section F: durability, driftq-46, driftq-51 and driftq-52.

The other sentences of the section need a disk that fails or a log that is cut: they are tested
where one can be had, at the storage and engine seams.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.broker_process import BrokerProcess, StartFailed, eventually, settle_body
from tests.contract.checks import assert_done, new_name
from tests.contract.conftest import StartBroker
from tests.ndjson import ConsumeStream, Item, NoItem, StreamEnded

# -- driftq-46: SIGKILL at any instant ---------------------------------------------------------


class Load:
    """Producers and a consumer that acks every second message, until the broker is gone."""

    def __init__(self, broker: BrokerProcess, topic: str, stem: str) -> None:
        self.broker = broker
        self.topic = topic
        self.stem = stem
        self.sent: set[str] = set()
        self.produced: set[str] = set()
        self.ack_sent: set[str] = set()
        self.acked: set[str] = set()
        self.failures: list[str] = []
        self.stream = broker.open_consume(topic, owner=stem)
        jobs = [threading.Thread(target=self._produce, args=(n,)) for n in range(3)]
        self.threads = [*jobs, threading.Thread(target=self._consume)]
        for thread in self.threads:
            thread.start()

    def wait_for_acks(self, count: int) -> None:
        eventually(lambda: len(self.acked), lambda acked: acked >= count)

    def join(self) -> None:
        for thread in self.threads:
            thread.join()
        self.stream.close()
        assert not self.failures, self.failures

    def _produce(self, writer: int) -> None:
        with self.broker.new_client() as client:
            for n in range(100_000):
                value = f"{self.stem}:{writer}:{n}"
                self.sent.add(value)
                body = {"topic": self.topic, "key": value, "value": value}
                try:
                    reply = client.post("/v1/produce", json=body)
                except httpx.HTTPError:
                    return
                if reply.status_code != 200:
                    self.failures.append(reply.text)
                self.produced.add(value)

    def _consume(self) -> None:
        with self.broker.new_client() as client:
            while True:
                try:
                    item = self.stream.next()
                except (StreamEnded, NoItem):
                    return
                if item.offset % 2:
                    continue
                self.ack_sent.add(item.value)
                body = settle_body(self.topic, item, "g", self.stem)
                try:
                    reply = client.post("/v1/ack", json=body)
                except httpx.HTTPError:
                    return
                if reply.status_code != 204:
                    self.failures.append(reply.text)
                self.acked.add(item.value)


def everything(stream: ConsumeStream, count: int) -> list[Item]:
    """As many as the broker has, and not one more."""
    items = stream.take(count)
    stream.expect_nothing()
    return items


# -- driftq-51: replay -------------------------------------------------------------------------


def describe(broker: BrokerProcess, topic: str) -> Any:
    reply = broker.client.get(f"/v1/topics/{topic}")
    assert reply.status_code == 200, reply.text
    return reply.json()


def lag(broker: BrokerProcess, topic: str, group: str) -> int:
    """How many messages the group has not finished."""
    [found] = [each for each in describe(broker, topic)["groups"] if each["name"] == group]
    return sum(each["lag"] for each in found["partitions"])


def read_all(broker: BrokerProcess, topic: str, count: int) -> list[dict[str, Any]]:
    """Every message as a group of its own sees it, without what differs from group to group."""
    name = new_name("audit")
    with broker.consume(topic, group=name) as stream:
        items = sorted(stream.take(count), key=lambda item: item.offset)
    assert broker.client.delete(f"/v1/topics/{topic}/groups/{name}").status_code == 204
    return [{k: v for k, v in item.members.items() if k != "delivery_id"} for item in items]


ROUTER = """
def route(topic, message):
    return {"label": "l-" + topic, "meta": {"source": "test"}}
"""


@pytest.mark.parametrize("segment_bytes", [None, 128 * 1024])
def test_replay_rebuilds_everything(
    start_broker: StartBroker, tmp_path: Path, segment_bytes: int | None
) -> None:
    """driftq-51, driftq-57: three times, with one segment and with many (and their snapshots)."""
    (tmp_path / "replay_router.py").write_text(ROUTER)
    env = {"PYTHONPATH": str(tmp_path)}
    if segment_bytes is not None:
        env["PENSTOCK_SEGMENT_BYTES"] = str(segment_bytes)
    broker = start_broker("--router", "replay_router:route", "--max-in-flight", "10000", env=env)
    topic = broker.create_topic("t", 3)
    count = 600
    for start in range(0, count, 100):
        batch = [
            {
                "topic": topic,
                "key": str(n),
                "value": f"{n}".ljust(500),
                "envelope": {"run_id": f"run {n}", "idempotency_key": f"key {n}"},
            }
            for n in range(start, start + 100)
        ]
        assert broker.client.post("/v1/produce/batch", json=batch).status_code == 200
    with broker.consume(topic) as stream:
        items = {item.offset: item for item in stream.take(count)}
        for offset in range(0, count, 2):
            assert_done(broker.ack(topic, items[offset]))
        for offset in range(1, 60, 2):
            assert_done(broker.nack(topic, items[offset], reason=f"why {offset}"))
        stream.take(30)
    messages = read_all(broker, topic, count)
    assert messages[7]["routing"] == {"label": "l-t", "meta": {"source": "test"}}
    assert messages[7]["envelope"] == {"run_id": "run 7", "idempotency_key": "key 7"}
    described = describe(broker, topic)
    for kill in (True, False, True):
        broker.restart(kill=kill)
        assert read_all(broker, topic, count) == messages
        after = describe(broker, topic)
        assert after["partitions"] == described["partitions"]
        # A COMMITTED key stores nothing new.
        broker.put(topic, "again", "7", {"idempotency_key": "key 7"})
        assert describe(broker, topic)["partitions"] == after["partitions"]
    with broker.consume(topic, owner="next") as stream:
        undone = {item.offset: item for item in stream.take(count // 2)}
        stream.expect_nothing()
    assert set(undone) == set(range(1, count, 2))
    assert {undone[offset].attempts for offset in range(1, 60, 2)} == {3}
    assert {undone[offset].attempts for offset in range(61, count, 2)} == {2}


# -- driftq-52: one broker a directory ---------------------------------------------------------


def test_a_second_broker_on_the_directory_refuses_to_start(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    """driftq-52: and the first one is not disturbed."""
    first = start_broker()
    topic = first.create_topic("t")
    started = time.monotonic()
    with pytest.raises(StartFailed) as refusal:
        start_broker()
    assert refusal.value.code not in (None, 0)
    assert str(tmp_path / "data") in refusal.value.output
    assert "Traceback" not in refusal.value.output
    assert time.monotonic() - started < 15
    first.put(topic, "v")
    first.kill()
    second = start_broker()
    with second.consume(topic) as stream:
        assert stream.next().value == "v"
