"""Each sealed file says which one it is: another in its place is found by a start and by verify."""

from __future__ import annotations

import os
import zlib
from struct import Struct

import msgspec
import pytest

from penstock.model.limits import KIB, Limits
from penstock.storage.checkpoint import load_state
from penstock.storage.errors import CorruptHistory, CorruptLog, CorruptSnapshot
from penstock.storage.history import history_name
from penstock.storage.journal_files import JournalIndex, journal_name
from penstock.storage.log import WalOptions
from penstock.storage.manifest import Manifest, load_manifest, write_manifest
from penstock.storage.offline import verify
from penstock.storage.repair import repair
from penstock.storage.snapshot import snapshot_name
from tests.engine.harness import DIRECTORY, Broker, values
from tests.storage.faulty_vfs import FaultyVfs

OPTIONS = WalOptions(segment_bytes=64 * KIB, reserve_bytes=0)
VALUES = [f"value {n}" for n in range(12)]


def path(name: str) -> str:
    return os.path.join(DIRECTORY, name)


def sealed_in_parts(parts: int = 3) -> tuple[FaultyVfs, list[dict[str, bytes]]]:
    """A directory that was sealed several times and stopped, and how it was after each."""
    broker = Broker(FaultyVfs(), options=OPTIONS)
    broker.topic()
    seen = []
    for part in range(parts):
        broker.put("t", *VALUES[4 * part : 4 * part + 4])
        reader = broker.consume()
        broker.ack(reader, reader.items[0])
        reader.live.close()
        broker.seal()
        seen.append({each: broker.disk.content(each) for each in broker.disk.paths()})
    broker.close()
    return broker.disk, seen


def manifest_of(vfs: FaultyVfs) -> Manifest:
    manifest = load_manifest(vfs, DIRECTORY)
    assert manifest is not None
    return manifest


def starts(vfs: FaultyVfs) -> list[str]:
    broker = Broker(vfs, options=OPTIONS)
    found = values(broker.stored("t"))
    broker.close()
    return found


def refused(vfs: FaultyVfs, kind: type[CorruptLog]) -> CorruptLog:
    """The same is said by a start and by verify, and nothing is changed."""
    before = {each: vfs.content(each) for each in vfs.paths()}
    with pytest.raises(kind) as caught:
        Broker(vfs, options=OPTIONS)
    damage = verify(vfs, DIRECTORY).damage
    assert damage is not None
    error = caught.value
    assert (damage.path, damage.detail) == (error.path, error.detail)
    assert {each: vfs.content(each) for each in vfs.paths()} == before
    assert vfs.open_files == 0
    return error


def test_an_older_snapshot_under_the_name_of_the_one_in_force_is_refused() -> None:
    vfs, seen = sealed_in_parts()
    name = path(snapshot_name(manifest_of(vfs).snapshot))
    older = next(each for each in seen[0] if "snapshot" in each)
    assert older != name
    vfs.plant(name, seen[0][older])
    error = refused(vfs, CorruptSnapshot)
    assert error.path == name
    assert f"it says that it is {os.path.basename(older)}" in error.detail


def test_a_snapshot_of_the_same_number_from_elsewhere_is_refused() -> None:
    vfs, _ = sealed_in_parts()
    name = path(snapshot_name(manifest_of(vfs).snapshot))
    other = Broker(FaultyVfs(), options=OPTIONS)
    for part in range(3):
        other.topic(f"other-{part}")
        other.seal()
    other.close()
    vfs.plant(name, other.disk.content(name))
    assert "not the one that the manifest names" in refused(vfs, CorruptSnapshot).detail


def test_two_history_files_that_change_places_are_refused() -> None:
    vfs, _ = sealed_in_parts()
    first, second = (path(history_name(file.number)) for file in manifest_of(vfs).history[:2])
    one, two = vfs.content(first), vfs.content(second)
    assert len(one) == len(two), "only what is inside tells them apart"
    vfs.plant(first, two)
    vfs.plant(second, one)
    error = refused(vfs, CorruptHistory)
    assert (error.path, error.detail) == (first, f"it says that it is {os.path.basename(second)}")


def test_two_journal_files_that_change_places_are_refused() -> None:
    vfs, _ = sealed_in_parts()
    files = manifest_of(vfs).journal.files
    pairs = [(a, b) for a in files for b in files if a.number < b.number and a.size == b.size]
    first, second = (path(journal_name(file.number)) for file in pairs[0])
    one, two = vfs.content(first), vfs.content(second)
    vfs.plant(first, two)
    vfs.plant(second, one)
    assert "it says that it is journal-" in refused(vfs, CorruptHistory).detail


def test_a_history_file_of_the_same_name_and_length_from_elsewhere_is_refused() -> None:
    vfs, _ = sealed_in_parts()
    other, _ = sealed_in_parts()
    name = path(history_name(manifest_of(vfs).history[0].number))
    assert len(other.content(name)) == len(vfs.content(name))
    vfs.plant(name, other.content(name))
    assert refused(vfs, CorruptHistory).detail == "another file than the one that was written"


