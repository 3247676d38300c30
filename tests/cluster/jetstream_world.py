"""Real JetStream services in a test: brokers' connections on one loop, and faults of their network.

A `JetStreamWorld` has the interface of `ContractWorld`, so that the tests of the contract of
`cluster/shared.py` run on the simulation and on real servers. Its time is real: it waits for
events, within a generous bound.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from penstock.cluster.jetstream.addresses import read_addresses
from penstock.cluster.jetstream.keys import JetStreamKeys
from penstock.cluster.jetstream.services import JetStreamServices, NatsSettings
from penstock.cluster.jetstream.stream import JetStreamStream
from penstock.cluster.shared import Bounds
from tests.cluster.nats_proxy import NatsProxy
from tests.cluster.nats_servers import NatsServers

WAIT_S = 90.0
STREAM_BYTES = 64 * 1024 * 1024
MESSAGE_BYTES = 1024 * 1024 + 64 * 1024
ACCEPTED = frozenset({"unread-sync"})
T = TypeVar("T")
_numbers = itertools.count()


def new_cluster_name() -> str:
    """A name that nothing on the servers has yet."""
    return f"t{os.getpid()}-{next(_numbers)}"


class JetStreamBroker:
    """One broker's services, each behind a proxy if asked for."""

    def __init__(self, services: JetStreamServices, proxy: NatsProxy | None) -> None:
        self.services = services
        self.proxy = proxy
        self.stream: JetStreamStream

    @property
    def keys(self) -> JetStreamKeys:
        return self.services.keys


class JetStreamWorld:
    """Everything that its tests make has a cluster's name of its own."""

    def __init__(self, servers: NatsServers, *, accept: frozenset[str] = ACCEPTED) -> None:
        self.servers = servers
        self.loop = asyncio.new_event_loop()
        self.loop_errors: list[dict[str, Any]] = []
        self.loop.set_exception_handler(lambda loop, context: self.loop_errors.append(context))
        self.cluster = new_cluster_name()
        self.brokers: list[JetStreamBroker] = []
        self._accept = accept
        self._outcomes: list[list[Any]] = []

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(work, WAIT_S))

    def broker(
        self, *, behind_proxy: bool = True, max_bytes: int = STREAM_BYTES, **settings: Any
    ) -> JetStreamBroker:
        made = self.run(self.connect(behind_proxy=behind_proxy, **settings))
        made.stream = self.run(made.services.stream("shard-0", max_bytes))
        return made

    async def connect(self, *, behind_proxy: bool = False, **settings: Any) -> JetStreamBroker:
        """A broker without a stream yet."""
        proxy, url = None, self.servers.url
        if behind_proxy:
            proxy = NatsProxy(self.servers.nodes[0].client_port)
            await proxy.open()
            url = f"nats://127.0.0.1:{proxy.port}"
        wanted: dict[str, Any] = {
            "addresses": read_addresses(url),
            "cluster": self.cluster,
            "max_message_bytes": MESSAGE_BYTES,
            "accept": self._accept,
        }
        services = JetStreamServices(NatsSettings(**wanted | settings), f"b{len(self.brokers)}")
        made = JetStreamBroker(services, proxy)
        self.brokers.append(made)
        await services.open()
        return made

    # -- as ContractWorld ------------------------------------------------------------------------

    def call(self, command: Callable[..., None], *arguments: Any) -> Any:
        """The outcome, which must be the only one, as `close` checks."""
        outcomes: list[Any] = []
        command(*arguments, outcomes.append)
        assert outcomes == [], "called back within the call"
        self._outcomes.append(outcomes)
        self.until(lambda: bool(outcomes))
        return outcomes[0]

    def until(self, is_true: Callable[[], bool], most_s: float = WAIT_S) -> float:
        """Lets the loop run until `is_true`. Returns how many seconds that took."""
        began = time.monotonic()
        while not is_true():
            assert time.monotonic() - began < most_s, "it did not happen in time"
            self.loop.run_until_complete(asyncio.sleep(0.002))
        return time.monotonic() - began

    def quiet(self) -> None:
        """Waits until what is on its way has arrived."""
        for broker in self.brokers:
            self.call(broker.services.keys.get, "quiet")
        self.loop.run_until_complete(asyncio.sleep(0.1))

    def away(self, broker: JetStreamBroker) -> None:
        """This broker cannot reach the services until `back`."""
        assert broker.proxy is not None
        broker.proxy.away()
        self.until(lambda: not broker.services.connection.is_connected)

    def back(self, broker: JetStreamBroker) -> None:
        """This broker reaches the services again, on a new connection."""
        assert broker.proxy is not None
        accepted = broker.proxy.accepted
        broker.proxy.back()
        self.until(lambda: broker.proxy is not None and broker.proxy.accepted > accepted)
        self.until(lambda: broker.services.connection.is_connected)

    def call_losing_answer(
        self, broker: JetStreamBroker, command: Callable[..., None], *arguments: Any
    ) -> Any:
        """The outcome of a request that arrives and whose answer does not."""
        assert broker.proxy is not None
        broker.proxy.swallows_answers = True
        outcome = self.call(command, *arguments)
        self.back(broker)
        return outcome

    def call_losing_request(
        self, broker: JetStreamBroker, command: Callable[..., None], *arguments: Any
    ) -> Any:
        assert broker.proxy is not None
        broker.proxy.swallows_requests = True
        outcome = self.call(command, *arguments)
        self.back(broker)
        return outcome

    # -- more ------------------------------------------------------------------------------------

    def bounds(self, stream: JetStreamStream) -> Bounds:
        """The bounds, once the stream has a leader that answers."""
        while not isinstance(bounds := self.call(stream.bounds), Bounds):
            self.loop.run_until_complete(asyncio.sleep(0.05))
        return bounds

    def sleep(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))

    def leader_of(self, stream_name: str) -> int:
        """The node that leads the stream, once there is one."""
        found: list[int | None] = [None]

        def is_led() -> bool:
            found[0] = self.servers.leader_of(stream_name)
            return found[0] is not None

        self.until(is_led)
        assert found[0] is not None
        return found[0]

    def remove_streams(self) -> None:
        """Makes room on the servers, which reserve the limit of each stream."""
        connected = [each for each in self.brokers if each.services.connection.is_connected]
        for name in (f"penstock-{self.cluster}_shard-0", f"KV_penstock-{self.cluster}"):
            if connected:
                self.run(self.delete_stream(connected[-1], name))

    async def delete_stream(self, broker: JetStreamBroker, name: str) -> None:
        await broker.services.connection.ask(f"$JS.API.STREAM.DELETE.{name}".encode(), b"", 10.0)

    def close(self) -> None:
        try:
            self.remove_streams()
            for broker in self.brokers:
                self.loop.run_until_complete(broker.services.close())
                if broker.proxy is not None:
                    self.loop.run_until_complete(broker.proxy.close())
            self.loop.run_until_complete(asyncio.sleep(0))
        finally:
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.run_until_complete(asyncio.sleep(0.01))
            self.loop.close()
        assert all(len(each) == 1 for each in self._outcomes), "called back more than once"
        assert self.loop_errors == []
