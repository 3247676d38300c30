"""A start finds everything the manifest names, or refuses and names what is wrong."""

from __future__ import annotations

import os

import pyarrow as pa
import pytest

from penstock.core.image import take_image
from penstock.core.state import BrokerState
from penstock.model.records import Message, Record, TopicCreated, Trimmed, encode_record
from penstock.storage import checkpoint as checkpoint_module
from penstock.storage import history_reader
from penstock.storage.checkpoint import SEAL_LOCK_NAME, load_checkpoint, remove_leftovers
from penstock.storage.errors import CorruptLog, DirectoryInUse
from penstock.storage.history import history_name
from penstock.storage.manifest import MANIFEST_NAME, Manifest, load_manifest, write_manifest
from penstock.storage.seal import SealJob, seal
from penstock.storage.segments import segment_name
from penstock.storage.snapshot import load_snapshot, snapshot_name, write_snapshot
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
    """Two files of history, a snapshot, and segment 3 as the rest of the log."""
    vfs = FaultyVfs()
    segments: list[list[Record]] = [
        [TopicCreated(1, 1, "orders", 2), *(Message(1, n % 2, n, n, "", "v") for n in range(6))],
        [Message(1, n % 2, n, n, "", "v") for n in range(6, 10)],
        [],
    ]
    write_log(vfs, DIRECTORY, [[encode_record(r) for r in segment] for segment in segments])
    for number in (1, 2):
        seal(vfs, SealJob(directory=DIRECTORY, up_to_segment=number, limits=LIMITS))
        vfs.unlink(place(segment_name(number)))
    return vfs


def load(vfs: FaultyVfs) -> checkpoint_module.Checkpoint:
    found = load_checkpoint(vfs, DIRECTORY, LIMITS)
    remove_leftovers(vfs, found)
    return found


def refuse(vfs: FaultyVfs, name: str) -> None:
    """The start is refused, names the file, and leaves the directory as it was."""
    before = {path: vfs.content(path) for path in vfs.paths()}
    with pytest.raises(CorruptLog, match=name):
        load(vfs)
    assert {path: vfs.content(path) for path in vfs.paths()} == before
    assert vfs.open_files == 0


def test_a_new_directory_has_an_empty_state():
    found = load(FaultyVfs())
    assert take_image(found.state) == take_image(BrokerState(LIMITS))
    assert (found.refs, found.files, found.first_segment) == ([], [], 1)


def test_references_come_by_partition_and_offset():
    found = load(sealed_store())
    places = [(ref.topic_id, ref.partition, ref.first, ref.last) for ref in found.refs]
    assert places == [(1, 0, 0, 4), (1, 0, 6, 8), (1, 1, 1, 5), (1, 1, 7, 9)]
    assert (found.files, found.first_segment) == ([1, 2], 3)
    assert found.state.topics["orders"].next_offset == 10


def test_a_batch_whose_rows_are_all_trimmed_is_not_referenced():
    vfs = sealed_store()
    trims: list[Record] = [Trimmed(1, 1, 20, 6, 3, 3)]
    write_log(vfs, DIRECTORY, [[], [], [encode_record(record) for record in trims]])
    seal(vfs, SealJob(directory=DIRECTORY, up_to_segment=3, limits=LIMITS))
    assert [(ref.partition, ref.first) for ref in load(vfs).refs] == [(0, 0), (0, 6), (1, 7)]


def test_a_manifest_with_any_bit_flipped_is_refused():
    vfs = sealed_store()
    whole = vfs.content(place(MANIFEST_NAME))
    for byte in range(len(whole)):
        for bit in range(8):
            data = bytearray(whole)
            data[byte] ^= 1 << bit
            vfs.plant(place(MANIFEST_NAME), bytes(data))
            with pytest.raises(CorruptLog, match=MANIFEST_NAME):
                load_manifest(vfs, DIRECTORY)


def test_a_manifest_cut_anywhere_is_refused():
    vfs = sealed_store()
    whole = vfs.content(place(MANIFEST_NAME))
    for length in range(len(whole)):
        vfs.plant(place(MANIFEST_NAME), whole[:length])
        with pytest.raises(CorruptLog, match=MANIFEST_NAME):
            load_manifest(vfs, DIRECTORY)


