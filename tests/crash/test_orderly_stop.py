"""A real broker that was stopped in order, and a log that was cut short since."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.storage.segments import decode_header, segment_name, walk_frames
from tests.broker_process import BrokerProcess, StartFailed
from tests.cli.conftest import run_penstock


def test_a_log_cut_at_a_frame_after_sigterm_is_refused_with_file_and_byte(
    tmp_path: Path,
) -> None:
    """driftq-48"""
    data_dir = tmp_path / "data"
    broker = BrokerProcess(data_dir, "--fsync", "commit")
    try:
        broker.start().create_topic("t")
        for number in range(20):
            broker.put("t", str(number))
        assert broker.terminate() == 0
        assert (data_dir / "STOPPED").exists()
        segment = data_dir / segment_name(1)
        whole = segment.read_bytes()
        header = decode_header(whole)
        assert header is not None
        ends = [frame.end for frame in walk_frames(whole, header)]
        segment.write_bytes(whole[: ends[9]].ljust(len(whole), b"\0"))
        with pytest.raises(StartFailed, match=f"{segment_name(1)} is damaged at byte {ends[9]}"):
            broker.start()
        verified = run_penstock("wal", "verify", str(data_dir))
        assert verified.code == 1
        assert f"byte {ends[9]}" in verified.err
        segment.write_bytes(whole)
        broker.start()
        assert not (data_dir / "STOPPED").exists()
        found = broker.client.get("/v1/topics/t").json()
        assert found["partitions"][0]["next_offset"] == 20
        broker.restart(kill=True)
        assert broker.client.get("/v1/topics/t").json() == found
    finally:
        broker.close()


def test_a_broker_in_memory_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    broker = BrokerProcess(None)
    try:
        broker.start().create_topic("t")
        assert broker.terminate() == 0
        assert list(tmp_path.iterdir()) == []
    finally:
        broker.close()
