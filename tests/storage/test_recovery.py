"""Starting on a log that was cut, torn or damaged."""

from __future__ import annotations

import logging

import pytest

from penstock.storage.errors import CorruptLog, StorageError
from penstock.storage.frames import FRAME_MAGIC
from penstock.storage.segments import SEGMENT_HEADER_BYTES, SegmentEnd, read_segment, segment_name
from tests.storage.faulty_vfs import FaultyVfs
from tests.storage.harness import (
    DIRECTORY,
    SEGMENT_BYTES,
    Bench,
    outcome,
    read_back,
    record,
    written,
)

FIRST = f"{DIRECTORY}/{segment_name(1)}"
SECOND = f"{DIRECTORY}/{segment_name(2)}"
THIRD = f"{DIRECTORY}/{segment_name(3)}"


def killed(vfs: FaultyVfs, bench: Bench) -> FaultyVfs:
    """The disk as it was with the log open; the log is then closed elsewhere."""
    bench.await_spare()
    survivor = vfs.restarted()
    bench.close()
    return survivor


def image(*, clean: bool, count: int = 8) -> tuple[bytes, int]:
    """The first segment of a small log, and where its frames end."""
    vfs = FaultyVfs()
    bench = written(vfs, count)
    if clean:
        bench.close()
        survivor = vfs
    else:
        survivor = killed(vfs, bench)
    data = survivor.content(FIRST)
    return data, len(data.rstrip(b"\0"))


def planted(*files: bytes) -> FaultyVfs:
    vfs = FaultyVfs()
    for number, data in enumerate(files, 1):
        vfs.plant(f"{DIRECTORY}/{segment_name(number)}", data)
    return vfs


def flipped(data: bytes, bit: int) -> bytes:
    damaged = bytearray(data)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


def check_prefix(bench: Bench | None, written_records: list[bytes]) -> int:
    """How many of the records were read; those read are the first ones."""
    assert bench is not None
    count = len(bench.replayed)
    assert bench.replayed == written_records[:count]
    return count


def test_a_log_comes_back_as_it_was_written() -> None:
    """driftq-51"""
    vfs = FaultyVfs()
    written(vfs, 9).close()
    assert read_back(vfs) == [record(n) for n in range(9)]
    assert vfs.open_files == 0


def test_starting_and_stopping_alone_changes_nothing() -> None:
    """driftq-47"""
    vfs = FaultyVfs()
    written(vfs, 9).close()
    before = vfs.content(FIRST)
    for _ in range(3):
        read_back(vfs)
    assert vfs.content(FIRST) == before


@pytest.mark.parametrize("padded", [False, True], ids=["cut", "zeroed"])
def test_a_log_cut_at_any_byte_starts_keeps_whole_frames_and_takes_appends(padded: bool) -> None:
    """driftq-47"""
    data, end = image(clean=False)
    everything = [record(n) for n in range(8)]
    kept = 0
    for length in [0, 1, 40, *range(SEGMENT_HEADER_BYTES - 1, end + 1)]:
        cut = data[:length].ljust(len(data) if padded else 0, b"\0")
        vfs = planted(cut)
        bench = Bench(vfs)
        count = check_prefix(bench, everything)
        assert count >= kept
        kept = count
        whole = bench.wal.torn_tails == []
        bench.append(b"appended after the cut")
        bench.commit()
        bench.close()
        again = Bench(vfs)
        assert again.replayed == [*everything[:kept], b"appended after the cut"]
        assert again.wal.torn_tails == []
        again.close()
        if length == end:
            assert whole
    assert kept == len(everything)


def test_a_cut_within_a_frame_is_reported_with_its_place(caplog: pytest.LogCaptureFixture) -> None:
    """driftq-47"""
    data, end = image(clean=False)
    with caplog.at_level(logging.WARNING, "penstock.storage"):
        bench = Bench(planted(data[: end - 1]))
    bench.close()
    (tail,) = bench.wal.torn_tails
    assert tail.path == FIRST
    assert tail.position + tail.bytes == end - 1
    assert f"{FIRST}: cut the torn tail at byte {tail.position}" in caplog.text


