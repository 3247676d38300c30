"""Directories that an older release damaged: what is found, and how it is repaired."""

from __future__ import annotations

import contextlib
import errno
import os
import random

import pytest

from penstock.storage import vacuum
from penstock.storage.checkpoint import load_checkpoint
from penstock.storage.errors import CorruptIndex, CorruptLog
from penstock.storage.history import history_name
from penstock.storage.offline import verify
from penstock.storage.repair import repair
from tests.storage.faulty_vfs import FLAVOURS, FaultyVfs
from tests.storage.old_vacuum import MERGED_FILES, damaged_store, old_release
from tests.storage.sealed_store import (
    DIRECTORY,
    LIMITS,
    Rows,
    SealedStore,
    patch_engine,
    read_paths,
)
from tests.storage.test_vacuum_random import RandomLife

MOST_RUNS = 60


@pytest.fixture(autouse=True)
def low_thresholds(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_engine(monkeypatch)


def contents(vfs: FaultyVfs) -> dict[str, bytes]:
    return {path: vfs.content(path) for path in vfs.paths()}


def found_by_readers(vfs: FaultyVfs) -> Rows:
    """The same through every path."""
    ways = list(read_paths(vfs).values())
    assert all(rows == ways[0] for rows in ways)
    return ways[0]


@pytest.mark.parametrize("partitions", [1, 2])
def test_verify_says_which_offsets_cannot_be_reached_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, partitions: int
):
    store = damaged_store(monkeypatch, partitions)
    before = contents(store.vfs)
    report = verify(store.vfs, DIRECTORY)
    assert contents(store.vfs) == before
    assert report.damage is not None
    assert "topic orders" in report.damage.detail
    [hidden] = report.hidden
    # Ten of each of the two files below the larger one; of two partitions, partition 0 has ten.
    assert (hidden.topic, hidden.partition, hidden.first) == ("orders", 0, 0)
    assert hidden.msgs == 20 // partitions
    assert hidden.last == 20 // partitions - 1
    assert str(hidden).startswith(f"offsets 0 to {hidden.last} ({hidden.msgs} messages) of")
    with pytest.raises(CorruptIndex, match="penstock wal repair"):
        load_checkpoint(store.vfs.restarted(), DIRECTORY, LIMITS)


@pytest.mark.parametrize("partitions", [1, 2])
def test_verify_lists_exactly_the_rows_that_readers_do_not_find(
    monkeypatch: pytest.MonkeyPatch, partitions: int
):
    store = damaged_store(monkeypatch, partitions)
    with old_release(monkeypatch):
        found = read_paths(store.vfs, only="pages")["pages"]
    [hidden] = verify(store.vfs, DIRECTORY).hidden
    missing = sorted(set(store.rows) - set(found))
    assert len(missing) == hidden.msgs
    assert (missing[0], missing[-1]) == ((1, 0, hidden.first), (1, 0, hidden.last))


@pytest.mark.parametrize("partitions", [1, 2])
def test_repair_makes_every_row_readable_and_keeps_the_old_files(
    monkeypatch: pytest.MonkeyPatch, partitions: int
):
    store = damaged_store(monkeypatch, partitions)
    before = contents(store.vfs)
    dry = repair(store.vfs, DIRECTORY)
    assert not dry.done
    assert contents(store.vfs) == before
    done = repair(store.vfs, DIRECTORY, dry_run=False)
    assert (done.done, done.lost, done.possible) == (True, [], True)
    assert (done.set_aside, done.found) == (dry.set_aside, dry.found)
    for path, aside in done.set_aside.items():
        assert store.vfs.content(aside) == before[path]
    report = verify(store.vfs, DIRECTORY)
    assert (report.damage, report.hidden, report.index) == (None, [], [])
    store.check()
    store.produce(1, 10)
    for _ in range(MERGED_FILES):
        store.produce(1, 1)
        store.seal()
        store.check()
    assert "nothing to repair" in repair(store.vfs, DIRECTORY).explanation


def test_rows_that_a_second_vacuum_put_out_of_order_are_found_and_repaired(
    monkeypatch: pytest.MonkeyPatch,
):
    store = damaged_store(monkeypatch)
    monkeypatch.setattr(vacuum, "SMALL_BYTES", 10**6)
    monkeypatch.setattr(vacuum, "MERGED_FILES", 2)
    with old_release(monkeypatch):
        store.produce(1, 1)
        store.seal()
    report = verify(store.vfs, DIRECTORY)
    assert sum(each.msgs for each in report.hidden) > 0
    assert repair(store.vfs, DIRECTORY, dry_run=False).done
    assert verify(store.vfs, DIRECTORY).hidden == []
    store.check()


@pytest.mark.parametrize("seed", range(16))
def test_any_damage_of_an_older_release_is_found_and_repaired(
    seed: int, monkeypatch: pytest.MonkeyPatch
):
    life = RandomLife(seed, monkeypatch)
    store = life.store
    with old_release(monkeypatch):
        for _ in range(MOST_RUNS):
            life.step()
            report = verify(store.vfs, DIRECTORY)
            if report.hidden:
                break
    assert report.hidden, "no run did damage: the test is void"
    with old_release(monkeypatch):
        for _ in range(seed % 4):
            life.step()  # damage of the damage
    outcome = repair(store.vfs, DIRECTORY, dry_run=False)
    assert outcome.done, outcome.explanation
    assert verify(store.vfs, DIRECTORY).hidden == []
    store.check()
    for _ in range(5):
        life.step()
        store.check()


