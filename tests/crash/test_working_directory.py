"""A broker's working directory is not a place to import from; and sealing that fails is seen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.broker_process import BrokerProcess, eventually

SMALL = {"PENSTOCK_SEGMENT_BYTES": "65536"}
INTRUDER = "raise SystemExit('imported from the working directory')\n"


def fill(broker: BrokerProcess, rounds: int = 60) -> None:
    for number in range(rounds):
        broker.put("t", str(number).ljust(4000, "."))


def metric(broker: BrokerProcess, name: str) -> float:
    lines = broker.client.get("/metrics").text.splitlines()
    [value] = [line.split()[1] for line in lines if line.split()[0] == name]
    return float(value)


@pytest.mark.parametrize("name", ["penstock.py", "json.py", "msgspec.py", "pyarrow.py"])
def test_a_module_in_the_working_directory_does_not_stop_sealing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / name).write_text(INTRUDER)
    monkeypatch.chdir(tmp_path / "work")
    broker = BrokerProcess(tmp_path / "data", env=SMALL)
    broker.safe_path = name == "penstock.py"  # python -m would run that very file
    try:
        broker.start().create_topic("t")
        fill(broker)
        broker.wait_for_seal()
        assert metric(broker, "penstock_sealing_failures") == 0
        assert broker.client.get("/v1/readyz").json() == {"status": "ready"}
    finally:
        broker.close()


def test_sealing_that_keeps_failing_is_in_readyz_metrics_and_once_in_the_log(
    tmp_path: Path,
) -> None:
    broker = BrokerProcess(tmp_path / "data", "--log-format", "json", env=SMALL)
    try:
        broker.start().create_topic("t")
        # The sealing process cannot write its snapshot: a directory has the name.
        taken = tmp_path / "data" / "snapshot-00000000000000000001.bin.tmp"
        (taken / "inside").mkdir(parents=True)
        fill(broker)
        warned = eventually(
            lambda: broker.client.get("/v1/readyz"),
            lambda reply: "warning" in reply.json(),
            timeout_s=60,
        )
        assert warned.status_code == 200, "it still serves"
        assert "sealing the log has failed" in warned.json()["warning"]
        assert str(tmp_path) not in warned.text, "probes need no token"
        assert metric(broker, "penstock_sealing_failures") >= 3
        assert metric(broker, "penstock_sealing_last_failure_seconds") > 1.7e9
        broker.put("t", "still served")
        said = [json.loads(line)["message"] for line in broker.stderr().splitlines()]
        assert len([line for line in said if "sealing the log" in line]) == 2, said
        (taken / "inside").rmdir()
        taken.rmdir()
        eventually(
            lambda: broker.client.get("/v1/readyz").json(),
            lambda body: body == {"status": "ready"},
            timeout_s=90,
        )
        assert metric(broker, "penstock_sealing_failures") == 0
        assert "sealing works again" in broker.stderr()
    finally:
        broker.close()
