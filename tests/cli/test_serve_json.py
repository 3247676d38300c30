"""`penstock serve --log-format json`: whatever happens, both streams have JSON objects only."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.broker_process import SOURCE, BrokerProcess, StartFailed, eventually
from tests.cli.conftest import run_penstock

TROUBLE = """
import logging, threading, warnings


class Sore:
    def __del__(self):
        raise RuntimeError("trouble while an object is destroyed")


def fail():
    raise RuntimeError("trouble in a thread")


def route(topic, message):
    Sore()
    warnings.warn("trouble as a warning")
    warnings.warn("two\\nlines", DeprecationWarning)
    logging.getLogger("library").warning("trouble %d", "in arguments")
    logging.getLogger("library").error("a name that is no Unicode: \\udcff", extra={"of": object()})
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    raise RuntimeError("trouble in the router")
"""


def events_of(text: str) -> list[dict[str, Any]]:
    """Every line must be a JSON object; the failure shows the first that is none."""
    events = []
    for line in text.splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            pytest.fail(f"no JSON: {line!r}\nin:\n{text}")
        assert isinstance(event, dict), line
        events.append(event)
    return events


def test_a_broker_in_trouble_writes_nothing_but_json(tmp_path: Path) -> None:
    (tmp_path / "trouble.py").write_text(TROUBLE)
    broker = BrokerProcess(
        tmp_path / "data", "--log-format", "json", "--log-level", "debug",
        "--router", "trouble:route",
        env={"PYTHONPATH": str(tmp_path), "PYTHONWARNINGS": "default"},
    )  # fmt: skip
    try:
        broker.start().create_topic("t")
        for _ in range(2):
            broker.put("t", "v")
        assert broker.client.get("/v1/nowhere").status_code == 404
        with socket.create_connection(("127.0.0.1", broker.port)) as wild:
            wild.sendall(b"\x00\xff nonsense\r\n\r\n")
            assert b"400" in wild.recv(4096)
        with broker.consume("t") as stream:
            assert stream.next().value == "v"
        assert broker.terminate() == 0
        (said,) = events_of(broker.stdout())
        events = events_of(broker.stderr())
    finally:
        broker.close()
    assert said["address"] == broker.url
    for event in events:
        assert {"time", "level", "logger", "message"} <= set(event), event
    text = broker_text(events)
    for trouble in ("as a warning", "in arguments", "in a thread", "is destroyed", "in the router"):
        assert trouble in text
    assert any("Traceback" in event.get("exception", "") for event in events)
    messages = [event["message"] for event in events]
    assert "the broker has started" in messages
    assert "the broker has stopped" in messages


def broker_text(events: list[dict[str, Any]]) -> str:
    return "\n".join(event["message"] + event.get("exception", "") for event in events)


def test_a_start_that_fails_says_why_in_json(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path / "data")
    try:
        broker.start()
        port = str(broker.port)
        cases = (
            (2, "cannot listen", ("--memory", "--port", port)),
            (1, "data", ("--data-dir", str(tmp_path / "data"), "--port", "0")),
            (2, "/nowhere", ("--memory", "--port", "0", "--token-file", "/nowhere")),
            (2, "no.such", ("--memory", "--port", "0", "--router", "no.such:route")),
        )
        for code, complaint, words in cases:
            done = run_penstock("serve", "--log-format", "json", *words)
            assert (done.code, done.out) == (code, "")
            *_, last = events_of(done.err)
            assert last["level"] == "error"
            assert complaint in last["message"]
    finally:
        broker.close()


def test_an_error_that_nobody_catches_is_a_json_line_too() -> None:
    program = (
        "from penstock.server.logs import configure_logging\n"
        "configure_logging('info', 'json', secrets=['s3\"cret'])\n"
        "raise ValueError('nobody catches s3\"cret')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(SOURCE)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    (event,) = events_of(done.stderr)
    assert "ValueError: nobody catches" in event["exception"]
    assert "cret" not in event["exception"] + event["message"]


def test_an_interrupt_while_the_broker_starts_is_a_json_line(tmp_path: Path) -> None:
    """As when Ctrl-C comes while a router is imported."""
    (tmp_path / "interrupted.py").write_text("raise KeyboardInterrupt\n")
    broker = BrokerProcess(
        None, "--log-format", "json", "--router", "interrupted:route",
        env={"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    try:
        with pytest.raises(StartFailed) as failed:
            broker.start()
        assert failed.value.code not in (0, None)
        assert eventually(lambda: events_of(broker.stderr()))[-1]["level"] in ("error", "critical")
    finally:
        broker.close()
