"""Room on disk: refused before it is needed, kept for what must go on, back by itself."""

from __future__ import annotations

import errno

import pytest

from penstock.storage.log import WalOptions
from tests.storage.faulty_vfs import FaultyVfs
from tests.storage.harness import DIRECTORY, SEGMENT_BYTES, Bench, read_back, record

RESERVE = 2 * SEGMENT_BYTES
OPTIONS = WalOptions(segment_bytes=SEGMENT_BYTES, reserve_bytes=RESERVE, frame_bytes=4096)


def check_space(bench: Bench) -> None:
    bench.wal.check_space()
    bench.loop.run_until(lambda: not bench.wal.files.supply._measuring)
    bench.await_spare()


def test_with_room_for_all_both_kinds_may_go_on() -> None:
    bench = Bench(FaultyVfs(), OPTIONS)
    for _ in range(2):
        assert bench.wal.has_room(1000)
        assert bench.wal.has_room(1000, reserve=True)
        bench.await_spare()
    bench.close()


def test_a_full_disk_refuses_produce_keeps_the_reserve_and_recovers_by_itself() -> None:
    """driftq-49"""
    vfs = FaultyVfs(capacity_bytes=8 * SEGMENT_BYTES)
    bench = Bench(vfs, OPTIONS)
    bench.await_spare()
    vfs.plant("/elsewhere", bytes(vfs.capacity_bytes - vfs.used_bytes))
    check_space(bench)
    assert not bench.wal.has_room(1)
    drained = 0
    while bench.wal.has_room(1000, reserve=True):
        bench.append(record(drained, size=900))
        bench.commit()
        bench.loop.run_posted()
        drained += 1
        check_space(bench)
        assert not bench.wal.has_room(1)
    assert bench.wal.failed is None
    assert drained * 900 > 1.7 * (SEGMENT_BYTES - 4096 - 1024)
    vfs.unlink("/elsewhere")
    check_space(bench)
    check_space(bench)
    assert bench.wal.has_room(1000)
    bench.append(record(drained))
    bench.commit()
    bench.close()
    assert read_back(vfs, OPTIONS) == bench.appended


def test_a_disk_that_is_low_but_not_full_refuses_produce_only() -> None:
    """driftq-49"""
    vfs = FaultyVfs(capacity_bytes=8 * SEGMENT_BYTES)
    bench = Bench(vfs, OPTIONS)
    bench.await_spare()
    vfs.plant("/elsewhere", bytes(vfs.capacity_bytes - vfs.used_bytes - RESERVE + 1))
    check_space(bench)
    assert not bench.wal.has_room(1)
    assert bench.wal.has_room(1000, reserve=True)
    vfs.unlink("/elsewhere")
    check_space(bench)
    assert bench.wal.has_room(1)
    bench.close()


def test_a_start_on_a_full_disk_drains() -> None:
    """driftq-49"""
    vfs = FaultyVfs(capacity_bytes=8 * SEGMENT_BYTES)
    bench = Bench(vfs, OPTIONS)
    bench.append(record(0))
    bench.commit()
    bench.close()
    vfs.plant("/elsewhere", bytes(vfs.capacity_bytes - vfs.used_bytes))
    again = Bench(vfs, OPTIONS)
    again.await_spare()
    assert not again.wal.has_room(1)
    assert again.wal.has_room(1, reserve=True)
    again.append(record(1))
    again.commit()
    assert again.reported == 2
    again.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("call", ["open", "write", "sync", "fsync_dir"])
def test_a_spare_that_cannot_be_prepared_is_tried_again(call: str, code: int) -> None:
    """driftq-49"""
    vfs = FaultyVfs()
    bench = Bench(vfs, OPTIONS)
    bench.await_spare()
    bench.append(record(0))
    bench.commit()
    third = f"{DIRECTORY}/wal-{3:020d}.seg"
    if call in ("write", "sync"):
        vfs.fail_call(1, code, only=[call], path=third)
    else:
        vfs.fail_call(1, code, only=[call])
    bench.roll()
    bench.await_spare()
    assert vfs.faults_hit == 1
    assert bench.wal.failed is None
    assert third not in vfs.paths(), "half a spare does not keep the space"
    assert not bench.wal.has_room(1)
    assert bench.wal.has_room(1, reserve=True)
    check_space(bench)
    assert bench.wal.has_room(1)
    bench.close()
    assert vfs.open_files == 0


