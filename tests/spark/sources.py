"""What the source's tests share: rows at a broker, and reads of them through Spark."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StructType

from tests.broker_process import BrokerProcess, eventually

Rows = list[dict[str, Any]]


def produce(
    broker: BrokerProcess, topic: str, numbers: Iterable[int], **envelope: Any
) -> list[str]:
    """A message for each number, spread over the partitions by key. The values."""
    values = [f"value {number}" for number in numbers]
    items = [
        {"topic": topic, "key": f"key {value}", "value": value}
        | ({"envelope": envelope} if envelope else {})
        for value in values
    ]
    for first in range(0, len(items), 5000):
        lines = "\n".join(json.dumps(item) for item in items[first : first + 5000])
        reply = broker.client.post("/v1/produce/batch", content=lines)
        assert reply.status_code == 200, reply.text
        assert all("offset" in result for result in reply.json()["results"]), reply.text[:500]
    return values


def await_history(broker: BrokerProcess) -> None:
    """Until something is sealed; of a broker with small segments."""
    data_dir = broker.data_dir
    assert data_dir is not None
    eventually(lambda: list(data_dir.rglob("history-*.arrow")), timeout_s=60)


def offsets(broker: BrokerProcess, topic: str) -> dict[str, dict[str, int]]:
    """{partition: {earliest, next}}"""
    reply = broker.client.get(f"/v1/topics/{topic}/offsets")
    assert reply.status_code == 200, reply.text
    return {str(one["partition"]): one for one in reply.json()["partitions"]}


def trim(broker: BrokerProcess, topic: str) -> None:
    """Lets retention remove everything that is there."""
    reply = broker.client.patch(f"/v1/topics/{topic}", json={"retention_ms": 1})
    assert reply.status_code == 204, reply.text
    eventually(
        lambda: offsets(broker, topic),
        lambda o: all(p["earliest"] == p["next"] for p in o.values()),
    )
    reply = broker.client.patch(f"/v1/topics/{topic}", json={"retention_ms": 0})
    assert reply.status_code == 204, reply.text


def rows_at(broker: BrokerProcess, topic: str) -> Rows:
    """Every row as the broker tells it as lines of JSON, which Spark does not read."""
    found: Rows = []
    for partition in offsets(broker, topic):
        path = f"/v1/topics/{topic}/partitions/{partition}/records"
        reply = broker.client.get(path, params={"format": "ndjson"})
        assert reply.status_code == 200, reply.text
        for line in reply.text.splitlines():
            found.append(json.loads(line) | {"topic": topic, "partition": int(partition)})
    return found


def frame(spark: SparkSession, broker: BrokerProcess, **options: Any) -> DataFrame:
    chosen: dict[str, Any] = {"url": broker.url, "retrySeconds": 20} | options
    return spark.read.format("penstock").options(**chosen).load()


def as_told(rows: Iterable[Row]) -> Rows:
    """Rows of Spark in the words of `rows_at`, in the same order."""
    told = []
    for row in rows:
        known = {name: value for name, value in row.asDict().items() if value is not None}
        if "timestamp" in known:
            known["timestamp"] = f"{known['timestamp'].isoformat()}"
        told.append(known)
    return sorted(told, key=lambda row: (row["topic"], row["partition"], row["offset"]))


def values_of(frame: DataFrame) -> list[str]:
    return sorted(row.value for row in frame.select("value").collect())


class Copy:
    """A streaming query from the broker into Parquet, run until nothing is left or started."""

    def __init__(self, spark: SparkSession, path: Path) -> None:
        self.spark = spark
        self.path = path
        self._schema: StructType | None = None

    def start(
        self, broker: BrokerProcess, *, available_now: bool, **options: Any
    ) -> StreamingQuery:
        chosen: dict[str, Any] = {"url": broker.url, "retrySeconds": 20} | options
        stream = self.spark.readStream.format("penstock").options(**chosen).load()
        self._schema = stream.schema
        writer = stream.writeStream.format("parquet").option(
            "checkpointLocation", str(self.path / "checkpoint")
        )
        if available_now:
            writer = writer.trigger(availableNow=True)
        else:
            writer = writer.trigger(processingTime="0 seconds")
        return writer.start(str(self.path / "rows"))

    def run(self, broker: BrokerProcess, **options: Any) -> StreamingQuery:
        """Reads what is there now."""
        query = self.start(broker, available_now=True, **options)
        try:
            query.awaitTermination(600)
        finally:
            query.stop()
        return query

    @contextmanager
    def running(self, broker: BrokerProcess, **options: Any) -> Iterator[StreamingQuery]:
        query = self.start(broker, available_now=False, **options)
        try:
            yield query
        finally:
            query.stop()

    def rows(self) -> DataFrame:
        assert self._schema is not None
        return self.spark.read.schema(self._schema).parquet(str(self.path / "rows"))

    def values(self) -> list[str]:
        return values_of(self.rows())

    def await_values(self, query: StreamingQuery, wanted: Iterable[str]) -> None:
        expected = sorted(wanted)

        def seen() -> list[str]:
            failure = query.exception()
            assert failure is None, failure
            return self.values() if (self.path / "rows" / "_spark_metadata").exists() else []

        eventually(seen, lambda values: values == expected, timeout_s=60)


def rows_of_batches(query: StreamingQuery) -> list[int]:
    return [progress["numInputRows"] for progress in query.recentProgress]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
