"""How a stream's reader plans: as Spark calls it, but in this process."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from penstock.model.errors import NotFound
from penstock.spark import logs
from penstock.spark.bounds import Bound
from penstock.spark.broker import BrokerConnection
from penstock.spark.options import SourceSettings
from penstock.spark.schemas import schema_of
from penstock.spark.source import StreamReader
from tests.broker_process import BrokerProcess
from tests.contract.checks import new_name
from tests.spark.sources import offsets, produce, trim

Offset = dict[str, Any]
MakeReader = Callable[..., StreamReader]


@pytest.fixture
def reader_of(broker: BrokerProcess) -> Iterator[MakeReader]:
    made: list[StreamReader] = []

    def make(*topics: str, **settings: Any) -> StreamReader:
        chosen = SourceSettings(url=broker.url, retry_s=20, topics=topics, **settings)
        made.append(StreamReader(chosen, schema_of("records")))
        return made[-1]

    yield make
    for reader in made:
        reader.stop()


def rows_between(reader: StreamReader, start: Offset, end: Offset) -> list[str]:
    """What the tasks of a batch read; they get copies, as they do from Spark."""
    copy = pickle.loads(pickle.dumps(reader))
    return sorted(
        value
        for task in reader.partitions(start, end)
        for batch in copy.read(pickle.loads(pickle.dumps(task)))
        for value in batch["value"].to_pylist()
    )


def latest(reader: StreamReader, start: Offset, limit: Any = None) -> Offset:
    """Through JSON, as Spark keeps it."""
    found: Offset = json.loads(json.dumps(reader.latestOffset(start, limit or ReadAllAvailable())))
    return found


def test_without_news_the_offset_is_the_same_text(
    broker: BrokerProcess, topic: str, reader_of: MakeReader
):
    produce(broker, topic, range(10))
    reader = reader_of(topic)
    end = latest(reader, reader.initialOffset())
    assert json.dumps(latest(reader, end)) == json.dumps(end)
    other = reader_of(topic, group="added")
    assert json.dumps(latest(other, end)) == json.dumps(end), "a group alone makes no batch"


def test_available_now_ends_where_it_began_whatever_is_produced_meanwhile(
    broker: BrokerProcess, reader_of: MakeReader
):
    stem = new_name("now")
    broker.create_topic(f"{stem}-1", 2)
    wanted = produce(broker, f"{stem}-1", range(20))
    reader = reader_of(f"{stem}-*")
    reader.prepareForTriggerAvailableNow()
    start = reader.initialOffset()
    produce(broker, f"{stem}-1", range(20, 40))
    broker.create_topic(f"{stem}-2")
    produce(broker, f"{stem}-2", range(40, 50))
    end = latest(reader, start)
    assert rows_between(reader, start, end) == sorted(wanted)
    assert latest(reader, end) == end


def test_a_limit_of_rows_is_exact_and_everything_is_reached(
    broker: BrokerProcess, topic: str, reader_of: MakeReader
):
    wanted = produce(broker, topic, range(100))
    reader = reader_of(topic)
    at = reader.initialOffset()
    seen: list[str] = []
    for size in (33, 33, 33, 1):
        end = latest(reader, at, ReadMaxRows(33))
        rows = rows_between(reader, at, end)
        assert len(rows) == size
        at, seen = end, seen + rows
    assert sorted(seen) == sorted(wanted)
    assert latest(reader, at, ReadMaxRows(33)) == at


def test_all_available_ignores_the_limit_of_the_options(
    broker: BrokerProcess, topic: str, reader_of: MakeReader
):
    produce(broker, topic, range(20))
    reader = reader_of(topic, max_rows_per_trigger=3)
    assert reader.getDefaultReadLimit() == ReadMaxRows(3)
    start = reader.initialOffset()
    assert len(rows_between(reader, start, latest(reader, start, ReadAllAvailable()))) == 20


def test_a_topic_that_appears_stands_in_the_offsets_before_a_row_of_it_is_read(
    broker: BrokerProcess, reader_of: MakeReader
):
    stem = new_name("appearing")
    reader = reader_of(f"{stem}-*")
    start = reader.initialOffset()
    assert start == {"records": {}}
    topic = broker.create_topic(f"{stem}-1")
    wanted = produce(broker, topic, range(10))
    begun = latest(reader, start)
    assert begun["records"] == {topic: {"0": 0}}
    assert rows_between(reader, start, begun) == []
    assert rows_between(reader, begun, latest(reader, begun)) == sorted(wanted)


def test_a_topic_that_appears_without_its_first_rows_is_begun_with_what_is_kept(
    broker: BrokerProcess, reader_of: MakeReader
):
    stem = new_name("appearing")
    reader = reader_of(f"{stem}-*")
    start = reader.initialOffset()
    topic = broker.create_topic(f"{stem}-1")
    produce(broker, topic, range(5))
    trim(broker, topic)
    wanted = produce(broker, topic, range(5, 8))
    begun = latest(reader, start)
    assert begun["records"] == {topic: {"0": 5}}
    assert rows_between(reader, start, begun) == []
    assert rows_between(reader, begun, latest(reader, begun)) == sorted(wanted)


def test_a_checkpoint_that_tells_no_ids_goes_on_where_it_is(
    broker: BrokerProcess, reader_of: MakeReader, topic: str
):
    reader = reader_of(topic)
    produce(broker, topic, range(10))
    start = latest(reader, reader.initialOffset())
    assert start["ids"]
    wanted = produce(broker, topic, range(10, 20))
    old = {"records": start["records"]}
    end = latest(reader, old)
    assert end["ids"] == start["ids"]
    assert rows_between(reader, old, end) == sorted(wanted)
    assert rows_between(reader, old, {"records": end["records"]}) == sorted(wanted)


def test_a_topic_that_is_no_longer_asked_for_is_left_out(
    broker: BrokerProcess, reader_of: MakeReader
):
    first, second = (broker.create_topic(new_name("kept")) for _ in range(2))
    produce(broker, first, range(5))
    wanted = produce(broker, second, range(5, 10))
    start = reader_of(first, second).initialOffset()
    reader = reader_of(second)
    end = latest(reader, start)
    assert list(end["records"]) == [second]
    assert rows_between(reader, start, end) == sorted(wanted)


def test_the_offsets_name_the_group_and_its_broker(
    broker: BrokerProcess, topic: str, reader_of: MakeReader
):
    produce(broker, topic, range(4))
    reader = reader_of(topic, group="spark")
    start = reader.initialOffset()
    end = latest(reader, start)
    for offset in (start, end):
        assert (offset["group"], offset["url"]) == ("spark", broker.url)
    assert lag(broker, topic) == 4
    latest(reader, end)
    assert lag(broker, topic) == 0, "the end of a batch is done when the next one is planned"


def lag(broker: BrokerProcess, topic: str) -> int:
    report = broker.client.get(f"/v1/topics/{topic}").json()
    [group] = [one for one in report["groups"] if one["name"] == "spark"]
    return sum(one["lag"] for one in group["partitions"])


def many_topics(broker: BrokerProcess) -> tuple[str, list[str]]:
    """More than are asked for one by one: what their names begin with, and their names."""
    prefix = new_name("many")
    names = [f"{prefix}-{n:02}" for n in range(logs.MANY_TOPICS + 2)]
    for name in names:
        broker.create_topic(name)
    return prefix, names


def test_many_topics_are_asked_for_at_once(
    broker: BrokerProcess, reader_of: MakeReader, monkeypatch: pytest.MonkeyPatch
):
    """A topic that is deleted between two looks is gone, and not among those asked for."""
    prefix, names = many_topics(broker)
    reader = reader_of(f"{prefix}-*", fail_on_data_loss=False)
    start = reader.initialOffset()
    wanted = [value for n, name in enumerate(names) for value in produce(broker, name, [n])]
    asked: list[str] = []
    call = BrokerConnection.call

    def counted(self: BrokerConnection, method: str, path: str, **rest: Any) -> bytes:
        asked.append(path)
        return call(self, method, path, **rest)

    monkeypatch.setattr(BrokerConnection, "call", counted)
    end = latest(reader, start)
    assert asked == ["/v1/topics", "/v1/offsets"]
    assert rows_between(reader, start, end) == sorted(wanted)
    broker.client.delete(f"/v1/topics/{names[3]}")
    assert sorted(latest(reader, end)["records"]) == names[:3] + names[4:]


def test_a_broker_that_knows_no_such_question_is_asked_one_by_one(
    broker: BrokerProcess, reader_of: MakeReader, monkeypatch: pytest.MonkeyPatch
):
    prefix, names = many_topics(broker)
    call = BrokerConnection.call

    def older(self: BrokerConnection, method: str, path: str, **rest: Any) -> bytes:
        return call(self, method, path.replace("/v1/offsets", "/v1/unknown"), **rest)

    monkeypatch.setattr(BrokerConnection, "call", older)
    assert sorted(reader_of(f"{prefix}-*").initialOffset()["records"]) == names
    with pytest.raises(NotFound, match=f"topic '{prefix}' does not exist"):
        reader_of(f"{prefix}-*", prefix).initialOffset()


def test_a_name_among_many_that_is_not_there_is_named(broker: BrokerProcess, reader_of: MakeReader):
    prefix, _ = many_topics(broker)
    with pytest.raises(NotFound, match=f"topic '{prefix}' does not exist"):
        reader_of(f"{prefix}-*", prefix).initialOffset()


def test_small_partitions_share_tasks(broker: BrokerProcess, reader_of: MakeReader):
    topic = broker.create_topic(new_name("wide"), 32)
    wanted = produce(broker, topic, range(400))
    reader = reader_of(topic)
    start = reader.initialOffset()
    end = latest(reader, start)
    assert len(reader.partitions(start, end)) == 1
    assert rows_between(reader, start, end) == sorted(wanted)
    apart = reader_of(topic, min_partitions=16)
    assert len(apart.partitions(start, end)) >= 16
    assert rows_between(apart, start, end) == sorted(wanted)


def test_a_time_is_where_a_query_begins(broker: BrokerProcess, topic: str, reader_of: MakeReader):
    wanted = produce(broker, topic, range(10))
    late = reader_of(topic, start=Bound(default="earliest", time_ms=2**50))
    ends = {partition: one["next"] for partition, one in offsets(broker, topic).items()}
    assert late.initialOffset()["records"][topic] == ends
    early = reader_of(topic, start=Bound(default="earliest", time_ms=0))
    start = early.initialOffset()
    assert rows_between(early, start, latest(early, start)) == sorted(wanted)
