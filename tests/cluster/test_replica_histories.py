"""Random histories of brokers on one stream with faults: nothing acknowledged is lost, or twice.

Who is promoted is random too, and often wrong: two brokers at once, one that is cut off. The fence
alone must keep them apart. A failing seed is in the test's name.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest

from penstock.api.messages import Produce, Settle
from penstock.model.errors import PenstockError
from penstock.model.limits import Limits
from penstock.model.records import Message
from penstock.storage.log import WalOptions
from tests.cluster.replicas import Node, ReplicaWorld
from tests.cluster.simulated_service import Faults
from tests.cluster.trouble import Trouble
from tests.engine.harness import Reader

SEEDS = range(int(os.environ.get("CLUSTER_SEEDS", "25")))
STEPS = 200
TINY = WalOptions(segment_bytes=16 * 1024, reserve_bytes=0)


class History:
    """One run: what was asked, what was acknowledged, and what must be true of it."""

    def __init__(self, seed: int) -> None:
        self.world = ReplicaWorld(
            seed, names="abc", options=TINY, limits=Limits(lease_ms=700, memory_bytes=1 << 20)
        )
        self.draw = self.world.simulation.random
        self.stored: dict[str, list[Any]] = {}
        self.settled: list[tuple[int, list[Any]]] = []
        self.readers: list[tuple[Node, Reader]] = []
        self.counts: Counter[str] = Counter()
        node = self.world.must_promote("a")
        self.world.must(node.engine.create_topic, "t", 1)
        world = self.world
        world.stream.faults = Faults.drawn(self.draw)
        self.trouble = Trouble(
            world.simulation,
            [world.stream],
            [each.process for each in world.nodes.values()],
            every_ms=1500,
            most_ms=3000,
        )

    # -- steps -----------------------------------------------------------------------------------

    def step(self) -> None:
        kind = self.draw.choices(
            ["produce", "consume", "settle", "promote", "kill", "read", "seal", "wait"],
            [10, 1, 6, 0.5, 0.3, 1, 1, 2],
        )[0]
        if not self._serving() and self.draw.random() < 0.5:
            kind = "promote"
        self.counts[kind] += 1
        getattr(self, f"_{kind}")()
        self.world.simulation.pass_ms(self.draw.choice([1, 5, 20, 100]))

    def _serving(self) -> list[Node]:
        return [
            node
            for node in self.world.nodes.values()
            if node.replica.engine is not None
            and not node.process.is_paused
            and not node.process.is_dead
        ]

    def _produce(self) -> None:
        for node in self._serving():
            for _ in range(self.draw.randint(1, 5)):
                value = f"v{len(self.stored)}" + "x" * self.draw.choice([0, 50, 2000])
                command = Produce("t", "", value, None)
                self.stored[value] = self.world.submit(node.engine.produce, command)

    def _consume(self) -> None:
        for node in self._serving():
            reader = Reader("t", "g", f"o{len(self.readers)}")
            node.engine.open_consumer("t", "g", reader.owner, 0, 0, reader, lambda _: None)
            self.readers.append((node, reader))

    def _settle(self) -> None:
        for node, reader in self.readers[-4:]:
            if node.replica.engine is None or node.process.is_paused or node.process.is_dead:
                continue
            for item in reader.take():
                settle = Settle("t", "g", 0, item.offset, reader.owner, "")
                if self.draw.random() < 0.8:
                    outcome = self.world.submit(node.engine.ack, settle)
                    self.settled.append((item.offset, outcome))
                else:
                    self.world.submit(node.engine.nack, settle, "no")

    def _promote(self) -> None:
        name = self.draw.choice(list(self.world.nodes))
        node = self.world[name]
        if node.replica.standby is not None and not node.process.is_paused:
            self.world.promote(name)

    def _kill(self) -> None:
        node = self.world[self.draw.choice(list(self.world.nodes))]
        node.process.resume()
        node.restart()
        processes = [each.process for each in self.world.nodes.values()]
        self.trouble.processes = processes

    def _read(self) -> None:
        for node in self._serving():
            node.is_current = self.draw.random() < 0.5
            self.world.submit(node.engine.describe_topic, "t")

    def _seal(self) -> None:
        for node in self._serving():
            node.engine.parts.log.roll()

    def _wait(self) -> None:
        self.world.simulation.pass_ms(self.draw.choice([200, 1000, 4000]))

    # -- the end ---------------------------------------------------------------------------------

    def finish(self) -> Node:
        """Everything works again; one broker owns the shard, and the others have caught up."""
        world = self.world
        self.trouble.end()
        world.stream.without_faults()
        world.simulation.pass_ms(5000)
        while True:
            outcomes = world.promote("b")
            world.simulation.wait_until(lambda: bool(outcomes), most_ms=120_000)  # noqa: B023
            if outcomes == [None]:
                break
            if world["b"].replica.engine is not None:
                world["b"].replica.drop("a test")
            world.simulation.pass_ms(500)
        for node in world.nodes.values():
            if node.name != "b":
                # An owner that appends nothing learns of the next one by its lease only.
                node.replica.drop("a test")
        world.simulation.pass_ms(5000)
        return world["b"]

    def check(self, owner: Node) -> None:
        values = self.world.values(owner)
        assert len(values) == len(set(values)), "a message was stored twice"
        told = {value: outcome[0] for value, outcome in self.stored.items() if outcome}
        acknowledged = {value: m for value, m in told.items() if isinstance(m, Message)}
        for value, message in acknowledged.items():
            assert values[message.offset] == value, "an acknowledged message is elsewhere, or gone"
        assert set(values) <= set(self.stored)
        self.counts["acknowledged"] = len(acknowledged)
        self.counts["refused"] = sum(isinstance(each, PenstockError) for each in told.values())
        done = {offset for offset, outcome in self.settled if outcome == [None]}
        reader = self.world.consume(owner, owner="last")
        self.world.simulation.pass_ms(3000)
        assert not done & {item.offset for item in reader.items}, "delivered again after its ack"
        self.world.simulation.pass_ms(100)
        image = owner.image()
        for node in self.world.nodes.values():
            assert node.replica.position() == owner.replica.position()
            assert node.image() == image, f"{node.name} differs"
        served = [epoch for epoch, _ in self.world.epochs]
        assert len(served) == len(set(served))


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_acknowledged_is_lost_or_twice(seed: int) -> None:
    history = History(seed)
    try:
        for _ in range(STEPS):
            history.step()
        history.check(history.finish())
        print(dict(history.counts), len(history.world.epochs), history.trouble.happened)
    finally:
        history.world.close()
