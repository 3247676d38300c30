"""A topic that is deleted under a query, at every step of a batch: the option failOnDeletedTopic.

A reader is called as Spark calls it, but in this process, where something can happen in between.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadMaxRows

from penstock.model.errors import NotFound, OutOfRange
from penstock.spark import planning, source
from penstock.spark.options import SourceSettings
from penstock.spark.schemas import schema_of
from penstock.spark.source import StreamReader
from tests.broker_process import BrokerProcess
from tests.contract.checks import new_name
from tests.spark.sources import produce

MOMENTS = ("before it looks", "while it looks", "before it plans", "before it reads")

Happen = Callable[[], object]


class Query:
    """A streaming query without Spark; `happen` is called once, at the moment it is told."""

    def __init__(self, broker: BrokerProcess, topics: str, **settings: Any) -> None:
        chosen = SourceSettings(
            url=broker.url, retry_s=20, topics=tuple(topics.split(",")), **settings
        )
        self._settings = chosen
        self.reader = self._new_reader()
        self.at = self.reader.initialOffset()
        self.values: list[str] = []
        self.offsets: list[int] = []

    def _new_reader(self) -> StreamReader:
        return StreamReader(self._settings, schema_of("records"))

    def start_again(self, *, once: bool = False, **settings: Any) -> None:
        """From the checkpoint: all that is known is where it was."""
        self.reader.stop()
        self._settings = replace(self._settings, **settings)
        self.reader = self._new_reader()
        if once:
            self.reader.prepareForTriggerAvailableNow()

    def batch(self, moment: str = "", happen: Happen = lambda: None) -> bool:
        """Is there one? Offsets go through JSON and tasks are copied, as they are by Spark."""
        with pytest.MonkeyPatch.context() as patched:
            if moment == "before it looks":
                happen()
            if moment == "while it looks":

                def late(*arguments: Any) -> Any:
                    patched.undo()
                    happen()
                    return planning.limited(*arguments)

                patched.setattr(source, "limited", late)
            found = self.reader.latestOffset(self.at, ReadMaxRows(1_000_000))
        end = json.loads(json.dumps(found))
        if end == self.at:
            return False
        if moment == "before it plans":
            happen()
        tasks = self.reader.partitions(self.at, end)
        if moment == "before it reads":
            happen()
        copy = pickle.loads(pickle.dumps(self.reader))
        for task in tasks:
            for batch in copy.read(pickle.loads(pickle.dumps(task))):
                self.values += batch["value"].to_pylist()
        self.at = end
        return True

    def finish(self) -> list[str]:
        while self.batch():
            pass
        return sorted(self.values)


@pytest.fixture
def query(broker: BrokerProcess) -> Iterator[Callable[..., Query]]:
    begun: list[Query] = []

    def begin(topics: str, **settings: Any) -> Query:
        begun.append(Query(broker, topics, **settings))
        return begun[-1]

    yield begin
    for one in begun:
        one.reader.stop()


def delete(broker: BrokerProcess, topic: str) -> None:
    assert broker.client.delete(f"/v1/topics/{topic}").status_code == 204


def two_topics(broker: BrokerProcess) -> tuple[str, str]:
    stem = new_name("some")
    return broker.create_topic(f"{stem}-going", 2), broker.create_topic(f"{stem}-staying", 2)


@pytest.mark.parametrize("is_pattern", [True, False], ids=["pattern", "names"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_the_others_go_on_whenever_a_topic_is_deleted_and_the_log_says_how_far_it_was_read(
    broker: BrokerProcess,
    query: Callable[..., Query],
    caplog: pytest.LogCaptureFixture,
    moment: str,
    is_pattern: bool,
):
    going, staying = two_topics(broker)
    topics = f"{going.removesuffix('going')}*" if is_pattern else f"{going},{staying}"
    wanted = produce(broker, going, range(10)) + produce(broker, staying, range(10, 20))
    running = query(topics, fail_on_deleted_topic=False)
    assert running.finish() == sorted(wanted)
    produce(broker, going, range(20, 25))
    wanted += produce(broker, staying, range(25, 30))
    running.batch(moment, lambda: delete(broker, going))
    wanted += produce(broker, staying, range(30, 35))
    assert running.finish() == sorted(wanted)
    said = [record.message for record in caplog.records]
    gone = [line for line in said if f"topic {going!r} does not exist any more" in line]
    assert len(gone) == 1, said
    # Where the last batch before ended, or the one that it was deleted under.
    assert "it was read to before offset" in gone[0]
    wanted += produce(broker, broker.create_topic(going, 2), range(40, 43))
    assert running.finish() == sorted(wanted), "made again, it is read from its beginning"


@pytest.mark.parametrize("once", [True, False], ids=["once", "on and on"])
def test_a_query_that_is_started_again_knows_which_of_its_topics_are_gone(
    broker: BrokerProcess, query: Callable[..., Query], once: bool
):
    going, staying = two_topics(broker)
    wanted = produce(broker, going, range(10)) + produce(broker, staying, range(10, 20))
    running = query(f"{going},{staying}", fail_on_deleted_topic=False)
    running.finish()
    delete(broker, going)
    running.finish()
    for settings in ({}, {"fail_on_deleted_topic": None}):
        wanted += produce(broker, staying, range(len(wanted), len(wanted) + 5))
        running.start_again(once=once, **settings)
        assert running.finish() == sorted(wanted)
    wanted += produce(broker, broker.create_topic(going, 2), range(70, 73))
    running.start_again(once=once)
    assert running.finish() == sorted(wanted), "made again, it is read from its beginning"
    assert "gone" not in running.at


@pytest.mark.parametrize("once", [True, False], ids=["once", "on and on"])
def test_a_name_that_was_never_right_is_refused_when_the_query_is_started_again(
    broker: BrokerProcess, query: Callable[..., Query], once: bool
):
    staying = two_topics(broker)[1]
    running = query(staying, fail_on_deleted_topic=False)
    missing = new_name("missing")
    running.start_again(once=once, topics=(staying, missing))
    with pytest.raises(NotFound, match=f"topic '{missing}' does not exist at"):
        running.finish()


@pytest.mark.parametrize("count", [2, 40], ids=["shorter", "longer"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_topic_that_is_made_again_is_read_from_its_beginning(
    broker: BrokerProcess, query: Callable[..., Query], moment: str, count: int
):
    going, staying = two_topics(broker)
    wanted = produce(broker, going, range(10)) + produce(broker, staying, range(10, 20))
    running = query(f"{going},{staying}", fail_on_deleted_topic=False)
    running.finish()
    produce(broker, going, range(20, 25))
    wanted += produce(broker, staying, range(25, 30))

    def made_again() -> None:
        delete(broker, going)
        broker.create_topic(going, 2)
        wanted.extend(produce(broker, going, range(50, 50 + count)))

    running.batch(moment, made_again)
    wanted += produce(broker, staying, range(30, 35))
    assert running.finish() == sorted(wanted)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_deletion_fails_the_query_that_wants_it_to_though_other_losses_do_not(
    broker: BrokerProcess, query: Callable[..., Query], moment: str
):
    going, staying = two_topics(broker)
    produce(broker, staying, range(5))
    errors = {"does not exist any more": NotFound, "deleted and made again": OutOfRange}

    def happen() -> None:
        delete(broker, going)
        if error is OutOfRange:
            broker.create_topic(going, 2)
            produce(broker, going, range(30, 60))

    for said, error in errors.items():
        if error is OutOfRange:
            broker.create_topic(going, 2)
        produce(broker, going, range(10))
        running = query(f"{going},{staying}", fail_on_data_loss=False, fail_on_deleted_topic=True)
        running.finish()
        produce(broker, going, range(20, 25))
        with pytest.raises(error, match=f"{going}.*{said}") as caught:
            running.batch(moment, happen)
        assert "failOnDataLoss" not in str(caught.value), "it would not help"
