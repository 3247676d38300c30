"""Repair of a log that was never sealed: what it cuts, sets aside, and leaves alone."""

from __future__ import annotations

import pytest

from penstock.storage.offline import verify
from penstock.storage.repair import repair
from tests.storage.harness import DIRECTORY, read_back
from tests.storage.harness import topic_record as record
from tests.storage.test_offline import FIRST, SECOND, contents, damaged, rolled, torn


def test_repair_of_a_sound_log_does_nothing() -> None:
    vfs = rolled()
    before = contents(vfs)
    result = repair(vfs, DIRECTORY, dry_run=False)
    assert (result.cut, result.damage, result.set_aside) == ([], None, {})
    assert contents(vfs) == before


def test_a_dry_run_says_what_would_be_cut_and_cuts_nothing() -> None:
    vfs = torn()
    before = contents(vfs)
    result = repair(vfs, DIRECTORY)
    assert not result.done
    assert len(result.cut) == 1
    assert contents(vfs) == before


def test_repair_cuts_a_torn_tail() -> None:
    """driftq-47"""
    vfs = torn().crash("everything")
    assert repair(vfs, DIRECTORY, dry_run=False).done
    vfs = vfs.crash("nothing")
    assert verify(vfs, DIRECTORY).torn == []
    assert read_back(vfs) == [record(n) for n in range(6)]


@pytest.mark.parametrize(("dry_run", "insists"), [(True, True), (False, False), (True, False)])
def test_damage_is_explained_and_left_alone_unless_asked(dry_run: bool, insists: bool) -> None:
    """driftq-48"""
    vfs = damaged()
    before = contents(vfs)
    result = repair(vfs, DIRECTORY, dry_run=dry_run, set_damage_aside=insists)
    assert not result.done
    assert result.damage is not None
    assert "Restore the file" in result.explanation
    assert contents(vfs) == before


def test_damage_set_aside_leaves_a_log_that_starts_and_every_byte_kept() -> None:
    vfs = damaged()
    before = contents(vfs)
    result = repair(vfs, DIRECTORY, dry_run=False, set_damage_aside=True)
    assert result.done
    assert FIRST in result.set_aside
    assert SECOND in result.set_aside
    for path, aside in result.set_aside.items():
        assert vfs.content(aside) == before[path]
    assert read_back(vfs) == [record(0), record(1), record(2), record(3)]


def test_damage_set_aside_twice_overwrites_nothing() -> None:
    vfs = damaged()
    vfs.plant(f"{FIRST}.damaged", b"from last time")
    result = repair(vfs, DIRECTORY, dry_run=False, set_damage_aside=True)
    assert result.set_aside[FIRST] == f"{FIRST}.damaged.1"
    assert vfs.content(f"{FIRST}.damaged") == b"from last time"


def test_a_damaged_header_is_set_aside_with_all_behind_it() -> None:
    vfs = rolled()
    data = bytearray(vfs.content(SECOND))
    data[12] ^= 1
    vfs.plant(SECOND, bytes(data))
    assert repair(vfs, DIRECTORY, dry_run=False, set_damage_aside=True).done
    assert read_back(vfs) == [record(n) for n in range(6)]