@pytest.mark.parametrize("clean", [True, False], ids=["stopped", "killed"])
def test_a_flipped_bit_anywhere_is_reported_or_refused_never_read(clean: bool) -> None:
    """driftq-48"""
    data, end = image(clean=clean)
    everything = [record(n) for n in range(8)]
    places = [*range(64), *range(64, SEGMENT_HEADER_BYTES, 97), *range(SEGMENT_HEADER_BYTES, end)]
    refused = trimmed = 0
    for byte in [*places, *range(end, len(data), 997), len(data) - 1]:
        for bit in range(8):
            vfs = planted(flipped(data, byte * 8 + bit))
            before = vfs.content(FIRST)
            bench, error = outcome(vfs)
            if error is not None:
                assert isinstance(error, CorruptLog)
                assert (error.path, error.position <= byte) == (FIRST, True)
                assert vfs.content(FIRST) == before
                refused += 1
            else:
                check_prefix(bench, everything)
                assert bench is not None
                assert len(bench.wal.torn_tails) == 1
                assert read_back(vfs) == bench.replayed
                trimmed += 1
    assert refused
    assert trimmed


def test_after_a_clean_stop_no_flipped_bit_costs_a_record_unnoticed() -> None:
    """driftq-48: the closing mark makes damage to the last commit a refusal, not a torn tail."""
    data, end = image(clean=True)
    mark = data.rfind(FRAME_MAGIC)
    for byte in range(SEGMENT_HEADER_BYTES, end):
        bench, error = outcome(planted(flipped(data, byte * 8 + byte % 8)))
        if byte < mark:
            assert isinstance(error, CorruptLog)
        else:
            assert check_prefix(bench, [record(n) for n in range(8)]) == 8


def test_after_a_kill_only_the_last_commit_can_pass_for_a_torn_tail() -> None:
    """driftq-48: each frame says what was synced before it, so damage before it is refused."""
    data, end = image(clean=False)
    last = data.rfind(FRAME_MAGIC)
    header = [*range(64), SEGMENT_HEADER_BYTES - 1]
    for byte in [*header, *range(SEGMENT_HEADER_BYTES, end)]:
        bench, error = outcome(planted(flipped(data, byte * 8 + byte % 8)))
        if byte < last:
            assert isinstance(error, CorruptLog)
        else:
            assert check_prefix(bench, [record(n) for n in range(8)]) == 6


def test_a_flipped_bit_in_the_spare_is_reported() -> None:
    """driftq-48"""
    data, _ = image(clean=True)
    for byte in (0, 17, SEGMENT_HEADER_BYTES, 20_000, len(data) - 1):
        vfs = planted(data, flipped(bytes(len(data)), byte * 8 + 3))
        bench, error = outcome(vfs)
        assert error is None
        assert check_prefix(bench, [record(n) for n in range(8)]) == 8
        assert bench is not None
        (tail,) = bench.wal.torn_tails
        assert (tail.path, tail.position, tail.bytes) == (SECOND, byte, 1)


def three_segments() -> tuple[FaultyVfs, list[bytes]]:
    vfs = FaultyVfs()
    bench = Bench(vfs)
    for number in range(3):
        bench.append(record(number))
        bench.commit()
        if number < 2:
            bench.roll()
    survivor = killed(vfs, bench)
    return survivor, bench.appended


def test_damage_before_a_later_segment_is_corruption_wherever_it_is() -> None:
    """driftq-48"""
    vfs, _ = three_segments()
    data = vfs.content(SECOND)
    for bit in range(len(data) * 8):
        if 64 * 8 <= bit < SEGMENT_HEADER_BYTES * 8 and bit % 101:
            continue
        damaged = vfs.restarted()
        damaged.plant(SECOND, flipped(data, bit))
        _, error = outcome(damaged)
        assert isinstance(error, CorruptLog)
        assert error.path == SECOND


@pytest.mark.parametrize("cut", [0, 10, SEGMENT_HEADER_BYTES, SEGMENT_HEADER_BYTES + 20])
def test_a_cut_before_a_later_segment_is_corruption(cut: int) -> None:
    """driftq-48"""
    vfs, _ = three_segments()
    vfs.plant(SECOND, vfs.content(SECOND)[:cut])
    _, error = outcome(vfs)
    assert isinstance(error, CorruptLog)


@pytest.mark.parametrize("missing", [FIRST, SECOND])
def test_a_missing_segment_is_corruption(missing: str) -> None:
    vfs, _ = three_segments()
    vfs.unlink(missing)
    _, error = outcome(vfs)
    assert isinstance(error, CorruptLog)
    assert "is missing" in str(error)


def test_exchanged_segments_are_corruption() -> None:
    vfs, _ = three_segments()
    first, second = vfs.content(FIRST), vfs.content(SECOND)
    vfs.plant(FIRST, second)
    vfs.plant(SECOND, first)
    _, error = outcome(vfs)
    assert isinstance(error, CorruptLog)


