"""The supervisor: several pipelines in one session, what it shows, and how it ends."""

from __future__ import annotations

import io
import logging
import logging.handlers
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from operator import lt
from pathlib import Path
from typing import Any

import pytest
from pyspark.logger import PySparkLogger
from pyspark.sql import DataFrame, SparkSession

from penstock.model.errors import InvalidArgument, PenstockError, Unauthenticated, Unavailable
from penstock.model.options import TEXT, Option
from penstock.spark.lake.lake import Lake
from penstock.spark.launching import submit
from penstock.spark.launching.catalog import Chosen, choose
from penstock.spark.launching.cluster import SignalForwarder, command, environment
from penstock.spark.launching.register import RUN_ID, Figures, Register, born_of
from penstock.spark.launching.screen import Screen, progress_text
from penstock.spark.launching.signals import Stop
from penstock.spark.launching.supervisor import (
    LOGGERS_OF_RAISED_ERRORS,
    PYTHON_LOGGERS_OF_RAISED_ERRORS,
    Supervisor,
    quieten,
)
from penstock.spark.options import BrokerSettings
from penstock.spark.running.pipeline import Pipeline
from penstock.spark.running.run import Run
from penstock.spark.running.text_table import text_table
from tests.broker_process import BrokerProcess, eventually
from tests.contract.checks import new_name
from tests.spark.sources import free_port, produce


class Stage:
    """A supervisor with pipelines that are functions of a test, and what it has shown."""

    def __init__(self, spark: SparkSession, broker: BrokerProcess, path: Path, once: bool) -> None:
        self.out, self.err = io.StringIO(), io.StringIO()
        self.kept: list[list[Figures]] = []
        self.stop = Stop()
        self.supervisor = Supervisor(
            spark,
            BrokerSettings(url=broker.url, retry_s=5),
            Lake(spark, str(path / "lake")),
            once=once,
            every_s=0.1,
            stop=self.stop,
            screen=Screen(self.out, self.err),
            keep=self.kept.append,
        )

    def run(self, **starts: Callable[[Run], None]) -> bool:
        chosen = [Chosen(Pipeline(new_name(name), "", start), {}) for name, start in starts.items()]
        return self.supervisor.run(chosen)

    def summary(self) -> list[list[str]]:
        """Pipeline, query, batches, rows and state of each line."""
        lines = [line.split() for line in self.out.getvalue().splitlines()[2:]]
        return [[line[0].split("-")[0], *line[1:4], line[-1]] for line in lines]


