"""Writes by batch on a disk that is full or damaged."""

from __future__ import annotations

import errno
import logging

import pytest

from penstock.engine import batch_storing
from penstock.model.errors import PenstockError, Unavailable
from penstock.model.limits import KIB, MIB
from penstock.model.writes import CommitReport
from penstock.storage.log import WalOptions
from tests.engine.write_harness import ROOMY, WriteBroker, numbered, write_broker
from tests.storage.faulty_vfs import FaultyVfs

SPACE_CHECK_MS = 1001
TINY = WalOptions(segment_bytes=32 * KIB, reserve_bytes=0, frame_bytes=16 * KIB)


def fill(broker: WriteBroker) -> None:
    broker.disk.capacity_bytes = broker.disk.used_bytes
    broker.pass_ms(SPACE_CHECK_MS)


def tiny_broker() -> WriteBroker:
    broker = WriteBroker(FaultyVfs(), options=TINY)
    broker.topic()
    return broker


def test_on_a_full_disk_storing_waits_and_goes_on_when_there_is_room():
    broker = tiny_broker()
    rows = [f"{n:05}" + "x" * KIB for n in range(300)]
    broker.stage(rows)
    fill(broker)
    outcomes = broker.ask_commit(300)
    broker.settle()
    broker.pass_ms(2000)
    if outcomes:  # there was no room to decide it: nothing is
        assert isinstance(outcomes[0], Unavailable)
        assert broker.contents() == []
    broker.disk.capacity_bytes = 2**40
    broker.pass_ms(SPACE_CHECK_MS)
    if isinstance(outcomes[0] if outcomes else None, Unavailable):
        assert broker.commit_batch(300).rows == 300
    broker.pass_ms(2000)
    assert broker.contents() == rows
    broker.close()


def test_a_disk_that_fills_while_a_batch_is_stored_delays_it_and_loses_nothing():
    broker = tiny_broker()
    rows = [f"{n:05}" + "x" * KIB for n in range(300)]
    broker.stage(rows)
    broker.disk.capacity_bytes = broker.disk.used_bytes + 100 * KIB
    broker.pass_ms(SPACE_CHECK_MS)
    outcomes = broker.ask_commit(300)
    broker.settle()
    broker.pass_ms(3000)
    assert outcomes == []
    found = broker.contents()
    assert found == rows[: len(found)]
    assert 0 < len(found) < 300
    broker.crash()
    broker.pass_ms(3000)
    assert len(broker.contents()) < 300
    broker.disk.capacity_bytes = 2**40
    broker.pass_ms(2 * SPACE_CHECK_MS)
    assert broker.contents() == rows
    assert broker.commit_batch(300) == CommitReport("already_committed", 300)
    broker.close()


def test_nothing_is_staged_on_a_full_disk():
    broker = write_broker()
    fill(broker)
    used = broker.disk.used_bytes
    error = broker.stage_in_vain(["x" * MIB])
    assert isinstance(error, Unavailable)
    assert broker.disk.used_bytes == used
    broker.disk.capacity_bytes = 2**40
    broker.pass_ms(SPACE_CHECK_MS)
    broker.write_batch(["x" * MIB])
    broker.close()


@pytest.mark.parametrize("call", ["open", "write", "sync", "rename", "fsync_dir"])
def test_a_piece_that_cannot_be_written_is_503_and_leaves_nothing(call: str):
    broker = write_broker()
    broker.disk.fail_call(1, errno.EIO, only=[call])
    error = broker.stage_in_vain(numbered(3))
    assert isinstance(error, Unavailable)
    assert broker.staged_files() == []
    assert broker.engine.writes.staging.bytes == 0
    assert broker.engine.health().ready
    broker.write_batch(numbered(3))
    assert broker.contents() == numbered(3)
    broker.close()


def test_a_damaged_piece_stops_its_batch_and_nothing_else_until_it_is_restored(
    caplog: pytest.LogCaptureFixture,
):
    broker = write_broker()
    broker.stage(numbered(5000))
    [path] = broker.staged_files()
    sound = broker.disk.content(path)
    broker.disk.plant(path, sound[:-1] + bytes([sound[-1] ^ 1]))
    with caplog.at_level(logging.ERROR):
        outcomes = broker.ask_commit(5000)
        broker.settle()
        broker.pass_ms(21_000)
    assert outcomes == [CommitReport("storing", 5000, 0)]
    assert "is damaged at byte" in caplog.text
    broker.write_batch(["of another producer"], producer="q")
    broker.put("t", "produced")
    assert broker.contents() == ["of another producer", "produced"]
    broker.disk.plant(path, sound)
    broker.pass_ms(batch_storing.UNREADABLE_RETRY_MS)
    assert broker.commit_batch(5000).rows == 5000
    assert broker.contents()[2:] == numbered(5000)
    broker.close()


