"""`penstock wal` on the directory of a stopped broker, and of a running one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pytest

from penstock.model.limits import Limits
from penstock.storage.checkpoint import SEAL_LOCK_NAME
from penstock.storage.history import history_name
from penstock.storage.lock import LOCK_NAME
from penstock.storage.seal import SealJob, seal
from penstock.storage.segments import SegmentHeader, encode_header, segment_name
from penstock.storage.snapshot import snapshot_name
from penstock.storage.stopped_file import STOPPED_NAME
from penstock.storage.vfs import Vfs
from tests.broker_process import BrokerProcess, StartFailed
from tests.cli.conftest import run_penstock
from tests.cli.test_serve import damage
from tests.storage.old_vacuum import damaged_store
from tests.storage.sealed_store import patch_engine


@pytest.fixture
def stopped(tmp_path: Path) -> Iterator[Path]:
    broker = BrokerProcess(tmp_path / "data")
    try:
        broker.start().create_topic("t")
        broker.put("t", "first")
        broker.put("t", "second")
        broker.terminate()
        yield tmp_path / "data"
    finally:
        broker.close()


def test_a_sound_log_is_verified_and_nothing_repaired(stopped: Path) -> None:
    verified = run_penstock("wal", "verify", str(stopped))
    assert verified.code == 0
    assert "all is sound: a start succeeds" in verified.out
    repaired = run_penstock("wal", "repair", "--dry-run", str(stopped))
    assert repaired.code == 0
    assert "nothing to repair" in repaired.out
    assert json.loads(run_penstock("wal", "verify", str(stopped), "--json").out)["damage"] is None


def test_inspect_lists_segments_and_records(stopped: Path) -> None:
    assert "wal-" in run_penstock("wal", "inspect", str(stopped)).out
    text = run_penstock("wal", "inspect", str(stopped), "--records").out
    assert "TopicCreated" in text
    assert '"value":"second"' in text
    lines = run_penstock("wal", "inspect", str(stopped), "--records", "--json").out.splitlines()
    records = [each for each in map(json.loads, lines) if "record" in each]
    assert [each["record"] for each in records] == ["TopicCreated", "Message", "Message"]
    assert records[1]["fields"]["value"] == "first"


def test_damage_is_named_and_set_aside_only_when_asked(stopped: Path) -> None:
    damage(stopped, b"first")
    verified = run_penstock("wal", "verify", str(stopped))
    assert verified.code == 1
    assert "is damaged at byte" in verified.err
    before = {path: path.read_bytes() for path in stopped.glob("wal-*")}
    for words in (["--dry-run"], [], ["--dry-run", "--set-damage-aside"]):
        repaired = run_penstock("wal", "repair", str(stopped), *words)
        assert repaired.code == 1
        assert "Restore the file" in repaired.out
        assert {path: path.read_bytes() for path in stopped.glob("wal-*")} == before
    assert run_penstock("wal", "repair", str(stopped), "--set-damage-aside").code == 0
    assert list(stopped.glob("*.damaged"))
    assert run_penstock("wal", "verify", str(stopped)).code == 0


def test_a_log_cut_after_an_orderly_stop_is_not_called_a_torn_tail(stopped: Path) -> None:
    segment = stopped / segment_name(1)
    data = segment.read_bytes()
    at = data.index(b"second") + 3
    segment.write_bytes(data[:at].ljust(len(data), b"\0"))
    verified = run_penstock("wal", "verify", str(stopped))
    assert verified.code == 1
    assert "A start is refused" in verified.err
    assert "torn tail" not in verified.out
    assert "nothing is lost" not in verified.out


def test_a_damaged_stopped_file_is_explained_as_what_it_is(stopped: Path) -> None:
    (stopped / STOPPED_NAME).write_bytes(b"damaged")
    explained = run_penstock("wal", "repair", "--dry-run", str(stopped))
    assert explained.code == 1
    assert "the log stays as it is" in explained.out
    assert "acknowledged" not in explained.out
    assert run_penstock("wal", "repair", "--set-damage-aside", str(stopped)).code == 0
    assert run_penstock("wal", "verify", str(stopped)).code == 0


def seal_all(directory: Path) -> None:
    """Seals the log's first segment, as a broker does once it is closed."""
    vfs = Vfs()
    path = directory / segment_name(1)
    path.write_bytes(path.read_bytes().rstrip(b"\0") + bytes(64))
    header = SegmentHeader(2, 1_000, salt=5)
    (directory / segment_name(2)).write_bytes(encode_header(header))
    seal(vfs, SealJob(directory=str(directory), up_to_segment=1, limits=Limits()))
    path.unlink()


