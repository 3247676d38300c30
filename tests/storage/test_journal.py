"""The journal has each event of the log once, however the log is sealed."""

from __future__ import annotations

import contextlib
import errno
import os
import zlib
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.image import restore_image
from penstock.core.state import BrokerState
from penstock.model.envelope import DeadLetter, Envelope, Routing
from penstock.model.limits import Limits
from penstock.model.records import (
    DEAD_LETTERED,
    SKIPPED,
    Delivered,
    DeliveredItem,
    Finished,
    GroupCreated,
    Message,
    Record,
    Released,
    Returned,
    Skipped,
    TopicCreated,
    TopicDeleted,
    Trimmed,
    encode_record,
)
from penstock.storage import history_reader, journal_files
from penstock.storage.checkpoint import load_checkpoint, remove_leftovers
from penstock.storage.directory_check import check_directory
from penstock.storage.errors import CorruptLog
from penstock.storage.frames import POSITION_BITS
from penstock.storage.history import history_name
from penstock.storage.journal_files import MERGED_FILES, journal_name, journal_number
from penstock.storage.manifest import Manifest, load_manifest, write_manifest
from penstock.storage.recovery import walk_log
from penstock.storage.repair import repair
from penstock.storage.seal import Sealed, SealJob, seal
from penstock.storage.segments import segment_name
from penstock.storage.snapshot import load_snapshot, write_snapshot
from tests.storage.faulty_vfs import FLAVOURS, FaultyVfs
from tests.storage.journal_account import COLUMNS, Row, account_of, instant, journal_of
from tests.storage.old_journal import make_old
from tests.storage.random_broker import (
    LIMITS,
    RandomBroker,
    Step,
    cut,
    long_histories,
    write_log,
    write_segment,
)

DIRECTORY = "/data"


