"""`penstock wal` on the directory of a stopped broker, and of a running one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.broker_process import BrokerProcess
from tests.cli.conftest import run_penstock
from tests.cli.test_serve import damage


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
    assert "the log is sound" in verified.out
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


def test_a_directory_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    done = run_penstock("wal", "verify", str(tmp_path / "none"))
    assert done.code == 1
    assert "there is no data directory" in done.err
