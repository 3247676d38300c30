"""Any life of a log, with crashes in it: what is found is what was reported, and a bit more."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.storage.log import WalOptions
from tests.storage.faulty_vfs import FLAVOURS, FaultyVfs
from tests.storage.harness import Bench, record

OPTIONS = WalOptions(segment_bytes=16 * 1024, reserve_bytes=0, frame_bytes=2048)

appends = st.tuples(st.just("append"), st.lists(st.sampled_from([1, 30, 700, 3000]), max_size=4))
others = st.tuples(st.sampled_from(["commit", "start commit", "roll", "drop", "restart"]))
crashes = st.tuples(st.just("crash"), st.sampled_from(FLAVOURS), st.integers(0, 1000))


class Life:
    """`kept` is what the log must still hold, from its first segment on."""

    def __init__(self) -> None:
        self.vfs = FaultyVfs()
        self.first_segment = 1
        self.count = 0
        self.bench = Bench(self.vfs, OPTIONS)

    def append(self, sizes: list[int]) -> None:
        if sizes:
            self.bench.append(*(record(self.count + n, size) for n, size in enumerate(sizes)))
            self.count += len(sizes)

    def roll(self) -> None:
        if self.bench.positions:
            self.bench.await_spare()
            before = self.bench.wal.segment_of_open_frame
            self.bench.wal.roll()
            self.bench.commit()
            wal = self.bench.wal
            if wal.segment_of_open_frame > before:
                number = wal.segment_of_open_frame - 1
                closed = wal.closed_segments
                self.bench.loop.run_until(lambda: any(n == number for n, _ in closed()))

    def drop(self) -> None:
        """Forgets the first closed segment, as sealing does."""
        closed = self.bench.wal.closed_segments()
        if not closed:
            return
        self.first_segment = closed[0][0] + 1
        self.bench.wal.drop_segments(closed[0][0])
        first_seq = self.bench.wal.files._segments[0].first_seq
        gone = sum(position >> 28 < first_seq for position in self.bench.positions)
        del self.bench.positions[:gone]
        del self.bench.appended[:gone]
        self.bench.reported -= gone

    def reopen(self, vfs: FaultyVfs, at_least: int) -> None:
        appended = self.bench.appended
        self.vfs = vfs
        self.bench = Bench(vfs, OPTIONS, first_segment=self.first_segment)
        found = self.bench.replayed
        assert found == appended[: len(found)]
        assert len(found) >= at_least
        self.bench.commit()
        assert self.bench.wal.read(self.bench.positions) == found

    def crash(self, flavour: str, seed: int) -> None:
        self.bench.loop.run_posted()
        disk = self.vfs.crash(flavour, seed)
        reported = self.bench.reported
        self.bench.close()
        self.reopen(disk, reported)

    def restart(self) -> None:
        self.bench.close()
        assert self.vfs.open_files == 0
        self.reopen(self.vfs, len(self.bench.appended))


@settings(max_examples=120, deadline=None)
@given(st.lists(st.one_of(appends, appends, others, crashes), max_size=40))
def test_whatever_happens_the_log_holds_what_it_reported(steps: list[tuple[Any, ...]]) -> None:
    """driftq-46, driftq-47"""
    life = Life()
    for name, *arguments in steps:
        if name == "commit":
            life.bench.commit()
        elif name == "start commit":
            life.bench.wal.commit()
        else:
            getattr(life, name)(*arguments)
    life.restart()
    life.bench.close()
