"""A callable as router: large batches, and a stop while a call hangs."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.broker_process import BrokerProcess, eventually
from tests.contract.conftest import StartBroker

CALLABLES = """
import threading


def label(topic, message):
    return {"label": "seen " + message["value"]}


async def label_async(topic, message):
    return {"label": "seen " + message["value"]}


def hang(topic, message):
    threading.Event().wait()
"""


def start_routed(start_broker: StartBroker, home: Path, name: str) -> BrokerProcess:
    (home / "callable_router.py").write_text(CALLABLES)
    return start_broker(
        "--router", f"callable_router:{name}", "--router-timeout-ms", "1000",
        memory=True,
        env={"PYTHONPATH": str(home), "PENSTOCK_MAX_IN_FLIGHT": "5000"},
    )  # fmt: skip


@pytest.mark.parametrize("name", ["label", "label_async"])
def test_a_large_batch_is_routed_to_its_last_item(
    start_broker: StartBroker, tmp_path: Path, name: str
) -> None:
    """driftq-54, driftq-55: a quick router fails for no item of the batch."""
    broker = start_routed(start_broker, tmp_path, name)
    topic = broker.create_topic("t")
    lines = [json.dumps({"topic": topic, "value": str(n)}) for n in range(3000)]
    reply = broker.client.post("/v1/produce/batch", content="\n".join(lines))
    assert reply.status_code == 200
    assert all(item["status"] == "produced" for item in reply.json()["results"])
    with broker.consume(topic) as stream:
        items = stream.take(3000)
    assert [item.value for item in items] == [str(n) for n in range(3000)]
    labels = [(item.routing or {}).get("label") for item in items]
    assert labels == [f"seen {n}" for n in range(3000)]


def test_a_router_that_hangs_does_not_keep_the_broker_from_stopping(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    """driftq-66: exit code 0 within 4 seconds."""
    broker = start_routed(start_broker, tmp_path, "hang")
    topic = broker.create_topic("t")
    broker.put(topic, "unrouted")
    eventually(lambda: broker.stderr().count("the router took longer") > 0)
    started = time.monotonic()
    assert broker.terminate(timeout_s=8) == 0
    assert time.monotonic() - started < 4
