"""A crash at any moment between the first piece and the last stored row.

A short life (stage two parts, commit, store, with produces in between) is lived through on a disk
that is photographed before every call that changes it, as each kind of crash would leave it. A
broker is started on every photograph: it holds nothing of the batch or, once that was decided, all
of it; every row once and in order. Then the client does what clients do: it begins anew.
"""

from __future__ import annotations

from itertools import pairwise

import pyarrow as pa
import pytest

from penstock.core.image import take_image
from penstock.core.invariants import check
from penstock.engine import batch_storing
from penstock.model.writes import CommitReport, PartCommit
from penstock.storage import staging
from tests.engine.write_harness import (
    EVERY_APPEND_A_FRAME,
    Photographer,
    WriteBroker,
    numbered,
)
from tests.storage.faulty_vfs import FLAVOURS, FaultyVfs

PARTS = {0: [numbered(17, "first"), numbered(9, "second")], 1: [numbered(11, "third")]}
ROWS = [row for pieces in PARTS.values() for piece in pieces for row in piece]
COMMIT = [PartCommit(0, "a", 2, 26), PartCommit(1, "a", 1, 11)]


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few rows are many frames."""
    monkeypatch.setattr(batch_storing, "BURST_ROWS", 4)
    monkeypatch.setattr(batch_storing, "SHARED_ROWS", 3)
    monkeypatch.setattr(staging, "SLICE_ROWS", 6)


def broker_on(vfs: FaultyVfs) -> WriteBroker:
    broker = WriteBroker(vfs, options=EVERY_APPEND_A_FRAME)
    broker.topic()
    return broker


def stage_all(broker: WriteBroker) -> None:
    for part, pieces in PARTS.items():
        for piece, rows in enumerate(pieces):
            broker.try_stage(rows, part=part, piece=piece)


def live(flavour: str) -> list[tuple[FaultyVfs, bool]]:
    vfs = Photographer(flavour)
    broker = broker_on(vfs)
    broker.put("t", "before")
    vfs.is_watching = True
    stage_all(broker)
    vfs.answered = broker.ask_commit(0, parts=COMMIT)
    for number in range(3):
        broker.produce("t", f"beside {number}")
    while not vfs.answered:
        broker.pass_ms(5)
    assert vfs.answered == [CommitReport("committed", 37)]
    broker.pass_ms(1)
    vfs.take()
    vfs.is_watching = False
    broker.close()
    return vfs.photographs


def of_batch(broker: WriteBroker) -> list[str]:
    return [
        value for value in broker.contents() if value.split()[0] in ("first", "second", "third")
    ]


@pytest.mark.parametrize("is_slow", [True, False], ids=["burst by burst", "many at once"])
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_crash_anywhere_leaves_a_batch_whole_or_not_begun(
    flavour: str, is_slow: bool, monkeypatch: pytest.MonkeyPatch
):
    """With a disk that is written once for each burst, and with one that takes several."""
    if is_slow:
        monkeypatch.setattr(batch_storing, "MAX_UNSYNCED_BYTES", 0)
    photographs = live(flavour)
    assert len(photographs) > (60 if is_slow else 40)
    decided = []
    for number, (vfs, is_answered) in enumerate(photographs):
        broker = broker_on(vfs)
        broker.pass_ms(50)
        found = of_batch(broker)
        place = f"crash {number} of {len(photographs)}, {flavour}"
        assert found in ([], ROWS), place
        assert found == ROWS or not is_answered, place
        decided.append(bool(found))
        check(broker.state)
        begin_anew(broker, place)
        broker.close()
    assert not decided[0]
    assert decided[-1]


def begin_anew(broker: WriteBroker, place: str) -> None:
    """As a client that did not hear the answer."""
    stage_all(broker)
    outcome = broker.commit_batch(0, parts=COMMIT)
    assert outcome.rows == 37, place
    assert of_batch(broker) == ROWS, place
    assert broker.commit_batch(0, parts=COMMIT) == CommitReport("already_committed", 37), place
    assert of_batch(broker) == ROWS, place
    broker.pass_ms(1)
    assert broker.staged_files() == [], place
    assert broker.engine.writes.staging.bytes == 0, place


@pytest.mark.parametrize("stop", ["crash", "seal", "kill", "restart"])
def test_storing_goes_on_where_it_was_however_often_it_is_interrupted(
    stop: str, monkeypatch: pytest.MonkeyPatch
):
    """Replayed from the log or from a snapshot, in the middle of a batch."""
    _store_few_in_a_life(monkeypatch)
    broker = broker_on(FaultyVfs())
    rows = numbered(60)
    broker.stage(rows)
    broker.ask_commit(60)
    broker.settle()
    lives = 1
    while (found := broker.contents()) != rows:
        assert found == rows[: len(found)]
        [writer] = broker.state.writers
        assert writer.storing[0].done == len(found)
        image = take_image(broker.state)
        interrupt(broker, stop)
        lives += 1
        assert image.writers != take_image(broker.state).writers
    assert 5 <= lives <= 8
    assert broker.commit_batch(60) == CommitReport("already_committed", 60)
    broker.settle()
    assert broker.staged_files() == []
    broker.close()


def _store_few_in_a_life(monkeypatch: pytest.MonkeyPatch) -> None:
    whole_turn = batch_storing.BatchStoring.turn

    def turn(self: batch_storing.BatchStoring) -> None:
        if self.rows < 8:
            whole_turn(self)

    monkeypatch.setattr(batch_storing.BatchStoring, "turn", turn)


def interrupt(broker: WriteBroker, stop: str) -> None:
    if stop == "crash":
        broker.crash()
    elif stop == "kill":
        broker.kill()
    elif stop == "restart":
        broker.restart()
    else:
        broker.seal_and_crash()


def test_what_was_staged_before_a_restart_is_committed_after_it():
    broker = broker_on(FaultyVfs())
    stage_all(broker)
    staged = broker.engine.writes.staging.bytes
    broker.crash()
    assert broker.engine.writes.staging.bytes == staged
    assert broker.commit_batch(0, parts=COMMIT) == CommitReport("committed", 37)
    assert broker.contents() == ROWS
    broker.close()


def test_the_newest_of_pieces_that_a_crash_left_side_by_side_counts():
    """A piece was sent again, and the crash came before the first one's file was removed."""
    broker = broker_on(FaultyVfs())
    broker.stage(["old", "old"])
    [path] = broker.staged_files()
    old = broker.disk.content(path)
    broker.stage(["new"])
    broker.disk.plant(path, old)
    broker.restart()
    assert broker.commit_batch(1).rows == 1
    assert broker.contents() == ["new"]
    assert broker.staged_files() == []
    broker.close()


def test_keys_are_stored_once_across_a_crash(monkeypatch: pytest.MonkeyPatch):
    _store_few_in_a_life(monkeypatch)
    broker = broker_on(FaultyVfs())
    keys = [f"key {n // 2}" for n in range(32)]
    broker.stage(pa.table({"value": numbered(32), "idempotency_key": keys}))
    broker.ask_commit(32)
    broker.settle()
    broker.crash()
    assert broker.contents() == numbered(32)[::2]
    broker.close()


def test_offsets_of_a_batch_and_of_produces_beside_it_rise_without_a_gap():
    photographs = live("nothing")
    broker = broker_on(photographs[-1][0])
    offsets = [message.offset for message in broker.stored("t")]
    assert all(second == first + 1 for first, second in pairwise(offsets))
    assert sorted(broker.contents()) == sorted([*ROWS, "before", *numbered(3, "beside")])
    broker.close()
