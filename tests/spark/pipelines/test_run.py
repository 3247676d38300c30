"""A run's queries and jobs: what they take, how they end, and what is said of a failure."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name

from penstock.spark.lake.lake import Lake
from penstock.spark.options import BrokerSettings
from penstock.spark.running.failure import PipelineFailed
from penstock.spark.running.query import MOST_STARTING, PipelineQuery, starting
from penstock.spark.running.run import Run
from tests.broker_process import BrokerProcess, eventually
from tests.contract.checks import new_name
from tests.spark.sources import produce, rows_at

MakeRun = Callable[..., Run]
WAIT_S = 600


@pytest.fixture
def make_run(spark: SparkSession, broker: BrokerProcess, tmp_path: Path) -> Iterator[MakeRun]:
    """Runs on one lake. A name is the test's own: Spark keeps those of running queries apart."""
    made: list[Run] = []
    name = new_name("copy")

    def make(**options: Any) -> Run:
        settings = BrokerSettings(url=broker.url, retry_s=10)
        run = Run(name, spark, settings, Lake(spark, str(tmp_path / "lake")), {}, **options)
        made.append(run)
        return run

    yield make
    for run in made:
        run.stop()


class Taken:
    """Keeps what batches had, by their numbers. Looks at each twice."""

    def __init__(self) -> None:
        self.batches: dict[int, list[str]] = {}

    def __call__(self, frame: DataFrame, batch: int) -> None:
        rows = frame.collect()
        assert frame.count() == len(rows)
        self.batches[batch] = sorted(row.value for row in rows)

    def values(self) -> list[str]:
        return sorted(value for batch in self.batches.values() for value in batch)


def test_a_run_takes_what_is_there_and_the_next_one_goes_on(
    make_run: MakeRun, broker: BrokerProcess, topic: str
):
    first = produce(broker, topic, range(5))
    taken = Taken()
    run = make_run()
    run.start("rows", run.stream(topic=topic, maxRowsPerTrigger=3), taken)
    run.wait(WAIT_S)
    assert taken.values() == sorted(first)
    (query,) = run.activities
    # Spark counts ten rows, for every batch was looked at twice.
    assert (query.state, query.rows, query.batches, query.lag) == ("finished", 5, 2, 0)

    second = produce(broker, topic, range(5, 7))
    again = Taken()
    order: list[str] = []
    run = make_run()

    def take(frame: DataFrame, batch: int) -> None:
        again(frame, batch)
        order.append("query")

    def work() -> int:
        order.append("job")
        return 7

    run.start("rows", run.stream(topic=topic), take)
    run.repeat("after", work)
    run.wait(WAIT_S)
    assert again.values() == sorted(second)
    assert order == ["query", "job"]
    assert [(each.rows, each.batches) for each in run.activities] == [(2, 1), (7, 1)]


def test_of_many_queries_only_a_few_start_their_sources_at_the_same_time(
    spark: SparkSession, make_run: MakeRun, broker: BrokerProcess, topic: str
):
    """Else Spark would not wait long enough for each, where cores are few."""
    sent = sorted(produce(broker, topic, range(2)))
    run, taken = make_run(), [Taken() for _ in range(MOST_STARTING + 1)]
    for number, each in enumerate(taken):
        run.start(f"rows-{number}", run.stream(topic=topic), each)
        assert starting(spark) <= MOST_STARTING
    run.wait(WAIT_S)
    assert [each.values() for each in taken] == [sent] * len(taken)


class Late:
    """A writer whose first queries end as Spark ends them when their Python is late."""

    def __init__(self, writer: Any, times: int) -> None:
        self._writer = writer
        self._times = times
        self.starts = 0

    def foreachBatch(self, take: Any) -> Late:  # noqa: N802 - Spark's name
        self._writer = self._writer.foreachBatch(take)
        return self

    def start(self) -> Any:
        self.starts += 1
        return Ended() if self.starts <= self._times else self._writer.start()


class Ended:
    def __init__(self) -> None:
        self.status = {"isTriggerActive": False}

    def stop(self) -> None:
        pass

    def awaitTermination(self) -> None:  # noqa: N802 - Spark's name
        raise RuntimeError("[STREAM_FAILED] Python worker failed to connect back.")