def test_a_piece_that_is_damaged_before_its_commit_is_not_staged(
    caplog: pytest.LogCaptureFixture,
):
    broker = write_broker()
    broker.stage(numbered(3))
    [path] = broker.staged_files()
    sound = broker.disk.content(path)
    for damaged in (b"", sound[:10], sound[:30], b"x" + sound[1:], sound[:40] + b"?" + sound[41:]):
        broker.disk.plant(path, damaged)
        with caplog.at_level(logging.WARNING):
            broker.restart()
        assert "cannot be read and is dropped" in caplog.text
        assert broker.staged_files() == []
        caplog.clear()
    broker.write_batch(numbered(3))
    assert broker.contents() == numbered(3)
    broker.close()


def test_damage_anywhere_in_a_piece_is_found_after_a_start_and_the_log_says_so_every_time(
    caplog: pytest.LogCaptureFixture,
):
    """Before the commit: the piece is dropped, whoever commits it is told, and stages it again."""
    broker = write_broker()
    broker.stage(numbered(40))
    broker.close()
    [path] = broker.staged_files()
    sound = broker.disk.content(path)
    cuts = [sound[:at] for at in range(0, len(sound), 97)]
    flips = [
        sound[:at] + bytes([sound[at] ^ 1]) + sound[at + 1 :] for at in range(0, len(sound), 13)
    ]
    for damaged in [*cuts, *flips, sound + b"more"]:
        broker.disk.plant(path, damaged)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            broker.open()
        assert "cannot be read and is dropped" in caplog.text
        assert broker.staged_files() == []
        outcome = broker.try_commit(40)
        assert isinstance(outcome, PenstockError), "the damaged piece was committed"
        broker.close()
    broker.open()
    broker.write_batch(numbered(40))
    assert broker.contents() == numbered(40)
    broker.close()


def test_damage_anywhere_in_a_committed_piece_is_in_the_log_and_nothing_of_it_is_stored(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    broker = write_broker()
    broker.stage(numbered(40))
    with monkeypatch.context() as patches:
        patches.setattr(batch_storing.BatchStoring, "turn", lambda self: None)
        broker.ask_commit(40)
        broker.settle()
        broker.close()
    disk = broker.disk
    [path] = broker.staged_files()
    sound = disk.content(path)
    for at in range(0, len(sound), 29):
        broker = WriteBroker(disk.restarted(), options=ROOMY, opens=False)
        broker.disk.plant(path, sound[:at] + bytes([sound[at] ^ 1]) + sound[at + 1 :])
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            broker.open()
        assert "is damaged at byte" in caplog.text
        assert broker.contents() == []
        broker.disk.plant(path, sound)
        broker.pass_ms(batch_storing.UNREADABLE_RETRY_MS)
        assert broker.commit_batch(40).rows == 40
        assert broker.contents() == numbered(40)
        broker.close()


def test_two_staged_pieces_that_change_places_are_found(caplog: pytest.LogCaptureFixture):
    broker = write_broker()
    broker.stage(numbered(4, "one"), producer="p")
    broker.stage(numbered(4, "two"), producer="q")
    broker.close()
    first, second = broker.staged_files()
    one, two = broker.disk.content(first), broker.disk.content(second)
    broker.disk.plant(first, two)
    broker.disk.plant(second, one)
    with caplog.at_level(logging.WARNING):
        broker.open()
    assert caplog.text.count("it says that it is piece-") == 2
    for producer in ("p", "q"):
        assert isinstance(broker.try_commit(4, producer=producer), PenstockError)
    broker.close()


def test_a_piece_of_another_batch_under_the_number_of_a_committed_one_is_not_stored(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    other = write_broker()
    other.stage(numbered(4, "wrong"), producer="q")
    [path] = other.staged_files()
    wrong = other.disk.content(path)
    other.close()
    broker = write_broker()
    broker.stage(numbered(4))
    with monkeypatch.context() as patches:
        patches.setattr(batch_storing.BatchStoring, "turn", lambda self: None)
        broker.ask_commit(4)
        broker.settle()
        broker.close()
    assert broker.staged_files() == [path]
    broker.disk.plant(path, wrong)
    with caplog.at_level(logging.WARNING):
        broker.open()
    assert "is of batch 0 of producer 'q'" in caplog.text
    assert broker.contents() == []
    broker.close()
