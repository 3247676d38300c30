"""Every way to read the messages of a topic from an engine, each as the same plain rows.

A message that is stored is found by all of them, as it was stored: by a group without a past, as a
range in Arrow and in JSON lines, by the splits of a range, and by what Spark plans and reads. The
Spark connector's own planning and reading run here, with the engine in place of HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa

from penstock.model.ranges import RangeRequest, Selection
from penstock.model.records import Message
from penstock.model.splits import SplitRequest
from penstock.spark import planning, reading
from penstock.spark.logs import TopicPartition
from penstock.spark.options import SourceSettings
from penstock.spark.schemas import schema_of
from tests.engine.harness import Broker

AUDIT = "audit"
SPLIT_ROWS = 4


class Row(NamedTuple):
    partition: int
    offset: int
    key: str
    value: str


Rows = list[Row]
ReadPath = Callable[[Broker, str], Rows]


def rows_of(messages: Mapping[int, Message]) -> Rows:
    """What a reader of these messages must find: by partition, in the order of their offsets."""
    rows = [Row(m.partition, m.offset, m.key, m.value) for m in messages.values()]
    return sorted(rows)


def by_a_new_group(broker: Broker, topic: str) -> Rows:
    """Deliveries to a group that did not exist before; it acks all of them and is deleted."""
    reader = broker.consume(topic, AUDIT, "auditor", lease_ms=600_000)
    rows: Rows = []
    while items := reader.take():
        rows += [Row(item.partition, item.offset, item.key, item.value) for item in items]
        broker.must(broker.engine.ack_many, [broker.naming(reader, item) for item in items])
        broker.settle()
    broker.must(broker.engine.delete_group, topic, AUDIT)
    broker.settle()
    return sorted(rows, key=lambda row: row.partition)  # stable: keeps the order of delivery


def as_arrow(broker: Broker, topic: str) -> Rows:
    rows: Rows = []
    for partition in _partitions(broker, topic):
        data = _range(broker, RangeRequest(topic=topic, partition=partition))
        rows += _of_table(partition, pa.ipc.open_stream(data).read_all())
    return rows


def as_json_lines(broker: Broker, topic: str) -> Rows:
    rows: Rows = []
    for partition in _partitions(broker, topic):
        request = RangeRequest(topic=topic, partition=partition, format="ndjson")
        for line in _range(broker, request).splitlines():
            row = json.loads(line)
            rows.append(Row(partition, row["offset"], row.get("key") or "", row["value"]))
    return rows


def by_splits(broker: Broker, topic: str) -> Rows:
    """Each split is read by itself, and has as many rows as it says."""
    rows: Rows = []
    for partition in _partitions(broker, topic):
        request = SplitRequest(topic=topic, partition=partition, rows=SPLIT_ROWS)
        for one in broker.must(broker.engine.ranges.splits, request).splits:
            piece = RangeRequest(topic=topic, partition=partition, start=one.start, end=one.end)
            table = pa.ipc.open_stream(_range(broker, piece)).read_all()
            assert table.num_rows == one.rows, f"{one} has {table.num_rows} rows"
            rows += _of_table(partition, table)
    return rows


def by_sparks_plan(broker: Broker, topic: str) -> Rows:
    settings = SourceSettings(
        url="http://127.0.0.1:0", retry_s=0, topics=(topic,), rows_per_partition=SPLIT_ROWS
    )
    stub: Any = _EngineAsBroker(broker)
    found = broker.must(broker.engine.ranges.offsets, topic, None)
    ranges = {
        TopicPartition(topic, one.partition, found.topic_id): (one.earliest, one.next)
        for one in found.partitions
    }
    planned = planning.tasks(planning.slices(stub, ranges, settings), 1)
    request = reading.RowRequest(settings, schema_of("records"))
    rows: Rows = []
    for one in [one for task in planned for one in task]:
        for batch in reading._read_slice(stub, request, one):
            rows += _of_table(one.place.partition, pa.Table.from_batches([batch]))
    return sorted(rows, key=lambda row: row.partition)


READ_PATHS: tuple[ReadPath, ...] = (as_arrow, as_json_lines, by_splits, by_sparks_plan)
"""Those that change nothing."""


class _EngineAsBroker:
    """The two calls of the connector's Broker that planning and reading make."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def retry_time(self) -> Any:
        return _NoRetries()

    def call(self, method: str, path: str, *, query: Mapping[str, Any]) -> bytes:
        assert (method, path.rsplit("/", 1)[1]) == ("GET", "splits"), path
        request = SplitRequest(**self._place(path), **query)
        return msgspec.json.encode(self._broker.must(self._broker.engine.ranges.splits, request))

    @contextmanager
    def rows(self, path: str, query: Mapping[str, Any]) -> Iterator[pa.RecordBatchReader]:
        asked = dict(query)
        columns = tuple(asked.pop("columns", "").split(",")) if "columns" in asked else ()
        omits = asked.pop("nulls", "") == "omit"
        request = RangeRequest(
            **self._place(path), **asked, selection=Selection(columns=columns), omit_nulls=omits
        )
        yield pa.ipc.open_stream(_range(self._broker, request))

    @staticmethod
    def _place(path: str) -> dict[str, Any]:
        _, _, _, topic, _, partition, _ = path.split("/")
        return {"topic": topic, "partition": int(partition)}


class _NoRetries:
    def renew(self) -> None:
        """Rows came."""

    def wait_after(self, error: Exception) -> None:
        raise error


def _partitions(broker: Broker, topic: str) -> range:
    return range(len(broker.state.topics[topic].partitions))


def _range(broker: Broker, request: RangeRequest) -> bytes:
    found = broker.must(broker.engine.ranges.open, request)
    pieces = [found.head]
    while (piece := broker.must(found.next)) is not None:
        pieces.append(bytes(piece))
    return b"".join([*pieces, found.tail])


def _of_table(partition: int, table: pa.Table) -> Rows:
    chosen = [table.column(name).to_pylist() for name in ("offset", "key", "value")]
    return [
        Row(partition, offset, key or "", value) for offset, key, value in zip(*chosen, strict=True)
    ]
