"""Kills NATS servers under appends for as long as you like, and compares what is stored.

One broker sends frames one at a time, as a log does; another follows them. By hand:
`python -m tests.cluster.stream_kill_loop --rounds 20 --seed 1`. At the end the writer's own list,
what the follower was told and what a new reader finds must be the same, message for message.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.cluster.frame_sender import Fate, FrameSender
from penstock.cluster.jetstream.stream import JetStreamStream
from penstock.engine.scheduler import LoopScheduler
from tests.cluster.jetstream_world import JetStreamWorld
from tests.cluster.nats_servers import NatsServers, nats_servers

KINDS = ("leader", "follower", "two", "all", "pause", "stop", "lame duck")
ROUND_S = 180.0
"""The longest that a round may take until frames are stored again."""
FRAMES_BETWEEN = 40
MOST_BYTES = 16 * 1024


class Writer:
    """Sends frames without a pause. `sent` has a checksum for each sequence that was confirmed."""

    def __init__(self, stream: JetStreamStream, draw: random.Random) -> None:
        self.sent: list[int] = []
        self.longest_s = 0.0
        self.doubtful = 0
        self.fates: Counter[Fate] = Counter()
        self._draw = draw
        self._sender = FrameSender(stream, LoopScheduler(asyncio.get_running_loop()))
        self._is_over = False
        self._began = 0.0

    def next(self) -> None:
        seq = len(self.sent) + 1
        data = seq.to_bytes(8) + self._draw.randbytes(self._draw.randint(0, MOST_BYTES))
        self._began = time.monotonic()
        self._sender.send(seq, data, lambda fate: self._told(fate, zlib.crc32(data)))

    def end(self) -> None:
        self._is_over = True

    def _told(self, fate: Fate, checksum: int) -> None:
        self.fates[fate] += 1
        self.longest_s = max(self.longest_s, time.monotonic() - self._began)
        if fate is not Fate.STORED:
            self._is_over = True
            return
        self.sent.append(checksum)
        if not self._is_over:
            self.next()


class Follower:
    """What a tail was told, as checksums. A gap or a repeat is an error at once."""

    def __init__(self) -> None:
        self.told: list[int] = []
        self.errors: list[str] = []

    def received(self, seq: int, data: bytes) -> None:
        if seq != len(self.told) + 1:
            self.errors.append(f"message {seq} after {len(self.told)}")
        self.told.append(zlib.crc32(data))

    def purged(self, first_seq: int) -> None:
        self.errors.append(f"purged up to {first_seq}")


class KillLoop:
    """`report` has a line for each round."""

    def __init__(self, servers: NatsServers, seed: int) -> None:
        self.report: list[str] = []
        self._servers = servers
        self._draw = random.Random(seed)
        self._world = JetStreamWorld(servers)

    def run(self, kinds: Sequence[str]) -> list[str]:
        """Returns what went wrong."""
        try:
            return self._run(kinds)
        finally:
            self._world.close()

    def _run(self, kinds: Sequence[str]) -> list[str]:
        world = self._world
        writing = world.broker(behind_proxy=False, max_bytes=1 << 30)
        reading = world.broker(behind_proxy=False)
        follower = Follower()
        reading.stream.follow(1, follower)
        writer = world.run(self._start(writing.stream))
        stream_name = writing.stream.place.name
        for number, kind in enumerate(kinds):
            self._until_stored(writer, FRAMES_BETWEEN)
            writer.longest_s = 0.0
            before = len(writer.sent)
            again_s = self._strike(kind, world.leader_of(stream_name), writer)
            self.report.append(
                f"round {number + 1}: {kind:9} {before} frames before, longest append "
                f"{writer.longest_s:.2f} s, all servers back after {again_s:.1f} s"
            )
        self._until_stored(writer, FRAMES_BETWEEN)
        writer.end()
        world.until(lambda: writer.fates.total() == len(writer.sent) and self._is_idle(writer))
        return self._compare(writer, follower, reading.stream)

    async def _start(self, stream: JetStreamStream) -> Writer:
        writer = Writer(stream, self._draw)
        writer.next()
        return writer

    def _is_idle(self, writer: Writer) -> bool:
        return writer._sender._done is None

    def _until_stored(self, writer: Writer, more: int) -> None:
        target = len(writer.sent) + more

        def is_there() -> bool:
            assert set(writer.fates) <= {Fate.STORED}, writer.fates
            return len(writer.sent) >= target

        self._world.until(is_there, ROUND_S)

    def _strike(self, kind: str, leader: int, writer: Writer) -> float:
        """Does harm, waits until frames are stored again or for a while, then repairs."""
        began = time.monotonic()
        nodes = self._servers.nodes
        others = [number for number in range(len(nodes)) if number != leader]
        victims = {
            "follower": [self._draw.choice(others)],
            "two": [leader, self._draw.choice(others)],
            "all": [leader, *others],
        }.get(kind, [leader])
        harm: dict[str, Callable[[int], None]] = {
            "pause": lambda number: nodes[number].pause(),
            "stop": lambda number: nodes[number].stop(),
            "lame duck": lambda number: nodes[number].lame_duck(),
        }
        for number in victims:
            harm.get(kind, lambda number: nodes[number].kill())(number)
        if len(victims) == 1:
            self._until_stored(writer, 5)
        else:
            self._world.sleep(self._draw.uniform(0.0, 2.0))
        for number in victims:
            self._repair(kind, number)
        self._world.run(asyncio.to_thread(self._servers.wait_until_ready))
        self._until_stored(writer, 5)
        return time.monotonic() - began

    def _repair(self, kind: str, number: int) -> None:
        node = self._servers.nodes[number]
        if kind == "pause":
            node.resume()
            return
        if kind == "lame duck":
            self._world.until(lambda: not node.is_running(), ROUND_S)
        node.start()

    def _compare(self, writer: Writer, follower: Follower, stream: JetStreamStream) -> list[str]:
        world, count = self._world, len(writer.sent)
        world.until(lambda: len(follower.told) >= count, ROUND_S)
        bounds = world.bounds(stream)
        again = Follower()
        stream.follow(1, again)
        world.until(lambda: len(again.told) >= bounds.last_seq, ROUND_S)
        world.quiet()
        wrong = follower.errors + again.errors
        if bounds.last_seq != count:
            wrong.append(f"{count} frames were confirmed, {bounds.last_seq} are stored")
        for name, each in (("follower", follower), ("reader", again)):
            if each.told != writer.sent:
                wrong.append(f"the {name} was told something else than was confirmed")
        self.report.append(
            f"{count} frames confirmed, stored and told; wrong: {wrong or 'nothing'}"
        )
        return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    arguments = parser.parse_args()
    logging.basicConfig(format="%(asctime)s %(message)s")
    draw = random.Random(arguments.seed)
    kinds = [*arguments.kinds * arguments.rounds][: arguments.rounds]
    draw.shuffle(kinds)
    with (
        tempfile.TemporaryDirectory() as folder,
        nats_servers(Path(folder), extra=LAME_DUCK) as servers,
    ):
        loop = KillLoop(servers, arguments.seed)
        try:
            wrong = loop.run(kinds)
        finally:
            print("\n".join(loop.report))
    if wrong:
        raise SystemExit("\n".join(wrong))


LAME_DUCK = 'lame_duck_duration: "30s"\nlame_duck_grace_period: "100ms"'
"""Servers in lame-duck mode end soon."""

if __name__ == "__main__":
    main()