def test_a_query_whose_source_was_late_is_started_again_but_not_for_ever(
    make_run: MakeRun, broker: BrokerProcess, topic: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("penstock.spark.running.query._LAST_EVENTS_S", 0.5)
    sent = sorted(produce(broker, topic, range(2)))
    late: list[Late] = []
    start = PipelineQuery.start

    def start_late(query: PipelineQuery, writer: Any) -> None:
        late.append(Late(writer, 9 if query.name == "never" else 2))
        start(query, late[-1])  # type: ignore[arg-type]

    monkeypatch.setattr(PipelineQuery, "start", start_late)
    told: list[str] = []
    taken = Taken()
    for name in ("never", "late"):
        run = make_run(warn=told.append)
        run.start(name, run.stream(topic=topic), taken)
        run.activities[0].wait(WAIT_S)
        assert late[-1].starts == 3
        assert run.activities[0].state == ("failed" if name == "never" else "finished")
    assert taken.values() == sent
    assert [text.split(", ")[1] for text in told] == [
        "query never: its source did not start in time; it is started again",
        "query never: its source did not start in time; it is started again",
        "query late: its source did not start in time; it is started again",
        "query late: its source did not start in time; it is started again",
    ]


def test_a_failure_names_pipeline_query_and_batch_and_the_batch_comes_again(
    make_run: MakeRun, broker: BrokerProcess, topic: str
):
    wanted = produce(broker, topic, range(4))
    taken = Taken()

    def spill(frame: DataFrame, batch: int) -> None:
        if batch == 1:
            raise ValueError("no room")
        taken(frame, batch)

    run = make_run()
    run.start("rows", run.stream(topic=topic, maxRowsPerTrigger=2), spill)
    run.repeat("after", lambda: 0)
    with pytest.raises(PipelineFailed) as failure:
        run.wait(WAIT_S)
    where, _, said = failure.value.message.partition(": ")
    assert where == f"pipeline {run.name}, query rows, batch 1"
    first, *frames = said.splitlines()
    assert first == "ValueError: no room"
    assert frames == [
        f'  File "{__file__}", line {spill.__code__.co_firstlineno + 2}, in spill',
        '    raise ValueError("no room")',
    ]
    assert [each.state for each in run.activities] == ["failed", "skipped"]
    assert list(taken.batches) == [0]

    run = make_run()
    run.start("rows", run.stream(topic=topic), taken)
    run.wait(WAIT_S)
    assert taken.values() == sorted(wanted)


def test_what_fails_on_an_executor_or_at_the_broker_is_told_in_its_own_words(
    make_run: MakeRun, broker: BrokerProcess, topic: str
):
    produce(broker, topic, range(2))

    @F.udf("string")
    def spoil(value):
        raise KeyError(value[:5])

    run = make_run()
    run.start("udf", run.stream(topic=topic).select(spoil("value").alias("value")), Taken())
    run.start("gone", run.stream(topic="nowhere"), lambda f, n: None)
    for activity in run.activities:
        activity.wait(WAIT_S)
    with pytest.raises(PipelineFailed) as failure:
        run.check()
    first, *frames = failure.value.message.splitlines()
    assert first == f"pipeline {run.name}, query udf, batch 0: KeyError: 'value'"
    assert frames[0].startswith(f'  File "{__file__}"')
    assert len(frames) == 2
    gone = PipelineFailed(run.activities[1].where(), run.activities[1].error or ValueError())
    assert gone.message == (
        f"pipeline {run.name}, query gone: topic 'nowhere' does not exist at {broker.url}"
    )


def test_a_stop_lets_the_batch_end_and_begins_no_other(
    make_run: MakeRun, broker: BrokerProcess, topic: str
):
    wanted = produce(broker, topic, range(6))
    taken = Taken()
    inside, go_on = threading.Event(), threading.Event()

    def slow(frame: DataFrame, batch: int) -> None:
        inside.set()
        go_on.wait(WAIT_S)
        taken(frame, batch)

    run = make_run(once=False, every_s=0.05)
    run.start("rows", run.stream(topic=topic, maxRowsPerTrigger=2), slow)
    assert inside.wait(WAIT_S)
    stopping = threading.Thread(target=run.stop)
    stopping.start()
    assert run.activities[0].is_running
    go_on.set()
    stopping.join(WAIT_S)
    assert [(each.state, each.rows) for each in run.activities] == [("stopped", 2)]
    assert list(taken.batches) == [0]

    run = make_run()
    run.start("rows", run.stream(topic=topic), taken)
    run.wait(WAIT_S)
    assert taken.values() == sorted(wanted)


def test_a_batch_that_does_not_end_is_given_up(
    make_run: MakeRun, broker: BrokerProcess, topic: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("penstock.spark.running.query._CANCEL_S", 60.0)
    produce(broker, topic, range(2))
    inside = threading.Event()
    jobs: list[str] = []

    @F.udf("string")
    def endless(value):
        time.sleep(600)
        return value

    def stuck(frame: DataFrame, batch: int) -> None:
        inside.set()
        frame.collect()

    def work() -> int:
        jobs.append("begun")
        return len(run.spark.range(1).select(endless(F.col("id").cast("string"))).collect())

    run = make_run(once=False, every_s=0.05)
    run.start("rows", run.stream(topic=topic).select(endless("value")), stuck)
    assert inside.wait(WAIT_S)
    run.repeat("job", work)
    eventually(lambda: jobs)
    began = time.monotonic()
    run.stop(patience_s=0.2)
    assert time.monotonic() - began < 45, "it was interrupted, not given up"
    assert [(each.state, each.batches) for each in run.activities] == [("stopped", 0)] * 2


def test_a_write_is_done_once_for_a_name_and_anew_for_a_new_checkpoint(
    make_run: MakeRun, broker: BrokerProcess, topic: str, tmp_path: Path
):
    target = broker.create_topic(new_name("copies"))
    wanted = produce(broker, topic, range(3))

    def copy(run: Run) -> Callable[[DataFrame, int], None]:
        def write(frame: DataFrame, batch: int) -> None:
            for _ in range(2):
                run.write(frame.select("value"), f"copy-{batch}", topic=target)

        return write

    for checkpoint in ("rows", "rows anew"):
        run = make_run()
        run.start(checkpoint, run.stream(topic=topic), copy(run))
        run.wait(WAIT_S)
    assert sorted(row["value"] for row in rows_at(broker, target)) == sorted(wanted * 2)