@pytest.fixture(autouse=True)
def no_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk in memory cannot be mapped."""
    monkeypatch.setattr(
        history_reader, "map_file", lambda vfs, path: pa.py_buffer(vfs.read_file(path))
    )


def sealed(vfs: FaultyVfs, up_to: int, limits: Limits = LIMITS, **options: Any) -> Sealed:
    job = SealJob(directory=DIRECTORY, up_to_segment=up_to, limits=limits, **options)
    return seal(vfs, job)


def encoded(records: list[Record]) -> list[bytes]:
    return [encode_record(record) for record in records]


def written(*segments: list[Record]) -> FaultyVfs:
    vfs = FaultyVfs()
    write_log(vfs, DIRECTORY, [encoded(segment) for segment in segments])
    return vfs


def place(name: str) -> str:
    return os.path.join(DIRECTORY, name)


# Any history


@settings(deadline=None)
@given(long_histories, st.integers(1, 6), st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_the_journal_matches_the_log_however_it_is_sealed(
    history: list[Step], pieces: int, ups: list[int]
):
    broker = RandomBroker().live_through(history)
    vfs = FaultyVfs()
    write_log(vfs, DIRECTORY, cut(broker.log, pieces))
    account = account_of(vfs, DIRECTORY)
    for up_to in [*ups, 6]:
        first = sealed(vfs, min(up_to, pieces)).first_segment
        told = journal_of(vfs, DIRECTORY)
        assert told == account[: len(told)]
        assert len(told) == len(account) or first <= pieces
    assert vfs.open_files == 0


@settings(deadline=None, max_examples=40)
@given(long_histories)
def test_a_long_job_in_many_steps_and_small_batches_has_the_same_rows(history: list[Step]):
    broker = RandomBroker().live_through(history)
    vfs = FaultyVfs()
    write_log(vfs, DIRECTORY, cut(broker.log, 5))
    account = account_of(vfs, DIRECTORY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal_files, "MAX_BATCH_ROWS", 7)
        patch.setattr("penstock.storage.journal_step.JOURNAL_ROWS", 5)
        patch.setattr("penstock.storage.seal._PACK_RECORDS", 2)
        seal(vfs, SealJob(directory=DIRECTORY, up_to_segment=5, limits=LIMITS), step_bytes=1)
    assert journal_of(vfs, DIRECTORY) == account


# Each kind, to the letter


ENVELOPE = Envelope(run_id="r", step_id="s", parent_step_id="p", tenant_id="t")
BEGUN: list[Record] = [
    TopicCreated(1, 5, "orders", 2),
    GroupCreated(2, 1, 6, "workers"),
    Message(1, 1, 0, 10, "key", "value", ENVELOPE, Routing("label")),
    Message(1, 1, 1, 11, "", "value"),
]


def told(*records: Record) -> list[Row]:
    """The rows of the last records, without their positions."""
    vfs = written([*BEGUN, *records])
    sealed(vfs, 1)
    rows = journal_of(vfs, DIRECTORY)
    positions = [row.pop("position") for row in rows]
    assert positions == sorted(set(positions))
    return rows[2:]


def row(kind: str, ms: int, offset: int = 0, since: int | None = None, **more: Any) -> Row:
    """`since` is when the delivery was made, if there was one."""
    known: Row = {"run_id": "r", "step_id": "s", "parent_step_id": "p", "tenant_id": "t"}
    known |= {"routing_label": "label"}
    if offset:
        known = dict.fromkeys(known)
    return {
        "timestamp": instant(ms), "kind": kind, "topic": "orders", "partition": 1,
        "offset": offset, "group": "workers", "owner": None, "attempt": None, "reason": None,
        **known, "retry_at": None, "produced_at": instant(10 + offset),
        "delivered_at": None if since is None else instant(since), "tenant": None,
        "namespace": None, "resource_kind": "topic", **more,
    }  # fmt: skip


def given_to(owner: str, ms: int, *offsets: int) -> Delivered:
    return Delivered(1, 2, 1, ms, owner, [DeliveredItem(offset, 5) for offset in offsets])


def test_a_message_is_produced():
    vfs = written(BEGUN)
    sealed(vfs, 1)
    first, second = journal_of(vfs, DIRECTORY)
    assert first.pop("position") < second.pop("position")
    assert first == row("produced", 10, group=None)
    assert second == row("produced", 11, 1, group=None)


def test_every_item_of_a_delivery_is_an_event_and_attempts_count_up():
    nacked = Released(1, 2, 1, 21, 0, "no", 22)
    assert told(given_to("a", 20, 0, 1), nacked, given_to("b", 23, 0)) == [
        row("delivered", 20, since=20, owner="a", attempt=1),
        row("delivered", 20, 1, since=20, owner="a", attempt=1),
        row("nacked", 21, since=20, owner="a", attempt=1, reason="no", retry_at=instant(22)),
        row("delivered", 23, since=23, owner="b", attempt=2),
    ]


def test_an_unsent_delivery_is_returned_and_its_attempt_is_repeated():
    rows = told(given_to("a", 20, 0, 1), Returned(1, 2, 1, 21, [1, 0]), given_to("b", 22, 0))
    assert rows[2:] == [
        row("returned", 21, 1, since=20, owner="a", attempt=1),
        row("returned", 21, since=20, owner="a", attempt=1),
        row("delivered", 22, since=22, owner="b", attempt=1),
    ]


def test_an_ack_has_the_owner_and_attempt_of_its_delivery():
    rows = told(given_to("a", 20, 0), Finished(1, 2, 1, 30, 0))
    assert rows[1:] == [row("acked", 30, since=20, owner="a", attempt=1)]


def test_the_end_of_a_lease_is_a_timeout_and_the_owner_s_late_nack_is_a_nack():
    late = Released(1, 2, 1, 41, 0, "ack_timeout", 50)
    rows = told(given_to("a", 20, 0), Released(1, 2, 1, 40, 0, "ack_timeout", 50), late)
    lapsed: Row = {"since": 20, "owner": "a", "attempt": 1, "reason": "ack_timeout"}
    lapsed |= {"retry_at": instant(50)}
    assert rows[1:] == [
        row("timed_out", 40, **lapsed),
        row("nacked", 41, **lapsed),
    ]


def burial(last_error: str, ms: int, offset: int = 0) -> list[Record]:
    letter = DeadLetter("orders", 1, offset, "workers", 1, last_error, ms)
    envelope = msgspec.structs.replace(ENVELOPE, dlq=letter)
    copy = Message(3, 1, 0, ms, "key", "value", envelope)
    finished = Finished(1, 2, 1, ms, offset, DEAD_LETTERED)
    return [TopicCreated(3, ms, "dlq.orders", 2), copy, finished]


def test_a_last_nack_and_the_dead_letter_are_events():
    rows = told(given_to("a", 20, 0), Released(1, 2, 1, 30, 0, "broken", -1), *burial("broken", 31))
    copy = row("produced", 31, group=None, topic="dlq.orders", routing_label=None)
    copy["produced_at"] = instant(31)
    assert rows[1:] == [
        row("nacked", 30, since=20, owner="a", attempt=1, reason="broken"),
        copy,
        row("dead_lettered", 31, since=20, owner="a", attempt=1, reason="broken"),
    ]


def test_the_end_of_a_last_lease_is_an_event_though_it_has_no_record():
    rows = told(given_to("a", 20, 0), *burial("ack_timeout", 31))
    assert rows[2:] == [
        row("timed_out", 31, since=20, owner="a", attempt=1, reason="ack_timeout"),
        row("dead_lettered", 31, since=20, owner="a", attempt=1, reason="ack_timeout"),
    ]


def test_a_message_whose_effect_is_committed_is_skipped():
    rows = told(Skipped(1, 2, 1, 20, 0, 5), given_to("a", 21, 1), Finished(1, 2, 1, 22, 1, SKIPPED))
    assert rows == [
        row("skipped", 20),
        row("delivered", 21, 1, since=21, owner="a", attempt=1),
        row("skipped", 22, 1, since=21, owner="a", attempt=1),
    ]


def test_a_position_is_that_of_the_record_and_the_item_s_place_in_it():
    vfs = written([*BEGUN, given_to("a", 20, 0, 1), Finished(1, 2, 1, 21, 1)])
    sealed(vfs, 1)
    positions = [row["position"] for row in journal_of(vfs, DIRECTORY)]
    # Frames of three records: the first has the topic, the group and a message.
    lengths = [len(data) + 4 for data in encoded(BEGUN)]
    delivered = (2 << POSITION_BITS) + lengths[3]
    assert positions == [
        (1 << POSITION_BITS) + lengths[0] + lengths[1],
        2 << POSITION_BITS,
        delivered,
        delivered + 1,
        delivered + len(encode_record(given_to("a", 20, 0, 1))) + 4,
    ]


def test_a_late_ack_after_an_unsent_delivery_ends_the_previous_one():
    rows = told(
        given_to("a", 20, 0),
        Released(1, 2, 1, 21, 0, "no", 21),
        given_to("b", 25, 0),
        Returned(1, 2, 1, 26, [0]),
        Finished(1, 2, 1, 30, 0),
    )
    assert rows[3:] == [
        row("returned", 26, since=25, owner="b", attempt=2),
        row("acked", 30, since=20, owner="a", attempt=1),
    ]


# What is known of messages


def test_ids_come_from_history_when_the_message_was_sealed_before():
    vfs = written(BEGUN, [given_to("a", 20, 0, 1)], [Finished(1, 2, 1, 21, 0)])
    for up_to in (1, 2, 3):
        sealed(vfs, up_to)
    rows = journal_of(vfs, DIRECTORY)
    assert [row["run_id"] for row in rows] == ["r", None, "r", None, "r"]
    assert rows[-1]["routing_label"] == "label"
    assert rows == account_of(vfs, DIRECTORY)


@pytest.mark.parametrize("envelope", [None, ENVELOPE], ids=["plain", "with ids"])
def test_rows_have_the_times_of_storing_and_delivery_from_any_earlier_segment(
    envelope: Envelope | None,
):
    first = [Message(1, 1, n, 100 + n, "", "v", envelope) for n in range(2, 6)]
    # Neither all of the messages nor all of the deliveries of a partition are in one segment.
    vfs = written(
        [*BEGUN, *first[:2]],
        [*first[2:], given_to("a", 200, 2, 4)],
        [Released(1, 2, 1, 300, 4, "no", 301), given_to("b", 310, 4, 5), given_to("a", 311, 3)],
        [Finished(1, 2, 1, 400 + n, n) for n in (5, 2, 3, 4)],
    )
    for up_to in (1, 2, 3, 4):
        sealed(vfs, up_to)
    rows = journal_of(vfs, DIRECTORY)
    assert rows == account_of(vfs, DIRECTORY)
    assert [(r["offset"], r["produced_at"], r["delivered_at"]) for r in rows[-4:]] == [
        (5, instant(105), instant(310)),
        (2, instant(102), instant(200)),
        (3, instant(103), instant(311)),
        (4, instant(104), instant(310)),
    ]


def test_rows_of_a_deleted_topic_still_have_its_ids_and_names():
    vfs = written([*BEGUN, given_to("a", 20, 0), TopicDeleted(1, 21)])
    sealed(vfs, 1)
    assert journal_of(vfs, DIRECTORY) == account_of(vfs, DIRECTORY)


def test_ids_and_the_time_of_storing_are_null_when_retention_has_removed_the_message():
    vfs = written(
        [*BEGUN, given_to("a", 20, 0, 1), Trimmed(1, 1, 21, 2, 2, 13)], [Finished(1, 2, 1, 22, 0)]
    )
    sealed(vfs, 1)
    sealed(vfs, 2)
    last = journal_of(vfs, DIRECTORY)[-1]
    assert (last["kind"], last["offset"], last["run_id"]) == ("acked", 0, None)
    assert (last["produced_at"], last["delivered_at"]) == (None, instant(20))


def test_a_damaged_history_file_costs_ids_and_does_not_stop_sealing():
    vfs = written(BEGUN, [given_to("a", 20, 0)])
    sealed(vfs, 1)
    damage(vfs, history_name(1))
    result = sealed(vfs, 2)
    assert result.first_segment == 3
    assert history_name(1) in result.damaged[0]
    last = journal_of(vfs, DIRECTORY)[-1]
    assert (last["kind"], last["run_id"], last["produced_at"]) == ("delivered", None, None)


def damage(vfs: FaultyVfs, name: str) -> None:
    data = bytearray(vfs.content(place(name)))
    data[len(data) // 3] ^= 0xFF
    vfs.plant(place(name), bytes(data))


# Files


def produced(*offsets: int, ts: int = 0) -> list[Record]:
    return [Message(1, 0, offset, ts or 1_000 + offset, "", "v", ENVELOPE) for offset in offsets]


def one_by_one(count: int) -> FaultyVfs:
    """As many sealing runs, each of a segment with three events."""
    topic: list[Record] = [TopicCreated(1, 1, "orders", 1)]
    vfs = written(topic, *(produced(n, n + 1, n + 2) for n in range(0, 3 * count, 3)))
    for number in range(1, count + 2):
        sealed(vfs, number)
    return vfs


def index(vfs: FaultyVfs) -> journal_files.JournalIndex:
    manifest = load_manifest(vfs, DIRECTORY)
    assert manifest is not None
    return manifest.journal


def on_disk(vfs: FaultyVfs) -> set[int]:
    numbers = map(journal_number, vfs.listdir(DIRECTORY))
    return {number for number in numbers if number is not None}


def test_many_small_files_in_a_row_become_one():
    vfs = one_by_one(MERGED_FILES)
    assert len(index(vfs).files) == MERGED_FILES
    number = MERGED_FILES + 2
    write_segment(vfs, DIRECTORY, number, 1000, encoded(produced(3 * MERGED_FILES)))
    known = [file.number for file in index(vfs).files]
    result = sealed(vfs, number, known_journal=known)
    assert result.journal_dropped == known
    [file] = index(vfs).files
    assert [file.number for file in result.journal_added] == [file.number]
    [ref] = file.batches
    assert ref.rows == 3 * MERGED_FILES + 1
    assert journal_of(vfs, DIRECTORY) == account_of(vfs, DIRECTORY)


def test_a_damaged_small_file_is_left_as_it_is():
    vfs = one_by_one(MERGED_FILES)
    damage(vfs, journal_name(index(vfs).files[3].number))
    number = MERGED_FILES + 2
    write_segment(vfs, DIRECTORY, number, 1000, encoded(produced(3 * MERGED_FILES)))
    assert sealed(vfs, number).first_segment == number + 1
    assert len(index(vfs).files) == MERGED_FILES + 1


def test_files_older_than_the_retention_are_dropped_and_the_journal_begins_behind_them():
    limits = msgspec.structs.replace(LIMITS, journal_retention_ms=5)
    topic: list[Record] = [TopicCreated(1, 1, "orders", 1)]
    vfs = written(topic, produced(0, 1), produced(2, 3), produced(4, ts=1_009))
    results = [sealed(vfs, n, limits, known_journal=sorted(on_disk(vfs))) for n in (1, 2, 3, 4)]
    assert [result.journal_start for result in results[:3]] == [1 << POSITION_BITS] * 3
    # 1009 - 5 is later than 1003: both files are too old.
    assert len(results[3].journal_dropped) == 2
    [kept] = index(vfs).files
    last = [row["position"] for row in account_of(vfs, DIRECTORY) if row["offset"] == 3]
    assert results[3].journal_start == last[0] + 1 == index(vfs).start
    assert [row["offset"] for row in journal_of(vfs, DIRECTORY)] == [4]
    assert kept.number in on_disk(vfs)


def test_a_journal_that_is_turned_off_and_on_again_begins_anew():
    off = msgspec.structs.replace(LIMITS, journal_retention_ms=0)
    topic: list[Record] = [TopicCreated(1, 1, "orders", 1)]
    vfs = written([*topic, *produced(0)], produced(1), produced(2))
    sealed(vfs, 1)
    [file] = index(vfs).files
    result = sealed(vfs, 2, off, known_journal=[file.number])
    assert (result.journal_start, result.journal_dropped) == (-1, [file.number])
    assert index(vfs).files == []
    result = sealed(vfs, 3)
    assert result.journal_start == 3 << POSITION_BITS
    assert [row["offset"] for row in journal_of(vfs, DIRECTORY)] == [2]


def test_a_journal_begins_where_its_first_segment_does_whether_or_not_it_has_rows():
    vfs = written([TopicCreated(1, 1, "orders", 1)], produced(0))
    assert sealed(vfs, 1).journal_start == 1 << POSITION_BITS
    assert index(vfs).files == []
    assert sealed(vfs, 2).journal_start == 1 << POSITION_BITS


def test_a_manifest_from_before_there_was_a_journal_is_read():
    vfs = FaultyVfs()
    manifest = Manifest(snapshot=4, first_segment=9, next_file=5)
    write_manifest(vfs, DIRECTORY, manifest, BrokerState(LIMITS))
    data = vfs.content(place("MANIFEST"))
    body = msgspec.json.decode(data.partition(b"\n")[2])
    del body["journal"]
    old = msgspec.json.encode(body)
    vfs.plant(place("MANIFEST"), b"PENSTOCK-MANIFEST 1 %08x\n" % zlib.crc32(old) + old)
    assert load_manifest(vfs, DIRECTORY) == manifest


def without_later_columns(rows: list[Row]) -> list[Row]:
    return [row | {"produced_at": None, "delivered_at": None} for row in rows]


def test_files_from_before_a_column_was_added_are_read_with_nulls_and_merged():
    vfs = one_by_one(MERGED_FILES)
    account = account_of(vfs, DIRECTORY)
    assert make_old(vfs, DIRECTORY) == MERGED_FILES
    assert {ref.columns for file in index(vfs).files for ref in file.batches} == {16}
    assert journal_of(vfs, DIRECTORY) == without_later_columns(account)
    assert all(file.state == "sound" for file in check_directory(vfs, DIRECTORY).files)
    number = MERGED_FILES + 2
    write_segment(vfs, DIRECTORY, number, 1000, encoded(produced(3 * MERGED_FILES)))
    sealed(vfs, number)
    [file] = index(vfs).files
    assert {ref.columns for ref in file.batches} == {len(COLUMNS)}
    *old, new = journal_of(vfs, DIRECTORY)
    assert old == without_later_columns(account)
    assert new["produced_at"] == instant(1_000 + 3 * MERGED_FILES)


def test_a_delivery_from_an_older_image_ends_without_its_time():
    """As if the broker was replaced by this release between the two."""
    vfs = written([*BEGUN, given_to("a", 20, 0)], [Finished(1, 2, 1, 21, 0)])
    sealed(vfs, 1)
    manifest = load_manifest(vfs, DIRECTORY)
    assert manifest is not None
    image = load_snapshot(vfs, DIRECTORY, manifest.snapshot)
    [entry] = image.topics[0].groups[0].progress[1].unfinished
    entry.delivered_at = 0
    mark = write_snapshot(vfs, DIRECTORY, manifest.snapshot, image)
    marked = msgspec.structs.replace(manifest, snapshot_mark=mark)
    write_manifest(vfs, DIRECTORY, marked, restore_image(image, LIMITS))
    sealed(vfs, 2)
    last = journal_of(vfs, DIRECTORY)[-1]
    assert (last["kind"], last["owner"], last["produced_at"]) == ("acked", "a", instant(10))
    assert last["delivered_at"] is None


def test_large_rows_make_smaller_batches(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(journal_files, "MAX_BATCH_BYTES", 2_000)
    reasons: list[Record] = [Released(1, 2, 1, 21 + n, 0, "why" * 100, 22) for n in range(20)]
    vfs = written([*BEGUN, given_to("a", 20, 0), *reasons])
    sealed(vfs, 1)
    [file] = index(vfs).files
    assert len(file.batches) > 3
    assert len(journal_of(vfs, DIRECTORY)) == 23


# Damage


def test_a_start_is_refused_without_a_journal_file_that_the_manifest_names():
    vfs = one_by_one(2)
    name = journal_name(index(vfs).files[0].number)
    vfs.unlink(place(name))
    with pytest.raises(CorruptLog, match=name):
        load_checkpoint(vfs, DIRECTORY, LIMITS)
    [found] = [file for file in check_directory(vfs, DIRECTORY).files if file.state != "sound"]
    assert (found.kind, found.state, found.refuses_start) == ("journal", "missing", True)
    assert repair(vfs, DIRECTORY, dry_run=False, set_damage_aside=True).done
    load_checkpoint(vfs, DIRECTORY, LIMITS)


def test_a_damaged_batch_is_reported_and_refuses_no_start():
    vfs = one_by_one(2)
    name = journal_name(index(vfs).files[0].number)
    damage(vfs, name)
    [found] = [file for file in check_directory(vfs, DIRECTORY).files if file.state != "sound"]
    assert (found.path, found.kind, found.refuses_start) == (place(name), "journal", False)
    assert "3 rows" in found.lost[0]
    load_checkpoint(vfs, DIRECTORY, LIMITS)


def test_a_journal_file_that_no_manifest_names_is_a_leftover():
    vfs = one_by_one(2)
    for name in (journal_name(99), journal_name(98) + ".tmp"):
        vfs.plant(place(name), b"left over")
    assert place(journal_name(99)) in check_directory(vfs, DIRECTORY).leftovers
    remove_leftovers(vfs, load_checkpoint(vfs, DIRECTORY, LIMITS))
    assert on_disk(vfs) == {file.number for file in index(vfs).files}


def test_positions_continue_after_the_journal_when_repair_creates_the_log_anew():
    vfs = one_by_one(2)
    for number in (1, 2, 3):
        vfs.unlink(place(segment_name(number)))
    vfs.plant(place(segment_name(4)), b"no header " * 1000)
    assert repair(vfs, DIRECTORY, dry_run=False, set_damage_aside=True).done
    log = walk_log(vfs, DIRECTORY, first_segment=4)
    assert log.next_seq << POSITION_BITS > index(vfs).files[-1].last


# Faults and crashes


def half_sealed() -> tuple[FaultyVfs, list[Row]]:
    """Two segments are sealed, the third is closed."""
    vfs = written(
        [*BEGUN, given_to("a", 20, 0)], [Finished(1, 2, 1, 21, 0)], [given_to("a", 22, 1)]
    )
    account = account_of(vfs, DIRECTORY)
    sealed(vfs, 2)
    return vfs, account


def check_told_once(vfs: FaultyVfs, account: list[Row]) -> None:
    """Each event is in the journal or in the log that is left, and in one of them only."""
    checkpoint = load_checkpoint(vfs, DIRECTORY, LIMITS)
    remove_leftovers(vfs, checkpoint)
    first = checkpoint.first_segment
    told = journal_of(vfs, DIRECTORY)
    assert told == (account if first == 4 else account[:-1])


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, 0], ids=["EIO", "ENOSPC", "short"])
def test_no_event_is_lost_or_repeated_whichever_call_fails(code: int):
    vfs, _ = half_sealed()
    before = len(vfs.calls)
    sealed(vfs, 3)
    for number in range(1, len(vfs.calls) - before + 1):
        vfs, account = half_sealed()
        vfs.fail_call(number, code)
        with contextlib.suppress(OSError):
            sealed(vfs, 3)
        vfs.fail_call(0, 0)
        assert vfs.open_files == 0
        assert on_disk(vfs) <= {1, 2}
        check_told_once(vfs.restarted(), account)
        assert sealed(vfs, 3).first_segment == 4
        assert journal_of(vfs, DIRECTORY) == account


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_no_event_is_lost_or_repeated_after_a_kill_or_power_loss_at_any_call(flavour: str):
    vfs, _ = half_sealed()
    before = len(vfs.calls)
    sealed(vfs, 3)
    for number in range(1, len(vfs.calls) - before + 1):
        vfs, account = half_sealed()
        vfs.fail_call(number, errno.EIO)
        for attribute in ("unlink", "close"):
            # A killed process tidies nothing up.
            setattr(vfs, attribute, lambda *_: None)
        with contextlib.suppress(OSError):
            sealed(vfs, 3)
        survivor = vfs.crash(flavour, seed=number)
        check_told_once(survivor, account)
        assert on_disk(survivor) == {file.number for file in index(survivor).files}
        assert sealed(survivor, 3).first_segment == 4
        check_told_once(survivor.crash("nothing"), account)
