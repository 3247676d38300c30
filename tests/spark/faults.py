"""The connector with something that happens in the middle of a write.

A hook runs in the process that Spark runs the writer in: after a task has staged its rows, and
before or after the driver's commit. Hooks and classes travel by value, for Spark's workers do not
import the tests.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

from pyspark import cloudpickle
from pyspark.sql import SparkSession

from penstock.spark.datasource import PenstockDataSource
from penstock.spark.options import SinkSettings
from penstock.spark.sink import BatchSink, StreamSink
from tests.broker_process import BrokerProcess

Hook = Callable[[], object]

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def nothing() -> None:
    pass


def register_faulty(
    spark: SparkSession,
    name: str,
    *,
    after_write: Hook = nothing,
    before_commit: Hook = nothing,
    after_commit: Hook = nothing,
) -> str:
    """The name of a format that is the connector's, but for the hooks."""

    class Hooks:
        def write(self, iterator: Any) -> Any:
            staged = super().write(iterator)  # type: ignore[misc]
            after_write()
            return staged

        def commit(self, *arguments: Any) -> None:
            before_commit()
            super().commit(*arguments)  # type: ignore[misc]
            after_commit()

    class FaultyBatchSink(Hooks, BatchSink):
        pass

    class FaultyStreamSink(Hooks, StreamSink):
        pass

    class Faulty(PenstockDataSource):
        @classmethod
        def name(cls) -> str:
            return name

        def writer(self, schema: Any, overwrite: bool) -> Any:
            settings = SinkSettings.from_options(self.options, "write")
            return FaultyBatchSink(settings, schema, overwrite)

        def streamWriter(self, schema: Any, overwrite: bool) -> Any:  # noqa: N802 - Spark's name
            settings = SinkSettings.from_options(self.options, "writeStream")
            return FaultyStreamSink(settings, schema, overwrite)

    spark.dataSource.register(Faulty)
    return name


def once(marker: Path, hook: Hook) -> Hook:
    """The hook, the first time only, whichever process comes first."""
    path = str(marker)

    def act() -> None:
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        hook()

    return act


def die() -> None:
    """As a worker that the system kills."""
    os.kill(os.getpid(), signal.SIGKILL)


def kill(pid: int, after_s: float = 0.0) -> Hook:
    """Ends the process at once, or a while later, beside what comes next."""

    def act() -> None:
        if after_s == 0:
            os.kill(pid, signal.SIGKILL)
        else:
            Thread(target=later, daemon=True).start()

    def later() -> None:
        time.sleep(after_s)
        os.kill(pid, signal.SIGKILL)

    return act


def until_dead(pid: int) -> Hook:
    def act() -> None:
        while Path(f"/proc/{pid}").exists():
            time.sleep(0.01)

    return act


@contextmanager
def revived(broker: BrokerProcess) -> Iterator[Callable[[], int]]:
    """Whenever the broker dies in here it is started again; what is yielded says how often."""
    stop = Event()
    lives: list[int] = []

    def watch() -> None:
        while not stop.wait(0.05):
            if not broker.is_running():
                lives.append(1)
                broker.kill()
                broker.start()

    watcher = Thread(target=watch)
    watcher.start()
    try:
        yield lambda: len(lives)
    finally:
        stop.set()
        watcher.join()
