"""Random histories of brokers that choose their owner themselves, under load and with faults.

Brokers are killed, paused, stopped in order and started again; they lose their stream, their keys
or both; answers are slow or lost; their clocks differ; people remove leases. A failing seed is in
the test's name. To run many more: `CLUSTER_SEEDS=1000-9000 pytest -n 2 <this file>`.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from penstock.api.messages import Produce, Settle
from penstock.api.topics import TopicReport
from penstock.cluster.ownership import ShardRole
from penstock.model.envelope import Envelope
from penstock.model.errors import PenstockError
from penstock.model.limits import Limits
from penstock.model.records import Message
from penstock.storage.log import WalOptions
from tests.cluster.members import TTL_MS, ClusterWorld, Member
from tests.cluster.simulated_service import Faults
from tests.cluster.trouble import Trouble
from tests.engine.harness import Reader

STEPS = 40
LEASE_KEY = "shard.0"
FOUND_MS = 4 * TTL_MS
"""How soon an owner is found when all troubles are over: a lease runs out after requests that the
troubles held up were given up, and a copy that was opened again has caught up."""
SEGMENT_BYTES = (16 * 1024, *[1024 * 1024] * 7)
"""Few brokers seal files meanwhile, which takes most of the time."""


def _seeds() -> range:
    first, _, end = os.environ.get("CLUSTER_SEEDS", "0-300").rpartition("-")
    return range(int(first or 0), int(end))


class Order:
    """A message that its client sends until it is acknowledged. None acknowledges a repetition."""

    def __init__(self, value: str) -> None:
        self.command = Produce("t", "", value, Envelope(idempotency_key=value))
        self.attempts: list[list[Any]] = []

    @property
    def is_stored(self) -> bool:
        return any(each and not isinstance(each[0], PenstockError) for each in self.attempts)

    @property
    def offset(self) -> int | None:
        """Where an acknowledgement says that it is."""
        told = [each[0] for each in self.attempts if each and isinstance(each[0], Message)]
        return told[0].offset if told else None

    @property
    def is_refused(self) -> bool:
        return all(each and isinstance(each[0], PenstockError) for each in self.attempts)


class ClusterHistory:
    """One run: what was asked, what was acknowledged, and what must be true of it."""

    def __init__(self, seed: int) -> None:
        segment_bytes = SEGMENT_BYTES[seed % len(SEGMENT_BYTES)]
        self.world = world = ClusterWorld(
            seed,
            options=WalOptions(segment_bytes=segment_bytes, reserve_bytes=0),
            limits=Limits(lease_ms=700, memory_bytes=1 << 20),
        )
        self.draw = draw = world.simulation.random
        self.orders: dict[str, Order] = {}
        self.acks: list[tuple[int, list[Any]]] = []
        self.readers: list[tuple[Member, Reader]] = []
        self.counts: Counter[str] = Counter()
        self.down: dict[str, int] = {}
        """Brokers that are stopped or killed, and when they start again."""
        for name in draw.choice(("ab", "abc", "abc")):
            world.start(
                name,
                speed=draw.uniform(0.97, 1.03),
                ahead_ms=draw.choice((0, 0, draw.randint(-300_000, 300_000))),
                started_ms=draw.randint(0, 1_000_000),
            )
        self.names = "".join(world.nodes)
        world.must(world.owner().engine.create_topic, "t", 1)
        world.stream.faults, world.keys.faults = Faults.drawn(draw), Faults.drawn(draw)
        world.probes_are_blind = draw.random() < 0.3
        self.trouble = Trouble(
            world.simulation, [world.stream, world.keys], [], every_ms=2000, most_ms=6000
        )
        self._update_trouble()

    def _update_trouble(self) -> None:
        self.trouble.processes = [each.process for each in self.world.nodes.values()]

    # -- steps -----------------------------------------------------------------------------------

    def step(self) -> None:
        weights = {
            self._produce: 10.0,
            self._read: 4.0,
            self._consume: 1.0,
            self._settle: 5.0,
            self._kill: 0.4,
            self._stop: 0.3,
            self._cut: 0.5,
            self._spoil_lease: 0.15,
            self._fail_disk: 0.15,
            self._wait: 2.0,
        }
        (step,) = self.draw.choices(list(weights), list(weights.values()))
        self.counts[step.__name__] += 1
        step()
        self._start_again()
        self.world.simulation.pass_ms(self.draw.choice((1, 5, 20, 100, 300)))

    def _serving(self) -> list[Member]:
        """Returns the brokers that have an engine, those included that do not know that another
        one has taken over."""
        members = self.world.nodes.values()
        return [each for each in members if each.is_running and each.replica.engine is not None]

    def _send(self, order: Order) -> None:
        serving = self._serving()
        if serving:
            engine = self.draw.choice(serving).engine
            order.attempts.append(self.world.submit(engine.produce, order.command))

    def _produce(self) -> None:
        for order in self.orders.values():
            if not order.is_stored and order.is_refused:
                self._send(order)
        for _ in range(self.draw.randint(1, 4)):
            value = f"v{len(self.orders)}" + "x" * self.draw.choice((0, 50, 1500))
            self.orders[value] = Order(value)
            self._send(self.orders[value])

    def _read(self) -> None:
        """A read shows everything that was acknowledged before it was asked."""
        told = [each.offset for each in self.orders.values()]
        least = max((offset + 1 for offset in told if offset is not None), default=0)

        def check(outcome: object) -> None:
            if isinstance(outcome, TopicReport):
                self.counts["answered reads"] += 1
                assert outcome.next_offset >= least, "a stale read"

        for member in self._serving():
            member.engine.describe_topic("t", check)

    def _consume(self) -> None:
        for member in self._serving():
            reader = Reader("t", "g", f"o{len(self.readers)}")
            member.engine.open_consumer("t", "g", reader.owner, 0, 0, reader, lambda _: None)
            self.readers.append((member, reader))

    def _settle(self) -> None:
        for member, reader in self.readers[-4:]:
            if not member.is_running or member.replica.engine is None:
                continue
            for item in reader.take():
                settle = Settle("t", "g", 0, item.offset, reader.owner, "")
                self.acks.append((item.offset, self.world.submit(member.engine.ack, settle)))

    def _any(self) -> Member:
        """Draws a broker; often the owner, where it hurts."""
        serving = self._serving()
        if serving and self.draw.random() < 0.5:
            return self.draw.choice(serving)
        return self.world[self.draw.choice(self.names)]

    def _kill(self) -> None:
        member = self._any()
        if not member.process.is_dead:
            member.kill()
            self._down_for_a_while(member)

    def _stop(self) -> None:
        member = self._any()
        if member.is_running and member.name not in self.down:
            member.stop()
            self._down_for_a_while(member)

    def _down_for_a_while(self, member: Member) -> None:
        lasts_ms = self.draw.choice((1, 10, 500, 5000))
        self.down[member.name] = self.world.simulation.now_ms + lasts_ms

    def _start_again(self, *, all_of_them: bool = False) -> None:
        for name, at_ms in list(self.down.items()):
            if all_of_them or self.world.simulation.now_ms >= at_ms:
                del self.down[name]
                self.world[name].restart()
                self._update_trouble()

    def _cut(self) -> None:
        """A broker loses the stream and the keys together, as behind a broken switch."""
        world, process = self.world, self._any().process
        services = (world.stream, world.keys)
        for service in services:
            service.cut(process)

        def mend() -> None:
            for service in services:
                service.connect(process)

        lasts_ms = self.draw.randint(1, 3 * TTL_MS)
        world.simulation.scheduler.later(lasts_ms, mend)

    def _spoil_lease(self) -> None:
        """Somebody removes or overwrites the lease."""
        keys = self.world.keys
        if self.draw.random() < 0.5:
            keys.delete(LEASE_KEY)
        else:
            keys.set(LEASE_KEY, b'{"owner": "nobody"')

    def _fail_disk(self) -> None:
        """One of the next writes of a broker fails."""
        self._any().vfs.fail_call(
            self.draw.randint(1, 3), errno.EIO, only=("write",), thread="penstock-wal-writer"
        )

    def _wait(self) -> None:
        self.world.simulation.pass_ms(self.draw.choice((200, 1000, 2 * TTL_MS)))

    # -- the end ---------------------------------------------------------------------------------

    def finish(self) -> Member:
        """Everything works again: soon there is an owner, and it answers every client."""
        world = self.world
        self.trouble.end()
        for member in world.nodes.values():
            member.vfs.fail_call(0, 0)
        self._start_again(all_of_them=True)
        self._wait_until(lambda: self._answers() is not None, FOUND_MS)
        for order in self.orders.values():
            while not order.is_stored:
                owner = world.owner()
                order.attempts.append([world.call(owner.engine.produce, order.command)])
        world.simulation.pass_ms(2 * TTL_MS)
        owner = world.owner()
        assert owner is self._answers(), "the owner changes without any trouble"
        return owner

    def _answers(self) -> Member | None:
        owners = [each for each in self.world.nodes.values() if each.role is ShardRole.OWNER]
        if len(owners) == 1 and owners[0].replica.engine is not None:
            return owners[0]
        return None

    def _wait_until(self, is_true: Callable[[], bool], most_ms: int) -> None:
        took_ms = self.world.simulation.wait_until(is_true, most_ms)
        self.counts["ms until an owner"] = took_ms

    def check(self, owner: Member) -> None:
        world = self.world
        values = world.values(owner)
        assert sorted(values) == sorted(self.orders), "a message is missing, or is there twice"
        for value, order in self.orders.items():
            assert order.offset is None or values[order.offset] == value
        done = {offset for offset, outcome in self.acks if outcome == [None]}
        reader = world.consume(owner, owner="last")
        world.simulation.pass_ms(3000)
        assert not done & {item.offset for item in reader.items}, "delivered again after its ack"
        world.simulation.wait_until(lambda: self._are_equal(owner), most_ms=1000)
        image = owner.image()
        for member in world.nodes.values():
            assert member.refusals == []
            assert member.image() == image, f"{member.name} differs"
        served = [epoch for epoch, _ in world.epochs]
        assert len(served) == len(set(served))

    def _are_equal(self, owner: Member) -> bool:
        """Says whether all brokers have everything, and nothing is under way."""
        at = [member.replica.position() for member in self.world.nodes.values()]
        return len(set(at)) == 1 and not owner.engine.parts.log.has_pending


@pytest.mark.parametrize("seed", _seeds())
def test_brokers_that_choose_their_owner_lose_nothing(seed: int) -> None:
    history = ClusterHistory(seed)
    try:
        for _ in range(STEPS):
            history.step()
        history.check(history.finish())
        print(dict(history.counts), len(history.world.epochs), history.trouble.happened)
    finally:
        history.world.close()
