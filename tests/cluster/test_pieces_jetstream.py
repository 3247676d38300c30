"""Staged pieces in a real JetStream stream: lists, limits, and the refusal of another's stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from penstock.cluster.jetstream.addresses import read_addresses
from penstock.cluster.jetstream.errors import ClusterRefused
from penstock.cluster.jetstream.pieces import JetStreamPieces
from penstock.cluster.jetstream.services import JetStreamServices, NatsSettings
from penstock.cluster.shared import Found, Full, Stored, Unanswered
from tests.cluster.nats_servers import NatsServers, nats_servers

MAX_BYTES = 4 * 2**20
MESSAGE_BYTES = 2**20
EPOCH = 3 << 32


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServers]:
    with nats_servers(tmp_path_factory.mktemp("nats"), 1) as servers:
        yield servers


def services_of(servers: NatsServers, cluster: str) -> JetStreamServices:
    accept = frozenset({"replicas", "unread-sync"})
    settings = NatsSettings(read_addresses(servers.url), cluster, MESSAGE_BYTES, accept=accept)
    return JetStreamServices(settings, "b1")


def run(
    servers: NatsServers,
    cluster: str,
    work: Callable[[JetStreamServices, JetStreamPieces], Coroutine[Any, Any, None]],
) -> None:
    async def main() -> None:
        services = services_of(servers, cluster)
        try:
            await services.open()
            await work(services, await services.pieces("pieces-0", MAX_BYTES))
        finally:
            await services.close()

    asyncio.run(asyncio.wait_for(main(), 120))


async def ask(command: Callable[..., None], *arguments: Any) -> Any:
    """The outcome; again while the server is too busy to answer."""
    while True:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        command(*arguments, future.set_result)
        outcome = await future
        if not isinstance(outcome, Unanswered):
            return outcome


def test_parts_are_stored_listed_read_and_removed(servers: NatsServers) -> None:
    async def work(services: JetStreamServices, pieces: JetStreamPieces) -> None:
        assert await ask(pieces.parts) == {}
        for number in (EPOCH + 1, EPOCH + 2, EPOCH + 11):
            for part in (1, 2, 0):
                data = f"{number} {part}".encode()
                assert await ask(pieces.put, number, part, data) == Stored()
        assert await ask(pieces.put, EPOCH + 1, 2, b"again") == Stored()
        assert await ask(pieces.get, EPOCH + 1, 2) == Found(b"again")
        assert await ask(pieces.get, EPOCH + 1, 3) is None
        whole = {0, 1, 2}
        listed = await ask(pieces.parts)
        assert listed == {EPOCH + 1: whole, EPOCH + 2: whole, EPOCH + 11: whole}
        assert await ask(pieces.remove, EPOCH + 1) is None
        assert await ask(pieces.remove, EPOCH + 1) is None
        assert await ask(pieces.parts) == {EPOCH + 2: whole, EPOCH + 11: whole}
        assert await ask(pieces.get, EPOCH + 1, 0) is None

    run(servers, "lists", work)


def test_what_does_not_fit_is_refused_and_lists_still_work(servers: NatsServers) -> None:
    async def work(services: JetStreamServices, pieces: JetStreamPieces) -> None:
        data = bytes(MESSAGE_BYTES)
        parts = 0
        while (outcome := await ask(pieces.put, EPOCH, parts + 1, data)) == Stored():
            parts += 1
            assert parts < 10
        assert outcome == Full()
        assert parts == 3
        assert await ask(pieces.parts) == {EPOCH: {1, 2, 3}}
        assert await ask(pieces.remove, EPOCH) is None
        assert await ask(pieces.put, EPOCH, 1, data) == Stored()

    run(servers, "full", work)


def test_a_long_list_is_complete(servers: NatsServers) -> None:
    async def work(services: JetStreamServices, pieces: JetStreamPieces) -> None:
        for first in range(0, 2000, 200):
            numbers = range(first, first + 200)
            await asyncio.gather(*(ask(pieces.put, EPOCH + n, 0, b"x") for n in numbers))
        assert await ask(pieces.parts) == {EPOCH + n: {0} for n in range(2000)}

    run(servers, "many", work)


def test_a_stream_of_another_cluster_is_refused(servers: NatsServers) -> None:
    async def work(services: JetStreamServices, pieces: JetStreamPieces) -> None:
        assert await ask(pieces.put, EPOCH, 0, b"mine") == Stored()
        services.cluster_id = "another"
        with pytest.raises(ClusterRefused, match="not of this cluster"):
            await services.pieces("pieces-0", MAX_BYTES)

    run(servers, "others", work)
