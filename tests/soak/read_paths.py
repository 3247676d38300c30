"""Every way to read the messages of a topic from a broker process, each as the same plain rows.

Over HTTP as JSON lines, as Arrow, by splits and as a group without a past; and by what Spark plans
and reads, with the connector's own code in this process. Rows come by partition, in the order they
were read.
"""

from __future__ import annotations

import json
import time
from typing import Any, NamedTuple

import httpx
import pyarrow as pa

from penstock.spark.options import SourceSettings
from penstock.spark.schemas import schema_of
from penstock.spark.source import BatchReader
from tests.broker_process import BrokerProcess, settle_body

SPLIT_ROWS = 7
AUDITOR = "auditor"
FRESH_S = 180.0


class Row(NamedTuple):
    partition: int
    offset: int
    key: str
    value: str


Rows = list[Row]


class ReadPaths:
    def __init__(self, broker: BrokerProcess) -> None:
        self._broker = broker
        self._audits = 0

    def of(self, topic: str, *, with_audit: bool) -> dict[str, Rows]:
        """What each path finds; nobody must write meanwhile."""
        found: dict[str, Rows] = {"json": [], "arrow": [], "splits": []}
        for end in self.ends(topic)["partitions"]:
            partition = end["partition"]
            found["json"] += self.as_json(topic, partition)
            found["arrow"] += self.as_arrow(topic, partition)
            found["splits"] += self.by_splits(topic, partition)
        found["Spark's plan"] = self.by_sparks_plan(topic)
        if with_audit:
            found["a new group"] = self.by_a_new_group(topic, len(found["json"]))
        return found

    def ends(self, topic: str) -> dict[str, Any]:
        """The answer of `offsets`."""
        found: dict[str, Any] = self.get(f"/v1/topics/{topic}/offsets").json()
        return found

    def lines(self, topic: str, partition: int) -> list[dict[str, Any]]:
        """Whole rows as JSON tells them."""
        text = self.get(_records(topic, partition), format="ndjson").text
        return [json.loads(line) for line in text.split("\n") if line]

    def as_json(self, topic: str, partition: int) -> Rows:
        return [_row(partition, line) for line in self.lines(topic, partition)]

    def as_arrow(self, topic: str, partition: int, **more: Any) -> Rows:
        data = self.get(_records(topic, partition), **more).content
        table = pa.ipc.open_stream(data).read_all().select(["offset", "key", "value"])
        return [_row(partition, row) for row in table.to_pylist()]

    def by_splits(self, topic: str, partition: int) -> Rows:
        path = f"/v1/topics/{topic}/partitions/{partition}/splits"
        rows: Rows = []
        for one in self.get(path, rows=SPLIT_ROWS).json()["splits"]:
            found = self.as_arrow(topic, partition, start=one["start"], end=one["end"])
            assert len(found) == one["rows"], f"{topic}: split {one} has {len(found)} rows"
            rows += found
        return rows

    def by_sparks_plan(self, topic: str) -> Rows:
        settings = SourceSettings(
            url=self._broker.url, retry_s=5, topics=(topic,), rows_per_partition=SPLIT_ROWS
        )
        reader = BatchReader(settings, schema_of("records"))
        columns = ["partition", "offset", "key", "value"]
        rows = [
            _row(row["partition"], row)
            for task in reader.partitions()
            for batch in reader.read(task)
            for row in batch.select(columns).to_pylist()
        ]
        return sorted(rows, key=lambda row: row.partition)

    def by_a_new_group(self, topic: str, count: int) -> Rows:
        """Acks all it is given; the group is deleted behind it."""
        group = f"audit-{self._audits}"
        self._audits += 1
        rows: Rows = []
        stream = self._broker.open_consume(topic, group, AUDITOR, 3_600_000)
        try:
            while len(rows) < count:
                items = [stream.next(timeout_s=60)]
                while stream.has_item:
                    items.append(stream.next())
                rows += [Row(one.partition, one.offset, one.key, one.value) for one in items]
                acks = [settle_body(topic, item, group, AUDITOR) for item in items]
                reply = self._broker.client.post("/v1/ack/batch", json=acks)
                assert reply.status_code == 200, reply.text
                assert '"error"' not in reply.text, reply.text
        finally:
            stream.close()
        reply = self._broker.client.delete(f"/v1/topics/{topic}/groups/{group}")
        assert reply.status_code == 204, reply.text
        return sorted(rows, key=lambda row: row.partition)

    def get(self, path: str, **query: Any) -> httpx.Response:
        reply = self._broker.client.get(path, params=query)
        assert reply.status_code == 200, f"GET {path}: {reply.status_code} {reply.text[:300]}"
        return reply


def fresh_positions(client: httpx.Client) -> dict[str, Any]:
    """Where the journal begins and ends, once all that is durable can be read. The broker asks to
    try again where a run of sealing was late or failed, as faults and a killed broker's own sealing
    process make it."""
    deadline = time.monotonic() + FRESH_S
    while True:
        reply = client.get("/v1/journal/offsets", params={"fresh": "true"})
        if reply.status_code == 200:
            return dict(reply.json())
        assert reply.status_code == 503, reply.text
        assert time.monotonic() < deadline, reply.text
        time.sleep(0.5)


def difference(found: Rows, wanted: Rows) -> str:
    missing = [row[:2] for row in wanted if row not in found][:20]
    extra = [row[:2] for row in found if row not in wanted][:20]
    return f"{len(found)} and {len(wanted)} rows, missing {missing}, more {extra}"


def _records(topic: str, partition: int) -> str:
    return f"/v1/topics/{topic}/partitions/{partition}/records"


def _row(partition: int, row: dict[str, Any]) -> Row:
    return Row(partition, row["offset"], row.get("key") or "", row["value"])
