"""At most one process in a data directory."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest

from penstock.storage.errors import DirectoryInUse, DirectoryReplaced
from penstock.storage.lock import DirectoryLock
from penstock.storage.vfs import Vfs
from tests.storage.faulty_vfs import FaultyVfs
from tests.storage.harness import Bench, written


def test_the_second_opener_is_refused_and_told_where_and_by_whom(tmp_path) -> None:
    """driftq-52"""
    directory = str(tmp_path / "data")
    first = Bench(Vfs(), directory=directory)
    with pytest.raises(DirectoryInUse) as caught:
        Bench(Vfs(), directory=directory)
    assert (caught.value.directory, caught.value.pid) == (directory, os.getpid())
    assert directory in str(caught.value)
    first.close()
    Bench(Vfs(), directory=directory).close()


def test_another_process_is_refused_too_and_a_killed_one_leaves_no_lock(tmp_path) -> None:
    """driftq-52"""
    directory = str(tmp_path / "data")
    program = (
        "import sys; from penstock.storage.lock import DirectoryLock as L; "
        "from penstock.storage.vfs import Vfs; "
        "lock = L.take(Vfs(), sys.argv[1]); print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", program, directory],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(DirectoryInUse) as caught:
            DirectoryLock.take(Vfs(), directory)
        assert caught.value.pid == holder.pid
        holder.kill()
    DirectoryLock.take(Vfs(), directory).release()


def test_a_lock_whose_holder_cannot_be_read_is_still_a_lock() -> None:
    vfs = FaultyVfs()
    lock = DirectoryLock.take(vfs, "/data")
    with pytest.raises(DirectoryInUse, match="another process"):
        DirectoryLock.take(vfs, "/data")
    lock.release()
    lock.release()


def test_a_lock_taken_earlier_is_handed_to_the_log() -> None:
    vfs = FaultyVfs()
    lock = DirectoryLock.take(vfs, "/data")
    Bench(vfs, lock=lock).close()
    written(vfs, 2).close()
    assert vfs.open_files == 0


def test_the_directory_stays_locked_when_its_lock_file_is_removed_or_replaced(tmp_path) -> None:
    """driftq-52"""
    directory = tmp_path / "data"
    lock = DirectoryLock.take(Vfs(), str(directory))
    (directory / "LOCK").unlink()
    with pytest.raises(DirectoryInUse, match="another process"):
        DirectoryLock.take(Vfs(), str(directory))
    (directory / "LOCK").write_text("1\n")
    for is_reading in (False, True):
        with pytest.raises(DirectoryInUse):
            DirectoryLock.take(Vfs(), str(directory), is_reading=is_reading)
    lock.release()
    DirectoryLock.take(Vfs(), str(directory)).release()


def test_a_broker_of_an_older_release_that_locks_the_file_only_keeps_others_out(tmp_path) -> None:
    """driftq-52"""
    vfs = Vfs()
    older = vfs.lock_file(str(tmp_path / "LOCK"))
    with pytest.raises(DirectoryInUse):
        DirectoryLock.take(vfs, str(tmp_path))
    vfs.close(older)
    DirectoryLock.take(vfs, str(tmp_path)).release()


def test_only_the_file_is_locked_where_directories_cannot_be_and_a_warning_says_so(caplog) -> None:
    vfs = FaultyVfs()
    vfs.fail_call(1, errno.ENOLCK, only=["lock_directory"])
    lock = DirectoryLock.take(vfs, "/data")
    assert "only its LOCK file keeps a second broker out" in caplog.text
    with pytest.raises(DirectoryInUse):
        DirectoryLock.take(vfs, "/data")
    lock.release()
    assert vfs.open_files == 0


def test_a_lock_knows_when_another_directory_is_at_its_path(tmp_path) -> None:
    directory = tmp_path / "data"
    lock = DirectoryLock.take(Vfs(), str(directory))
    lock.check()
    directory.rename(tmp_path / "moved")
    with pytest.raises(DirectoryReplaced):
        lock.check()
    directory.mkdir()
    with pytest.raises(DirectoryReplaced, match="moved, removed or replaced"):
        lock.check()
    directory.rmdir()
    (tmp_path / "moved").rename(directory)
    lock.check()
    lock.release()


def test_a_log_whose_directory_is_replaced_fails_at_the_roll_and_makes_no_file_there() -> None:
    vfs = FaultyVfs()
    bench = written(vfs, 4)
    bench.await_spare()
    before = vfs.paths()
    vfs.inodes["/data"] = 2
    bench.wal.roll()
    bench.loop.run_until(lambda: bench.wal.failed is not None)
    assert isinstance(bench.wal.failed, DirectoryReplaced)
    bench.close()
    assert vfs.paths() == before


def test_a_log_whose_directory_is_replaced_before_its_spare_is_made_fails_at_once() -> None:
    vfs = FaultyVfs()
    bench = written(vfs, 4)
    bench.await_spare()
    bench.wal.files.supply.take_spare()
    before = vfs.paths()
    vfs.inodes["/data"] = 2
    bench.wal.check_space()
    bench.loop.run_until(lambda: bench.wal.failed is not None)
    assert isinstance(bench.wal.failed, DirectoryReplaced)
    bench.close()
    assert vfs.paths() == before
