"""Nothing reported durable is missing, whichever call fails and whatever a crash loses."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable
from functools import partial

import pytest

from penstock.api.durability import FsyncMode
from penstock.model.errors import Unavailable
from penstock.storage.errors import CorruptLog, FailedWriteRemains
from penstock.storage.log import WalOptions
from penstock.storage.segments import SEGMENT_MAGIC
from penstock.storage.wal_writer import Batch, WalWriter
from tests.storage.faulty_vfs import FLAVOURS, FaultyVfs
from tests.storage.harness import DIRECTORY, SMALL, Bench, record, written

SHORT = 0
WRITER = "penstock-wal-writer"
TINY = WalOptions(segment_bytes=16 * 1024, reserve_bytes=0, frame_bytes=2 * 1024)


def lax(fsync: FsyncMode) -> WalOptions:
    """Syncs at a roll and at the stop only."""
    return WalOptions(
        segment_bytes=TINY.segment_bytes,
        reserve_bytes=0,
        frame_bytes=TINY.frame_bytes,
        fsync=fsync,
        fsync_interval_ms=3_600_000,
    )


def life(vfs: FaultyVfs, *, look: Callable[[Bench], object] | None = None) -> Bench | None:
    """Open, append, commit, grow past two segments, roll, close. None: the start failed."""
    try:
        bench = Bench(vfs, TINY)
    except OSError:
        return None
    try:
        for number in range(14):
            bench.append(record(number), record(100 + number, size=1500))
            bench.append(record(200 + number, size=1900))
            if look is None:
                bench.commit()
            else:
                bench.commit_and_look(vfs, partial(look, bench))
            if number == 9:
                bench.await_spare()
                bench.wal.check_space()
                bench.await_spare()
                if bench.wal.files.supply.spare is not None:
                    bench.roll()
    except Unavailable:
        pass
    bench.close()
    return bench


def check_survivor(
    survivor: FaultyVfs, appended: list[bytes], reported: int, *, is_exact: bool = False
) -> None:
    """The next start succeeds, has all that was reported and nothing that was never appended;
    what is appended then is there at the start after it. With `is_exact` nothing more than what
    was reported is there."""
    bench = Bench(survivor, TINY)
    count = len(bench.replayed)
    assert bench.replayed == appended[:count]
    assert count == reported if is_exact else count >= reported
    bench.append(b"after the crash")
    bench.commit()
    assert bench.reported == count + 1
    bench.close()
    last = Bench(survivor, TINY)
    last.close()
    assert last.replayed == [*appended[:count], b"after the crash"]
    assert last.wal.torn_tails == []


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, SHORT], ids=["EIO", "ENOSPC", "short"])
def test_whichever_call_fails_nothing_reported_durable_is_missing(code: int) -> None:
    """driftq-45, driftq-46, driftq-50"""
    number = 0
    failed = refused = 0
    while True:
        number += 1
        vfs = FaultyVfs()
        vfs.fail_call(number, code)
        bench = life(vfs)
        if not vfs.faults_hit:
            break
        appended, reported = (bench.appended, bench.reported) if bench else ([], 0)
        failed += bench is not None and bench.wal.failed is not None
        refused += bench is None
        is_exact = bench is not None and bench.wal.failed is not None
        assert vfs.open_files == 0
        for flavour in FLAVOURS:
            disk = vfs.crash(flavour, seed=number)
            check_survivor(disk, appended, reported, is_exact=is_exact)
        check_survivor(vfs.restarted(), appended, reported, is_exact=is_exact)
    assert number > 40
    if code == SHORT:
        assert failed == refused == 0
    else:
        assert failed > 10
        assert refused > 5


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, SHORT], ids=["EIO", "ENOSPC", "short"])
def test_whichever_call_fails_while_recovering_nothing_is_lost(code: int) -> None:
    """driftq-46"""
    vfs = FaultyVfs()
    bench = written(vfs, 30, options=TINY)
    vfs.fail_call(1, errno.EIO, only=["write"])
    bench.append(record(30), record(31))
    bench.commit()
    torn = vfs.restarted()
    bench.close()
    number = 0
    while True:
        number += 1
        disk = torn.restarted()
        disk.fail_call(number, code)
        with contextlib.suppress(OSError):
            Bench(disk, TINY).close()
        if not disk.faults_hit:
            break
        assert disk.open_files == 0
        for flavour in FLAVOURS:
            check_survivor(disk.crash(flavour, seed=number), bench.appended, 30)
    assert number > 3


def with_a_commit_over_two_segments(vfs: FaultyVfs) -> Bench:
    """Six records are durable. Then one commit ends a segment and begins the next; it may fail."""
    bench = written(vfs, 6, options=TINY)
    bench.await_spare()
    for number in range(6, 18):
        bench.append(record(number, size=1200))
    return bench


@pytest.mark.parametrize("is_dsync", [True, False], ids=["dsync", "write and sync"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
def test_nothing_of_a_failed_commit_is_there_after_a_restart(code: int, is_dsync: bool) -> None:
    """driftq-45, driftq-50: whichever call of the commit failed; on the machine that goes on, and
    after a power cut that follows the refusal."""
    rolled = failed = 0
    for number in range(1, 100):
        vfs = FaultyVfs()
        vfs._dsync_flag = int(is_dsync)
        bench = with_a_commit_over_two_segments(vfs)
        vfs.fail_call(number, code, thread=WRITER)
        bench.commit()
        if bench.wal.failed is None:
            bench.close()
            break
        failed += 1
        rolled += bench.wal.segment_of_open_frame > 1
        disks = [vfs.restarted(), *(vfs.crash(flavour, number) for flavour in FLAVOURS)]
        bench.close()
        for disk in disks:
            check_survivor(disk, bench.appended, 6, is_exact=True)
    assert failed > 3
    assert rolled == failed


def test_a_failed_commit_is_gone_where_zeros_cannot_be_written() -> None:
    """driftq-45: the file is cut instead."""
    vfs = FaultyVfs()
    bench = with_a_commit_over_two_segments(vfs)
    vfs.fail_call(1, errno.EIO, only=["write"], thread=WRITER, then_all_after=0)
    bench.commit()
    assert isinstance(bench.wal.failed, OSError)
    assert vfs.faults_hit >= 2
    disks = [vfs.restarted(), *(vfs.crash(flavour) for flavour in FLAVOURS)]
    bench.close()
    for disk in disks:
        check_survivor(disk, bench.appended, 6, is_exact=True)


def test_a_commit_that_ran_out_of_space_is_gone_without_taking_more() -> None:
    """driftq-45: a frame that made its segment longer, on a disk that became full meanwhile."""
    vfs = FaultyVfs()
    bench = written(vfs, 6, options=TINY)
    bench.await_spare()
    bench.append(*(record(number, size=6000) for number in range(6, 10)))
    vfs.capacity_bytes = vfs.used_bytes
    bench.commit()
    assert isinstance(bench.wal.failed, OSError)
    bench.close()
    vfs.capacity_bytes = 2**40
    check_survivor(vfs.restarted(), bench.appended, 6, is_exact=True)


def test_a_log_says_so_when_a_failed_commit_cannot_be_erased() -> None:
    """The disk takes nothing more from some call on. Then what was refused may be there, and the
    failure says so; what was reported is there, and the start succeeds. As after a kill or a power
    cut in the middle of erasing."""
    gone = remains = 0
    for number in range(1, 8):
        for after in range(10):
            vfs = FaultyVfs()
            bench = with_a_commit_over_two_segments(vfs)
            vfs.fail_call(number, errno.EIO, thread=WRITER, then_all_after=after)
            bench.commit()
            if bench.wal.failed is None:
                bench.close()
                continue
            is_exact = not isinstance(bench.wal.failed, FailedWriteRemains)
            assert is_exact or "may take effect at the next start" in str(bench.wal.failed)
            gone += is_exact
            remains += not is_exact
            disks = [vfs.restarted(), *(vfs.crash(flavour, after) for flavour in FLAVOURS)]
            bench.close()
            for disk in disks:
                check_survivor(disk, bench.appended, 6, is_exact=is_exact)
    assert gone > 10
    assert remains > 10


def test_a_failed_first_commit_keeps_the_header_of_its_segment() -> None:
    """The log may begin with this segment: without a header the next start would be refused."""
    vfs = FaultyVfs()
    bench = Bench(vfs, TINY)
    bench.await_spare()
    vfs.fail_call(1, errno.EIO, only=["write"])
    bench.append(record(0))
    bench.commit()
    assert bench.wal.failed is not None
    bench.close()
    assert vfs.content(bench.wal.files.active.path).startswith(SEGMENT_MAGIC)


@pytest.mark.parametrize("fsync", ["interval", "none"])
def test_in_the_weaker_modes_only_the_failed_commit_is_erased(fsync: FsyncMode) -> None:
    """driftq-45: what was reported before it, and is not synced, stays."""
    vfs = FaultyVfs()
    bench = Bench(vfs, lax(fsync))
    for number in range(3):
        bench.append(record(number))
        bench.commit()
    vfs.fail_call(1, errno.EIO, only=["write"], thread=WRITER)
    bench.append(record(3))
    bench.append(record(4, size=3000))
    bench.commit()
    assert bench.wal.failed is not None
    disk = vfs.restarted()
    bench.close()
    check_survivor(disk, bench.appended, 3, is_exact=True)


def test_a_sync_that_fails_at_the_stop_does_not_refuse_what_was_written() -> None:
    """In a mode that answers before the sync, the last commit is answered like those before it:
    it is in the file."""
    vfs = FaultyVfs()
    bench = Bench(vfs, lax("none"))
    bench.append(record(0))
    bench.commit()
    bench.await_spare()
    bench.append(record(1))
    vfs.fail_call(1, errno.EIO, only=["sync"], thread=WRITER)
    bench.close()
    assert bench.failures
    assert bench.reported == 2
    check_survivor(vfs.restarted(), bench.appended, 2, is_exact=True)


def test_a_commit_under_way_is_reported_before_a_directory_is_found_replaced() -> None:
    """driftq-45: it is on disk, so it must not be refused."""
    vfs = FaultyVfs()
    bench = written(vfs, 4, options=TINY)
    bench.await_spare()
    vfs.hold(bench.wal.files.active.path, lambda: bench.loop.post(bool))
    bench.append(record(4))
    bench.wal.commit()
    bench.loop.run_until(lambda: vfs.is_held)
    vfs.inodes[DIRECTORY] = 2
    bench.wal.files.supply.take_spare()
    bench.wal.check_space()
    told: list[bool] = []
    bench.wal.files.supply._tasks.put(lambda: bench.loop.post(partial(told.append, True)))
    bench.loop.run_until(lambda: bool(told))
    assert not bench.failures
    vfs.release()
    bench.loop.run_until(lambda: bool(bench.failures))
    assert bench.reported == 5
    bench.close()


Disk = tuple[FaultyVfs, list[bytes], int]
"""What a crash left, what had been appended, and how many of those were reported."""


def crashes(rounds: range) -> None:
    """Crashes within and after every commit: the disk has all that was reported by then."""
    for _ in rounds:
        disks: list[Disk] = []

        vfs = FaultyVfs()

        def crash(bench: Bench, vfs: FaultyVfs = vfs, disks: list[Disk] = disks) -> None:
            for flavour in FLAVOURS:
                disks.append((vfs.crash(flavour, len(disks)), list(bench.appended), bench.reported))

        life(vfs, look=crash)
        assert len(disks) == 14 * 2 * len(FLAVOURS)
        for disk, appended, reported in disks:
            check_survivor(disk, appended, reported)


def test_a_crash_that_drops_unsynced_writes_loses_nothing_reported() -> None:
    """driftq-46"""
    crashes(range(4))


def test_a_crash_in_the_middle_of_a_write_leaves_a_log_that_starts() -> None:
    """driftq-46, driftq-47: also when the disk took later sectors and not earlier ones."""
    for seed in range(60):
        vfs = FaultyVfs()
        bench = written(vfs, 6, options=TINY)
        for number in range(6, 12):
            bench.append(record(number, size=1200))
        vfs.fail_call(1 + seed % 2, errno.EIO, only=["write", "sync"])
        bench.commit()
        if bench.wal.failed is None:
            bench.append(record(12, size=1200))
            bench.commit()
        disk = vfs.crash("sectors", seed)
        bench.close()
        check_survivor(disk, bench.appended, bench.reported)


@pytest.mark.parametrize("fsync", ["interval", "none"])
def test_in_the_weaker_modes_a_crash_still_leaves_a_first_part(fsync: FsyncMode) -> None:
    for seed in range(40):
        vfs = FaultyVfs()
        bench = Bench(vfs, lax(fsync))
        for number in range(25):
            bench.append(record(number, size=900 + 37 * (number % 5)))
            bench.commit()
        for flavour in FLAVOURS:
            check_survivor(vfs.crash(flavour, seed), bench.appended, 0)
        check_survivor(vfs.restarted(), bench.appended, bench.reported)
        bench.close()
        check_survivor(vfs.crash("nothing"), bench.appended, len(bench.appended))


def _report_before_writing(writer: WalWriter, batch: Batch) -> None:
    batch.synced = batch.seq
    writer._tell(lambda: writer._on_written(batch))
    _honest_write(writer, batch)


def _report_between_write_and_sync(writer: WalWriter, batch: Batch) -> None:
    for write in batch.writes:
        writer._vfs.write_at(write.segment.fd, write.buffers, write.offset)
    _report_before_writing(writer, batch)


_honest_write = WalWriter._write


@pytest.mark.parametrize(
    "mutant", ["no sync", "report before the write", "report between write and sync"]
)
def test_the_crash_test_catches_a_log_that_loses_what_it_reported(
    mutant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mutant == "no sync":
        monkeypatch.setattr(FaultyVfs, "write_at_durable", FaultyVfs.write_at)
    elif mutant == "report before the write":
        monkeypatch.setattr(WalWriter, "_write", _report_before_writing)
    else:
        monkeypatch.setattr(WalWriter, "_write", _report_between_write_and_sync)
    with pytest.raises((AssertionError, CorruptLog)):
        crashes(range(1))


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, SHORT], ids=["EIO", "ENOSPC", "short"])
def test_a_file_written_atomically_is_the_old_or_the_new_one_whatever_fails(code: int) -> None:
    old, new = b"old" * 500, b"new" * 800
    number = 0
    while True:
        number += 1
        vfs = FaultyVfs()
        vfs.write_file_atomically("/data/manifest", old)
        vfs.fail_call(number, code)
        told = False
        with contextlib.suppress(OSError):
            vfs.write_file_atomically("/data/manifest", new)
            told = True
        for flavour in FLAVOURS:
            for seed in range(8):
                found = vfs.crash(flavour, seed).content("/data/manifest")
                assert found == new or (found == old and not told)
        if not vfs.faults_hit:
            break
    assert number > 1


def test_a_failed_sync_fails_the_log_for_good() -> None:
    """driftq-50: it is never retried, and nothing held back is released."""
    vfs = FaultyVfs()
    bench = written(vfs, 4)
    bench.await_spare()
    vfs.fail_call(1, errno.EIO, only=["write"])
    bench.append(b"held back")
    bench.commit()
    assert len(bench.failures) == 1
    assert bench.wal.failed is bench.failures[0]
    assert bench.reported == 4
    writes = vfs.calls.count("write")
    with pytest.raises(Unavailable, match="cannot be written"):
        bench.wal.append([b"later"])
    with pytest.raises(Unavailable):
        bench.wal.append_one(b"later")
    bench.wal.commit()
    bench.wal.roll()
    bench.wal.check_space()
    assert not bench.wal.has_room(1)
    assert not bench.wal.has_room(1, reserve=True)
    bench.close()
    assert vfs.calls.count("write") == writes
    assert (bench.reported, len(bench.failures)) == (4, 1)


@pytest.mark.parametrize("fsync", ["interval", "none"])
def test_a_failed_sync_in_the_background_fails_the_log(fsync: FsyncMode) -> None:
    """driftq-50"""
    vfs = FaultyVfs()
    options = WalOptions(
        segment_bytes=SMALL.segment_bytes, reserve_bytes=0, fsync=fsync, fsync_interval_ms=1
    )
    bench = Bench(vfs, options)
    bench.await_spare()
    vfs.fail_call(1, errno.EIO, only=["sync"], path=bench.wal.files.active.path)
    bench.append(b"written, not synced")
    bench.commit()
    if fsync == "none":
        bench.wal.roll()
    bench.append(b"appended before it is known")
    bench.loop.run_until(lambda: bool(bench.failures))
    for _ in range(2):
        with pytest.raises(Unavailable):
            bench.wal.append_one(b"later")
        bench.wal.commit()
    assert bench.reported == 1
    bench.close()


def test_what_a_failed_sync_left_in_memory_is_written_again_at_the_next_start() -> None:
    """After a failed sync the kernel may call the pages clean: a sync alone would not save them
    once they are replayed and seen."""
    vfs = FaultyVfs()
    lax = WalOptions(segment_bytes=SMALL.segment_bytes, reserve_bytes=0, fsync="none")
    bench = Bench(vfs, lax)
    bench.append(record(0))
    bench.commit()
    bench.await_spare()
    vfs.fail_call(1, errno.EIO, only=["sync"])
    bench.close()
    assert bench.failures
    machine = vfs.restarted()
    again = Bench(machine)
    assert again.replayed == [record(0)]
    disk = machine.crash("nothing")
    again.close()
    last = Bench(disk)
    last.close()
    assert last.replayed == [record(0)]
