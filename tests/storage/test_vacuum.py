"""Vacuum keeps every row readable, and each run makes progress."""

from __future__ import annotations

import os

import pytest

from penstock.storage import vacuum
from penstock.storage.history import history_name
from penstock.storage.vacuum import MERGED_FILES
from tests.storage.sealed_store import DIRECTORY, SealedStore, patch_engine

SMALL_BYTES = 2_000
"""A file of 40 rows is larger, one of 10 is not."""


@pytest.fixture(autouse=True)
def low_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_engine(monkeypatch)
    monkeypatch.setattr(vacuum, "SMALL_BYTES", SMALL_BYTES)


def around_a_larger_file(partitions: int = 1) -> tuple[SealedStore, int]:
    """Sixteen small files, a larger one after the first eight, and the run that merges them."""
    store = SealedStore()
    topic = store.topic("orders", partitions)
    for number in range(MERGED_FILES):
        if number == MERGED_FILES // 2:
            store.produce(topic, 40, "large" * 20, number % partitions)
            store.seal()
        store.produce(topic, 10, partition=number % partitions)
        store.seal()
    store.produce(topic, 10)
    return store, topic


@pytest.mark.parametrize("partitions", [1, 3])
def test_small_files_around_a_larger_one_are_merged_and_every_row_is_found(partitions: int):
    store, _ = around_a_larger_file(partitions)
    sealed = store.seal()
    assert len(sealed.dropped) == MERGED_FILES, "nothing was merged: the test is void"
    store.check()


def test_a_deleted_topic_beside_files_that_stay_hides_no_row():
    store = SealedStore()
    orders, gone = store.topic("orders"), store.topic("gone")
    for number in range(5):
        if number % 2 == 0:
            store.produce(gone, 5)
        store.produce(orders, 20)
        store.seal()
    store.delete(gone)
    sealed = store.seal()
    assert len(sealed.dropped) == 3, "the files with the deleted topic were not rewritten"
    store.check()


def test_a_small_file_between_rewritten_ones_hides_no_row():
    store = SealedStore()
    orders = store.topic("orders", 2)
    other = store.topic("other")
    for number in range(3):
        store.produce(orders, 10, partition=number % 2)
        store.produce(orders, 10, partition=0)
        if number != 1:
            store.produce(other, 60)
        store.seal()
    store.trim(other, 0, 120)
    sealed = store.seal()
    assert len(sealed.dropped) == 2, "the mostly trimmed files were not rewritten"
    store.check()


def small_files(count: int) -> SealedStore:
    store = SealedStore()
    topic = store.topic("orders")
    for _ in range(count):
        store.produce(topic, 2)
        store.seal()
    return store


def test_a_disk_with_room_for_a_few_small_files_only_is_not_rewritten_in_every_run():
    store = small_files(MERGED_FILES)
    few = 4 * sum(ref.bytes for file in store.manifest.history[:3] for ref in file.batches)
    store.vfs.free_bytes = lambda directory: few  # type: ignore[method-assign]
    for _ in range(3):
        assert store.seal().dropped == []
    store.check()


def test_damaged_small_files_do_not_have_the_others_rewritten_in_every_run():
    store = small_files(MERGED_FILES)
    for file in store.manifest.history[:3]:
        path = os.path.join(DIRECTORY, history_name(file.number))
        data = bytearray(store.vfs.content(path))
        data[file.batches[0].start + file.batches[0].length - 20] ^= 1
        store.vfs.plant(path, bytes(data))
    for _ in range(3):
        sealed = store.seal()
        assert sealed.dropped == []
        assert len(sealed.damaged) == 3


def test_more_small_files_than_a_run_may_copy_are_merged_run_by_run(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(vacuum, "MERGED_FILES", 10**6)
    store = small_files(3 * MERGED_FILES)
    most = sum(
        ref.bytes for file in store.manifest.history[: MERGED_FILES + 2] for ref in file.batches
    )
    monkeypatch.setattr(vacuum, "MERGED_FILES", MERGED_FILES)
    monkeypatch.setattr(vacuum, "COPY_BYTES", most)
    counts = [len(store.manifest.history)]
    while store.seal().dropped:
        counts.append(len(store.manifest.history))
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] < MERGED_FILES
    assert len(counts) == 3
    store.check()
