"""The real file system, and the one place where short writes are finished."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

import pytest

from penstock.storage.vfs import Vfs, remove_if_there


class Stingy(Vfs):
    """Takes at most `most` bytes and two buffers a call, from the `after`th call on nothing."""

    def __init__(self, most: int, after: int = 10**9) -> None:
        super().__init__()
        self.most = most
        self.left = after

    def _pwritev(
        self, fd: int, buffers: Sequence[bytes | memoryview], offset: int, flags: int
    ) -> int:
        self.left -= 1
        if self.left < 0:
            return 0
        part = b"".join(buffers)[: self.most]
        return os.pwritev(fd, [part], offset)

    def _pread(self, fd: int, length: int, offset: int) -> bytes:
        return os.pread(fd, min(length, self.most), offset)


@pytest.mark.parametrize("most", [1, 2, 3, 4, 5, 7, 100])
def test_short_writes_and_reads_are_finished(tmp_path, most: int) -> None:
    vfs = Stingy(most)
    fd = vfs.open(str(tmp_path / "file"), create=True)
    vfs.write_at(fd, [b"abc", b"", b"defg", memoryview(b"h"), b""], 2)
    vfs.write_at_durable(fd, [b"XY"], 0)
    assert vfs.read_at(fd, 100, 0) == b"XYabcdefgh"
    assert vfs.read_at(fd, 3, 4) == b"cde"
    vfs.close(fd)


def test_a_file_that_takes_no_more_bytes_is_an_error(tmp_path) -> None:
    vfs = Stingy(2, after=2)
    fd = vfs.open(str(tmp_path / "file"), create=True)
    with pytest.raises(OSError, match="no more bytes"):
        vfs.write_at(fd, [b"abcdefgh"], 0)
    vfs.close(fd)


def test_more_buffers_than_one_call_takes_are_written(tmp_path) -> None:
    vfs = Vfs()
    fd = vfs.open(str(tmp_path / "file"), create=True)
    buffers = [b"%05d" % number for number in range(2500)]
    vfs.write_at_durable(fd, buffers, 0)
    assert vfs.read_at(fd, vfs.size(fd), 0) == b"".join(buffers)
    vfs.close(fd)


def test_a_platform_without_durable_writes_syncs_instead(tmp_path) -> None:
    synced: list[int] = []

    class Plain(Vfs):
        def _pwritev(
            self, fd: int, buffers: Sequence[bytes | memoryview], offset: int, flags: int
        ) -> int:
            if flags:
                raise OSError(errno.EOPNOTSUPP, "not here")
            return os.pwritev(fd, buffers, offset)

        def sync(self, fd: int) -> None:
            super().sync(fd)
            synced.append(fd)

    vfs = Plain()
    fd = vfs.open(str(tmp_path / "file"), create=True)
    vfs.write_at_durable(fd, [b"a"], 0)
    vfs.write_at_durable(fd, [b"b"], 1)
    assert synced == [fd, fd]
    assert vfs.read_file(str(tmp_path / "file")) == b"ab"
    vfs.close(fd)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path) -> None:
    vfs = Vfs()
    path = str(tmp_path / "manifest")
    for data in (b"old", b"new and longer", b""):
        (tmp_path / "manifest.tmp").write_bytes(b"left by a crash")
        vfs.write_file_atomically(path, data)
        assert vfs.read_file(path) == data
        assert vfs.listdir(str(tmp_path)) == ["manifest"]


def test_files_are_created_once_and_removed_quietly(tmp_path) -> None:
    vfs = Vfs()
    path = str(tmp_path / "file")
    vfs.close(vfs.open(path, create=True))
    with pytest.raises(FileExistsError):
        vfs.open(path, create=True)
    remove_if_there(vfs, path)
    remove_if_there(vfs, path)
    assert not vfs.exists(path)
    assert vfs.free_bytes(str(tmp_path)) > 0
    assert len(vfs.random_bytes(4)) == 4