def test_messages_that_are_in_no_file_are_given_up_only_when_asked(
    monkeypatch: pytest.MonkeyPatch,
):
    """As retention of an older release did it: it removed a batch that another one hid, and did
    not count its rows."""
    store = damaged_store(monkeypatch)
    with old_release(monkeypatch):
        store.trim(1, 0, 65, uncounted=7)
        store.seal()
    before = contents(store.vfs)
    refused = repair(store.vfs, DIRECTORY, dry_run=False)
    assert not refused.done
    assert "7 messages of partition 0 of topic orders" in refused.lost[0]
    assert contents(store.vfs) == before
    outcome = repair(store.vfs, DIRECTORY, dry_run=False, set_damage_aside=True)
    assert outcome.done
    assert verify(store.vfs, DIRECTORY).damage is None
    store.check()


def test_a_damaged_batch_that_the_repair_needs_is_named_and_nothing_changes(
    monkeypatch: pytest.MonkeyPatch,
):
    store = damaged_store(monkeypatch)
    merged = store.manifest.history[-1]
    flip(store, merged.number, merged.batches[0].start + merged.batches[0].length - 30)
    before = contents(store.vfs)
    outcome = repair(store.vfs, DIRECTORY, dry_run=False)
    assert not outcome.done
    assert not outcome.possible
    assert history_name(merged.number) in outcome.explanation
    assert contents(store.vfs) == before


def test_a_damaged_batch_that_can_stay_where_it_is_does_not_matter(
    monkeypatch: pytest.MonkeyPatch,
):
    store = damaged_store(monkeypatch)
    large = store.manifest.history[0]
    flip(store, large.number, large.batches[0].start + large.batches[0].length - 30)
    assert repair(store.vfs, DIRECTORY, dry_run=False).done
    assert verify(store.vfs, DIRECTORY).damage is None


def flip(store: SealedStore, number: int, at: int) -> None:
    path = os.path.join(DIRECTORY, history_name(number))
    data = bytearray(store.vfs.content(path))
    data[at] ^= 1
    store.vfs.plant(path, bytes(data))


def test_a_disk_without_room_for_the_new_file_is_reported_before_any_change(
    monkeypatch: pytest.MonkeyPatch,
):
    store = damaged_store(monkeypatch)
    store.vfs.capacity_bytes = store.vfs.used_bytes + 100
    before = contents(store.vfs)
    outcome = repair(store.vfs, DIRECTORY, dry_run=False)
    assert (outcome.done, outcome.possible) == (False, False)
    assert "room" in outcome.explanation
    assert contents(store.vfs) == before


# Faults and crashes


def judged(vfs: FaultyVfs, rows: Rows) -> str:
    """Is the directory the old one, still to be repaired, or the new one, whole?"""
    try:
        load_checkpoint(vfs, DIRECTORY, LIMITS)
    except CorruptIndex:
        assert repair(vfs, DIRECTORY, dry_run=False).done
        assert found_by_readers(vfs) == rows
        return "old"
    assert found_by_readers(vfs) == rows
    return "new"


def calls_of_a_repair(monkeypatch: pytest.MonkeyPatch) -> tuple[SealedStore, int]:
    store = damaged_store(monkeypatch)
    vfs = store.vfs.restarted()
    repair(vfs, DIRECTORY, dry_run=False)
    return store, len(vfs.calls)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_repair_killed_at_any_call_leaves_the_old_directory_or_the_new_one(
    flavour: str, monkeypatch: pytest.MonkeyPatch
):
    store, count = calls_of_a_repair(monkeypatch)
    outcomes = set()
    for number in range(1, count + 1):
        vfs = store.vfs.crash("everything")
        vfs.fail_call(number, errno.EIO)
        for attribute in ("unlink", "close"):
            # A killed process tidies nothing up.
            setattr(vfs, attribute, lambda *_: None)
        with contextlib.suppress(OSError, CorruptLog):
            repair(vfs, DIRECTORY, dry_run=False)
        outcomes.add(judged(vfs.crash(flavour, seed=number), store.rows))
    assert outcomes == {"old", "new"}


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, 0], ids=["EIO", "ENOSPC", "short"])
def test_a_repair_in_which_a_call_fails_can_be_repeated(code: int, monkeypatch: pytest.MonkeyPatch):
    store, count = calls_of_a_repair(monkeypatch)
    rng = random.Random(code)
    for number in sorted(rng.sample(range(1, count + 1), min(40, count))):
        vfs = store.vfs.crash("everything")
        vfs.fail_call(number, code)
        with contextlib.suppress(OSError, CorruptLog):
            repair(vfs, DIRECTORY, dry_run=False)
        vfs.fail_call(0, 0)
        assert vfs.open_files == 0
        judged(vfs, store.rows)
