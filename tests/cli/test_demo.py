"""The tour that a newcomer takes first, and the examples beside it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.broker_process import SOURCE, BrokerProcess
from tests.quick_java import quick_java

ROOT = SOURCE.parent


def test_the_demo_runs_to_its_end_and_leaves_nothing_behind_but_a_picture(tmp_path: Path) -> None:
    env = os.environ | {"PYTHONPATH": str(SOURCE), "TMPDIR": str(tmp_path)} | quick_java()
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "demo.py"],
        env=env,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert "all 1000 messages are there, and all 500 acks" in done.stdout
    assert "fast:    received 20,000, dropped 0" in done.stdout
    assert "4 clients add 1 to a counter, 50 times each: 200" in done.stdout
    assert "the second is refused: 412" in done.stdout
    assert "a watch saw: put limits 20/s" in done.stdout
    assert "messages read as rows" in done.stdout
    assert "7 runs: 5 succeeded, 2 failed" in done.stdout
    assert "LookupError: no source for claim <n>" in done.stdout
    (left,) = tmp_path.iterdir()
    assert f"timeline: {left}" in done.stdout
    assert left.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("function", ["route", "route_async"])
def test_the_callable_router_of_the_examples_routes(function: str) -> None:
    env = {"PYTHONPATH": str(ROOT / "examples")}
    broker = BrokerProcess(None, "--router", f"router_callable:{function}", env=env)
    try:
        broker.start()
        for topic in ("tickets", "tickets.urgent"):
            broker.create_topic(topic)
        broker.put("tickets", "the printer is on FIRE")
        with broker.consume("tickets.urgent") as stream:
            assert stream.next().members["routing"] == {
                "label": "urgent",
                "meta": {"because": "fire"},
            }
    finally:
        broker.close()


def test_the_http_router_of_the_examples_routes() -> None:
    with subprocess.Popen(
        [sys.executable, "-u", ROOT / "examples" / "router_http.py", "0"],
        stdout=subprocess.PIPE,
        text=True,
    ) as router:
        assert router.stdout is not None
        address = router.stdout.readline().split()[-1]
        broker = BrokerProcess(None, "--router", address)
        try:
            broker.start().create_topic("orders")
            broker.put("orders", '{"amount": 12000}')
            with broker.consume("orders") as stream:
                assert stream.next().members["routing"]["label"] == "large"
        finally:
            broker.close()
            router.send_signal(signal.SIGINT)
    assert router.returncode == 0


def test_the_worker_of_the_examples_works_and_stops() -> None:
    broker = BrokerProcess(None)
    try:
        broker.start().create_topic("orders")
        broker.put("orders", "17 EUR", envelope={"idempotency_key": "o1"})
        env = {"PYTHONPATH": str(SOURCE), "PENSTOCK_URL": broker.url}
        with subprocess.Popen(
            [sys.executable, "-u", ROOT / "examples" / "worker.py"],
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        ) as worker:
            assert worker.stdout is not None
            assert worker.stdout.readline().startswith("waiting for orders")
            assert worker.stdout.readline() == "charging 17 EUR (attempt 1)\n"
            worker.terminate()
        assert worker.returncode == 0
    finally:
        broker.close()
