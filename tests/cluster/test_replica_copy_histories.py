"""Random lives of three brokers whose stream is purged, lost in part, and filled up.

Brokers are killed at any time, and one of them may lose its disk while two others have everything.
The stream forgets its newest messages now and then. Nothing that was acknowledged is lost, or there
twice. A failing seed is in the test's name.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest

from penstock.api.messages import Produce
from penstock.cluster import copying
from penstock.cluster.ownership import ShardRole
from penstock.model.records import Message
from penstock.storage.log import WalOptions
from tests.cluster.members import ClusterWorld, Member

SEEDS = range(int(os.environ.get("CLUSTER_SEEDS", "4")))
STEPS = 60
TINY = WalOptions(segment_bytes=16 * 1024, reserve_bytes=0)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "PAUSE_S", 0.0)
    monkeypatch.setattr(copying, "CHUNK_BYTES", 4000)


class Lives:
    def __init__(self, seed: int) -> None:
        self.world = ClusterWorld(seed, options=TINY)
        self.draw = self.world.simulation.random
        self.world.start("abc")
        owner = self.world.owner()
        self.world.must(owner.engine.create_topic, "t", 1)
        self.stored: dict[str, list[Any]] = {}
        self.counts: Counter[str] = Counter()
        self.world.before_read = self._before_read

    def step(self) -> None:
        kinds = ["produce", "kill", "start", "wipe", "lose", "fill", "wait"]
        kind = self.draw.choices(kinds, [12, 1, 3, 0.5, 0.3, 0.3, 2])[0]
        self.counts[kind] += bool(getattr(self, f"_{kind}")())
        self.world.simulation.pass_ms(self.draw.choice([5, 50, 500]))

    def _owner(self) -> Member | None:
        for member in self.world.nodes.values():
            if not member.process.is_dead and member.node.ownership.role is ShardRole.OWNER:
                return member
        return None

    def _produce(self) -> bool:
        owner = self._owner()
        for _ in range(self.draw.randint(1, 30) if owner is not None else 0):
            value = f"v{len(self.stored)} ".ljust(600, "x")
            if owner is not None and owner.replica.engine is not None:
                command = Produce("t", "", value, None)
                self.stored[value] = self.world.submit(owner.engine.produce, command)
                self.world.simulation.pass_ms(self.draw.choice([1, 1, 5]))
        return owner is not None

    def _live(self) -> list[Member]:
        return [each for each in self.world.nodes.values() if not each.process.is_dead]

    def _dead(self) -> list[Member]:
        return [each for each in self.world.nodes.values() if each.process.is_dead]

    def _kill(self) -> bool:
        live = self._live()
        if len(live) < 2:
            return False
        self.draw.choice(live).kill()
        return True

    def _start(self) -> bool:
        dead = self._dead()
        if dead:
            self.draw.choice(dead).start()
        return bool(dead)

    def _wipe(self) -> bool:
        """A broker loses its disk, while two others have caught up."""
        dead, live = self._dead(), self._live()
        whole = [each for each in live if each.replica.is_caught_up()]
        if not dead or len(whole) < 2:
            return False
        for path in dead[0].vfs.paths():
            dead[0].vfs.unlink(path)
        return True

    def _lose(self) -> bool:
        """The stream forgets its last messages. Every broker that has them is running, or will."""
        self.world.simulation.pass_ms(2000)
        stream = self.world.stream
        count = min(self.draw.randint(1, 4), stream.last_seq - stream.first_seq)
        ends = [each.replica.position() for each in self._live() if each.replica.is_caught_up()]
        if count < 1 or len(ends) < 2 or max(ends) != stream.last_seq:
            return False
        stream.lose_tail(stream.last_seq - count)
        self.world.simulation.pass_ms(self.draw.choice([100, 120_000]))
        return True

    def _fill(self) -> bool:
        """The stream is half full from now on, or was until now."""
        stream = self.world.stream
        used = sum(map(len, stream.messages.values()))
        stream.max_bytes = self.draw.choice([1 << 40, int(1.8 * used) + 100_000])
        return True

    def _wait(self) -> bool:
        self.world.simulation.pass_ms(self.draw.choice([3000, 12_000]))
        return True

    def _before_read(self, node: object, name: str) -> None:
        if self.draw.random() < 0.05:
            raise copying.PeerFailed("a connection broke")

    # -- the end ---------------------------------------------------------------------------------

    def check(self) -> None:
        world = self.world
        for member in self._dead():
            member.start()
        world.stream.max_bytes = 1 << 40
        world.simulation.pass_ms(150_000)
        owner = world.owner(most_ms=300_000)
        world.produce(owner, "the last")
        world.simulation.wait_until(self._are_equal, most_ms=300_000)
        values = world.values(owner)
        assert len(values) == len(set(values))
        told = {value: outcome[0] for value, outcome in self.stored.items() if outcome}
        for value, outcome in told.items():
            if isinstance(outcome, Message):
                assert values[outcome.offset] == value, "an acknowledged message is gone"
                self.counts["acknowledged"] += 1
        image = owner.image()
        assert all(member.image() == image for member in world.nodes.values())
        copies = {type(each.replica.failure).__name__ for each in world.nodes.values()}
        repaired = sum(each.replica.findings.repaired for each in world.nodes.values())
        print(dict(self.counts), "purged", world.stream.first_seq, copies, "repaired", repaired)

    def _are_equal(self) -> bool:
        members = self.world.nodes.values()
        return len({each.replica.position() for each in members}) == 1 and all(
            each.replica.is_caught_up() for each in members
        )


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_acknowledged_is_lost(seed: int) -> None:
    lives = Lives(seed)
    try:
        for _ in range(STEPS):
            lives.step()
        lives.check()
    finally:
        lives.world.close()
