"""One broker in a data directory, whatever is done to its files and its name from outside."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.broker_process import BrokerProcess, StartFailed, eventually

SMALL = {"PENSTOCK_SEGMENT_BYTES": "65536"}


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_second_broker_is_refused_after_the_lock_file_was_removed(
    tmp_path: Path, is_replaced: bool
) -> None:
    """driftq-52"""
    first, second = BrokerProcess(tmp_path / "data"), BrokerProcess(tmp_path / "data")
    try:
        first.start().create_topic("t")
        (tmp_path / "data" / "LOCK").unlink()
        if is_replaced:
            (tmp_path / "data" / "LOCK").write_text("1\n")
        with pytest.raises(StartFailed, match="is in use by") as caught:
            second.start()
        assert caught.value.code == 1
        first.put("t", "still alone")
        first.restart()
        assert first.client.get("/v1/topics").json()["topics"] == ["t"]
    finally:
        first.close()
        second.close()


def test_a_broker_whose_directory_was_replaced_stops_writing_at_the_next_segment(
    tmp_path: Path,
) -> None:
    """driftq-52"""
    data, moved = tmp_path / "data", tmp_path / "moved"
    first, second = BrokerProcess(data, env=SMALL), BrokerProcess(data, env=SMALL)
    third = BrokerProcess(moved, env=SMALL)
    try:
        first.start().create_topic("t")
        first.put("t", "0")
        data.rename(moved)
        second.start().create_topic("other")
        second.put("other", "mine")
        stored = 1
        while first.produce("t", str(stored).ljust(2000, ".")).status_code == 200:
            stored += 1
            assert stored < 1000, "it goes on writing"
        reply = eventually(lambda: first.client.get("/v1/readyz"), lambda it: it.status_code == 503)
        assert "moved, removed or replaced" in reply.text
        said = [line for line in first.stderr().splitlines() if "cannot be written any" in line]
        assert len(said) == 1
        first.terminate()
        assert not (data / "STOPPED").exists(), "it is the second broker's directory"
        second.put("other", "mine too")
        second.restart()
        assert second.client.get("/v1/topics").json()["topics"] == ["other"]
        third.start()
        offsets = third.client.get("/v1/topics/t").json()
        assert offsets["partitions"][0]["next_offset"] == stored, offsets
    finally:
        for broker in (first, second, third):
            broker.close()


def test_a_broker_whose_directory_was_removed_stops_writing(tmp_path: Path) -> None:
    data = tmp_path / "data"
    broker = BrokerProcess(data, env=SMALL)
    try:
        broker.start().create_topic("t")
        data.rename(tmp_path / "gone")
        for number in range(1000):
            if broker.produce("t", str(number).ljust(2000, ".")).status_code != 200:
                break
        reply = eventually(
            lambda: broker.client.get("/v1/readyz"), lambda it: it.status_code == 503
        )
        assert "moved, removed or replaced" in reply.text
        assert not data.exists(), "nothing makes it anew"
    finally:
        broker.close()
