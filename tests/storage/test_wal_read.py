"""Reading records back by position, from any thread."""

from __future__ import annotations

import threading

import pytest

from penstock.storage.errors import CorruptLog, NotYetInLog
from penstock.storage.frames import POSITION_BITS
from penstock.storage.segments import SEGMENT_HEADER_BYTES
from tests.storage.faulty_vfs import FaultyVfs
from tests.storage.harness import Bench, record, written


@pytest.fixture
def vfs() -> FaultyVfs:
    return FaultyVfs()


def test_records_are_read_by_position_in_any_order(vfs: FaultyVfs) -> None:
    bench = Bench(vfs)
    for number in range(120):
        bench.append(record(number, size=20 + 97 * (number % 31)), record(number, size=9000))
        bench.commit()
    wanted = list(zip(bench.positions, bench.appended, strict=True))
    for some in (wanted, wanted[::-1], wanted[::7], wanted[5:6] * 3, []):
        assert bench.wal.read([position for position, _ in some]) == [data for _, data in some]
    bench.close()
    again = Bench(vfs)
    assert again.wal.read(again.positions) == bench.appended
    again.close()


def test_neighbours_are_read_with_one_call(vfs: FaultyVfs) -> None:
    bench = written(vfs, 100)
    before = vfs.calls.count("read")
    assert bench.wal.read(bench.positions) == bench.appended
    assert vfs.calls.count("read") == before + 1
    bench.close()


def test_a_frame_that_is_being_written_is_read_from_memory(vfs: FaultyVfs) -> None:
    bench = written(vfs, 4)
    for number in range(3):
        bench.append(record(number, size=3000))

    def look() -> None:
        assert bench.wal.read(bench.positions) == bench.appended

    bench.commit_and_look(vfs, look)
    bench.close()


def test_a_position_of_the_open_frame_cannot_be_read(vfs: FaultyVfs) -> None:
    bench = Bench(vfs)
    bench.append(record(0))
    with pytest.raises(NotYetInLog):
        bench.wal.read(bench.positions)
    bench.close()


def test_readers_on_other_threads_see_every_record_while_the_log_rolls(vfs: FaultyVfs) -> None:
    bench = Bench(vfs)
    durable = 0
    stop = threading.Event()
    wrong: list[object] = []

    def read() -> None:
        while not stop.is_set():
            try:
                count = durable
                if bench.wal.read(bench.positions[:count]) != bench.appended[:count]:
                    wrong.append(count)
            except Exception as error:
                wrong.append(error)
                raise

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for number in range(150):
        bench.append(record(number, size=1500))
        bench.commit()
        durable = bench.reported
        bench.await_spare()
    stop.set()
    for reader in readers:
        reader.join()
    assert wrong == []
    assert bench.rolls > 2
    bench.close()


def test_a_byte_changed_under_a_running_log_is_never_read_as_a_record(vfs: FaultyVfs) -> None:
    """driftq-48"""
    bench = written(vfs, 12)
    bench.await_spare()
    [segment] = bench.wal.files._segments
    wanted = list(zip(bench.positions, bench.appended, strict=True))
    whole = vfs.content(segment.path)
    ends = [*segment.offsets[1:], segment.used]
    for byte in range(SEGMENT_HEADER_BYTES, segment.used):
        data = bytearray(whole)
        data[byte] ^= 1 << byte % 8
        vfs.plant(segment.path, bytes(data))
        damaged = next(index for index, end in enumerate(ends) if byte < end)
        others = [(at, data) for at, data in wanted if at >> POSITION_BITS != damaged + 1]
        assert bench.wal.read([at for at, _ in others]) == [data for _, data in others]
        with pytest.raises(CorruptLog) as caught:
            bench.wal.read(bench.positions)
        assert caught.value.path == segment.path
        assert caught.value.position == segment.offsets[damaged]
    assert vfs.open_files == 4  # the segment, the spare and the two locks
    vfs.plant(segment.path, whole)
    assert bench.wal.read(bench.positions) == bench.appended
    bench.close()


def test_a_file_cut_under_a_running_log_is_told_as_damage(vfs: FaultyVfs) -> None:
    bench = written(vfs, 4)
    [segment] = bench.wal.files._segments
    whole = vfs.content(segment.path)
    for length in (0, SEGMENT_HEADER_BYTES, segment.offsets[1] + 5, segment.used - 1):
        vfs.plant(segment.path, whole[:length])
        with pytest.raises(CorruptLog):
            bench.wal.read(bench.positions)
    bench.close()


def test_a_frame_is_read_once_whatever_the_order_of_its_positions(vfs: FaultyVfs) -> None:
    bench = written(vfs, 120, per_commit=60)
    bench.append(*(record(n, size=3000) for n in range(4)))
    bench.commit()
    wanted = list(zip(bench.positions, bench.appended, strict=True))
    mixed = [*wanted[1::2], *wanted[::-2], *wanted]
    before = vfs.calls.count("read")
    assert bench.wal.read([at for at, _ in mixed]) == [data for _, data in mixed]
    assert vfs.calls.count("read") == before + 1
    bench.close()


def test_a_position_that_is_no_record_s_is_refused(vfs: FaultyVfs) -> None:
    bench = written(vfs, 2)
    for beyond in (10_000, 2**20):
        with pytest.raises(ValueError, match="not that of a record"):
            bench.wal.read([bench.positions[0] + beyond])
    bench.close()
