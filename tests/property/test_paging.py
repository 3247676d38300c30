"""A backlog far larger than memory, on a real disk, sealed by the real process meanwhile.

However late a group comes and however slowly it reads, it gets every message once, in order;
memory stays within its bound; and after a restart it goes on where it was.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from penstock.core.invariants import check
from penstock.model.envelope import Envelope
from penstock.model.item import Item
from penstock.model.limits import KIB, Limits
from penstock.storage.log import WalOptions
from penstock.storage.vfs import Vfs
from tests.engine.harness import LONG_MS, Broker, Reader

PARTITIONS = 3
MESSAGES = 900
LIMITS = Limits(memory_bytes=64 * KIB, max_in_flight=20)
OPTIONS = WalOptions(segment_bytes=64 * KIB, reserve_bytes=0)


class Log:
    """What each group was given for the first time, by partition; acks as it goes."""

    def __init__(self, broker: Broker, rng: random.Random) -> None:
        self.broker = broker
        self.rng = rng
        self.readers: dict[str, Reader] = {}
        self.hands: dict[str, list[Item]] = {}
        self.got: dict[str, list[list[int]]] = {}
        self.acked: dict[str, set[int]] = {}

    def join(self, group: str) -> None:
        self.readers[group] = self.broker.consume(group=group, lease_ms=LONG_MS)
        self.hands[group] = []
        self.got.setdefault(group, [[] for _ in range(PARTITIONS)])
        self.acked.setdefault(group, set())

    def read(self, group: str, share: float = 1.0) -> None:
        """Takes what has come, and acks a share of all that is in hand."""
        reader, hand = self.readers[group], self.hands[group]
        for item in reader.take():
            assert item.value.split()[0] == str(item.offset), "not what was sent"
            assert item.offset not in self.acked[group], "done, and delivered again"
            if item.attempts == 1:
                self.got[group][item.partition].append(item.offset)
            hand.append(item)
        for item in [item for item in hand if self.rng.random() < share]:
            assert self.broker.ack(reader, item) is None
            self.acked[group].add(item.offset)
            hand.remove(item)

    def drain(self, group: str) -> None:
        while self.readers[group].items or self.hands[group]:
            self.read(group)

    def is_complete(self, group: str) -> bool:
        every = set(range(MESSAGES))
        return self.acked[group] == every and all(
            offsets == sorted(offsets) for offsets in self.got[group]
        )


def produced(broker: Broker, first: int, last: int, rng: random.Random) -> None:
    commands = [
        broker.command(
            "t",
            f"{n} ".ljust(rng.randrange(20, 900), "."),
            envelope=Envelope(partition_override=rng.randrange(PARTITIONS)),
        )
        for n in range(first, last)
    ]
    broker.must(broker.engine.produce_many, commands)


@pytest.mark.parametrize("seed", [1, 2])
def test_new_and_lagging_groups_read_everything_in_order(tmp_path: Path, seed: int):
    """driftq-21, 22, 24, 30: over evictions, sealing and restarts."""
    rng = random.Random(seed)
    broker = Broker(
        Vfs(), limits=LIMITS, options=OPTIONS, directory=str(tmp_path), waits_for_sealing=False
    )
    broker.topic("t", PARTITIONS)
    log = Log(broker, rng)
    log.join("lagging")
    log.join("leading")
    window = broker.engine.parts.window
    for first in range(0, MESSAGES, 30):
        produced(broker, first, first + 30, rng)
        assert window.used_bytes <= LIMITS.memory_bytes
        log.drain("leading")
        log.read("lagging", share=0.2)
        if rng.random() < 0.15:
            broker.restart()
            window = broker.engine.parts.window
            for group in list(log.readers):
                log.join(group)
        check(broker.state)
    log.join("new")
    for group in ("lagging", "leading", "new"):
        log.drain(group)
        assert log.is_complete(group), group
    broker.waits_for_sealing = True
    broker.settle()
    assert any(tmp_path.glob("history-*.arrow")), "nothing was sealed: the test is void"
    assert broker.engine.parts.pages.reads, "nothing was read back: the test is void"
    log.join("latest")
    log.drain("latest")
    assert log.is_complete("latest")
    check(broker.state)
    broker.close()


def test_retention_takes_what_all_have_finished_from_log_history_and_disk(tmp_path: Path):
    """driftq-70: and nothing that somebody still needs."""
    rng = random.Random(3)
    broker = Broker(Vfs(), limits=LIMITS, options=OPTIONS, directory=str(tmp_path))
    broker.topic("t", PARTITIONS)
    log = Log(broker, rng)
    log.join("slow")
    log.join("quick")
    broker.must(broker.engine.configure_topic, "t", None, 20 * KIB)
    for first in range(0, MESSAGES, 60):
        produced(broker, first, first + 60, rng)
        log.drain("quick")
        log.read("slow", share=0.3)
        broker.pass_ms(1100)
        check(broker.state)
    log.drain("slow")
    assert log.is_complete("slow")
    assert log.is_complete("quick")
    broker.pass_ms(70_000)
    for partition in broker.state.topics["t"].partitions:
        assert partition.backlog.retained_bytes() <= 22 * KIB
    kept = [m.offset for p in range(PARTITIONS) for m in broker.stored("t", p)]
    log.join("late")
    late = log.readers["late"]
    log.drain("late")
    assert sorted(log.acked["late"]) == sorted(kept)
    assert not late.items
    broker.restart()
    check(broker.state)
    assert sorted(m.offset for p in range(PARTITIONS) for m in broker.stored("t", p)) == sorted(
        kept
    )
    on_disk = sum(path.stat().st_size for path in tmp_path.glob("history-*.arrow"))
    assert on_disk < 600 * KIB, "what was trimmed is still on disk"
    broker.close()
