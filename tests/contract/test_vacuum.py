"""A broker whose history files are merged and rewritten: every acknowledged message stays readable,
by groups and by ranges, before and after a restart, and `penstock wal verify` agrees.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from tests.broker_process import BrokerProcess, eventually
from tests.cli.conftest import run_penstock

SEGMENT_BYTES = 65_536
MERGED_FILES = 16
"""As many small history files become one; a file of 4 MiB is not small."""
PATIENCE_S = 60.0


@pytest.fixture
def broker(tmp_path: Path):
    env = {"PENSTOCK_SEGMENT_BYTES": str(SEGMENT_BYTES), "PENSTOCK_MEMORY_BYTES": str(2**20)}
    process = BrokerProcess(tmp_path / "data", env=env).start()
    yield process
    process.close()


def files(broker: BrokerProcess) -> set[str]:
    assert broker.data_dir is not None
    return {path.name for path in broker.data_dir.glob("history-*.arrow")}


class Producer:
    """Fills segments, each of which is sealed when the next one is begun."""

    def __init__(self, broker: BrokerProcess) -> None:
        self.broker = broker
        self.counts: dict[str, int] = {}
        self._segments = 0

    def fill(self, sizes: dict[str, tuple[int, int]]) -> None:
        """So many messages of so many bytes for each topic, in a segment of their own, and waits
        until the segment before it is sealed."""
        items = [
            {"topic": topic, "value": f"{n} ".ljust(size, ".")}
            for topic, (count, size) in sizes.items()
            for n in range(count)
        ]
        reply = self.broker.client.post("/v1/produce/batch", json=items)
        assert reply.status_code == 200, reply.text
        for topic, (count, _) in sizes.items():
            self.counts[topic] = self.counts.get(topic, 0) + count
        self._segments += 1
        eventually(self.runs, lambda runs: runs >= self._segments, timeout_s=PATIENCE_S)

    def runs(self) -> int:
        return self.broker.stderr().count("the log begins at segment")

    def delete(self, topic: str) -> None:
        assert self.broker.client.delete(f"/v1/topics/{topic}").status_code == 204
        del self.counts[topic]


def check_ranges(broker: BrokerProcess, counts: dict[str, int]) -> None:
    for topic, count in counts.items():
        reply = broker.client.get(f"/v1/topics/{topic}/partitions/0/records")
        offsets = pa.ipc.open_stream(reply.content).read_all().column("offset").to_pylist()
        assert offsets == list(range(count)), f"{topic}: {len(offsets)} of {count} rows"


def check_deliveries(broker: BrokerProcess, counts: dict[str, int]) -> None:
    for topic, count in counts.items():
        delivered: list[int] = []
        with broker.consume(topic) as stream:
            while len(delivered) < count:
                item = stream.next()
                delivered.append(item.offset)
                assert broker.ack(topic, item).status_code == 204
        assert delivered == list(range(count))


def check_all(broker: BrokerProcess, counts: dict[str, int]) -> None:
    check_ranges(broker, counts)
    broker.restart()
    check_ranges(broker, counts)
    check_deliveries(broker, counts)
    assert broker.terminate() == 0
    verified = run_penstock("wal", "verify", str(broker.data_dir))
    assert verified.code == 0, verified.out + verified.err


def test_small_files_around_a_larger_one_lose_no_message(broker: BrokerProcess):
    broker.create_topic("orders")
    producer = Producer(broker)
    for number in range(MERGED_FILES):
        if number == MERGED_FILES // 2:
            producer.fill({"orders": (20, 250_000)})
        producer.fill({"orders": (100, 700)})
    producer.fill({"orders": (100, 700)})
    before = files(broker)
    producer.fill({"orders": (100, 700)})
    eventually(lambda: len(before - files(broker)) == MERGED_FILES, timeout_s=PATIENCE_S)
    check_all(broker, producer.counts)


def test_a_deleted_topic_beside_files_that_stay_loses_no_message(broker: BrokerProcess):
    broker.create_topic("orders")
    broker.create_topic("gone")
    producer = Producer(broker)
    for number in range(5):
        others = {"gone": (10, 700)} if number % 2 == 0 else {}
        producer.fill({"orders": (100, 700)} | others)
    before = files(broker)
    producer.delete("gone")
    producer.fill({"orders": (100, 700)})
    # Three, if the fifth segment was sealed before the topic was deleted.
    eventually(lambda: len(before - files(broker)), lambda gone: gone >= 2, timeout_s=PATIENCE_S)
    check_all(broker, producer.counts)
