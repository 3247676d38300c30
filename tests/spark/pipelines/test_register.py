"""The register: what runs on this machine, told from what did."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from penstock.model.errors import FailedPrecondition
from penstock.spark.launching import register as registers
from penstock.spark.launching.register import Register, RunEntry, born_of

LAKE = "/data/lake"


def enter(register: Register, *pipelines: str, lake: str = LAKE) -> RunEntry:
    names = list(pipelines or ("archive",))
    return register.enter("+".join(names), names, lake, "local[*]", "http://b:1", once=False)


def test_a_run_is_running_as_long_as_its_very_process_is(tmp_path: Path):
    register = Register(tmp_path)
    entry = enter(register)
    assert [each.state for each in register.entries()] == ["running"]

    entry.born = "another process had this number"
    register.keep(entry)
    assert [each.state for each in register.entries()] == ["died"]

    entry.exit_code = 0
    register.keep(entry)
    assert [each.state for each in register.entries()] == ["ended"]
    assert born_of(2**22 + 1) == ""


def test_a_query_runs_once_on_a_lake(tmp_path: Path):
    register = Register(tmp_path)
    first, second = enter(register), enter(register)
    elsewhere = enter(register, lake="/data/other")
    register.claim(first, "archive", "records")
    with pytest.raises(FailedPrecondition, match=f"records runs on {LAKE} already, in process"):
        register.claim(second, "archive", "records")
    register.claim(second, "archive", "journal")
    register.claim(elsewhere, "archive", "records")
    first.exit_code = 1
    register.keep(first)
    register.claim(second, "archive", "records")


def test_a_lake_is_the_same_by_whatever_path(tmp_path: Path):
    register = Register(tmp_path / "register")
    (tmp_path / "lake").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "lake")
    register.claim(enter(register, lake=str(tmp_path / "lake")), "archive", "records")
    for path in (f"{tmp_path}/link", f"{tmp_path}/lake/", f"file://{tmp_path}/link"):
        with pytest.raises(FailedPrecondition, match="already"):
            register.claim(enter(register, lake=path), "archive", "records")
    bucket = enter(register, lake="s3a://bucket/lake")
    register.claim(bucket, "archive", "records")
    with pytest.raises(FailedPrecondition, match="already"):
        register.claim(enter(register, lake="s3a://bucket/lake/"), "archive", "records")


def test_what_runs_is_refused_with_the_same_settings_and_not_with_others(tmp_path: Path):
    register = Register(tmp_path)
    running = enter(register)
    running.digests = {"archive": "a digest"}
    register.keep(running)
    with pytest.raises(FailedPrecondition, match=f"archive runs on {LAKE} already, in process"):
        register.check_free(LAKE, {"metrics": "x", "archive": "a digest"})
    register.check_free(LAKE, {"archive": "another"})
    register.check_free("/data/other", {"archive": "a digest"})
    register.end(running, 0, was_stopped=True)
    assert running.state == "stopped"
    register.check_free(LAKE, {"archive": "a digest"})


def test_what_cannot_be_read_is_left_out_and_what_ended_long_ago_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    register = Register(tmp_path)
    (tmp_path / "half.json").write_text('{"id": "ha')
    old = enter(register, "archive")
    old.exit_code, old.ended_s = 0, 1.0
    register.keep(old)
    monkeypatch.setattr(registers, "MOST_ENDED", 2)
    for name in ("one", "two", "three"):
        entry = enter(register, name)
        entry.exit_code, entry.ended_s = 0, entry.started_s
        register.keep(entry)
    running = enter(register, "metrics")
    assert [each.name for each in register.entries()] == ["two", "three", "metrics"]
    assert register.find(running.id) == running


def test_a_directory_that_cannot_be_written_stops_nothing(tmp_path: Path):
    (tmp_path / "file").write_text("")
    register = Register(tmp_path / "file" / "pipelines")
    enter(register)
    assert register.entries() == []


def test_a_stop_asks_the_process_and_waits_for_its_end(tmp_path: Path):
    script = (
        "import signal, time; signal.signal(signal.SIGTERM, {});"
        "print(1, flush=True); time.sleep(60)"
    )
    register = Register(tmp_path)
    for handler, timeout_s, has_ended in (
        ("signal.SIG_DFL", 20, True),
        ("signal.SIG_IGN", 0.3, False),
    ):
        process = subprocess.Popen(
            [sys.executable, "-c", script.format(handler)], stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        try:
            process.stdout.readline()
            entry = enter(register)
            entry.pid, entry.born = process.pid, born_of(process.pid)
            reaper = threading.Thread(target=process.wait)
            reaper.start()
            assert register.stop(entry, timeout_s) is has_ended
        finally:
            process.kill()
            reaper.join()
            process.stdout.close()
        entry.exit_code = -signal.SIGTERM
        register.keep(entry)


def test_files_are_where_the_system_keeps_such_things():
    home = Path(os.path.expanduser("~"))
    found = registers.default_directory({})
    assert found == home / ".local" / "state" / "penstock" / "pipelines"
    assert registers.default_directory({"XDG_STATE_HOME": "/s"}) == Path("/s/penstock/pipelines")