def test_once_means_one_after_the_other_and_a_failure_leaves_the_others_alone(
    spark: SparkSession, broker: BrokerProcess, topic: str, tmp_path: Path
):
    produce(broker, topic, range(3))
    order: list[str] = []

    def take(frame: DataFrame, batch: int) -> None:
        assert frame.count() == 3
        order.append("first")

    def first(run: Run) -> None:
        run.start("rows", run.stream(topic=topic), take)

    def broken(run: Run) -> None:
        run.repeat("work", lambda: 1 // 0)

    def unstarted(run: Run) -> None:
        raise RuntimeError("what is this?")

    def last(run: Run) -> None:
        order.append("last")
        run.repeat("work", lambda: 8)

    stage = Stage(spark, broker, tmp_path, once=True)
    assert not stage.run(first=first, broken=broken, unstarted=unstarted, last=last)
    assert order == ["first", "last"]
    assert stage.summary() == [
        ["first", "rows", "1", "3", "finished"],
        ["broken", "work", "0", "0", "failed"],
        ["last", "work", "1", "8", "finished"],
    ]
    told = stage.err.getvalue()
    assert "job work: ZeroDivisionError: integer division or modulo by zero" in told
    assert "RuntimeError: what is this?" in told
    assert [each.state for each in stage.kept[-1]] == ["finished", "failed", "finished"]
    assert stage.kept[-1][1].error.startswith("ZeroDivisionError")


def test_without_once_all_run_side_by_side_until_a_stop(
    spark: SparkSession, broker: BrokerProcess, topic: str, tmp_path: Path
):
    seen: list[int] = []
    works = threading.Semaphore(0)

    def rows(run: Run) -> None:
        run.start("rows", run.stream(topic=topic), lambda f, batch: seen.append(f.count()))

    def broken(run: Run) -> None:
        run.repeat("work", lambda: 1 // 0)

    def work() -> int:
        works.release()
        return 1

    def steady(run: Run) -> None:
        run.repeat("work", work)

    stage = Stage(spark, broker, tmp_path, once=False)
    outcome: list[bool] = []
    running = threading.Thread(
        target=lambda: outcome.append(stage.run(rows=rows, broken=broken, steady=steady))
    )
    running.start()
    try:
        for number in range(2):
            produce(broker, topic, range(number, number + 1))
            eventually(lambda: len(seen), partial(lt, number), timeout_s=60)
        assert works.acquire(timeout=20)
        eventually(lambda: "ZeroDivisionError" in stage.err.getvalue())
    finally:
        stage.stop.request()
        running.join(60)
    assert outcome == [False]
    first, second, third = stage.summary()
    assert first == ["rows", "rows", "2", "2", "stopped"]
    assert second[-1] == "failed"
    assert third[-1] == "stopped"
    assert "stopping" in stage.err.getvalue()


# -- before anything runs --------------------------------------------------------------------------


def test_options_reach_the_pipelines_that_have_them(monkeypatch: pytest.MonkeyPatch):
    def pipeline(name: str, *options: str) -> Pipeline:
        return Pipeline(name, "", lambda run: None, tuple(Option(o, TEXT) for o in options))

    known = [pipeline("archive", "topics", "max_rows"), pipeline("metrics", "max_rows")]
    monkeypatch.setattr("penstock.spark.launching.catalog.find", lambda words: known)
    chosen = choose((), [("max_rows", "5"), ("metrics.max_rows", "7"), ("topics", "a")])
    assert [each.settings for each in chosen] == [
        {"topics": "a", "max_rows": "5"},
        {"max_rows": "7"},
    ]
    with pytest.raises(InvalidArgument, match="none of archive, metrics has an option topic"):
        choose((), [("topic", "a")])
    with pytest.raises(
        InvalidArgument, match=r"pipeline metrics: unknown option topics; there are max"
    ):
        choose((), [("metrics.topics", "a")])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["archiv"], "there is no pipeline 'archiv'; there are archive, "),
        (["archive", "archive"], "pipeline archive is named twice"),
        (["nowhere.py"], "there is no file nowhere.py"),
    ],
)
def test_what_is_not_there_is_refused_by_name(words: list[str], said: str):
    with pytest.raises(PenstockError) as failure:
        choose(words, [])
    assert said in failure.value.message


def test_a_broker_that_is_away_or_refuses_is_one_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(submit, "FIRST_TRY_S", 0.1)
    with pytest.raises(Unavailable, match=r"no broker answers at .* starts one$"):
        submit.check_broker(BrokerSettings(url=f"http://127.0.0.1:{free_port()}"))
    guarded = BrokerProcess(None, env={"PENSTOCK_TOKEN": "right-token-of-16"})
    try:
        url = guarded.start().url
        with pytest.raises(Unauthenticated, match="does not take the token") as failure:
            submit.check_broker(BrokerSettings(url=url, token="wrong"))
        assert "wrong" not in failure.value.message
        submit.check_broker(BrokerSettings(url=url, token="right-token-of-16"))
    finally:
        guarded.close()


def test_a_lake_that_cannot_be_written_is_refused(spark: SparkSession, tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PenstockError, match="file/lake"):
        submit.check_lake(Lake(spark, str(tmp_path / "file" / "lake")))
    with pytest.raises(PenstockError, match="nofs"):
        submit.check_lake(Lake(spark, "nofs://host/lake"))
    submit.check_lake(Lake(spark, str(tmp_path / "lake")))
    assert list((tmp_path / "lake").iterdir()) == []


def test_the_command_of_a_cluster_has_no_token_and_makes_the_same_launch():
    launch = submit.Launch(
        words=("archive", "my.py:totals"),
        lake="hdfs:///lake",
        master="spark://host:7077",
        url="http://broker:8080",
        once=True,
        every_s=2.5,
        name="nightly",
        options=(("archive.topics", "a b=c"),),
        conf=(("spark.executor.memory", "4g"),),
    )
    said = command(launch, {})
    assert said[0].endswith("/bin/spark-submit")
    assert said[said.index("--master") + 1] == "spark://host:7077"
    assert "spark.executor.memory=4g" in said
    program = next(at for at, word in enumerate(said) if word.endswith("driver.py"))
    again = submit.launch_of(said[program + 1 :])
    assert again == submit.Launch(**vars(launch) | {"master": None, "conf": ()})
    environ = environment({"PATH": "/bin"}, "secret", "0" * 32)
    assert environ["PENSTOCK_TOKEN"] == "secret"
    assert not any("secret" in word for word in said)


