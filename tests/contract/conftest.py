"""Brokers and topics for the contract tests.

`broker` is one process a module, shared by tests that use topics of their own. A test that needs
other settings, or restarts, starts one with `start_broker`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.broker_process import BrokerProcess
from tests.contract.checks import new_name

StartBroker = Callable[..., BrokerProcess]
MakeTopic = Callable[..., str]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """The default settings on a directory: durable, profile `work`."""
    process = BrokerProcess(tmp_path_factory.mktemp("data"))
    try:
        yield process.start()
    finally:
        process.close()


@pytest.fixture
def start_broker(tmp_path: Path) -> Iterator[StartBroker]:
    """Starts a broker on a directory of the test's own (`memory=True`: on none)."""
    started: list[BrokerProcess] = []

    def start(*flags: str, memory: bool = False, **options: Any) -> BrokerProcess:
        data_dir = options.pop("data_dir", tmp_path / "data")
        process = BrokerProcess(None if memory else data_dir, *flags, **options)
        started.append(process)
        return process.start()

    yield start
    for process in started:
        process.close()


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
