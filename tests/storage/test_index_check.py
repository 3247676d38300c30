"""The check of a manifest's batches: what it refuses, with which place, and what it accepts."""

from __future__ import annotations

import os

import msgspec
import pytest

from penstock.storage.checkpoint import load_checkpoint
from penstock.storage.errors import CorruptIndex
from penstock.storage.history import BatchRef, HistoryFile, history_name
from penstock.storage.index_check import IndexFault, find_index_faults
from penstock.storage.manifest import load_manifest, write_manifest
from penstock.storage.seal import SealJob, seal
from penstock.storage.segments import list_segments
from penstock.storage.snapshot import snapshot_name
from penstock.storage.vacuum import VacuumPlan
from tests.storage.random_broker import write_segment
from tests.storage.sealed_store import DIRECTORY, LIMITS, SealedStore, patch_engine


@pytest.fixture(autouse=True)
def disk_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_engine(monkeypatch)


def store_of(partitions: int, trimmed: int = 0) -> SealedStore:
    """Four files, each with ten rows of every partition; partition 0 is trimmed below an offset
    in the first."""
    store = SealedStore()
    topic = store.topic("orders", partitions)
    for _ in range(4):
        for _ in range(10):
            for partition in range(partitions):
                store.produce(topic, 1, partition=partition)
        store.seal()
    if trimmed:
        store.trim(topic, 0, trimmed)
        store.seal()
    return store


def faults(store: SealedStore, history: list[HistoryFile]) -> list[IndexFault]:
    return find_index_faults(history, store.state)


def without(history: list[HistoryFile], file: int, partition: int = 0) -> list[HistoryFile]:
    """The same without a partition's batch in one of the files."""
    kept = [ref for ref in history[file].batches if ref.partition != partition]
    changed = msgspec.structs.replace(history[file], batches=kept)
    return [*history[:file], changed, *history[file + 1 :]]


def replaced(history: list[HistoryFile], file: int, **changes: int) -> list[HistoryFile]:
    """The same with another first batch in one of the files."""
    first, *others = history[file].batches
    batches = [msgspec.structs.replace(first, **changes), *others]
    changed = msgspec.structs.replace(history[file], batches=batches)
    return [*history[:file], changed, *history[file + 1 :]]


def forgotten(history: list[HistoryFile]) -> list[HistoryFile]:
    """As an older release wrote it: no batch says how many messages precede it."""
    return [
        msgspec.structs.replace(
            file, batches=[msgspec.structs.replace(ref, preceding=-1) for ref in file.batches]
        )
        for file in history
    ]


@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize("trimmed", [0, 7, 15])
def test_a_sealed_index_is_sound_with_and_without_preceding(partitions: int, trimmed: int):
    store = store_of(partitions, trimmed)
    assert faults(store, store.manifest.history) == []
    assert faults(store, forgotten(store.manifest.history)) == []


@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize("file", range(4))
def test_a_missing_batch_is_found_and_counted_where_it_was(partitions: int, file: int):
    store = store_of(partitions)
    gone = store.manifest.history[file].batches[0]
    [fault] = faults(store, without(store.manifest.history, file))
    assert (fault.kind, fault.partition) == ("missing", 0)
    assert fault.first <= gone.first <= gone.last <= fault.last
    assert fault.msgs == (0 if file == 3 else 10)  # at the end only offsets tell


@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize("file", range(4))
def test_a_missing_batch_among_those_of_an_older_release_is_found_too(partitions: int, file: int):
    store = store_of(partitions)
    [fault] = faults(store, forgotten(without(store.manifest.history, file)))
    assert fault.kind == "missing"
    assert file == 3 or fault.msgs == 10


def test_a_batch_that_spans_another_is_found_and_both_are_named():
    store = store_of(1)
    history = store.manifest.history
    [fault] = faults(store, replaced(history, 1, first=5, last=35, msgs=20))[:1]
    assert fault.kind == "overlap"
    assert "spans offsets 5 to 35 of partition 0 of topic orders" in fault.detail
    assert history_name(history[2].number) in fault.detail