def test_a_signal_goes_to_the_driver_and_until_there_is_one_to_spark_submit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    run_id = "0" * 32
    monkeypatch.setenv(RUN_ID, run_id)
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(sleep) as driver, subprocess.Popen(sleep) as submitted:
        asked = SignalForwarder(run_id, submitted)
        entry = Register().enter("archive", ["archive"], "/lake", "yarn", "http://b", once=True)
        entry.pid, entry.born = driver.pid, born_of(driver.pid)
        Register().keep(entry)
        asked(signal.SIGINT, None)
        assert driver.wait(20) == -signal.SIGTERM
        assert submitted.poll() is None
        asked(signal.SIGINT, None)
        assert submitted.wait(20) == -signal.SIGTERM


# -- the screen ------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def figures(**changed: object) -> Figures:
    usual = {"pipeline": "archive", "name": "records", "state": "running", "batches": 2}
    return Figures(**{**usual, "rows": 12_345, "rows_per_s": 99.6, "lag": 7, **changed})  # type: ignore[arg-type]


def test_progress_is_one_line_on_a_terminal_and_gives_way_to_text():
    out, err = io.StringIO(), Terminal()
    screen = Screen(out, err)
    assert screen.is_due
    screen.progress([figures()])
    assert err.getvalue() == "\r\x1b[Karchive records: 12,345 rows, 100 rows/s, lag 7"
    screen.print("a row\x1b[2J\twith\nlines")
    assert err.getvalue().endswith("\r\x1b[K")
    assert out.getvalue() == "a row\\x1b[2J       with\nlines\n"
    before = err.getvalue()
    screen.clear()
    assert err.getvalue() == before


def test_elsewhere_progress_comes_line_by_line():
    err = io.StringIO()
    screen = Screen(io.StringIO(), err)
    assert not screen.is_due
    screen.progress([figures(lag=None), figures(rows=7, rows_per_s=0.25)])
    assert err.getvalue() == (
        "archive records: 12,345 rows, 100 rows/s | archive records: 7 rows, 0.2 rows/s, lag 7\n"
    )
    assert progress_text(figures(lag=0)).endswith("lag 0")


def test_a_table_ends_its_numbers_in_one_line():
    assert text_table(("name", " rows"), [("archive", "1,000"), ("x", 7)]) == (
        "name      rows\n-------  -----\narchive  1,000\nx            7"
    )


def test_what_spark_also_raises_is_not_logged(spark: SparkSession):
    """Java writes where this process did when it was started, so its levels are looked at; and
    Python's loggers where it did when they were made, so they are listened to."""

    def fail() -> list[str]:
        listener = logging.handlers.BufferingHandler(100)
        loggers = [PySparkLogger.getLogger(name) for name in PYTHON_LOGGERS_OF_RAISED_ERRORS]
        for logger in loggers:
            logger.addHandler(listener)
        with pytest.raises(Exception, match="DIVIDE_BY_ZERO"):
            spark.range(1).selectExpr("1 / (id - id)").collect()
        for logger in loggers:
            logger.removeHandler(listener)
        return [record.name for record in listener.buffer if record.levelno >= logging.ERROR]

    log4j: Any = spark._jvm.org.apache.logging.log4j  # type: ignore[union-attr]

    def level(name: str) -> str:
        return str(log4j.LogManager.getLogger(name).getLevel().name())

    before = {name: level(name) for name in LOGGERS_OF_RAISED_ERRORS}
    assert "ERROR" in before.values()
    assert fail() != []
    quieten(spark)
    try:
        assert {level(name) for name in LOGGERS_OF_RAISED_ERRORS} == {"OFF"}
        assert fail() == []
    finally:
        for name in LOGGERS_OF_RAISED_ERRORS:
            known = log4j.Level.toLevel(before[name])
            log4j.core.config.Configurator.setLevel(name, known)
        for name in PYTHON_LOGGERS_OF_RAISED_ERRORS:
            logging.getLogger(name).setLevel(logging.NOTSET)
