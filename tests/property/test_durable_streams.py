"""Random histories of a durable stream against a model: what was accepted, acked and replayed.

Thresholds are small, so that sealing, vacuum and eviction happen all the time between publishes,
crashes and reads.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from penstock.api.transactions import EventAckOperation, TransactionCommand
from penstock.model.errors import FailedPrecondition, OutOfRange, ResourceExhausted
from penstock.model.item import EventItem
from penstock.model.limits import KIB, Limits
from penstock.model.scopes import stream_log_name
from penstock.model.streams import Publish, Start, Subscribe
from penstock.model.transactions import SettledResult, StoredResult
from penstock.storage.log import WalOptions
from tests.engine.durable_stream_harness import EARLIEST, EventReader, Listener, Streams
from tests.engine.harness import LEASE_MS
from tests.property.follower import Follower, must_equal, recovered
from tests.thresholds import SMALL, lowered

STEPS = 250


class History:
    """A broker under random load, and what must be true of it."""

    def __init__(self, seed: int, *, retention_ms: int = 0) -> None:
        self.rng = random.Random(seed)
        limits = Limits(
            lease_ms=LEASE_MS, memory_bytes=32 * KIB, tail_bytes=2 * KIB, max_partition_msgs=400
        )
        options = WalOptions(segment_bytes=16 * KIB, reserve_bytes=0)
        self.broker = Streams(
            delivery="exactly_once",
            limits=limits,
            options=options,
            config={"retention_ms": retention_ms},
        )
        self.target = self.broker.create("results")
        self.results: list[bytes] = []
        self.follower = Follower(self.broker)
        self.accepted: list[bytes] = []
        self.sequences: dict[str, int] = {}
        self.last: tuple[str, int, list[bytes], int] | None = None
        self.replays: list[tuple[int, Listener]] = []
        self.readers: list[EventReader] = []
        self.handled: dict[str, set[int]] = {"a": set(), "b": set()}
        self.acked: dict[str, dict[int, int]] = {"a": {}, "b": {}}
        self.begin: dict[str, int] = {}
        self.seals = 0

    def publish(self) -> None:
        producer = self.rng.choice(["p", "q"])
        sequence = self.sequences.get(producer, 0)
        count = self.rng.choice([1, 1, 1, 2, 7])
        payloads = [self.rng.randbytes(self.rng.randrange(60)) for _ in range(count)]
        outcome = self.broker.try_publish(*payloads, producer_id=producer, sequence=sequence)
        if isinstance(outcome, ResourceExhausted):
            return
        assert outcome == len(self.accepted)
        self.accepted += payloads
        self.sequences[producer] = sequence + 1
        self.last = (producer, sequence, payloads, outcome)

    def repeat(self) -> None:
        """A repeat gets its first answer, and stores nothing."""
        if self.last is not None:
            producer, sequence, payloads, offset = self.last
            numbers: dict[str, Any] = {"producer_id": producer, "sequence": sequence}
            assert self.broker.try_publish(*payloads, **numbers) == offset

    def lose_the_answer(self) -> None:
        """The broker dies while a publish is under way; the producer repeats it."""
        sequence = self.sequences.get("p", 0)
        payloads = [b"lost?", self.rng.randbytes(20)]
        command = Publish(
            path=self.broker.path, payloads=payloads, producer_id="p", sequence=sequence
        )
        self.broker.submit(self.broker.engine.streams.publish, command)
        for _ in range(self.rng.randrange(3)):
            if self.broker.scheduler._turns:
                self.broker.scheduler._turns.popleft()()
        self.crash()
        outcome = self.broker.try_publish(*payloads, producer_id="p", sequence=sequence)
        if isinstance(outcome, ResourceExhausted):
            return
        assert outcome == len(self.accepted)
        self.accepted += payloads
        self.sequences["p"] = sequence + 1

    def join(self) -> None:
        name = self.rng.choice(["a", "b"])
        owner = f"o{self.rng.randrange(1000)}"
        if name not in self.begin:
            start = self.rng.choice([EARLIEST, Start("latest"), self._some_offset()])
            first = self.broker.state.topics[self.broker.log_name].partitions[0].first_offset
            at = {"earliest": first, "latest": len(self.accepted)}.get(start.kind, start.number)
            try:
                self.readers.append(self.broker.named(name, owner, start))
            except OutOfRange:
                assert at < first
                return
            self.begin[name] = at
        else:
            self.readers.append(self.broker.named(name, owner))

    def settle_some(self) -> None:
        for reader in self.readers:
            for item in reader.take():
                assert item.value == self.accepted[item.offset]
                assert item.offset >= self.begin[reader.group]
                # One that was acked by another may still lie here; none was delivered since.
                acked = self.acked[reader.group]
                assert item.attempts <= acked.get(item.offset, item.attempts)
                self.handled[reader.group].add(item.offset)
                if self.rng.random() < 0.8:
                    if self.rng.random() < 0.7:
                        is_acked = self.broker.ack_item(reader, item) is None
                    else:
                        is_acked = self._transform(reader, item)
                    if is_acked:
                        acked[item.offset] = item.attempts
                        assert not self._transform(reader, item), "acked twice"

    def _transform(self, reader: EventReader, item: EventItem) -> bool:
        """Acks an event in a transaction with its result, which says whose it is."""
        command = self._transformation(reader, item)
        outcome = self.broker.call(self.broker.engine.transactions.commit, command)
        if isinstance(outcome, FailedPrecondition):
            return False
        assert outcome == [StoredResult(0, len(self.results)), SettledResult()]
        self.results.append(result_of(reader, item))
        return True

    def _transformation(self, reader: EventReader, item: EventItem) -> TransactionCommand:
        path, name, owner = self.broker.path, reader.group, reader.owner
        return TransactionCommand(
            [
                Publish(path=self.target, payloads=[result_of(reader, item)]),
                EventAckOperation(path, name, item.offset, owner, item.delivery_id),
            ]
        )

    def lose_the_transaction(self) -> None:
        """The broker dies while an event is acked with its result: both are there, or neither."""
        found = [(reader, item) for reader in self.readers for item in reader.take()[:1]]
        if not found:
            return
        reader, item = found[0]
        command = self._transformation(reader, item)
        self.broker.submit(self.broker.engine.transactions.commit, command)
        if self.rng.random() < 0.5:
            self.broker.settle()
        self.crash()
        topics = self.broker.state.topics
        progress = topics[self.broker.log_name].groups[reader.group].progress[0]
        end = topics[stream_log_name(self.target)].next_offset
        if end > len(self.results):
            assert item.offset not in progress.unfinished
            self.results.append(result_of(reader, item))
            self.acked[reader.group][item.offset] = item.attempts
            self.handled[reader.group].add(item.offset)
        assert end == len(self.results)

    def replay(self) -> None:
        start = self._some_offset()
        try:
            listener = self.broker.listen(start, is_stalled=self.rng.random() < 0.5)
        except OutOfRange:
            return
        self.replays.append((start.number, listener))

    def read_some(self) -> None:
        for _, listener in self.replays:
            if not listener.ends:
                listener.read(self.rng.randrange(1, 20))
        self.check_replays()

    def check_replays(self) -> None:
        for start, listener in self.replays:
            end = start + len(listener.events)
            assert listener.offsets == list(range(start, end))
            assert listener.events == self.accepted[start:end]

    def seal(self) -> None:
        self.broker.seal()
        self.seals += 1

    def crash(self) -> None:
        self.broker.kill() if self.rng.random() < 0.5 else self.broker.crash()
        self.readers.clear()
        self.check_replays()
        self.replays.clear()
        must_equal(recovered(self.broker), self.broker)
        self.follower = Follower(self.broker)

    def step(self) -> None:
        steps = {
            self.publish: 12,
            self.repeat: 1,
            self.join: 1,
            self.settle_some: 4,
            self.replay: 1,
            self.read_some: 4,
            self.seal: 2,
            self.crash: 0.3,
            self.lose_the_answer: 0.3,
            self.lose_the_transaction: 0.5,
            lambda: self.broker.pass_ms(self.rng.choice([10, LEASE_MS])): 1,
        }
        self.rng.choices(list(steps), list(steps.values()))[0]()

    def finish(self) -> None:
        """Everything arrives in the end."""
        for name in self.begin:
            self.readers.append(self.broker.named(name, "last"))
        for _ in range(60):
            self.settle_some()
            self.broker.pass_ms(LEASE_MS)
        for name, begin in self.begin.items():
            missing = set(range(begin, len(self.accepted))) - self.handled[name]
            assert not missing
        for _, listener in self.replays:
            listener.is_stalled = False
            for _ in range(len(self.accepted)):
                if not listener.ends:
                    listener.read()
                self.broker.settle()
        results = self._stored_results()
        assert results == self.results
        assert len(set(results)) == len(results), "an event has its result twice"
        self.check_replays()
        for start, listener in self.replays:
            if listener.ends:
                assert isinstance(listener.ends[0], OutOfRange)
            else:
                assert len(listener.events) == len(self.accepted) - start

    def _stored_results(self) -> list[bytes]:
        listener = Listener(is_stalled=True)
        command = Subscribe(path=self.target, start=EARLIEST)
        listener.subscription = self.broker.must(
            self.broker.engine.streams.subscribe, command, listener
        )
        while True:
            before = len(listener.events)
            self.broker.settle()
            listener.read()
            if len(listener.events) == before:
                return listener.events

    def _some_offset(self) -> Start:
        return Start("offset", self.rng.randrange(len(self.accepted) + 1))


def result_of(reader: EventReader, item: EventItem) -> bytes:
    return f"{reader.group} {item.offset}".encode()


@pytest.mark.parametrize("seed", range(6))
def test_nothing_is_lost_or_repeated_in_any_history(seed):
    """felix-109, 110, 118, 119, 122, 123: replays join live events; acked events stay acked."""
    with lowered(SMALL):
        history = History(seed)
        for _ in range(STEPS):
            history.step()
        history.follower.compare()
        history.finish()
    assert history.seals > 5
    assert history.results


@pytest.mark.parametrize("seed", range(6, 9))
def test_retention_ends_replays_and_loses_nothing_for_names(seed):
    """felix-126."""
    with lowered(SMALL):
        history = History(seed, retention_ms=1500)
        for _ in range(STEPS):
            history.step()
        history.follower.compare()
        history.finish()