def test_the_same_batch_twice_is_found():
    store = store_of(2)
    history = store.manifest.history
    again = msgspec.structs.replace(history[1], number=history[1].number + 50)
    again = msgspec.structs.replace(
        again, batches=[msgspec.structs.replace(ref, file=again.number) for ref in again.batches]
    )
    assert {fault.kind for fault in faults(store, [*history, again])} == {"overlap"}


@pytest.mark.parametrize(
    "changes", [{"msgs": 0}, {"msgs": 11}, {"first": 19}, {"partition": 4}, {"topic_id": 900}]
)
def test_an_impossible_batch_is_refused(changes: dict[str, int]):
    store = store_of(1)
    kinds = [fault.kind for fault in faults(store, replaced(store.manifest.history, 1, **changes))]
    assert "invalid" in kinds


def test_a_row_count_that_is_one_off_is_found():
    store = store_of(3)
    for change in (-1, 1):
        history = replaced(store.manifest.history, 1, msgs=10 + change)
        assert faults(store, history), change


def test_batches_of_deleted_topics_and_trimmed_rows_are_not_checked():
    store = store_of(1)
    other = store.topic("other")
    store.produce(other, 5)
    store.seal()
    history = store.manifest.history
    store.trim(1, 0, 30)
    store.delete(other)
    assert faults(store, without(history, 1)) == []
    assert faults(store, history[3:]) == []


def test_a_topic_whose_partitions_lack_an_offset_is_refused():
    store = store_of(2)
    store.state.topics_by_id[1].next_offset += 1
    assert [fault.kind for fault in faults(store, store.manifest.history)] == ["invalid"]


# Where it is used


def test_a_manifest_that_lacks_rows_is_not_written():
    store = store_of(1)
    old = store.manifest
    bad = msgspec.structs.replace(old, history=without(old.history, 1))
    with pytest.raises(CorruptIndex, match="10 messages of partition 0 of topic orders"):
        write_manifest(store.vfs, DIRECTORY, bad, store.state)
    assert load_manifest(store.vfs, DIRECTORY) == old


def test_a_sealing_run_whose_result_would_lack_rows_fails_and_keeps_the_log(
    monkeypatch: pytest.MonkeyPatch,
):
    store = store_of(1)
    old = store.manifest
    write_segment(store.vfs, DIRECTORY, 5, 1000, [])
    monkeypatch.setattr(
        "penstock.storage.seal.plan_vacuum",
        lambda history, *_: VacuumPlan(keep=history[1:]),
    )
    with pytest.raises(CorruptIndex, match="repair"):
        seal(store.vfs, SealJob(directory=DIRECTORY, up_to_segment=5, limits=LIMITS))
    assert load_manifest(store.vfs, DIRECTORY) == old
    assert store.vfs.exists(os.path.join(DIRECTORY, snapshot_name(old.snapshot)))
    assert [number for number, _ in list_segments(store.vfs, DIRECTORY)] == [5]
    store.check()


def test_a_start_and_a_sealing_run_refuse_a_manifest_that_lacks_rows(
    monkeypatch: pytest.MonkeyPatch,
):
    store = store_of(1)
    bad = msgspec.structs.replace(store.manifest, history=without(store.manifest.history, 1))
    with monkeypatch.context() as unchecked:
        unchecked.setattr("penstock.storage.manifest.check_index", lambda *_: None)
        write_manifest(store.vfs, DIRECTORY, bad, store.state)
    before = {path: store.vfs.content(path) for path in store.vfs.paths()}
    with pytest.raises(CorruptIndex, match=r"history-0+1\.arrow.*penstock wal repair"):
        load_checkpoint(store.vfs, DIRECTORY, LIMITS)
    with pytest.raises(CorruptIndex):
        seal(store.vfs, SealJob(directory=DIRECTORY, up_to_segment=5, limits=LIMITS))
    assert {path: store.vfs.content(path) for path in store.vfs.paths()} == before


def test_a_reference_of_an_older_release_is_read():
    ref = BatchRef(1, 0, 1, 0, 0, 9, 10, 100, 1, 2, 8, 100, 5)
    old = msgspec.json.encode(msgspec.to_builtins(ref)[:14])
    assert msgspec.json.decode(old, type=BatchRef) == ref
