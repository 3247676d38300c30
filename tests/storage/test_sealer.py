"""The sealing process is a child of the broker: it never blocks, harms or outlives the broker."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from penstock.model.records import Message, Record, TopicCreated, encode_record
from penstock.storage.checkpoint import SEAL_LOCK_NAME, load_checkpoint
from penstock.storage.history_reader import HistoryReader
from penstock.storage.seal import Sealed, SealJob
from penstock.storage.sealer import Sealer, _environment
from penstock.storage.segments import segment_name
from penstock.storage.vfs import Vfs
from tests.storage.harness import PATIENCE_S, Loop
from tests.storage.random_broker import LIMITS, write_log


class Broker:
    """What a broker has of a sealer: its loop and its two reports."""

    def __init__(self, directory: Path) -> None:
        self.loop = Loop()
        self.sealed: list[Sealed] = []
        self.errors: list[str] = []
        self.sealer = Sealer(
            str(directory), LIMITS, self.loop.post, self.sealed.append, self.errors.append
        )

    def await_report(self) -> None:
        self.loop.run_until(lambda: bool(self.sealed or self.errors))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A log of two closed segments."""
    first: list[Record] = [TopicCreated(1, 1, "orders", 1)]
    first += [Message(1, 0, n, n, "key", "välue") for n in range(500)]
    second: list[Record] = [Message(1, 0, n, n, "key", "välue") for n in range(500, 900)]
    segments = [[encode_record(record) for record in part] for part in (first, second)]
    write_log(Vfs(), str(tmp_path), segments)
    return tmp_path


def test_a_process_seals_and_the_report_comes_on_the_loop(directory: Path):
    broker = Broker(directory)
    assert broker.sealer.start(2)
    broker.await_report()
    assert broker.errors == []
    [sealed] = broker.sealed
    assert (sealed.first_segment, sealed.records, sealed.messages) == (3, 901, 900)
    assert not broker.sealer.is_running
    [ref] = sealed.added
    rows = HistoryReader(Vfs(), str(directory)).read(ref, 0, 10_000)
    assert [row.offset for row in rows] == list(range(900))
    found = load_checkpoint(Vfs(), str(directory), LIMITS)
    assert (found.refs, found.first_segment) == ([ref], 3)
    assert (directory / segment_name(1)).exists()
    broker.sealer.close()


def test_the_process_has_the_requested_niceness(directory: Path):
    broker = Broker(directory)
    broker.sealer.start(2, nice=7)
    thread = broker.sealer._thread
    assert thread is not None
    seen = set()
    while thread.is_alive():
        process = broker.sealer._process
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                seen.add(os.getpriority(os.PRIO_PROCESS, process.pid))
        thread.join(0.001)
    assert os.getpriority(os.PRIO_PROCESS, 0) + 7 in seen
    broker.await_report()
    broker.sealer.close()


def test_one_job_runs_at_a_time(directory: Path):
    broker = Broker(directory)
    assert broker.sealer.start(1)
    assert not broker.sealer.start(2)
    broker.await_report()
    assert broker.sealer.start(2, known_files=[1])
    broker.loop.run_until(lambda: len(broker.sealed) == 2)
    assert broker.sealed[1].added_files == [2]
    broker.sealer.close()


def test_damage_is_reported_with_the_file_named(directory: Path):
    path = directory / segment_name(2)
    data = bytearray(path.read_bytes())
    data[5_000] ^= 1
    path.write_bytes(data)
    broker = Broker(directory)
    broker.sealer.start(2)
    broker.await_report()
    assert broker.sealed == []
    assert "CorruptLog" in broker.errors[0]
    assert segment_name(2) in broker.errors[0]
    broker.sealer.close()


def test_a_seal_lock_that_another_process_holds_is_named(directory: Path):
    path = directory / SEAL_LOCK_NAME
    vfs = Vfs()
    held = vfs.lock_file(str(path))
    broker = Broker(directory)
    broker.sealer.start(2)
    broker.await_report()
    assert f"another process holds {path}" in broker.errors[0]
    vfs.close(held)
    broker.sealer.start(2)
    broker.loop.run_until(lambda: bool(broker.sealed))
    broker.sealer.close()


def test_a_killed_process_is_reported_and_the_job_can_be_done_again(directory: Path):
    broker = Broker(directory)
    broker.sealer.start(2)
    deadline = time.monotonic() + PATIENCE_S
    while (process := broker.sealer._process) is None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    broker.await_report()
    assert "status -9" in broker.errors[0]
    broker.sealer.start(2)
    broker.loop.run_until(lambda: bool(broker.sealed))
    assert broker.sealed[0].first_segment == 3
    broker.sealer.close()


def test_a_closed_sealer_leaves_no_process_and_reports_nothing(directory: Path):
    broker = Broker(directory)
    broker.sealer.start(2)
    broker.sealer.close()
    broker.loop.run_posted()
    assert broker.sealer._process is None
    assert (broker.sealed, broker.errors) == ([], [])
    assert not broker.sealer.start(2)
    load_checkpoint(Vfs(), str(directory), LIMITS)


def test_a_process_whose_broker_is_gone_changes_nothing(directory: Path):
    job = SealJob(directory=str(directory), up_to_segment=2, limits=LIMITS)
    before = sorted(path.name for path in directory.iterdir())
    done = subprocess.run(
        [sys.executable, "-m", "penstock.storage.seal"],
        input=msgspec.json.encode(job) + b"\n",  # and then the pipe is closed
        capture_output=True,
        env=_environment(),
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, b"")
    after = sorted(path.name for path in directory.iterdir() if path.name != "SEAL-LOCK")
    assert after == before


def test_a_waiting_process_ends_when_its_broker_does():
    with subprocess.Popen(
        [sys.executable, "-c", "import penstock.storage.seal as s; s._end_with_parent()"],
        stdin=subprocess.PIPE,
        env=_environment(),
    ) as process:
        assert process.poll() is None
        if process.stdin is not None:
            process.stdin.close()
        assert process.wait(PATIENCE_S) == 1
