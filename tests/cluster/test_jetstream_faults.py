"""Logs on real servers that are killed, stopped and paused: nothing lost, nothing twice."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.api.messages import Produce
from penstock.cluster.jetstream.pieces import JetStreamPieces
from penstock.cluster.jetstream.stream import JetStreamStream
from penstock.cluster.loop_calls import LoopCalls
from penstock.cluster.pieces import SharedPieceStore
from penstock.cluster.replica import Replica
from penstock.cluster.replica_directory import ReplicaDirectory
from penstock.cluster.shared import Stored
from penstock.core.comparison import comparable
from penstock.core.image import StateImage, take_image
from penstock.core.invariants import check
from penstock.core.state import BrokerState
from penstock.engine.clock import SystemClock
from penstock.engine.scheduler import LoopScheduler
from penstock.model.limits import MIB, Limits
from penstock.model.records import Message
from penstock.storage.log import WalOptions
from tests.cluster.jetstream_world import JetStreamBroker, JetStreamWorld
from tests.cluster.nats_servers import NatsServers, nats_servers
from tests.cluster.service_world import Heard
from tests.cluster.stream_kill_loop import LAME_DUCK, KillLoop
from tests.engine.inline_sealing import InlineSealer
from tests.storage.faulty_vfs import FaultyVfs


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServers]:
    """Three servers; each test leaves them as it found them."""
    with nats_servers(tmp_path_factory.mktemp("nats"), extra=LAME_DUCK) as running:
        yield running


def test_frames_survive_kills_of_the_leader_and_of_all_servers(servers: NatsServers) -> None:
    """A short run of `python -m tests.cluster.stream_kill_loop`."""
    loop = KillLoop(servers, seed=1)
    assert loop.run(["leader", "all", "lame duck"]) == [], loop.report


def test_a_broker_starts_when_the_servers_come_and_a_tail_goes_on_when_they_are_back(
    jetstream: JetStreamWorld,
) -> None:
    broker = jetstream.broker(behind_proxy=False)
    heard = Heard()
    broker.stream.follow(1, heard)
    assert jetstream.call(broker.stream.append, 1, b"1") == Stored()
    jetstream.until(lambda: bool(heard.messages))
    for node in jetstream.servers.nodes:
        node.stop()
    late = jetstream.loop.create_task(jetstream.connect())
    jetstream.sleep(0.5)
    assert not late.done()
    for node in jetstream.servers.nodes:
        node.start()
    jetstream.run(asyncio.to_thread(jetstream.servers.wait_until_ready))
    started = jetstream.run(asyncio.wait_for(late, None))
    started.stream = jetstream.run(started.services.stream("shard-0", 1 << 20))
    assert jetstream.bounds(started.stream).last_seq == 1
    while jetstream.call(started.stream.append, 2, b"2") != Stored():
        if jetstream.bounds(started.stream).last_seq == 2:
            break
    jetstream.until(lambda: len(heard.messages) == 2)
    assert heard.messages == [(1, b"1"), (2, b"2")]


def test_a_tail_on_a_server_that_is_paused_goes_on_at_another(jetstream: JetStreamWorld) -> None:
    """It notices by silence: nothing says that the server is gone."""
    broker, other = jetstream.broker(behind_proxy=False), jetstream.broker(behind_proxy=False)
    heard = Heard()
    broker.stream.follow(1, heard)
    jetstream.call(broker.stream.append, 1, b"1")
    jetstream.until(lambda: bool(heard.messages))
    paused = broker.services.connection.server_name
    node = next(node for node in jetstream.servers.nodes if node.name == paused)
    node.pause()
    try:
        jetstream.until(lambda: broker.services.connection.server_name not in ("", paused))
        jetstream.until(lambda: other.services.connection.server_name not in ("", paused))
        while jetstream.call(other.stream.append, 2, b"2") != Stored():
            if jetstream.bounds(other.stream).last_seq == 2:
                break
        jetstream.until(lambda: len(heard.messages) == 2)
    finally:
        node.resume()
    jetstream.run(asyncio.to_thread(jetstream.servers.wait_until_ready))
    assert heard.messages == [(1, b"1"), (2, b"2")]


# -- a replica on a real stream --------------------------------------------------------------------


class ReplicaOfTest:
    """A replica of a broker, whose local files are in memory. It is its own listener."""

    def __init__(self, name: str, broker: JetStreamBroker, pieces: JetStreamPieces) -> None:
        self.name = name
        self._pieces = pieces
        self.endings: list[Any] = []
        self._loop = asyncio.get_running_loop()
        self._stream: JetStreamStream = broker.stream
        self._vfs = InlineSealer.disks[f"/{name}"] = FaultyVfs()
        scheduler = LoopScheduler(self._loop)
        self.replica = Replica(
            name,
            self._stream,
            Limits(),
            SystemClock(),
            scheduler,
            lambda: LoopScheduler(self._loop),
            self._open,
            self,
        )
        self.replica.open()

    def _open(self, scheduler: Any, ended: Any) -> ReplicaDirectory:
        return ReplicaDirectory(
            self._vfs,
            f"/{self.name}",
            WalOptions(segment_bytes=1 << 20, reserve_bytes=0),
            self._stream,
            SharedPieceStore(self._pieces, scheduler, LoopCalls(scheduler)),
            scheduler,
            "tested",
            is_current=lambda: True,
            on_ended=ended,
        )

    def engine_began(self, engine: Any) -> None: ...

    def engine_ended(self, reason: Any) -> None:
        self.endings.append(reason)

    @property
    def state(self) -> BrokerState:
        if self.replica.engine is not None:
            return self.replica.engine.parts.state
        assert self.replica.standby is not None
        return self.replica.standby.state

    def image(self) -> StateImage:
        check(self.state)
        return comparable(take_image(self.state), self.state.last_ts)


class Producers:
    """Some clients, each with one message under way at a time."""

    def __init__(self, owner: ReplicaOfTest, count: int) -> None:
        self.values: list[str] = []
        self.offsets: list[int] = []
        self.errors: list[Any] = []
        self.is_over = False
        self.under_way = 0
        self._owner = owner
        for _ in range(count):
            self._next()

    def _next(self) -> None:
        engine = self._owner.replica.engine
        if self.is_over or engine is None:
            return
        value = f"v{len(self.values)}"
        self.values.append(value)
        self.under_way += 1
        engine.produce(Produce("t", "", value, None), self._done)

    def _done(self, outcome: Any) -> None:
        self.under_way -= 1
        if isinstance(outcome, Message):
            self.offsets.append(outcome.offset)
        else:
            self.errors.append(outcome)
        asyncio.get_running_loop().call_later(0.001, self._next)


def test_the_owner_keeps_all_and_a_standby_has_the_same_state_after_the_leader_was_killed(
    jetstream: JetStreamWorld,
) -> None:
    brokers = [jetstream.broker(behind_proxy=False) for _ in range(2)]

    async def replicas() -> list[ReplicaOfTest]:
        return [
            ReplicaOfTest(name, each, await each.services.pieces("pieces-0", MIB))
            for name, each in zip("ab", brokers, strict=True)
        ]

    owner, standby = jetstream.run(replicas())
    promoted: list[Any] = []
    owner.replica.promote(1, promoted.append)
    jetstream.until(lambda: bool(promoted))
    assert promoted == [None]

    engine = owner.replica.engine
    assert engine is not None
    jetstream.call(engine.create_topic, "t", 1)

    async def produce() -> Producers:
        return Producers(owner, 16)

    producers = jetstream.run(produce())
    jetstream.until(lambda: len(producers.offsets) > 100)
    leader = jetstream.leader_of(brokers[0].stream.place.name)
    jetstream.servers.nodes[leader].kill()
    before = len(producers.offsets)
    jetstream.until(lambda: len(producers.offsets) > before + 200)
    jetstream.servers.nodes[leader].start()
    jetstream.run(asyncio.to_thread(jetstream.servers.wait_until_ready))
    before = len(producers.offsets)
    jetstream.until(lambda: len(producers.offsets) > before + 100)
    producers.is_over = True
    jetstream.until(lambda: producers.under_way == 0)
    # While no leader answered, produces were refused with a reason, and nothing else happened.
    assert {str(error.code) for error in producers.errors} <= {"unavailable"}
    assert sorted(producers.offsets) == list(range(len(producers.offsets)))
    assert owner.endings == []
    position = owner.replica.position()
    jetstream.until(lambda: standby.replica.position() >= position)
    assert standby.image() == owner.image()
    assert jetstream.bounds(brokers[0].stream).last_seq == position
    for each in (owner, standby):
        each.replica.close()
