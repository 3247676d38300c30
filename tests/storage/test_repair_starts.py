"""After every repair that says it is done a real start succeeds; the others say why not and have
changed nothing. Damage is put into every place of a sealed store and of one that was never sealed.
"""

from __future__ import annotations

import os

import pyarrow as pa
import pytest

from penstock.core.state import apply
from penstock.model.records import Message, Record, TopicCreated, decode_record, encode_record
from penstock.storage import history_reader
from penstock.storage.checkpoint import load_checkpoint
from penstock.storage.errors import CorruptHistory, CorruptLog
from penstock.storage.frames import FRAME_MAGIC
from penstock.storage.history import history_name
from penstock.storage.history_reader import HistoryReader
from penstock.storage.manifest import MANIFEST_NAME, load_manifest
from penstock.storage.offline import verify
from penstock.storage.repair import repair
from penstock.storage.seal import SealJob, seal
from penstock.storage.segments import SEGMENT_HEADER_BYTES, segment_name
from penstock.storage.snapshot import snapshot_name
from penstock.storage.wal import Wal
from tests.storage.faulty_vfs import FaultyVfs
from tests.storage.harness import SMALL, Loop
from tests.storage.random_broker import LIMITS, write_log

DIRECTORY = "/data"
PER_SEGMENT = 9
SEGMENTS = 5
SEALED = 2


