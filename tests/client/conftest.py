"""The SDK against a broker in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.client import Client
from tests.broker_process import BrokerProcess


@pytest.fixture(scope="package")
def broker() -> Iterator[BrokerProcess]:
    with BrokerProcess(None) as process:
        yield process


@pytest.fixture
def client(broker: BrokerProcess) -> Iterator[Client]:
    with Client(broker.url) as client:
        yield client


@pytest.fixture
def topic(client: Client, request: pytest.FixtureRequest) -> str:
    """A topic of the test's own."""
    name: str = request.node.name
    client.create_topic(name)
    return name
