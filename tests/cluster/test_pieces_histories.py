"""Random histories of batch writes on brokers that come and go: every batch is stored once, or not.

A client stages the pieces of a batch and commits it, at whichever broker serves, and begins the
batch anew when it is told that it is not staged. A failing seed is in the test's name.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from penstock.cluster.pieces import SWEEP_MS
from penstock.model.errors import PenstockError
from penstock.model.limits import Limits
from penstock.model.writes import CommitReport, PieceReport
from penstock.storage import staging
from tests.cluster.batches import commit, rows_of, stage
from tests.cluster.replicas import Node, ReplicaWorld
from tests.cluster.simulated_service import Faults

SEEDS = range(int(os.environ.get("CLUSTER_SEEDS", "6")))
BATCHES = 4
DISTURBANCES = 40
"""So many in one run: with the worst faults a write takes longer than the time between two."""


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "SLICE_ROWS", 4)


class Writer:
    """The client, and whoever disturbs it."""

    def __init__(self, seed: int) -> None:
        self.world = ReplicaWorld(seed, names="abc", limits=Limits(lease_ms=700))
        self.draw = self.world.simulation.random
        node = self.world.must_promote("a")
        self.world.must(node.engine.create_topic, "t", 1)
        self.world.stream.faults = Faults.drawn(self.draw)
        self.world.stream.faults.stray = 0.0
        self.world.pieces.faults = Faults.drawn(self.draw)
        self.counts: Counter[str] = Counter()
        self.is_calm = False
        self.disturbances = DISTURBANCES

    def owner(self) -> Node:
        while True:
            serving = [n for n in self.world.nodes.values() if n.replica.engine is not None]
            if serving:
                return max(serving, key=lambda node: node.replica.serving_epoch)
            node = self.world[self.draw.choice(list(self.world.nodes))]
            if node.replica.standby is not None:
                outcomes = self.world.promote(node.name)
                for _ in range(300):
                    if outcomes:
                        break
                    self.world.simulation.pass_ms(100)
            self.world.simulation.pass_ms(100)

    def disturb(self, kind: str = "") -> None:
        kind = kind or self.draw.choices(["none", "promote", "kill"], [40, 1, 1])[0]
        if kind == "none" or not self.disturbances:
            return
        self.disturbances -= 1
        self.counts[kind] += 1
        node = self.world[self.draw.choice(list(self.world.nodes))]
        if kind == "kill" and not self.is_calm:
            node.restart()
        elif kind == "promote" and node.replica.standby is not None:
            self.world.promote(node.name)

    def wait(self, outcomes: list[object]) -> object:
        """The outcome, or None if nobody gives one: the broker is gone."""
        for _ in range(100):
            if outcomes:
                return outcomes[0]
            self.world.simulation.pass_ms(self.draw.choice([1, 20, 100, 400, 3000]))
            if not self.is_calm:
                self.disturb()
        return outcomes[0] if outcomes else None

    def write(self, batch: int, parts: list[list[str]]) -> None:
        counts = {part: len(rows) for part, rows in enumerate(parts)}
        for attempt in range(300):
            name = f"a{attempt}"
            staged = [
                self.wait(stage(self.world, self.owner(), rows, batch=batch, part=n, attempt=name))
                for n, rows in enumerate(parts)
            ]
            if not all(isinstance(each, PieceReport) for each in staged):
                self.counts["staged in vain"] += 1
                if any(
                    isinstance(each, PenstockError) and each.http_status == 409 for each in staged
                ):
                    return  # it was committed, and nobody could say so
                continue
            for _ in range(50):
                told = self.wait(
                    commit(self.world, self.owner(), counts, batch=batch, attempt=name)
                )
                if isinstance(told, CommitReport) and told.status != "storing":
                    return
                if isinstance(told, PenstockError) and told.http_status == 409:
                    self.counts["not staged"] += 1
                    break
        raise AssertionError("the batch was never written")


@pytest.mark.parametrize("seed", SEEDS)
def test_every_batch_is_stored_once(seed: int) -> None:
    writer = Writer(seed)
    world = writer.world
    wanted: list[str] = []
    try:
        for batch in range(BATCHES):
            parts = [
                rows_of(f"{batch}.{part}", writer.draw.choice([1, 7, 30])) for part in range(2)
            ]
            wanted += [row for rows in parts for row in rows]
            writer.write(batch, parts)
        writer.is_calm = True
        world.stream.without_faults()
        world.pieces.without_faults()
        owner = writer.owner()
        world.simulation.pass_ms(40_000)
        owner = writer.owner()
        assert world.values(owner) == wanted
        assert not any(state.storing for state in owner.state.writers)
        world.simulation.pass_ms(2 * SWEEP_MS + 2000)
        assert world.pieces.numbers() == set(), "all pieces are removed in the end"
        print(dict(writer.counts), len(world.epochs))
    finally:
        world.close()
