"""Streams under random histories: what must hold whatever happens."""

from __future__ import annotations

import random

import pytest

from penstock.model.errors import ResourceExhausted
from penstock.model.streams import Publish
from tests.engine.stream_harness import Bank, Listener, S


class History:
    """Publishers, readers and the clock, at random; and what the publishers were told."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.bank = Bank(
            event_queue_depth=self.rng.choice([1, 7, 40]),
            pub_queue_depth=self.rng.choice([1, 10, 50]),
            event_queue_bytes=self.rng.choice([30, 10_000]),
            publish_queue_wait_timeout_ms=100,
            lag_alert_events=self.rng.choice([0, 5]),
        )
        self.sent = 0
        self.accepted: list[bytes] = []
        self.publishes: list[list[bytes]] = []
        self.refused: set[bytes] = set()
        self.unanswered = 0
        self.readers: list[tuple[Listener, int]] = []

    def publish(self) -> None:
        count = self.rng.choice([1, 1, 3, 12, 60])
        events = [b"%d" % n for n in range(self.sent, self.sent + count)]
        self.sent += count
        self.unanswered += 1

        def answered(outcome: object) -> None:
            self.unanswered -= 1
            if outcome is None:
                self.accepted += events
                self.publishes.append(events)
            else:
                assert isinstance(outcome, ResourceExhausted)
                self.refused.update(events)

        self.bank.streams.publish(Publish(path=S, payloads=events), answered)

    def subscribe(self) -> None:
        depth = self.rng.choice([None, 3, 100])
        listener = Listener(stalled=self.rng.random() < 0.6)
        self.bank.subscribe(listener=listener, event_queue_depth=depth, wants_lag=True)
        self.readers.append((listener, len(self.accepted)))

    def read(self) -> None:
        if self.readers:
            self.rng.choice(self.readers)[0].read(self.rng.choice([1, 5, 1000]))

    def close(self) -> None:
        if self.readers:
            self.rng.choice(self.readers)[0].live.close()

    def hold(self) -> None:
        self.bank.streams.hold_fanout()

    def release(self) -> None:
        self.bank.streams.release_fanout()

    def turn(self) -> None:
        turns = self.bank.broker.scheduler._turns
        if turns:
            turns.popleft()()

    def wait(self) -> None:
        self.bank.pass_ms(self.rng.choice([1, 60]))

    def run(self, steps: int) -> None:
        acts = [self.publish, self.subscribe, self.read, self.close, self.hold, self.release]
        acts += [self.turn, self.wait]
        for act in self.rng.choices(acts, [8, 1, 4, 0.3, 1, 2, 6, 1], k=steps):
            act()
        self.release()
        self.bank.settle()


@pytest.mark.parametrize("seed", range(150))
def test_whatever_happens_streams_keep_their_promises(seed: int):
    """felix-1, 11, 12, 15, 20, 32, 45, 115: in order, once, from the tail on; the beginning
    of a publish that does not fit; all is accounted for."""
    history = History(seed)
    history.run(150)
    assert history.unanswered == 0
    assert not history.refused.intersection(history.accepted)
    assert sorted(map(int, [*history.accepted, *history.refused])) == list(range(history.sent))
    for listener, start in history.readers:
        is_open = not listener.live.is_closed
        lag = listener.live.lag()
        assert len(listener.events) == lag.delivered
        assert lag.messages_behind <= lag.event_queue_depth
        if is_open:
            offered = history.accepted[start:]
            assert lag.delivered + lag.messages_behind + lag.dropped == len(offered)
            if not listener.is_stalled and lag.event_queue_depth > 3:
                assert lag.dropped == 0, "it reads whenever it is woken"
            listener.read()
        later = iter(history.accepted[start:])
        assert all(event in later for event in listener.events), "repeated, early or out of order"
        seen = set(listener.events)
        for publish in history.publishes:
            kept = [event in seen for event in publish]
            assert kept == sorted(kept, reverse=True), "an event after one that was lost"
    counts = history.bank.counts()
    assert counts.published == len(history.accepted)
    assert counts.subscribers == sum(not reader.live.is_closed for reader, _ in history.readers)
    assert counts.lagging == 0
    assert history.bank.queued() == (0, 0)
