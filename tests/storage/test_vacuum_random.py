"""Random lives of a store whose thresholds are so low that most runs merge, rewrite or drop files.

After each sealing every live row is read through each read path and compared with a plain dict.
"""

from __future__ import annotations

import random

import pytest

from penstock.storage import history, vacuum
from tests.storage.sealed_store import SealedStore, patch_engine

SEEDS = range(12)
SEALS = 25


@pytest.fixture(autouse=True)
def tiny_thresholds(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_engine(monkeypatch)


class RandomLife:
    """Topics come, fill, are trimmed and deleted; a run may copy little, or hardly anything."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.random = random.Random(seed)
        self.store = SealedStore()
        self._monkeypatch = monkeypatch
        self._topics: dict[str, int] = {}
        self._set_thresholds()

    def _set_thresholds(self) -> None:
        choose = self.random.choice
        rows = choose([20, 65_536, 65_536])
        for module, name, value in [
            (vacuum, "COPY_BYTES", choose([600, 1_500, 10**9])),
            (vacuum, "SMALL_BYTES", choose([200, 400, 1_000])),
            (vacuum, "MERGED_FILES", choose([2, 3, 5])),
            (vacuum, "MAX_BATCH_ROWS", rows),
            (history, "MAX_BATCH_ROWS", rows),
        ]:
            self._monkeypatch.setattr(module, name, value)

    def step(self) -> None:
        for _ in range(self.random.randint(0, 4)):
            action = self.random.choices(
                [self._produce, self._trim, self._delete], weights=[10, 3, 1]
            )
            action[0]()
        before = len(self.store.manifest.history)
        sealed = self.store.seal()
        assert len(self.store.manifest.history) <= before + 1, "a run adds one file at most"
        assert len(sealed.added_files) <= 1

    def _topic(self) -> int:
        name = self.random.choice(["orders", "events", "dlq.orders"])
        if name not in self._topics:
            self._topics[name] = self.store.topic(name, self.random.choice([1, 1, 2, 4]))
        return self._topics[name]

    def _produce(self) -> None:
        topic_id = self._topic()
        partitions = len(self.store.state.topics_by_id[topic_id].partitions)
        for _ in range(self.random.randint(1, 4)):
            count = self.random.choice([1, 2, 5, 12])
            value = "v" * self.random.choice([1, 1, 1, 80])
            self.store.produce(topic_id, count, value, self.random.randrange(partitions))

    def _trim(self) -> None:
        topic_id = self._topic()
        partition = self.random.choice(self.store.state.topics_by_id[topic_id].partitions)
        if partition.first_offset < partition.end_offset:
            span = partition.end_offset - partition.first_offset
            before = partition.first_offset + self.random.randint(1, span)
            self.store.trim(topic_id, partition.index, before)

    def _delete(self) -> None:
        if self._topics:
            name = self.random.choice(sorted(self._topics))
            self.store.delete(self._topics.pop(name))


@pytest.mark.parametrize("seed", SEEDS)
def test_every_row_is_found_whatever_vacuum_merges_rewrites_and_drops(
    seed: int, monkeypatch: pytest.MonkeyPatch
):
    life = RandomLife(seed, monkeypatch)
    for _ in range(SEALS):
        life.step()
        life.store.check()
    runs = len(life.store.manifest.history) + 1
    while life.store.seal().dropped:
        runs -= 1
        assert runs, "vacuum goes on rewriting although nothing changes any more"
    life.store.check()


def test_the_random_lives_merge_rewrite_and_drop_many_files(monkeypatch: pytest.MonkeyPatch):
    """Without this the test above could be void."""
    dropped = joined = 0
    seeds = SEEDS[:5]
    for seed in seeds:
        life = RandomLife(seed, monkeypatch)
        for _ in range(SEALS):
            life.step()
        dropped += sum(len(sealed.dropped) for sealed in life.store.sealed)
        joined += sum(ref.msgs > 12 for sealed in life.store.sealed for ref in sealed.added)
    assert dropped > 10 * len(seeds)
    assert joined > len(seeds)
