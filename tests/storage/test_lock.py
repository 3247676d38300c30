"""At most one process in a data directory."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from penstock.storage.errors import DirectoryInUse
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
