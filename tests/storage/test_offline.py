"""Inspecting and verifying the log of a stopped broker."""

from __future__ import annotations

import errno

import pytest

from penstock.model.records import TopicCreated, encode_record
from penstock.storage import offline
from penstock.storage.errors import DirectoryInUse
from penstock.storage.repair import repair
from penstock.storage.segments import SEGMENT_HEADER_BYTES, segment_name
from tests.storage.faulty_vfs import FaultyVfs
from tests.storage.harness import DIRECTORY, Bench, written
from tests.storage.harness import topic_record as record

FIRST = f"{DIRECTORY}/{segment_name(1)}"
SECOND = f"{DIRECTORY}/{segment_name(2)}"


def rolled() -> FaultyVfs:
    vfs = FaultyVfs()
    bench = written(vfs, 6, record=record)
    bench.await_spare()
    bench.roll()
    bench.append(record(6))
    bench.commit()
    bench.await_spare()
    bench.close()
    return vfs


def damaged() -> FaultyVfs:
    vfs = rolled()
    data = bytearray(vfs.content(FIRST))
    data[SEGMENT_HEADER_BYTES + 200] ^= 1
    vfs.plant(FIRST, bytes(data))
    return vfs


def torn() -> FaultyVfs:
    """The disk after a kill in the middle of a write: the log ends with half a frame."""
    vfs = FaultyVfs()
    bench = written(vfs, 6, record=record)
    bench.await_spare()
    sound_end = bench.wal.files.active.used
    bench.append(record(6))
    bench.commit()
    half = (sound_end + bench.wal.files.active.used) // 2
    disk = vfs.crash("everything")
    log = disk.content(FIRST)
    disk.plant(FIRST, log[:half] + bytes(len(log) - half))
    bench.close()
    return disk


def contents(vfs: FaultyVfs) -> dict[str, bytes]:
    return {path: vfs.content(path) for path in vfs.paths()}


def test_verify_of_a_sound_log_counts_its_frames_and_records() -> None:
    report = offline.verify(rolled(), DIRECTORY)
    assert [segment.state for segment in report.segments] == ["sound", "sound", "spare"]
    assert (report.records, report.frames) == (7, 5)  # four commits and the closing mark
    assert (report.torn, report.damage) == ([], None)
    assert sum(segment.bytes for segment in report.segments) > 2 * SEGMENT_HEADER_BYTES


def test_verify_names_a_torn_tail_and_changes_nothing() -> None:
    vfs = torn()
    before = contents(vfs)
    report = offline.verify(vfs, DIRECTORY)
    assert report.damage is None
    assert [tail.path for tail in report.torn] == [FIRST]
    assert contents(vfs) == before
    assert vfs.open_files == 0


def test_verify_names_damage_and_what_can_still_be_read() -> None:
    """driftq-48"""
    report = offline.verify(damaged(), DIRECTORY)
    assert report.damage is not None
    assert report.damage.path == FIRST
    first, second, _ = report.segments
    assert (first.state, first.used) == ("broken", report.damage.position)
    assert first.frames + first.frames_behind == 2
    assert second.records == 1


def test_inspect_decodes_each_record() -> None:
    vfs = FaultyVfs()
    bench = Bench(vfs)
    created = TopicCreated(1, 1000, "orders", 3)
    first = bench.append(encode_record(created), b"\xc1 is no record")
    bench.commit()
    bench.await_spare()
    bench.close()
    seen = list(offline.inspect(vfs, DIRECTORY, records=True))
    summary, good, bad, spare = seen
    assert isinstance(summary, offline.SegmentSummary)
    assert isinstance(spare, offline.SegmentSummary)
    assert isinstance(good, offline.RecordSeen)
    assert (good.position, good.record) == (first, created)
    assert isinstance(bad, offline.RecordSeen)
    assert bad.record is None
    assert bad.error


def test_inspect_without_records_lists_the_segments() -> None:
    seen = list(offline.inspect(rolled(), DIRECTORY))
    assert [type(each) for each in seen] == [offline.SegmentSummary] * 3


def test_a_running_broker_s_log_is_not_touched() -> None:
    """driftq-52"""
    vfs = FaultyVfs()
    bench = written(vfs, 2)
    for tool in (offline.verify, repair, lambda v, d: list(offline.inspect(v, d))):
        with pytest.raises(DirectoryInUse):
            tool(vfs, DIRECTORY)
    bench.close()


def test_a_missing_directory_is_not_created() -> None:
    vfs = FaultyVfs()
    with pytest.raises(FileNotFoundError):
        offline.verify(vfs, DIRECTORY)
    assert "mkdir" not in vfs.calls


class Mounted(FaultyVfs):
    """To be read only."""

    def open(self, path: str, *, create: bool = False) -> int:
        raise OSError(errno.EROFS, "Read-only file system", path)

    def lock_file(self, path: str) -> int:
        return self.open(path)


def test_a_read_only_mount_can_be_verified():
    vfs = rolled()
    vfs.plant(f"{DIRECTORY}/LOCK", b"")
    vfs.__class__ = Mounted
    assert offline.verify(vfs, DIRECTORY).records == 7
    assert len(list(offline.inspect(vfs, DIRECTORY))) == 3
    with pytest.raises(OSError, match="Read-only"):
        repair(vfs, DIRECTORY)
