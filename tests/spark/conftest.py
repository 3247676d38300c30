"""One Spark for all tests of this folder, and brokers for it.

Where there is no PySpark or no Java these tests are left out, but never in CI.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from penstock.model.errors import FailedPrecondition
from tests.broker_process import BrokerProcess
from tests.contract.checks import new_name
from tests.quick_java import quick_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

IS_CI = os.environ.get("CI") == "true"
SMALL_SEGMENTS = {"PENSTOCK_SEGMENT_BYTES": str(8 * 2**20)}

StartBroker = Callable[..., BrokerProcess]

# For the shared session and for every Spark that a test starts: the batches of tests are small, and
# compiling them to the fastest code takes Java longer than running them.
os.environ.update(quick_java())

collect_ignore_glob = []
try:
    import pyspark  # noqa: F401
except ImportError:
    if IS_CI:
        raise
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def java() -> None:
    """For tests that start Java with a script of Spark's: it is on the PATH or in JAVA_HOME."""
    from penstock.spark.java import find_java_home

    try:
        home = find_java_home(os.environ)
    except FailedPrecondition as error:
        if IS_CI:
            raise
        pytest.skip(error.message)
    if home is not None:
        os.environ["JAVA_HOME"] = str(home)


@pytest.fixture(scope="session")
def spark(java: None) -> Iterator[SparkSession]:
    from penstock.spark import session

    made = session("penstock tests", "local[2,2]", {"spark.sql.shuffle.partitions": 2})
    yield made
    made.stop()


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """Durable, with the default settings."""
    data_dir = tmp_path_factory.mktemp("data")
    process = BrokerProcess(data_dir, env=SMALL_SEGMENTS)
    try:
        yield process.start()
        _assert_no_traceback(process)
    finally:
        process.close()
        shutil.rmtree(data_dir)


@pytest.fixture
def start_broker(tmp_path: Path) -> Iterator[StartBroker]:
    """Starts brokers of the test's own, each on a directory and, if asked for, a port."""
    started: list[BrokerProcess] = []

    def start(*flags: str, env: dict[str, str] | None = None, **options: Any) -> BrokerProcess:
        data_dir = tmp_path / f"data-{len(started)}"
        process = BrokerProcess(data_dir, *flags, env=SMALL_SEGMENTS | (env or {}), **options)
        started.append(process)
        return process.start()

    try:
        yield start
        for process in started:
            _assert_no_traceback(process)
    finally:
        for process in started:
            process.close()


@pytest.fixture
def topic(broker: BrokerProcess) -> str:
    """A new topic with two partitions on the shared broker."""
    return broker.create_topic(new_name("orders"), 2)


def _assert_no_traceback(process: BrokerProcess) -> None:
    log = process.stderr()
    assert "Traceback" not in log, log[-5000:]
