"""The log that keeps nothing behaves like the one that does."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from penstock.model.errors import Unavailable
from penstock.storage.errors import SegmentGone
from penstock.storage.frames import POSITION_BITS
from penstock.storage.log import Log, NoListener
from penstock.storage.memory_log import MemoryLog
from tests.storage.faulty_vfs import FaultyVfs
from tests.storage.harness import Bench, Loop


class Told(NoListener):
    """Hears what is durable."""

    def __init__(self, durable: Callable[[int], None]) -> None:
        self._durable = durable

    def durable(self, seq: int) -> None:
        self._durable(seq)


def test_it_is_a_log_with_the_positions_of_one() -> None:
    loop = Loop()
    memory = MemoryLog(loop.post)
    log: Log = memory
    bench = Bench(FaultyVfs())
    for records in ([b"abc"], [b"de", b"f"], [], [b"g" * 100]):
        assert log.append(records) == bench.wal.append(records)
    assert log.append_one(b"h") == bench.wal.append_one(b"h")
    bench.close()


def test_what_is_committed_is_durable_in_a_later_turn() -> None:
    loop = Loop()
    log = MemoryLog(loop.post)
    told: list[int] = []
    log.start(Told(told.append))
    log.commit()
    log.append_one(b"a")
    pending = log.has_pending
    log.commit()
    log.append_one(b"b")
    log.commit()
    assert told == []
    loop.run_posted()
    assert told == [1]
    assert (pending, log.has_pending) == (True, False)
    assert (log.seq, log.durable_seq, log.commits) == (2, 1, 1)
    assert log.append_one(b"c") == 2 << POSITION_BITS


def test_it_always_has_room_and_never_anything_to_read() -> None:
    log = MemoryLog(Loop().post)
    assert log.has_room(2**40)
    assert log.has_room(2**40, reserve=True)
    assert log.read([]) == []
    with pytest.raises(SegmentGone):
        log.read([log.append_one(b"a")])
    log.roll()
    log.check_space()
    log.drop_segments(5)
    assert (log.closed_segments(), log.size_bytes) == ([], 0)


def test_offsets_in_a_frame_stay_in_their_bits() -> None:
    log = MemoryLog(Loop().post)
    block = bytes(2**24)
    positions = [log.append_one(block) for _ in range(40)]
    assert positions == sorted(set(positions))
    assert log.seq > 1


def test_a_callback_that_raises_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop()
    log = MemoryLog(loop.post)

    def broken(seq: int) -> None:
        raise ConnectionResetError(f"gone at {seq}")

    log.start(Told(broken))
    log.append_one(b"a")
    log.commit()
    with caplog.at_level(logging.ERROR, "penstock.storage"):
        loop.run_posted()
    assert "gone at 1" in caplog.text
    assert log.durable_seq == 1


def test_close_reports_what_was_appended_and_refuses_more() -> None:
    loop = Loop()
    log = MemoryLog(loop.post)
    told: list[int] = []
    log.start(Told(told.append))
    log.append_one(b"a")
    log.commit()
    log.close()
    loop.run_posted()
    log.close()
    assert told == [1]
    with pytest.raises(Unavailable):
        log.append_one(b"b")
    assert not log.has_room(1)
