"""`penstock journal`."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator

import pytest

from tests.broker_process import BrokerProcess
from tests.cli.conftest import Ran, run_penstock
from tests.cli.test_event import following


@pytest.fixture(scope="module")
def lively(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    small = {"PENSTOCK_SEGMENT_BYTES": "1MiB"}
    broker = BrokerProcess(tmp_path_factory.mktemp("journal"), env=small)
    try:
        broker.start().create_topic("jobs")
        broker.put("jobs", "one", envelope={"run_id": "run-1"})
        with broker.consume("jobs", "g", "ada") as stream:
            broker.nack("jobs", stream.next(), owner="ada", reason="no\x1b[2Jmemory")
            stream.next()
        yield broker
    finally:
        broker.close()


def journal(broker: BrokerProcess, *words: str) -> Ran:
    return run_penstock("journal", *words, env={"PENSTOCK_URL": broker.url})


def test_every_event_is_a_line_and_nothing_in_it_moves_the_cursor(lively: BrokerProcess) -> None:
    lines = journal(lively).out.splitlines()
    assert [re.sub(r"^\S+ ", "", line) for line in lines[:2]] == [
        "produced      jobs/0 @0 run_id=run-1",
        "delivered     jobs/0 @0 group=g owner=ada attempt=1 run_id=run-1",
    ]
    assert r"reason=no\x1b[2Jmemory" in lines[2]
    assert not any("produced_at" in line or "delivered_at" in line for line in lines)
    assert len(lines) == 4


def test_events_are_chosen_and_printed_as_json(lively: BrokerProcess) -> None:
    (line,) = journal(lively, "--kind", "nacked", "--run", "run-1", "--json").out.splitlines()
    row = json.loads(line)
    assert row["reason"] == "no\x1b[2Jmemory"
    assert row["produced_at"] <= row["delivered_at"] <= row["timestamp"]
    assert journal(lively, "--run", "nobody").out == ""
    assert journal(lively, "--since", "1h", "--topic", "jobs").out.count("\n") == 4
    assert journal(lively, "--since", "2999-01-01T00:00:00Z").out == ""


def test_what_happens_later_is_followed_until_ctrl_c(lively: BrokerProcess) -> None:
    words = ("journal", "--follow", "--json", "--topic", "later")
    lively.create_topic("later")
    lively.put("later", "before")
    with following(lively.url, *words) as follower:
        for offset in range(3):
            row = json.loads(follower.out.readline())
            assert (row["kind"], row["offset"]) == ("produced", offset)
            lively.put("later", "after")
        assert json.loads(follower.out.readline())["offset"] == 3
        follower.process.send_signal(signal.SIGINT)
        assert follower.process.wait(timeout=20) == 0
        assert (follower.out.read(), follower.err.read()) == (b"", b"")


def test_wrong_journal_options_are_refused(lively: BrokerProcess) -> None:
    ran = journal(lively, "--since", "yesterday")
    assert ran.code == 1
    assert "--since" in ran.err
    assert journal(lively, "--kind", "exploded").code == 2


def test_lines_of_a_durable_stream_are_told_from_those_of_a_topic(lively: BrokerProcess) -> None:
    path = "/v1/tenants/default/namespaces/default/streams"
    settings = {"name": "jobs", "delivery": "at_least_once"}
    assert lively.client.post(path, json=settings).status_code in (200, 201)
    assert lively.client.post(f"{path}/jobs/publish", json={"payload": ""}).status_code == 200
    (line,) = journal(lively, "--stream", "jobs").out.splitlines()
    assert line.endswith(" produced      stream:jobs/0 @0")
    assert "stream:jobs" not in journal(lively, "--topic", "jobs").out
    both = journal(lively, "--topic", "jobs", "--stream", "jobs")
    assert both.code != 0
    assert "exclude each other" in both.err
