"""Position files: one object uses a file at a time, and its offsets are those of one stream."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from penstock.client import PositionFile
from penstock.client.positions import HandledEventsOfStream
from penstock.model.errors import FailedPrecondition, InvalidArgument, OutOfRange

ORDERS, PAYMENTS = ("t", "n", "orders"), ("t", "n", "payments")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "position"


def test_a_second_opener_of_a_position_file_is_refused(path: Path) -> None:
    """Otherwise the one that writes last would forget what the other has handled."""
    first = PositionFile(path)
    first.add(0)
    with pytest.raises(FailedPrecondition, match="in use by another PositionFile"):
        PositionFile(path)
    first.close()
    with PositionFile(path) as second:
        second.add(1)
        with pytest.raises(FailedPrecondition, match="is closed"):
            first.add(2)
    assert PositionFile(path).ranges == [(0, 2)]


def test_another_process_cannot_open_a_position_file_until_its_owner_ends(path: Path) -> None:
    opening = f"from penstock.client import PositionFile\nfile = PositionFile({str(path)!r})\n"
    holding = f"{opening}file.add(0)\nprint('there', flush=True)\ninput()"
    holder = subprocess.Popen(
        [sys.executable, "-c", holding], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"there\n"
        with pytest.raises(FailedPrecondition, match="in use"):
            PositionFile(path)
        holder.kill()
    assert PositionFile(path).ranges == [(0, 1)]


def test_a_fork_cannot_write_the_position_file_of_its_parent(path: Path) -> None:
    file = PositionFile(path)
    pid = os.fork()
    if pid == 0:
        try:
            file.add(0)
        except FailedPrecondition:
            file.close()
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    with pytest.raises(FailedPrecondition, match="in use"):
        PositionFile(path)
    file.add(1)
    assert file.ranges == [(1, 2)]


def test_a_position_file_is_free_when_its_object_is_gone(path: Path) -> None:
    for offset in range(3):
        PositionFile(path).add(offset)
    assert PositionFile(path).ranges == [(0, 3)]


def test_a_position_file_belongs_to_one_stream(path: Path) -> None:
    file = PositionFile(path)
    assert isinstance(file, HandledEventsOfStream)
    assert file.expected_id(ORDERS) is None
    file.begin(ORDERS, 7)
    file.begin(ORDERS, 7)
    file.add(0)
    file.close()
    again = PositionFile(path)
    assert (again.stream, again.stream_id, again.ranges) == (ORDERS, 7, [(0, 1)])
    assert again.expected_id(ORDERS) == 7
    with pytest.raises(InvalidArgument, match="'t/n/orders', not in 't/n/payments'"):
        again.expected_id(PAYMENTS)
    with pytest.raises(InvalidArgument, match="a file for each stream"):
        again.begin(PAYMENTS, 7)
    with pytest.raises(OutOfRange, match="Delete the file"):
        again.begin(ORDERS, 8)


def test_a_position_file_of_an_older_version_takes_the_stream_that_uses_it_first(
    path: Path,
) -> None:
    path.write_bytes(b'{"ranges":[[0,3],[5,6]]}')
    with PositionFile(path) as file:
        assert (file.ranges, file.stream, file.stream_id) == ([(0, 3), (5, 6)], None, None)
        file.begin(ORDERS, 7)
    with PositionFile(path) as file:
        assert (file.ranges, file.stream_id) == ([(0, 3), (5, 6)], 7)


def test_a_position_file_that_cannot_be_read_stays_free(path: Path) -> None:
    path.write_bytes(b"[")
    with pytest.raises(msgspec.DecodeError):
        PositionFile(path)
    path.unlink()
    PositionFile(path).add(0)
