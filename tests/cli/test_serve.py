"""`penstock serve` and `penstock config`."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.broker_process import BrokerProcess, StartFailed
from tests.cli.conftest import run_penstock


@pytest.fixture(autouse=True)
def _python_starts_each_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a person starts them: here the start is the subject."""
    monkeypatch.setattr(BrokerProcess, "is_copy", False)


def test_serve_says_where_it_listens_and_what_its_durability_means(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path / "data")
    try:
        said = broker.start().stdout()
        assert f"listens on {broker.url}" in said
        assert "every answer waits until its data is synced to disk" in said
        assert str(tmp_path / "data") in said
        assert "1 GiB" in said
        assert f"curl -s {broker.url}/v1/topics" in said
        assert broker.stderr() == ""
    finally:
        broker.close()


def test_ctrl_c_ends_the_broker_with_0() -> None:
    broker = BrokerProcess(None)
    try:
        process = broker.start().process
        assert process is not None
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0
        assert "the broker has stopped" in broker.stderr()
        assert "nothing is kept" in broker.stdout()
    finally:
        broker.close()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--port", "70000"], "port from flag: '70000' is not allowed"),
        (["--max-in-flight", "many"], "max_in_flight"),
        (["--max-in-flight", "0"], "max_in_flight from flag: '0' is not allowed"),
        (["--fsync", "sometimes"], "--fsync"),
        (["--config", "/nowhere.toml"], "/nowhere.toml"),
        (["--token-file", "/nowhere"], "/nowhere"),
        (["--router", "no.such.module:route"], "no.such.module"),
        (["--host", "0.0.0.0"], "--allow-insecure-bind"),
        (["--control-plane", "nonsense"], "control_plane is no broker's address"),
        (["--control-plane", "http://me:s3cret@h"], "must not hold credentials"),
        (["--control-plane-token-file", "/nowhere"], "control_plane_token_file"),
    ],
)
def test_wrong_settings_are_one_line_and_exit_code_2(words: list[str], complaint: str) -> None:
    done = run_penstock("serve", "--memory", "--port", "0", *words)
    assert (done.code, done.out) == (2, "")
    assert complaint in done.err.splitlines()[-1]
    assert "s3cret" not in done.err


def test_a_port_in_use_is_reported() -> None:
    broker = BrokerProcess(None)
    try:
        broker.start()
        done = run_penstock("serve", "--memory", "--port", str(broker.port))
        assert done.code == 2
        assert f"cannot listen on 127.0.0.1:{broker.port}" in done.err
        assert "--port takes another" in done.err
    finally:
        broker.close()


def test_a_directory_in_use_or_damaged_is_exit_code_1(tmp_path: Path) -> None:
    first, second = BrokerProcess(tmp_path / "data"), BrokerProcess(tmp_path / "data")
    try:
        first.start().create_topic("t")
        first.put("t", "the first")
        with pytest.raises(StartFailed) as in_use:
            second.start()
        assert in_use.value.code == 1
        first.put("t", "w")
        first.terminate()
        damage(tmp_path / "data", b"the first")
        with pytest.raises(StartFailed) as damaged:
            second.start()
        assert damaged.value.code == 1
        assert "penstock wal verify" in damaged.value.output
        assert "Traceback" not in damaged.value.output
    finally:
        first.close()
        second.close()


def damage(data_dir: Path, value: bytes) -> None:
    """Flips a bit of a message in the log, which others follow."""
    path = sorted(data_dir.glob("wal-*"))[0]
    data = bytearray(path.read_bytes())
    data[data.index(value)] ^= 1
    path.write_bytes(data)


def test_the_log_is_json_when_asked_for_and_has_no_secret(tmp_path: Path) -> None:
    broker = BrokerProcess(
        None, "--log-format", "json", "--log-level", "debug", env={"PENSTOCK_TOKEN": "s3cret"}
    )
    try:
        broker.start().terminate()
        events = [json.loads(line) for line in broker.stderr().splitlines()]
        assert {"time", "level", "logger", "message"} <= set(events[0])
        started = next(event for event in events if event["message"].endswith("has started"))
        assert started["address"] == broker.url
        assert "s3cret" not in broker.stderr() + broker.stdout()
    finally:
        broker.close()


def test_config_shows_each_value_with_its_origin_and_no_secret(tmp_path: Path) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text('port = 9000\nmax_in_flight = 7\nmax_partition_bytes = "1MiB"\n')
    env = {"PENSTOCK_MAX_IN_FLIGHT": "8", "PENSTOCK_TOKEN": "s3cret"}
    words = ("config", "--config", str(file), "--profile", "contract", "--memory")
    shown = json.loads(run_penstock(*words, "--json", env=env).out)
    assert shown["port"] == {"value": 9000, "origin": f"file {file}"}
    assert shown["max_in_flight"] == {"value": 8, "origin": "environment"}
    assert shown["max_partition_bytes"] == {"value": 1 << 20, "origin": f"file {file}"}
    assert shown["max_partition_msgs"] == {"value": 2, "origin": "profile contract"}
    assert shown["memory"] == {"value": True, "origin": "flag"}
    assert shown["fsync"] == {"value": "commit", "origin": "default"}
    assert shown["token"]["value"] == "********"
    text = run_penstock(*words, env=env).out
    assert "1 MiB" in text
    assert "s3cret" not in text


def test_a_flag_that_is_not_given_does_not_overrule_the_environment() -> None:
    env = {"PENSTOCK_MEMORY": "true", "PENSTOCK_FSYNC": "none", "PENSTOCK_LOG_LEVEL": "debug"}
    shown = json.loads(run_penstock("config", "--json", env=env).out)
    for name in ("memory", "fsync", "log_level"):
        assert shown[name]["origin"] == "environment"


def test_a_router_in_the_current_folder_is_found(tmp_path: Path) -> None:
    (tmp_path / "here.py").write_text("route = 5\n")
    words = ("serve", "--memory", "--port", "0", "--router", "here:route")
    done = run_penstock(*words, cwd=tmp_path)
    assert done.code == 2
    assert "not callable" in done.err