def test_sealed_files_are_verified_and_a_given_up_one_lets_the_broker_start(stopped: Path) -> None:
    seal_all(stopped)
    sound = run_penstock("wal", "verify", str(stopped))
    assert sound.code == 0
    for name in ("MANIFEST", history_name(1), snapshot_name(1)):
        assert name in sound.out
    history = stopped / history_name(1)
    history.write_bytes(history.read_bytes()[:-1])
    verified = run_penstock("wal", "verify", str(stopped))
    assert verified.code == 1
    assert "A start is refused" in verified.err
    assert "cannot be delivered: offsets 0 to 1 (2 messages)" in verified.out
    repaired = run_penstock("wal", "repair", str(stopped), "--set-damage-aside")
    assert repaired.code == 0
    assert "a start succeeds" in repaired.out
    assert "lost: " in repaired.out
    verified = run_penstock("wal", "verify", str(stopped))
    assert verified.code == 1
    assert "A start succeeds" in verified.err
    broker = BrokerProcess(stopped)
    try:
        broker.start().put("t", "third")
    finally:
        broker.close()


def test_a_header_that_is_set_aside_leaves_a_directory_that_starts(stopped: Path) -> None:
    seal_all(stopped)
    active = stopped / segment_name(2)
    data = bytearray(active.read_bytes())
    data[20] ^= 1
    active.write_bytes(data)
    assert run_penstock("wal", "verify", str(stopped)).code == 1
    repaired = run_penstock("wal", "repair", str(stopped), "--set-damage-aside")
    assert repaired.code == 0
    assert "goes back to the snapshot" in repaired.out
    broker = BrokerProcess(stopped)
    try:
        broker.start().put("t", "third")
    finally:
        broker.close()


def test_a_lost_snapshot_is_said_to_be_beyond_repair(stopped: Path) -> None:
    seal_all(stopped)
    (stopped / snapshot_name(1)).unlink()
    repaired = run_penstock("wal", "repair", str(stopped), "--set-damage-aside")
    assert repaired.code == 1
    assert "cannot be repaired" in repaired.out
    assert "nothing was changed" in repaired.out


def test_a_running_brokers_log_is_left_alone(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path / "data")
    try:
        broker.start()
        for action in ("inspect", "verify", "repair"):
            done = run_penstock("wal", action, str(tmp_path / "data"))
            assert done.code == 1
            assert "is in use by process" in done.err
    finally:
        broker.close()


@pytest.mark.parametrize("action", ["inspect", "verify", "repair"])
def test_what_is_no_data_directory_is_not_called_sound(stopped: Path, action: str) -> None:
    """Such as the folder around a copy."""
    (stopped.parent / "file").touch()
    for path, complaint in (
        (stopped / "none", "there is no data directory"),
        (stopped.parent, "is no data directory of a broker"),
        (stopped.parent / "file", "Not a directory"),
    ):
        done = run_penstock("wal", action, str(path))
        assert (done.code, done.out) == (1, "")
        assert complaint in done.err
    assert sorted(path.name for path in stopped.parent.iterdir()) == ["data", "file"]


def test_a_copy_without_a_lock_is_left_as_it_is(stopped: Path) -> None:
    for name in (LOCK_NAME, SEAL_LOCK_NAME):
        (stopped / name).unlink(missing_ok=True)
    before = sorted(path.name for path in stopped.iterdir())
    assert run_penstock("wal", "verify", str(stopped)).code == 0
    assert run_penstock("wal", "inspect", str(stopped)).code == 0
    assert sorted(path.name for path in stopped.iterdir()) == before


def test_messages_that_an_older_release_hid_are_listed_and_put_within_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch_engine(monkeypatch)
    store = damaged_store(monkeypatch)
    directory = tmp_path / "data"
    directory.mkdir()
    for path in store.vfs.paths():
        (directory / Path(path).name).write_bytes(store.vfs.content(path))
    broker = BrokerProcess(directory)
    with closing(broker), pytest.raises(StartFailed, match="penstock wal repair"):
        broker.start()
    verified = run_penstock("wal", "verify", str(directory))
    assert verified.code == 1
    lost = "offsets 0 to 19 (20 messages) of partition 0 of topic orders"
    assert f"cannot be reached: {lost}" in verified.out
    assert "A start is refused" in verified.err
    before = {path: path.read_bytes() for path in directory.glob("[!L]*") if path.is_file()}
    dry = run_penstock("wal", "repair", str(directory), "--dry-run")
    assert f"would be reached again: {lost}" in dry.out
    assert before == {path: path.read_bytes() for path in before}
    repaired = run_penstock("wal", "repair", str(directory))
    assert repaired.code == 0
    assert "done: every message on disk can be reached, and a start succeeds" in repaired.out
    assert run_penstock("wal", "verify", str(directory)).code == 0
    with closing(BrokerProcess(directory)) as broker:
        reply = broker.start().client.get("/v1/topics/orders/partitions/0/records")
        offsets = pa.ipc.open_stream(reply.content).read_all().column("offset").to_pylist()
    assert offsets == [offset for topic, _, offset in sorted(store.rows) if topic == 1]
