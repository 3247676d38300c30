"""A start finds everything that was written, however the log is sealed."""

from __future__ import annotations

import contextlib
import errno
import os

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.image import take_image
from penstock.core.state import BrokerState, apply
from penstock.model.records import (
    Message,
    Record,
    TopicCreated,
    TopicDeleted,
    Trimmed,
    decode_record,
    encode_record,
)
from penstock.storage import history_reader
from penstock.storage.checkpoint import Checkpoint, load_checkpoint, remove_leftovers
from penstock.storage.errors import CorruptLog
from penstock.storage.history import history_name, history_number
from penstock.storage.history_reader import HistoryReader
from penstock.storage.journal_files import journal_name
from penstock.storage.manifest import MANIFEST_NAME, load_manifest
from penstock.storage.seal import Sealed, SealJob, seal
from penstock.storage.segments import SegmentEnd, list_segments, read_segment, segment_name
from penstock.storage.snapshot import snapshot_name, snapshot_number
from penstock.storage.vacuum import MERGED_FILES
from penstock.storage.vfs import Vfs, remove_if_there
from tests.storage.faulty_vfs import FLAVOURS, FaultyVfs
from tests.storage.random_broker import (
    LIMITS,
    RandomBroker,
    Step,
    cut,
    long_histories,
    replayed,
    write_log,
    write_segment,
)

DIRECTORY = "/data"
Place = tuple[int, int, int]


