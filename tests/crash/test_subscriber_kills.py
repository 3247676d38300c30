"""felix-118, 119 and 124, with a subscriber that is killed between and around effect and ack.

It is a process of its own, and SIGKILL is all that ends it. With its position in the database of
the effects, every event has its effect once. With a position in a file, an event has it twice only
if the subscriber was killed after the effect and before its position was stored.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.client import Client
from tests.broker_process import BrokerProcess, eventually
from tests.crash.event_subscriber import NAME, POINTS, STREAM, effects

EVENTS = 40
PATIENCE_S = 120.0


class Subscribers:
    """Starts subscribers, and waits for their ends."""

    def __init__(self, url: str, directory: Path, kind: str) -> None:
        self._arguments = [url, str(directory), kind]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.event_subscriber"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._running: list[int] = []

    def start(self, point: str = "", times: int = 1) -> int:
        pid = self._ask([*self._arguments, point, times])
        self._running.append(pid)
        return pid

    def wait(self, pid: int) -> int:
        """Returns the signal that ended it."""
        self._running.remove(pid)
        return self._ask(pid)

    def close(self) -> None:
        for pid in list(self._running):
            os.kill(pid, signal.SIGKILL)
            self.wait(pid)
        self._process.communicate(timeout=PATIENCE_S)

    def _ask(self, message: object) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(message), file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with BrokerProcess(tmp_path / "data") as broker, Client(broker.url) as client:
        client.create_stream("default", "default", STREAM, delivery="exactly_once")
        client.stream(STREAM).producer().publish_batch([b"%d" % n for n in range(EVENTS)])
        yield client


def is_drained(client: Client) -> bool:
    named = client.stream(STREAM).subscriptions().named
    return [(each.name, each.unacked, each.messages_behind) for each in named] == [(NAME, 0, 0)]


@pytest.mark.parametrize("kind", ["file", "database"])
def test_a_subscriber_that_is_killed_around_an_ack_loses_nothing(
    client: Client, tmp_path: Path, kind: str
) -> None:
    subscribers = Subscribers(client.url, tmp_path, kind)
    handled_twice = []
    try:
        for point in (each for each, kinds in POINTS.items() if kind in kinds):
            assert subscribers.wait(subscribers.start(point, times=3)) == signal.SIGKILL
            if (kind, point) == ("file", "after the effect"):
                handled_twice.append(effects(tmp_path, kind)[-1])
        # Only the database can be shared by two at a time.
        for _ in range(1 if kind == "file" else 2):
            subscribers.start()
        eventually(lambda: is_drained(client), timeout_s=PATIENCE_S)
    finally:
        subscribers.close()
    counts = Counter(effects(tmp_path, kind))
    assert set(counts) == {b"%d" % n for n in range(EVENTS)}, "an event had no effect"
    assert [payload for payload, count in counts.items() if count > 1] == handled_twice
    assert max(counts.values()) == 1 + bool(handled_twice)
