"""`verify` reads the same files as a start and reports the state of each."""

from __future__ import annotations

import os

import pyarrow as pa
import pytest

from penstock.model.records import Message, Record, TopicCreated, Trimmed, encode_record
from penstock.storage import checkpoint as checkpoint_module
from penstock.storage import history_reader
from penstock.storage.checkpoint import SEAL_LOCK_NAME, load_checkpoint
from penstock.storage.errors import (
    CorruptHistory,
    CorruptLog,
    CorruptManifest,
    CorruptSnapshot,
    DirectoryInUse,
)
from penstock.storage.history import history_name
from penstock.storage.journal_files import journal_name
from penstock.storage.manifest import MANIFEST_NAME, load_manifest
from penstock.storage.offline import VerifyReport, verify
from penstock.storage.seal import SealJob, seal
from penstock.storage.segments import segment_name
from penstock.storage.snapshot import snapshot_name
from tests.storage.faulty_vfs import FaultyVfs
from tests.storage.random_broker import LIMITS, write_log

DIRECTORY = "/data"


@pytest.fixture(autouse=True)
def no_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk in memory cannot be mapped."""
    monkeypatch.setattr(
        history_reader, "map_file", lambda vfs, path: pa.py_buffer(vfs.read_file(path))
    )


def place(name: str) -> str:
    return os.path.join(DIRECTORY, name)


def sealed_store() -> FaultyVfs:
    """Two files of history with two batches each, a snapshot, and segment 3 behind them."""
    vfs = FaultyVfs()
    segments: list[list[Record]] = [
        [TopicCreated(1, 1, "orders", 2), *(Message(1, n % 2, n, n, "", "v") for n in range(6))],
        [*(Message(1, n % 2, n, n, "", "v") for n in range(6, 10))],
        [Message(1, 0, 10, 10, "", "v")],
    ]
    write_log(vfs, DIRECTORY, [[encode_record(r) for r in segment] for segment in segments])
    for number in (1, 2):
        seal(vfs, SealJob(directory=DIRECTORY, up_to_segment=number, limits=LIMITS))
        vfs.unlink(place(segment_name(number)))
    return vfs


def flip(vfs: FaultyVfs, name: str, at: int) -> None:
    data = bytearray(vfs.content(place(name)))
    data[at] ^= 1
    vfs.plant(place(name), bytes(data))


def checked(vfs: FaultyVfs) -> VerifyReport:
    """Verifies, and sees that nothing was changed and that a start says the same."""
    before = {path: vfs.content(path) for path in vfs.paths()}
    report = verify(vfs, DIRECTORY)
    assert {path: vfs.content(path) for path in vfs.paths()} == before
    assert vfs.open_files == 0
    said: CorruptLog | None = None
    try:
        load_checkpoint(vfs.restarted(), DIRECTORY, LIMITS)
    except CorruptLog as error:
        said = error
    if said is None:
        assert report.damage is None
    else:
        assert report.damage is not None
        assert (report.damage.path, report.damage.detail) == (said.path, said.detail)
    return report


def states(report: VerifyReport) -> dict[str, str]:
    return {os.path.basename(file.path): file.state for file in report.files}


def test_each_file_of_a_sound_store_is_reported_sound() -> None:
    report = checked(sealed_store())
    names = [MANIFEST_NAME, history_name(1), history_name(2), snapshot_name(2)]
    names += [journal_name(1), journal_name(2)]
    assert states(report) == dict.fromkeys(names, "sound")
    assert (report.damage, report.leftovers, report.records) == (None, [], 1)


def test_a_store_that_was_never_sealed_has_no_sealed_files() -> None:
    vfs = FaultyVfs()
    write_log(vfs, DIRECTORY, [[]])
    assert checked(vfs).files == []


@pytest.mark.parametrize("name", [MANIFEST_NAME, history_name(1), snapshot_name(2)])
def test_a_missing_file_is_reported_missing(name: str) -> None:
    vfs = sealed_store()
    vfs.unlink(place(name))
    report = checked(vfs)
    assert report.damage is not None
    assert states(report)[name] == "missing"


@pytest.mark.parametrize("name", [MANIFEST_NAME, history_name(2), snapshot_name(2)])
def test_a_shortened_file_is_reported_damaged(name: str) -> None:
    vfs = sealed_store()
    vfs.plant(place(name), vfs.content(place(name))[:-1])
    report = checked(vfs)
    assert report.damage is not None
    assert states(report)[name] == "damaged"


def test_a_snapshot_with_any_bit_flipped_is_reported_damaged() -> None:
    whole = sealed_store()
    for byte in range(len(whole.content(place(snapshot_name(2))))):
        vfs = whole.restarted()
        flip(vfs, snapshot_name(2), byte)
        assert states(checked(vfs))[snapshot_name(2)] == "damaged"


def test_a_damaged_batch_is_named_with_its_messages_though_a_start_succeeds() -> None:
    vfs = sealed_store()
    manifest = load_manifest(vfs, DIRECTORY)
    assert manifest is not None
    second = manifest.history[0].batches[1]
    flip(vfs, history_name(1), second.start + second.length // 2)
    report = checked(vfs)
    assert report.damage is None
    [damaged] = [file for file in report.files if file.state != "sound"]
    assert damaged.path == place(history_name(1))
    assert damaged.position == second.start
    assert damaged.lost == ["offsets 1 to 5 (3 messages) of partition 1 of topic orders"]


def test_a_damaged_batch_without_retained_rows_loses_nothing() -> None:
    vfs = sealed_store()
    trims: list[Record] = [Trimmed(1, 1, 20, 6, 3, 3)]
    write_log(vfs, DIRECTORY, [[], [], [encode_record(record) for record in trims]])
    seal(vfs, SealJob(directory=DIRECTORY, up_to_segment=3, limits=LIMITS))
    write_log(vfs, DIRECTORY, [[], [], [], []])
    manifest = load_manifest(vfs, DIRECTORY)
    assert manifest is not None
    flip(vfs, history_name(1), manifest.history[0].batches[1].start + 50)
    report = checked(vfs)
    assert states(report)[history_name(1)] == "damaged"
    assert [each for file in report.files for each in file.lost] == []


def test_files_that_a_start_would_remove_are_listed() -> None:
    vfs = sealed_store()
    expected = [
        MANIFEST_NAME + ".tmp",
        history_name(3),
        snapshot_name(1),
        segment_name(1),
        segment_name(2),
    ]
    for name in expected:
        vfs.plant(place(name), b"left over")
    vfs.plant(place("notes.txt"), b"not ours")
    report = checked(vfs)
    assert report.leftovers == [place(name) for name in expected]
    assert [segment.state for segment in report.segments] == ["leftover", "leftover", "sound"]


def test_a_missing_segment_that_the_manifest_needs_is_damage() -> None:
    vfs = sealed_store()
    vfs.unlink(place(segment_name(3)))
    report = verify(vfs, DIRECTORY)
    assert report.damage is not None
    assert report.damage.path == place(segment_name(3))


def test_verify_waits_for_a_sealing_process_that_is_left_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vfs = sealed_store()
    vfs.plant(place(SEAL_LOCK_NAME), b"")
    held = vfs.lock_file(place(SEAL_LOCK_NAME))
    monkeypatch.setattr(checkpoint_module, "_ORPHAN_WAIT_S", 0.0)
    with pytest.raises(DirectoryInUse):
        verify(vfs, DIRECTORY)
    vfs.close(held)
    assert verify(vfs, DIRECTORY).damage is None
    assert vfs.open_files == 0


@pytest.mark.parametrize(
    ("kind", "helps", "does_not"),
    [
        (CorruptLog, "wal repair --set-damage-aside` can", "cannot"),
        (CorruptManifest, "Restore the whole data directory from a copy", "wal verify"),
        (CorruptSnapshot, "Restore this file from a copy", "wal verify"),
        (CorruptHistory, "stops only the groups that need", "wal verify"),
    ],
)
def test_each_error_says_what_to_do(kind: type[CorruptLog], helps: str, does_not: str) -> None:
    text = str(kind("/data/file", 7, "a bad sector"))
    assert text.startswith("/data/file is damaged at byte 7: a bad sector. Nothing was changed.")
    assert helps in text
    assert does_not not in text