def test_a_refused_start_changes_nothing_and_lets_go_of_the_directory() -> None:
    """driftq-48"""
    vfs, _ = three_segments()
    vfs.plant(FIRST, flipped(vfs.content(FIRST), (SEGMENT_HEADER_BYTES + 40) * 8))
    before = {path: vfs.content(path) for path in vfs.paths()}
    for _ in range(2):
        with pytest.raises(CorruptLog) as caught:
            Bench(vfs)
        assert caught.value.position == SEGMENT_HEADER_BYTES
        assert "penstock wal verify" in str(caught.value)
    assert {path: vfs.content(path) for path in vfs.paths()} == before
    assert vfs.open_files == 0


def test_frames_of_one_write_survive_up_to_the_first_that_was_torn() -> None:
    """A write of several frames may reach the disk in any order: a whole frame behind a torn one
    is damage only if the torn one had been synced before."""
    vfs = FaultyVfs()
    bench = written(vfs, 2)
    before = len(vfs.content(FIRST).rstrip(b"\0"))
    for number in range(2, 5):
        bench.append(record(number, size=4000))
    bench.commit()
    survivor = killed(vfs, bench)
    data = survivor.content(FIRST)
    torn = planted(data[: before + 100] + bytes(200) + data[before + 300 :])
    again = Bench(torn)
    again.close()
    assert again.replayed == [record(0), record(1)]
    assert [(tail.position, tail.frames) for tail in again.wal.torn_tails] == [(before, 2)]


def test_bytes_in_a_message_that_imitate_a_frame_do_not_refuse_the_start() -> None:
    vfs = FaultyVfs()
    bench = written(vfs, 4)
    data = killed(vfs, bench).content(FIRST)
    imitation = data[SEGMENT_HEADER_BYTES:].rstrip(b"\0")
    vfs = FaultyVfs()
    bench = Bench(vfs)
    bench.append(imitation)
    bench.commit()
    data = killed(vfs, bench).content(FIRST)
    again, error = outcome(planted(data.rstrip(b"\0")[:-1]))
    assert error is None
    assert check_prefix(again, [imitation]) == 0


def test_leftovers_below_the_first_segment_are_removed() -> None:
    vfs, appended = three_segments()
    bench = Bench(vfs, first_segment=3)
    assert bench.replayed == appended[2:]
    bench.close()
    assert FIRST not in vfs.paths()
    assert SECOND not in vfs.paths()


def test_a_log_that_lost_its_first_segment_is_refused() -> None:
    vfs, _ = three_segments()
    for path in (FIRST, SECOND, THIRD):
        vfs.unlink(path)
    with pytest.raises(StorageError, match="segment 3"):
        Bench(vfs, first_segment=3)


def test_a_closed_segment_can_be_read_by_its_path_alone() -> None:
    vfs, appended = three_segments()
    found = list(read_segment(vfs, SECOND, SegmentEnd()))
    assert [data for _, data in found] == appended[1:2]
    vfs.plant(SECOND, flipped(vfs.content(SECOND), (SEGMENT_HEADER_BYTES + 3) * 8))
    with pytest.raises(CorruptLog):
        list(read_segment(vfs, SECOND, SegmentEnd()))


def test_an_error_in_replay_lets_go_of_everything() -> None:
    vfs = FaultyVfs()
    written(vfs, 2).close()

    class Broken(Bench):
        def _replay(self, record: bytes, position: int) -> None:
            raise KeyError(position)

    before = {path: vfs.content(path) for path in vfs.paths()}
    with pytest.raises(CorruptLog, match=r"wal-0*1.seg is damaged at byte 4096: a record of frame"):
        Broken(vfs)
    assert {path: vfs.content(path) for path in vfs.paths()} == before
    assert vfs.open_files == 0
    assert read_back(vfs) == [record(0), record(1)]


def test_a_blank_that_cannot_be_used_leaves_no_gap_in_the_numbers() -> None:
    """driftq-46: a crash after a roll leaves two blanks, and the first may be a small one. Were the
    second used, a number would be missing, and the start after the next roll be refused."""
    vfs = FaultyVfs()
    vfs = killed(vfs, written(vfs, 4))
    vfs.plant(SECOND, bytes(SEGMENT_BYTES // 2))
    vfs.plant(THIRD, bytes(SEGMENT_BYTES))
    bench = Bench(vfs)
    bench.await_spare()
    bench.roll()
    bench.append(record(4))
    bench.commit()
    bench.close()
    again = Bench(vfs)
    again.close()
    assert again.replayed == [record(number) for number in range(5)]