def test_what_has_room_promises_is_written_without_more_disk() -> None:
    """driftq-49: whatever sizes are asked for, a disk that is full from now on takes them."""
    for size in (1, 40, 300, 3000, 9000, 20_000):
        vfs = FaultyVfs()
        bench = Bench(vfs, OPTIONS)
        bench.await_spare()
        vfs.capacity_bytes = vfs.used_bytes
        check_space(bench)
        while bench.wal.has_room(3 * (size + 4), reserve=True):
            bench.append(record(0, size), record(1, size))
            bench.append(record(2, size))
            if len(bench.appended) % 7 == 0:
                bench.wal.commit()
        bench.commit()
        assert bench.wal.failed is None
        assert bench.reported == len(bench.appended)
        assert vfs.used_bytes <= vfs.capacity_bytes
        bench.close()


def test_while_a_spare_is_on_its_way_produce_leaves_a_part_for_the_rest() -> None:
    vfs = FaultyVfs(capacity_bytes=2 * SEGMENT_BYTES + RESERVE)
    bench = Bench(vfs, OPTIONS)
    assert bench.wal.files.supply.preparing
    while bench.wal.has_room(1000):
        bench.append(record(0, size=900))
        bench.wal.commit()
    for _ in range(3):
        assert bench.wal.has_room(1000, reserve=True)
        bench.append(record(1, size=900))
    bench.await_spare()
    assert bench.wal.has_room(1000)
    bench.commit()
    bench.close()


def test_what_no_segment_holds_needs_twice_its_size_free() -> None:
    vfs = FaultyVfs(capacity_bytes=RESERVE + 20 * SEGMENT_BYTES)
    bench = Bench(vfs, OPTIONS)
    bench.await_spare()
    check_space(bench)
    assert bench.wal.has_room(8 * SEGMENT_BYTES)
    assert not bench.wal.has_room(9 * SEGMENT_BYTES)
    bench.append(bytes(8 * SEGMENT_BYTES))
    bench.commit()
    assert bench.reported == 1
    assert not bench.wal.has_room(8 * SEGMENT_BYTES), "what it took is not counted twice"
    bench.close()


def test_a_slow_spare_refuses_nobody_while_the_disk_has_room() -> None:
    vfs = FaultyVfs()
    bench = Bench(vfs, OPTIONS)
    assert bench.wal.files.supply.preparing
    for number in range(100):
        assert bench.wal.has_room(1000)
        assert bench.wal.has_room(1000, reserve=True)
        bench.append(record(number, size=900))
        bench.wal.commit()
    bench.commit()
    bench.close()
    assert read_back(vfs, OPTIONS) == bench.appended


def test_growth_without_a_spare_stops_at_the_reserve() -> None:
    """driftq-49"""
    vfs = FaultyVfs(capacity_bytes=RESERVE + 6 * SEGMENT_BYTES)
    bench = Bench(vfs, OPTIONS)
    assert bench.wal.files.supply.preparing
    while bench.wal.has_room(1000):
        bench.append(record(0, size=900))
        bench.wal.commit()
        assert len(bench.appended) < 1000
    assert vfs.capacity_bytes - vfs.used_bytes >= RESERVE
    bench.commit()
    assert bench.wal.failed is None
    bench.close()


def test_a_disk_that_cannot_be_measured_is_asked_again() -> None:
    vfs = FaultyVfs()
    bench = Bench(vfs, OPTIONS)
    bench.await_spare()
    vfs.fail_call(1, errno.EIO, only=["free_bytes"])
    check_space(bench)
    assert vfs.faults_hit == 1
    check_space(bench)
    assert bench.wal.has_room(1)
    bench.close()