def test_a_start_reads_only_the_head_of_each_history_file() -> None:
    """A start takes as long with a terabyte of history as with none."""
    vfs, _ = sealed_in_parts()
    names = [path(history_name(file.number)) for file in manifest_of(vfs).history]
    read: list[tuple[str, int]] = []
    plain_read = vfs._pread

    def noted(fd: int, length: int, offset: int) -> bytes:
        read.append((vfs._open[fd][0], length))
        return plain_read(fd, length, offset)

    vfs._pread = noted  # type: ignore[method-assign]  # a disk that is watched
    Broker(vfs, options=OPTIONS).close()
    heads = {file.identity.head for file in manifest_of(vfs).history if file.identity}
    assert len(heads) == 1
    assert sorted(each for each in read if each[0] in names) == [(n, *heads) for n in names]


def test_verify_finds_a_changed_byte_anywhere_in_a_sealed_file() -> None:
    """The foot too, and the padding, which no batch's checksum covers."""
    vfs, _ = sealed_in_parts(1)
    manifest = manifest_of(vfs)
    names = [history_name(file.number) for file in manifest.history]
    names += [journal_name(file.number) for file in manifest.journal.files]
    for name in names:
        whole = vfs.content(path(name))
        for at in range(0, len(whole), 7):
            disk = vfs.restarted()
            disk.plant(path(name), whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            found = {file.path: file for file in verify(disk, DIRECTORY).files}
            assert found[path(name)].state == "damaged", at


def test_a_file_of_another_place_can_be_given_up_and_the_broker_starts() -> None:
    vfs, _ = sealed_in_parts()
    first, second = (path(history_name(file.number)) for file in manifest_of(vfs).history[:2])
    vfs.plant(first, vfs.content(second))
    done = repair(vfs, DIRECTORY, dry_run=False, set_damage_aside=True)
    assert done.done, done.explanation
    assert done.set_aside == {first: f"{first}.damaged"}
    assert verify(vfs, DIRECTORY).damage is None
    broker = Broker(vfs, options=OPTIONS)
    assert values(broker.stored("t", first_offset=4)) == VALUES[4:]
    broker.close()


def as_an_older_release_left_it(vfs: FaultyVfs) -> FaultyVfs:
    """Without the fields and the headers that this release has added."""
    manifest = manifest_of(vfs)
    without = msgspec.structs.replace
    files = [without(file, identity=None) for file in manifest.journal.files]
    old = without(
        manifest,
        snapshot_mark=None,
        history=[without(file, identity=None) for file in manifest.history],
        journal=JournalIndex(manifest.journal.start, files),
    )
    name = path(snapshot_name(manifest.snapshot))
    body = vfs.content(name)[24:]  # the length and the image
    vfs.plant(name, Struct("<8sII").pack(b"PENSNAP\n", 1, zlib.crc32(body)) + body)
    state = load_state(vfs, DIRECTORY, old, Limits())
    write_manifest(vfs, DIRECTORY, old, state)
    vfs.unlink(path("STOPPED"))
    return vfs


def test_a_directory_of_an_older_release_starts_and_is_sealed_on() -> None:
    vfs = as_an_older_release_left_it(sealed_in_parts()[0])
    assert verify(vfs, DIRECTORY).damage is None
    assert starts(vfs) == VALUES
    broker = Broker(vfs, options=OPTIONS)
    broker.put("t", "one more")
    broker.seal()
    broker.close()
    assert manifest_of(vfs).snapshot_mark is not None
    assert starts(vfs) == [*VALUES, "one more"]


def test_an_older_releases_snapshot_that_does_not_fit_its_log_is_refused_without_a_traceback() -> (
    None
):
    broker = Broker(FaultyVfs(), options=OPTIONS)
    broker.topic("first")
    broker.seal()
    older = {each: broker.disk.content(each) for each in broker.disk.paths()}
    broker.topic("t")
    broker.seal()
    broker.put("t", *VALUES)
    broker.close()
    vfs = as_an_older_release_left_it(broker.disk)
    name = path(snapshot_name(manifest_of(vfs).snapshot))
    body = next(data for each, data in older.items() if "snapshot" in each)[24:]
    vfs.plant(name, Struct("<8sII").pack(b"PENSNAP\n", 1, zlib.crc32(body)) + body)
    assert "cannot be applied" in refused(vfs, CorruptLog).detail


def test_a_start_that_the_log_refuses_removes_no_file_that_the_manifest_does_not_name() -> None:
    """Manifest and snapshot of another time, put back by hand: history must not go for it."""
    vfs, seen = sealed_in_parts()
    whole = {each: vfs.content(each) for each in vfs.paths()}
    for each, data in seen[0].items():
        if "MANIFEST" in each or "snapshot" in each:
            vfs.plant(each, data)
    refused(vfs, CorruptLog)
    for each in (path("MANIFEST"), path(snapshot_name(1))):
        if each in whole:
            vfs.plant(each, whole[each])
    assert starts(vfs) == VALUES
