"""Brokers and topics for the contract tests.

`broker` is one process a module, shared by tests that use topics of their own. A test that needs
other settings, or restarts, starts one with `start_broker`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.broker_process import IS_CLUSTER, BrokerProcess
from tests.contract.checks import new_name
from tests.contract.http_router import HttpRouter

SMALL_SEGMENTS = {"PENSTOCK_SEGMENT_BYTES": str(8 * 2**20)}
"""Segments are filled with zeros ahead of their use: small ones make a start cheap."""

StartBroker = Callable[..., BrokerProcess]
MakeTopic = Callable[..., str]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves out what cannot hold for a cluster, if the brokers are clusters."""
    if IS_CLUSTER:
        from tests.cluster.embedded_only import reason_for

        for item in items:
            if "tests/contract/" in item.nodeid and (reason := reason_for(item.nodeid)):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="module", autouse=True)
def ended_clusters() -> Iterator[None]:
    """Lets the NATS servers forget the clusters of a module, if its brokers were clusters."""
    yield
    if IS_CLUSTER:
        from tests.cluster.alternating import forget_clusters

        forget_clusters()


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """The default settings on a directory: durable, profile `work`."""
    data_dir = tmp_path_factory.mktemp("data")
    process = BrokerProcess(data_dir, env=SMALL_SEGMENTS)
    try:
        yield process.start()
        assert_no_traceback(process)
    finally:
        process.close()
        shutil.rmtree(data_dir)


@pytest.fixture
def start_broker(tmp_path: Path) -> Iterator[StartBroker]:
    """Starts a broker on a directory of the test's own (`memory=True`: on none)."""
    started: list[BrokerProcess] = []

    def start(*flags: str, memory: bool = False, **options: Any) -> BrokerProcess:
        env = SMALL_SEGMENTS | options.pop("env", {})
        data_dir = None if memory else tmp_path / "data"
        process = BrokerProcess(data_dir, *flags, env=env, **options)
        started.append(process)
        return process.start()

    try:
        yield start
        for process in started:
            assert_no_traceback(process)
    finally:
        for process in started:
            process.close()
        shutil.rmtree(tmp_path / "data", ignore_errors=True)


def assert_no_traceback(process: BrokerProcess) -> None:
    """driftq-65: whatever was sent, the broker met no surprise of its own."""
    log = process.stderr()
    assert "Traceback" not in log, log[-5000:]


@pytest.fixture
def topic(broker: BrokerProcess) -> str:
    """A new topic with one partition on the shared broker."""
    return broker.create_topic(new_name())


@pytest.fixture
def make_topic(broker: BrokerProcess) -> MakeTopic:
    """New topics on the shared broker, with as many partitions as asked for."""

    def make(partitions: int = 1) -> str:
        return broker.create_topic(new_name(), partitions)

    return make


@pytest.fixture
def http_router() -> Iterator[HttpRouter]:
    router = HttpRouter()
    yield router
    router.close()