@pytest.fixture(autouse=True)
def no_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk in memory cannot be mapped."""
    monkeypatch.setattr(history_reader, "map_file", lambda vfs, path: pa.py_buffer(read(vfs, path)))


def read(vfs: Vfs, path: str) -> bytes:
    return vfs.read_file(path)


def job(up_to: int, known_files: list[int] | None = None) -> SealJob:
    return SealJob(
        directory=DIRECTORY, up_to_segment=up_to, limits=LIMITS, known_files=known_files or []
    )


def restart(vfs: Vfs) -> tuple[Checkpoint, BrokerState, dict[Place, Message]]:
    """What a start makes of the directory: its checkpoint, the replayed state, all messages."""
    checkpoint = load_checkpoint(vfs, DIRECTORY, LIMITS)
    remove_leftovers(vfs, checkpoint)
    state = checkpoint.state
    reader = HistoryReader(vfs, DIRECTORY)
    messages: dict[Place, Message] = {}
    for ref in checkpoint.refs:
        rows = reader.read(ref, 0, 10**6, 10**9)
        assert [rows[0].offset, rows[-1].offset, len(rows)] == [ref.first, ref.last, ref.msgs]
        messages |= {(m.topic_id, m.partition, m.offset): m for m in rows if isinstance(m, Message)}
    for number, path in list_segments(vfs, DIRECTORY):
        if number < checkpoint.first_segment:
            continue
        for _, data in read_segment(vfs, path, SegmentEnd()):
            record = decode_record(data)
            apply(state, record)
            if isinstance(record, Message):
                place = (record.topic_id, record.partition, record.offset)
                assert place not in messages, "both sealed and in the log"
                messages[place] = record
    return checkpoint, state, messages


def check_store(vfs: Vfs, log: list[bytes], retained: dict[Place, Message]) -> Checkpoint:
    checkpoint, state, found = restart(vfs)
    assert take_image(state) == take_image(replayed(log))
    live = {
        place: message
        for place, message in found.items()
        if place[0] in state.topics_by_id
        and place[2] >= state.topics_by_id[place[0]].partitions[place[1]].first_offset
    }
    assert live == retained
    return checkpoint


@settings(deadline=None)
@given(long_histories, st.integers(1, 6), st.lists(st.integers(1, 6), max_size=4))
def test_sealing_in_any_steps_equals_no_sealing(history: list[Step], pieces: int, ups: list[int]):
    broker = RandomBroker().live_through(history)
    vfs = FaultyVfs()
    write_log(vfs, DIRECTORY, cut(broker.log, pieces))
    for up_to in ups:
        sealed = seal(vfs, job(min(up_to, pieces)))
        for number in range(1, sealed.first_segment):
            remove_if_there(vfs, os.path.join(DIRECTORY, segment_name(number)))
        check_store(vfs, broker.log, broker.retained())
    assert vfs.open_files == 0


@settings(deadline=None, max_examples=40)
@given(long_histories)
def test_a_long_job_in_many_steps_equals_the_same_job_at_once(history: list[Step]):
    broker = RandomBroker().live_through(history)
    at_once, in_steps = FaultyVfs(), FaultyVfs()
    for vfs in (at_once, in_steps):
        write_log(vfs, DIRECTORY, cut(broker.log, 5))
    whole = seal(at_once, job(5))
    parts = seal(in_steps, job(5), step_bytes=1)
    assert (parts.records, parts.first_segment) == (whole.records, 6)
    check_store(at_once, broker.log, broker.retained())
    check_store(in_steps, broker.log, broker.retained())


# A small history whose sealing writes, rewrites and drops


def produce(topic_id: int, offset: int, partition: int = 0) -> Message:
    return Message(topic_id, partition, offset, 1_000 + offset, f"key-{offset}", "body" * 20)


def encoded(records: list[Record]) -> list[bytes]:
    return [encode_record(record) for record in records]


def two_topics() -> list[list[bytes]]:
    """Sealed one by one: a file with both topics; one that dies whole; then trims and a delete."""
    first: list[Record] = [TopicCreated(1, 1, "kept", 2), TopicCreated(2, 1, "gone", 1)]
    first += [produce(1, n, n % 2) for n in range(20)] + [produce(2, n) for n in range(10)]
    second: list[Record] = [produce(2, n) for n in range(10, 20)]
    third: list[Record] = [produce(1, n, n % 2) for n in range(20, 30)]
    third += [TopicDeleted(2, 2_000), Trimmed(1, 0, 2_000, 7, 4, 300)]
    return [encoded(first), encoded(second), encoded(third)]


def retained_of(log: list[bytes]) -> dict[Place, Message]:
    state = replayed(log)
    records = [decode_record(data) for data in log]
    return {
        (m.topic_id, m.partition, m.offset): m
        for m in records
        if isinstance(m, Message)
        and m.topic_id in state.topics_by_id
        and m.offset >= state.topics_by_id[m.topic_id].partitions[m.partition].first_offset
    }


def half_sealed() -> tuple[FaultyVfs, list[bytes]]:
    """Segments 1 and 2 sealed and dropped; 3 is closed."""
    vfs = FaultyVfs()
    segments = two_topics()
    write_log(vfs, DIRECTORY, segments)
    seal(vfs, job(1))
    seal(vfs, job(2))
    for number in (1, 2):
        vfs.unlink(os.path.join(DIRECTORY, segment_name(number)))
    vfs.fsync_dir(DIRECTORY)
    return vfs, [record for segment in segments for record in segment]


def history_files(vfs: Vfs) -> list[int]:
    numbers = (history_number(name) for name in vfs.listdir(DIRECTORY))
    return sorted(number for number in numbers if number is not None)


def test_the_result_lists_changes_against_the_files_that_the_broker_knew():
    vfs = FaultyVfs()
    write_log(vfs, DIRECTORY, two_topics())
    first = seal(vfs, job(2))
    assert (first.first_segment, first.added_files, first.dropped) == (3, [1], [])
    assert (first.records, first.messages) == (42, 40)
    places = [(ref.topic_id, ref.partition, ref.first, ref.last) for ref in first.added]
    assert places == [(1, 0, 0, 18), (1, 1, 1, 19), (2, 0, 0, 19)]
    second = seal(vfs, job(3, known_files=[1]))
    assert (second.first_segment, second.added_files, second.dropped) == (4, [2], [1])
    assert {ref.file for ref in second.added} == {2}


def test_a_lost_result_is_included_in_the_next_one():
    vfs = FaultyVfs()
    write_log(vfs, DIRECTORY, two_topics())
    lost = seal(vfs, job(2))
    again = seal(vfs, job(2))
    assert (again.first_segment, again.added, again.records) == (3, lost.added, 0)


def test_nothing_to_seal_writes_nothing():
    vfs, _ = half_sealed()
    before = vfs.calls.count("rename")
    sealed = seal(vfs, job(2, known_files=history_files(vfs)))
    assert (sealed.first_segment, sealed.added, sealed.dropped) == (3, [], [])
    assert vfs.calls.count("rename") == before


def test_an_empty_segment_is_sealed_too():
    vfs = FaultyVfs()
    write_log(vfs, DIRECTORY, [[], []])
    assert seal(vfs, job(2)).first_segment == 3
    assert load_checkpoint(vfs, DIRECTORY, LIMITS).refs == []


def test_rows_trimmed_or_deleted_in_the_same_run_never_reach_history():
    vfs = FaultyVfs()
    segments = two_topics()
    write_log(vfs, DIRECTORY, segments)
    sealed = seal(vfs, job(3))
    places = [(ref.topic_id, ref.partition, ref.first, ref.last) for ref in sealed.added]
    assert places == [(1, 0, 8, 28), (1, 1, 1, 29)]
    log = [record for segment in segments for record in segment]
    check_store(vfs, log, retained_of(log))


def test_a_file_without_a_live_row_is_dropped_and_a_deleted_topic_leaves_no_bytes():
    vfs, log = half_sealed()
    assert history_files(vfs) == [1, 2]
    sealed = seal(vfs, job(3, known_files=[1, 2]))
    assert sealed.dropped == [1, 2]
    checkpoint = check_store(vfs, log, retained_of(log))
    assert history_files(vfs) == [3] == checkpoint.files
    reader = HistoryReader(vfs, DIRECTORY)
    manifest = load_manifest(vfs, DIRECTORY)
    assert manifest is not None
    rows = [reader.read(ref, 0, 100) for file in manifest.history for ref in file.batches]
    assert {message.topic_id for batch in rows for message in batch} == {1}


def trimmed_store(before: int) -> tuple[FaultyVfs, list[bytes], Sealed]:
    """A file of 100 rows, of which a later segment trims those below `before`."""
    first: list[Record] = [TopicCreated(1, 1, "kept", 1), *(produce(1, n) for n in range(100))]
    second: list[Record] = [Trimmed(1, 0, 3_000, before, before, before * 86)]
    segments = [encoded(first), encoded(second)]
    vfs = FaultyVfs()
    write_log(vfs, DIRECTORY, segments)
    seal(vfs, job(1))
    return vfs, segments[0] + segments[1], seal(vfs, job(2, known_files=[1]))


def test_a_file_that_is_mostly_dead_is_rewritten_with_its_live_rows():
    vfs, log, sealed = trimmed_store(60)
    assert sealed.dropped == [1]
    assert [(ref.first, ref.last, ref.msgs) for ref in sealed.added] == [(60, 99, 40)]
    check_store(vfs, log, retained_of(log))


def test_a_file_that_is_mostly_alive_is_left_alone():
    vfs, log, sealed = trimmed_store(40)
    assert (sealed.dropped, sealed.added) == ([], [])
    assert history_files(vfs) == [1]
    check_store(vfs, log, retained_of(log))


def test_many_small_files_become_one_with_the_rows_of_a_partition_together():
    first: list[Record] = [TopicCreated(1, 1, "kept", 2)]
    some = [[produce(1, n, n % 2) for n in range(at, at + 4)] for at in range(0, 4 * 17, 4)]
    segments = [encoded(first), *(encoded([*part]) for part in some)]
    vfs = FaultyVfs()
    write_log(vfs, DIRECTORY, segments)
    for number in range(1, MERGED_FILES + 2):
        seal(vfs, job(number))
    assert len(history_files(vfs)) == MERGED_FILES
    known = history_files(vfs)
    sealed = seal(vfs, job(MERGED_FILES + 2, known_files=known))
    assert sealed.dropped == known
    rows = [(ref.partition, ref.first, ref.last, ref.msgs) for ref in sealed.added]
    assert rows == [(0, 0, 62, 32), (1, 1, 63, 32), (0, 64, 66, 2), (1, 65, 67, 2)]
    log = [record for segment in segments for record in segment]
    check_store(vfs, log, retained_of(log))


def test_nothing_is_rewritten_on_a_disk_that_is_nearly_full():
    vfs, log = half_sealed()
    vfs.free_bytes = lambda directory: 3_000  # type: ignore[method-assign]
    sealed = seal(vfs, job(3, known_files=[1, 2]))
    assert (sealed.first_segment, sealed.dropped) == (4, [2])
    check_store(vfs, log, retained_of(log))


def test_a_damaged_file_is_not_rewritten_and_does_not_stop_sealing():
    vfs, log = half_sealed()
    path = os.path.join(DIRECTORY, history_name(1))
    data = bytearray(vfs.content(path))
    data[len(data) // 3] ^= 0xFF
    vfs.plant(path, bytes(data))
    sealed = seal(vfs, job(3, known_files=[1, 2]))
    assert sealed.first_segment == 4
    assert sealed.dropped == [2]
    assert len(sealed.damaged) == 1
    assert path in sealed.damaged[0]
    assert history_files(vfs) == [1, 2, 3]
    with pytest.raises(CorruptLog, match=history_name(1)):
        check_store(vfs, log, retained_of(log))


def test_a_missing_segment_fails_the_job_and_is_named():
    vfs = FaultyVfs()
    write_log(vfs, DIRECTORY, two_topics())
    with pytest.raises(CorruptLog, match=segment_name(4)):
        seal(vfs, job(4))


def test_a_record_that_cannot_be_applied_fails_the_job_and_changes_nothing():
    vfs = FaultyVfs()
    write_segment(vfs, DIRECTORY, 1, 1, [encode_record(produce(9, 0))])
    with pytest.raises(CorruptLog, match=segment_name(1)):
        seal(vfs, job(1))
    assert vfs.listdir(DIRECTORY) == [segment_name(1)]


# Faults and crashes


def calls_of_a_job() -> int:
    vfs, _ = half_sealed()
    before = len(vfs.calls)
    seal(vfs, job(3))
    return len(vfs.calls) - before


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, 0], ids=["EIO", "ENOSPC", "short"])
def test_the_store_is_whole_and_the_job_can_be_repeated_whichever_call_fails(code: int):
    count = calls_of_a_job()
    failed = 0
    for number in range(1, count + 1):
        vfs, log = half_sealed()
        vfs.fail_call(number, code)
        try:
            seal(vfs, job(3))
        except OSError as error:
            failed += error.errno == code
        vfs.fail_call(0, 0)
        assert vfs.open_files == 0
        check_store(vfs.restarted(), log, retained_of(log))
        sealed = seal(vfs, job(3))
        assert sealed.first_segment == 4
        check_store(vfs, log, retained_of(log))
    # Only the removal of the old snapshot may fail unsaid; a short write is finished.
    assert failed >= (count - 1 if code else 0)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_the_store_is_whole_after_a_kill_or_power_loss_at_any_call(flavour: str):
    for number in range(1, calls_of_a_job() + 1):
        vfs, log = half_sealed()
        vfs.fail_call(number, errno.EIO)
        for attribute in ("unlink", "close"):
            # A killed process tidies nothing up.
            setattr(vfs, attribute, lambda *_: None)
        with contextlib.suppress(OSError):
            seal(vfs, job(3))
        survivor = vfs.crash(flavour, seed=number)
        check_store(survivor, log, retained_of(log))
        names = survivor.listdir(DIRECTORY)
        assert sum(snapshot_number(name) is not None for name in names) == 1
        assert not any(name.endswith(".tmp") for name in names)
        assert seal(survivor, job(3)).first_segment == 4
        check_store(survivor.crash("nothing"), log, retained_of(log))


def test_the_manifest_is_replaced_last():
    vfs, _ = half_sealed()
    order: list[str] = []
    real = vfs.fsync_dir

    def watched(path: str) -> None:
        real(path)
        on_disk = vfs.crash("nothing")
        manifest = load_manifest(on_disk, DIRECTORY)
        assert manifest is not None
        assert on_disk.exists(os.path.join(DIRECTORY, snapshot_name(manifest.snapshot)))
        for file in manifest.history:
            assert on_disk.exists(os.path.join(DIRECTORY, history_name(file.number)))
        for each in manifest.journal.files:
            assert on_disk.exists(os.path.join(DIRECTORY, journal_name(each.number)))
        order.append(f"{manifest.snapshot}")

    vfs.fsync_dir = watched  # type: ignore[method-assign]
    seal(vfs, job(3))
    assert order == ["2", "2", "2", "3"]
    assert vfs.exists(os.path.join(DIRECTORY, MANIFEST_NAME))