@pytest.fixture(autouse=True)
def no_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk in memory cannot be mapped."""
    monkeypatch.setattr(
        history_reader, "map_file", lambda vfs, path: pa.py_buffer(vfs.read_file(path))
    )


def place(name: str) -> str:
    return os.path.join(DIRECTORY, name)


def store(sealed: int) -> FaultyVfs:
    """Five segments of nine messages in three frames, the first `sealed` of them sealed one by
    one; the topic is created by the first record."""
    vfs = FaultyVfs()
    segments: list[list[Record]] = [
        [message(n) for n in range(at, at + PER_SEGMENT)]
        for at in range(0, SEGMENTS * PER_SEGMENT, PER_SEGMENT)
    ]
    segments[0][0] = TopicCreated(1, 1, "orders", 1)
    write_log(vfs, DIRECTORY, [[encode_record(r) for r in segment] for segment in segments])
    for number in range(1, sealed + 1):
        seal(vfs, SealJob(directory=DIRECTORY, up_to_segment=number, limits=LIMITS))
        vfs.unlink(place(segment_name(number)))
    return vfs


def message(number: int) -> Message:
    """Record `number` of the log. Record 0 creates the topic, so its offset is one less."""
    return Message(1, 0, number - 1, 1000 + number, "", f"value {number}")


def flip(vfs: FaultyVfs, name: str, at: int) -> None:
    data = bytearray(vfs.content(place(name)))
    data[at] ^= 0x10
    vfs.plant(place(name), bytes(data))


def frames_of(vfs: FaultyVfs, name: str) -> list[int]:
    data = vfs.content(place(name))
    found = []
    at = data.find(FRAME_MAGIC)
    while at >= 0:
        found.append(at)
        at = data.find(FRAME_MAGIC, at + 1)
    return found


def contents(vfs: FaultyVfs) -> dict[str, bytes]:
    return {path: vfs.content(path) for path in vfs.paths()}


def start(vfs: FaultyVfs) -> int:
    """As the broker does. The number of the log's next record. The next start
    finds the record that this one appends."""
    first = _start_and_append(vfs)
    assert _start_and_append(vfs) == first + 1
    assert verify(vfs, DIRECTORY).damage is None
    return first


def _start_and_append(vfs: FaultyVfs) -> int:
    checkpoint = load_checkpoint(vfs, DIRECTORY, LIMITS)
    state, loop = checkpoint.state, Loop()
    wal = Wal.open(
        vfs,
        DIRECTORY,
        SMALL,
        replay=lambda data, _: apply(state, decode_record(data)),
        post=loop.post,
        first_segment=checkpoint.first_segment,
    )
    end = state.topics["orders"].next_offset + 1 if state.topics else 0
    record: Record = message(end) if end else TopicCreated(1, 2000, "orders", 1)
    wal.append([encode_record(record)])
    wal.commit()
    loop.run_until(lambda: not wal.has_pending or wal.failed is not None)
    wal.close()
    assert wal.failed is None
    return end


def refused(vfs: FaultyVfs) -> None:
    with pytest.raises(CorruptLog):
        start(vfs)


HURTS = ["header", "first frame", "middle frame", "last frame", "missing", "blank", "empty"]


def hurt(vfs: FaultyVfs, number: int, how: str) -> None:
    name = segment_name(number)
    frames = frames_of(vfs, name)
    if how == "missing":
        vfs.unlink(place(name))
    elif how == "blank":
        vfs.plant(place(name), bytes(len(vfs.content(place(name)))))
    elif how == "empty":
        vfs.plant(place(name), b"")
    elif how == "header":
        flip(vfs, name, 13)
    else:
        index = {"first frame": 0, "middle frame": 1, "last frame": 2}[how]
        flip(vfs, name, frames[index] + 50)


def first_lost(number: int, how: str) -> int:
    frame = {"middle frame": 3, "last frame": 6}.get(how, 0)
    return (number - 1) * PER_SEGMENT + frame


@pytest.mark.parametrize("how", HURTS)
@pytest.mark.parametrize(
    ("sealed", "number"),
    [(sealed, n) for sealed in (0, SEALED) for n in range(sealed + 1, SEGMENTS + 1)],
)
def test_a_repaired_log_starts_and_ends_before_the_damage(
    sealed: int, number: int, how: str
) -> None:
    """driftq-48"""
    vfs = store(sealed)
    hurt(vfs, number, how)
    if verify(vfs, DIRECTORY).damage is None:
        # The end of the log: a torn write looks the same. A start cuts it.
        assert number == SEGMENTS
        assert repair(vfs, DIRECTORY, dry_run=False).done
        assert start(vfs) >= first_lost(number, how)
        return
    before = contents(vfs)
    refused(vfs)
    done = repair(vfs, DIRECTORY, dry_run=False, set_damage_aside=True)
    assert done.done
    assert done.lost
    for path, aside in done.set_aside.items():
        assert vfs.content(aside) == before[path]
    assert verify(vfs, DIRECTORY).damage is None
    assert start(vfs) == first_lost(number, how)


def test_a_log_without_a_readable_segment_goes_back_to_the_snapshot_and_says_so() -> None:
    vfs = store(SEALED)
    flip(vfs, segment_name(3), 13)
    plan = repair(vfs, DIRECTORY)
    assert any("segment 3 on" in each and "snapshot" in each for each in plan.lost)
    assert any("wal-00000000000000000004.seg: 9 records" in each for each in plan.lost)
    assert repair(vfs, DIRECTORY, dry_run=False, set_damage_aside=True).lost == plan.lost
    checkpoint = load_checkpoint(vfs, DIRECTORY, LIMITS)
    assert (checkpoint.first_segment, checkpoint.files) == (3, [1, 2])


@pytest.mark.parametrize("damage", ["header", "missing"])
def test_damage_to_the_first_segment_beside_an_interrupted_first_sealing(damage: str) -> None:
    """Sealed files without a manifest refuse a start that has no segment 1."""
    vfs = store(0)
    vfs.plant(place(history_name(1)), b"half of it")
    hurt(vfs, 1, damage)
    if damage == "missing":
        done = repair(vfs, DIRECTORY, dry_run=False, set_damage_aside=True)
        assert (done.done, done.possible) == (False, False)
        refused(vfs)
        return
    assert repair(vfs, DIRECTORY, dry_run=False, set_damage_aside=True).done
    start(vfs)


@pytest.mark.parametrize("name", [MANIFEST_NAME, snapshot_name(2)])
@pytest.mark.parametrize("damage", ["changed", "cut", "missing"])
def test_a_lost_manifest_or_snapshot_cannot_be_repaired_and_is_left_alone(
    name: str, damage: str
) -> None:
    vfs = store(SEALED)
    if damage == "missing":
        vfs.unlink(place(name))
    elif damage == "cut":
        vfs.plant(place(name), vfs.content(place(name))[:-1])
    else:
        flip(vfs, name, 30)
    before = contents(vfs)
    result = repair(vfs, DIRECTORY, dry_run=False, set_damage_aside=True)
    assert (result.done, result.possible) == (False, False)
    assert name in result.explanation
    assert "from a copy" in result.explanation
    assert contents(vfs) == before
    refused(vfs)


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "longer"])
def test_a_history_file_that_refuses_the_start_can_be_given_up(number: int, damage: str) -> None:
    vfs = store(SEALED)
    path = place(history_name(number))
    whole = vfs.content(path)
    if damage == "missing":
        vfs.unlink(path)
    else:
        vfs.plant(path, {"empty": b"", "cut": whole[:-9], "longer": whole + b"more"}[damage])
    before = contents(vfs)
    refused(vfs)
    assert not repair(vfs, DIRECTORY, dry_run=False).done
    assert contents(vfs) == before
    done = repair(vfs, DIRECTORY, dry_run=False, set_damage_aside=True)
    assert done.done
    assert all("of topic orders" in each for each in done.lost)
    assert done.set_aside == ({} if damage == "missing" else {path: f"{path}.damaged"})
    for old, aside in done.set_aside.items():
        assert vfs.content(aside) == before[old]
    assert start(vfs) == SEGMENTS * PER_SEGMENT
    manifest = load_manifest(vfs, DIRECTORY)
    assert manifest is not None
    reader = HistoryReader(vfs, DIRECTORY)
    for file in manifest.history:
        [ref] = file.batches
        if file.number != number or damage == "longer":
            assert len(reader.read(ref, 0, 100)) == ref.msgs
        else:
            with pytest.raises(CorruptHistory):
                reader.read(ref, 0, 100)


def test_the_listed_losses_of_history_are_exactly_the_messages_that_cannot_be_delivered() -> None:
    vfs = store(SEALED)
    path = place(history_name(1))
    vfs.plant(path, vfs.content(path) + b"more")
    assert repair(vfs, DIRECTORY).lost
    assert repair(vfs, DIRECTORY, dry_run=False, set_damage_aside=True).lost == []
    assert verify(vfs, DIRECTORY).files[1].state == "sound"


def test_a_damaged_batch_refuses_no_start_and_no_repair_claims_to_fix_it() -> None:
    vfs = store(SEALED)
    manifest = load_manifest(vfs, DIRECTORY)
    assert manifest is not None
    flip(vfs, history_name(1), manifest.history[0].batches[0].start + 100)
    before = contents(vfs)
    result = repair(vfs, DIRECTORY, dry_run=False, set_damage_aside=True)
    assert (result.damage, result.set_aside) == (None, {})
    assert "cannot be repaired" in result.explanation
    assert contents(vfs) == before
    start(vfs)


def test_damage_to_history_and_log_at_once_is_repaired_at_once() -> None:
    vfs = store(SEALED)
    vfs.unlink(place(history_name(2)))
    hurt(vfs, 4, "middle frame")
    assert repair(vfs, DIRECTORY, dry_run=False, set_damage_aside=True).done
    assert start(vfs) == first_lost(4, "middle frame")


def test_segments_that_were_sealed_are_no_damage_and_are_not_set_aside() -> None:
    vfs = store(1)
    seal(vfs, SealJob(directory=DIRECTORY, up_to_segment=2, limits=LIMITS))
    hurt(vfs, 2, "header")
    assert verify(vfs, DIRECTORY).damage is None
    hurt(vfs, 3, "header")
    done = repair(vfs, DIRECTORY, dry_run=False, set_damage_aside=True)
    assert done.done
    assert place(segment_name(2)) not in done.set_aside
    start(vfs)


@pytest.mark.parametrize("calls", range(1, 14))
def test_an_interrupted_repair_can_be_done_again(calls: int) -> None:
    vfs = store(SEALED)
    hurt(vfs, 3, "header")
    vfs.plant(place(history_name(1)), vfs.content(place(history_name(1)))[:-5])
    vfs.fail_call(calls, 5, only=["rename", "write", "sync", "fsync_dir", "truncate"])
    try:
        repair(vfs, DIRECTORY, dry_run=False, set_damage_aside=True)
    except OSError:
        vfs = vfs.crash("everything")
    assert repair(vfs, DIRECTORY, dry_run=False, set_damage_aside=True).done
    start(vfs)


def test_a_second_damage_before_a_blank_segment_is_found_first() -> None:
    vfs = store(SEALED)
    hurt(vfs, 3, "last frame")
    hurt(vfs, 4, "blank")
    damage = verify(vfs, DIRECTORY).damage
    assert damage is not None
    assert damage.path == place(segment_name(3))
    assert damage.position >= SEGMENT_HEADER_BYTES