def test_a_damaged_manifest_refuses_the_start_and_nothing_is_removed():
    vfs = sealed_store()
    vfs.plant(place("history-00000000000000000099.arrow"), b"a leftover")
    vfs.plant(place(MANIFEST_NAME), vfs.content(place(MANIFEST_NAME))[:-1])
    refuse(vfs, MANIFEST_NAME)


def test_a_manifest_of_a_later_version_is_refused_by_name():
    vfs = sealed_store()
    data = vfs.content(place(MANIFEST_NAME)).replace(b"MANIFEST 1 ", b"MANIFEST 2 ", 1)
    vfs.plant(place(MANIFEST_NAME), data)
    refuse(vfs, "version 2")


def test_a_snapshot_with_any_bit_flipped_is_refused():
    vfs = sealed_store()
    path = place(snapshot_name(2))
    whole = vfs.content(path)
    for byte in range(len(whole)):
        data = bytearray(whole)
        data[byte] ^= 1 << byte % 8
        vfs.plant(path, bytes(data))
        with pytest.raises(CorruptLog, match=snapshot_name(2)):
            load_snapshot(vfs, DIRECTORY, 2)


def test_a_snapshot_cut_anywhere_refuses_the_start():
    vfs = sealed_store()
    whole = vfs.content(place(snapshot_name(2)))
    for length in range(len(whole)):
        vfs.plant(place(snapshot_name(2)), whole[:length])
        refuse(vfs, snapshot_name(2))


@pytest.mark.parametrize("name", [snapshot_name(2), history_name(1), history_name(2)])
def test_a_missing_file_refuses_the_start_and_is_named(name: str):
    vfs = sealed_store()
    vfs.unlink(place(name))
    refuse(vfs, name)


def test_a_shortened_history_file_refuses_the_start():
    vfs = sealed_store()
    vfs.plant(place(history_name(1)), vfs.content(place(history_name(1)))[:-1])
    refuse(vfs, history_name(1))


def test_a_lost_manifest_refuses_the_start_and_the_history_stays():
    vfs = sealed_store()
    vfs.unlink(place(MANIFEST_NAME))
    refuse(vfs, MANIFEST_NAME)


def test_leftovers_are_removed_and_nothing_else():
    vfs = sealed_store()
    wanted = set(vfs.paths())
    for name in (
        history_name(3),
        snapshot_name(1),
        snapshot_name(3) + ".tmp",
        history_name(2) + ".tmp",
        MANIFEST_NAME + ".tmp",
    ):
        vfs.plant(place(name), b"left over")
    for name in ("notes.txt", "history-1.arrow", "LOCK", segment_name(7) + ".tmp"):
        vfs.plant(place(name), b"not ours")
        wanted.add(place(name))
    load(vfs)
    assert set(vfs.paths()) == wanted


def test_an_interrupted_first_sealing_is_tidied_up():
    vfs = FaultyVfs()
    write_log(vfs, DIRECTORY, [[]])
    vfs.plant(place(history_name(1)), b"half of it")
    vfs.plant(place(snapshot_name(1)), b"half of it")
    assert load(vfs).first_segment == 1
    assert vfs.paths() == [place(segment_name(1))]


def test_a_start_waits_for_a_sealing_process_that_is_left_over(monkeypatch: pytest.MonkeyPatch):
    vfs = sealed_store()
    held = vfs.lock_file(place(SEAL_LOCK_NAME))
    monkeypatch.setattr("penstock.storage.checkpoint.time.sleep", lambda _: vfs.close(held))
    assert load(vfs).first_segment == 3


def test_a_start_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch):
    vfs = sealed_store()
    vfs.lock_file(place(SEAL_LOCK_NAME))
    monkeypatch.setattr(checkpoint_module, "_ORPHAN_WAIT_S", 0.0)
    with pytest.raises(DirectoryInUse):
        load(vfs)


def test_a_manifest_is_loaded_as_it_was_written():
    vfs = FaultyVfs()
    assert load_manifest(vfs, DIRECTORY) is None
    manifest = Manifest(snapshot=4, first_segment=9, next_file=5)
    write_manifest(vfs, DIRECTORY, manifest, BrokerState(LIMITS))
    assert load_manifest(vfs, DIRECTORY) == manifest
    image = take_image(load(sealed_store()).state)
    write_snapshot(vfs, DIRECTORY, 4, image)
    assert load_snapshot(vfs, DIRECTORY, 4) == image
