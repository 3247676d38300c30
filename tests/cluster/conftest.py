"""Sealing on the disk in memory; real nats-servers for a file; the two worlds of the contract."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.contract_world import ContractWorld, SimulatedWorld
from tests.cluster.jetstream_world import JetStreamWorld
from tests.cluster.nats_servers import NatsServers, nats_servers
from tests.engine.inline_sealing import PATCHES


@pytest.fixture(autouse=True)
def sealing_inline(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, replacement in PATCHES:
        monkeypatch.setattr(module, name, replacement)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServers]:
    """Three servers, which a test leaves running."""
    with nats_servers(tmp_path_factory.mktemp("nats")) as running:
        yield running


@pytest.fixture
def jetstream(servers: NatsServers) -> Iterator[JetStreamWorld]:
    """Brokers of a new cluster on the servers of the file."""
    made = JetStreamWorld(servers)
    yield made
    made.close()


@pytest.fixture(params=["simulated", "jetstream"])
def both_worlds(request: pytest.FixtureRequest) -> Iterator[ContractWorld]:
    """A test of the contract runs on the simulation and on real servers."""
    if request.param == "simulated":
        yield SimulatedWorld()
    else:
        made: JetStreamWorld = request.getfixturevalue("jetstream")
        yield made
