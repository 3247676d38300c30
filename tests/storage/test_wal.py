"""The log as its user meets it: append, commit, be told, read, roll, drop, close."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable

import pytest

from penstock.api.durability import FsyncMode
from penstock.model.errors import TooLarge, Unavailable
from penstock.storage.errors import SegmentGone
from penstock.storage.frames import MAX_FRAME_BYTES, OFFSET_MASK, POSITION_BITS
from penstock.storage.log import Log, WalOptions
from penstock.storage.vfs import Vfs
from penstock.storage.wal import Wal
from penstock.storage.wal_supply import SMALLEST_SHARE
from tests.storage.faulty_vfs import FaultyVfs
from tests.storage.harness import SEGMENT_BYTES, SMALL, Bench, Loop, read_back, record, written


@pytest.fixture
def vfs() -> FaultyVfs:
    return FaultyVfs()


def test_the_wal_is_a_log(vfs: FaultyVfs) -> None:
    bench = Bench(vfs)
    log: Log = bench.wal
    log.close()


def test_nothing_is_durable_before_it_is_committed(vfs: FaultyVfs) -> None:
    bench = Bench(vfs)
    bench.append(record(0))
    assert (bench.wal.has_pending, bench.wal.seq, bench.wal.durable_seq) == (True, 1, 0)
    bench.commit()
    assert not bench.wal.has_pending
    assert (bench.wal.seq, bench.wal.durable_seq, bench.reported) == (2, 1, 1)
    bench.close()


def test_nothing_is_reported_while_its_sync_is_under_way(vfs: FaultyVfs) -> None:
    """driftq-46"""
    bench = Bench(vfs)
    bench.append(record(0))
    seen: list[int] = []
    bench.commit_and_look(vfs, lambda: seen.append(bench.reported))
    assert seen == [0, 1]
    bench.close()


def test_all_that_arrives_while_one_sync_runs_shares_the_next(vfs: FaultyVfs) -> None:
    bench = Bench(vfs)
    bench.append(record(0))

    def arrive() -> None:
        if len(bench.appended) == 1:
            for number in range(1, 9):
                bench.append(record(number))
                bench.wal.commit()

    bench.commit_and_look(vfs, arrive)
    assert bench.reported == 9
    assert bench.wal.commits == 2
    assert (bench.wal.last_commit_frames, bench.wal.durable_seq) == (1, 2)
    bench.close()


def test_what_is_not_committed_waits_for_its_commit(vfs: FaultyVfs) -> None:
    bench = Bench(vfs)
    bench.append(record(0))
    bench.wal.commit()
    bench.append(record(1))
    bench.loop.run_until(lambda: bench.reported == 1)
    assert bench.wal.commits == 1
    assert bench.wal.has_pending
    bench.commit()
    assert bench.reported == 2
    bench.close()


def test_a_commit_of_nothing_writes_nothing(vfs: FaultyVfs) -> None:
    bench = Bench(vfs)
    bench.await_spare()
    calls = len(vfs.calls)
    bench.wal.commit()
    assert bench.wal.append([]) == 1 << POSITION_BITS
    bench.wal.commit()
    bench.loop.run_posted()
    assert len(vfs.calls) == calls
    bench.close()


def test_positions_are_sequence_and_offset_in_the_frame(vfs: FaultyVfs) -> None:
    bench = Bench(vfs)
    assert bench.wal.append_one(b"abc") == 1 << POSITION_BITS
    assert bench.wal.append([b"de", b"f"]) == 1 << POSITION_BITS | 7
    assert bench.wal.append_one(b"g") == 1 << POSITION_BITS | 18
    bench.wal.commit()
    assert bench.wal.append_one(b"h") == 2 << POSITION_BITS
    bench.commit()
    bench.close()
    again = Bench(vfs)
    assert again.positions[:4] == [(1 << POSITION_BITS) + at for at in (0, 7, 13, 18)]
    assert again.replayed == [b"abc", b"de", b"f", b"g", b"h"]
    again.close()


def test_records_appended_together_share_a_frame_however_full_it_is(vfs: FaultyVfs) -> None:
    bench = Bench(vfs)
    for size in (10, 1500, 3000, 5000, 10):
        position = bench.append(record(0, size), record(1, size), record(2, size))
        sequences = {p >> POSITION_BITS for p in bench.positions[-3:]}
        assert sequences == {position >> POSITION_BITS}
    bench.commit()
    assert len({p >> POSITION_BITS for p in bench.positions}) > 1
    bench.close()
    assert read_back(vfs) == bench.appended


def test_a_frame_larger_than_a_segment_makes_a_longer_one(vfs: FaultyVfs) -> None:
    bench = written(vfs, 4)
    for _ in range(3):
        bench.append(b"L" * (3 * SEGMENT_BYTES))
        bench.append(b"small")
        bench.commit()
    assert bench.wal.read(bench.positions) == bench.appended
    bench.close()
    assert read_back(vfs) == bench.appended


def test_what_no_frame_can_hold_is_refused_and_the_log_goes_on(vfs: FaultyVfs) -> None:
    bench = Bench(vfs)
    block = bytes(MAX_FRAME_BYTES // 16)
    with pytest.raises(TooLarge):
        bench.wal.append([block] * 16)
    bench.append(record(0))
    bench.commit()
    bench.close()
    assert read_back(vfs) == [record(0)]


def test_a_callback_that_raises_does_not_break_the_commit_loop(
    vfs: FaultyVfs, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(vfs)
    told: list[int] = []

    def broken(seq: int) -> None:
        told.append(seq)
        raise ConnectionResetError("the client is gone")

    monkeypatch.setattr(bench, "durable", broken)
    with caplog.at_level(logging.ERROR, "penstock.storage"):
        for number in range(3):
            bench.append(record(number))
            bench.commit()
    assert told == [1, 2, 3]
    assert "the client is gone" in caplog.text
    bench.close()
    assert read_back(vfs) == bench.appended


def test_a_log_rolls_over_many_segments(vfs: FaultyVfs) -> None:
    bench = Bench(vfs)
    for number in range(200):
        bench.append(record(number, size=1500))
        bench.commit()
        bench.await_spare()
    assert bench.wal.segment_of_open_frame > 8
    closed = bench.wal.closed_segments()
    assert [number for number, _ in closed] == list(range(1, bench.wal.segment_of_open_frame))
    assert bench.rolls == len(closed)
    sizes = [len(vfs.content(path)) for _, path in closed]
    assert bench.wal.size_bytes == sum(sizes) + SEGMENT_BYTES
    assert bench.wal.read(bench.positions) == bench.appended
    bench.close()
    assert read_back(vfs) == bench.appended


def test_without_a_spare_the_active_segment_grows(vfs: FaultyVfs) -> None:
    bench = Bench(vfs)
    bench.await_spare()
    vfs.fail_call(1, errno.EIO, only=["open"])
    for number in range(60):
        bench.append(record(number, size=1500))
        bench.commit()
    bench.await_spare()
    assert bench.wal.segment_of_open_frame == 2
    bench.wal.check_space()
    bench.await_spare()
    bench.append(record(60))
    bench.commit()
    assert bench.wal.segment_of_open_frame == 3
    bench.close()
    assert read_back(vfs) == bench.appended


def test_roll_closes_the_active_segment_behind_what_is_appended(vfs: FaultyVfs) -> None:
    bench = written(vfs, 4)
    bench.append(record(4))
    bench.roll()
    assert bench.reported == 5
    assert [number for number, _ in bench.wal.closed_segments()] == [1]
    bench.wal.roll()
    bench.await_spare()
    assert bench.wal.segment_of_open_frame == 2, "an empty segment is not rolled"
    bench.append(record(5))
    bench.commit()
    bench.close()
    assert read_back(vfs) == bench.appended


def test_a_segment_that_is_rolled_early_is_followed_by_a_small_spare(vfs: FaultyVfs) -> None:
    """Who looks at the newest rows again and again does not have full segments written for it."""
    full = 512 * 1024
    bench = Bench(vfs, WalOptions(segment_bytes=full, reserve_bytes=0, frame_bytes=4096))
    prepared = []
    for size in (1, 1, 20_000, 200_000, 1, 1):
        bench.append(*[record(n) for n in range(size // len(record(0)) + 1)])
        bench.roll()
        bench.await_spare()
        assert bench.wal.files.supply.spare is not None
        prepared.append(bench.wal.files.supply.spare.capacity)
    least = full // SMALLEST_SHARE
    assert prepared[0] == prepared[1] == prepared[-1] == least
    assert least < prepared[2] < prepared[3] == full
    bench.close()
    assert read_back(vfs) == bench.appended


def test_a_roll_without_a_spare_waits_for_one(vfs: FaultyVfs) -> None:
    bench = Bench(vfs)
    bench.append(record(0))
    bench.wal.roll()
    assert bench.wal.segment_of_open_frame == 1
    bench.loop.run_until(lambda: bench.rolls == 1)
    assert bench.wal.segment_of_open_frame == 2
    bench.close()
    assert read_back(vfs) == bench.appended


def test_dropped_segments_are_gone_from_the_log_and_the_disk(vfs: FaultyVfs) -> None:
    bench = Bench(vfs)
    for number in range(3):
        bench.append(record(number))
        bench.roll()
    bench.append(record(3))
    bench.commit()
    (_, first), (_, second), (_, third) = bench.wal.closed_segments()
    bench.wal.drop_segments(2)
    assert [number for number, _ in bench.wal.closed_segments()] == [3]
    assert bench.wal.read(bench.positions[2:]) == bench.appended[2:]
    for position in bench.positions[:2]:
        with pytest.raises(SegmentGone) as caught:
            bench.wal.read([position])
        assert caught.value.position == position
    bench.wal.drop_segments(99)
    assert bench.wal.segment_of_open_frame == 4, "the active segment is never dropped"
    bench.wal.check_space()
    bench.loop.run_until(lambda: not bench.wal.files.supply._measuring)
    assert not {first, second, third} & set(vfs.paths())
    bench.close()
    again = Bench(vfs, first_segment=4)
    assert again.replayed == [record(3)]
    again.close()


@pytest.mark.parametrize("fsync", ["commit", "interval", "none"])
def test_close_writes_and_syncs_in_every_mode(vfs: FaultyVfs, fsync: FsyncMode) -> None:
    options = WalOptions(
        segment_bytes=SEGMENT_BYTES, reserve_bytes=0, fsync=fsync, fsync_interval_ms=3_600_000
    )
    bench = Bench(vfs, options)
    for number in range(10):
        bench.append(record(number))
        bench.commit()
    bench.append(record(10))
    bench.close()
    assert bench.reported == 11
    assert read_back(vfs.crash("nothing")) == bench.appended


def test_an_append_after_close_is_refused(vfs: FaultyVfs) -> None:
    bench = written(vfs, 2)
    bench.close()
    with pytest.raises(Unavailable, match="stopping"):
        bench.wal.append_one(b"late")
    assert not bench.wal.has_room(1, reserve=True)
    bench.close()
    assert vfs.open_files == 0


def test_interval_syncs_by_itself_and_none_does_not(vfs: FaultyVfs) -> None:
    options = WalOptions(segment_bytes=SEGMENT_BYTES, fsync="interval", fsync_interval_ms=1)
    bench = Bench(vfs, options)
    bench.await_spare()
    synced = threading.Event()
    original = vfs.sync

    def sync(fd: int) -> None:
        original(fd)
        synced.set()

    vfs.sync = sync  # type: ignore[method-assign]
    bench.append(record(0))
    bench.commit()
    assert synced.wait(20)
    disk = vfs.crash("nothing")
    bench.close()
    assert read_back(disk) == [record(0)]


def test_mode_none_does_not_sync_between_rolls(vfs: FaultyVfs) -> None:
    bench = Bench(vfs, WalOptions(segment_bytes=SEGMENT_BYTES, fsync="none"))
    bench.await_spare()
    before = vfs.calls.count("sync")
    for number in range(20):
        bench.append(record(number))
        bench.commit()
    assert bench.reported == 20
    assert vfs.calls.count("sync") == before
    bench.close()


def test_a_loop_that_is_gone_does_not_stop_the_last_write(
    vfs: FaultyVfs, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop()
    gone = False

    def post(callback: Callable[[], None]) -> None:
        if gone:
            raise RuntimeError("Event loop is closed")
        loop.post(callback)

    wal = Wal.open(vfs, "/data", SMALL, replay=lambda *_: None, post=post)
    wal.append_one(record(0))
    gone = True
    wal.commit()
    wal.close()
    assert wal.durable_seq == 1
    assert vfs.open_files == 0
    assert read_back(vfs) == [record(0)]


def test_metrics_say_what_a_commit_cost(vfs: FaultyVfs) -> None:
    bench = written(vfs, 8)
    wal = bench.wal
    assert wal.commits == 4
    assert wal.commit_seconds >= wal.last_commit_seconds > 0
    assert wal.last_commit_bytes == 32 + 2 * 24
    bench.close()


def test_the_log_works_on_a_real_disk(tmp_path) -> None:
    directory = str(tmp_path / "deep" / "data")
    bench = Bench(Vfs(), directory=directory)
    for number in range(100):
        bench.append(record(number, size=700), record(number, size=50))
        bench.commit()
    assert bench.rolls > 0
    assert bench.wal.read(bench.positions) == bench.appended
    bench.close()
    again = Bench(Vfs(), directory=directory)
    assert again.replayed == bench.appended
    assert all(position & OFFSET_MASK < SMALL.frame_bytes for position in again.positions)
    again.close()
