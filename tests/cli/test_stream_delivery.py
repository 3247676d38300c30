"""`penstock stream ack`, `nack`, `release`, `extend` and `offsets`: one event at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.client import Client
from tests.broker_process import BrokerProcess
from tests.cli.conftest import Run


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """A broker that keeps events."""
    with BrokerProcess(tmp_path_factory.mktemp("broker") / "data") as process:
        yield process


@pytest.fixture
def stream(broker: BrokerProcess, request: pytest.FixtureRequest) -> Iterator[str]:
    """A durable stream of the test's own."""
    name: str = request.node.name
    with Client(broker.url) as client:
        client.create_stream("default", "default", name, delivery="at_least_once")
        yield name
        client.delete_stream("default", "default", name)


def subscribe(penstock: Run, stream: str, *words: str) -> list[dict[str, Any]]:
    """Returns the events that come to the name `n`, which are not acked."""
    named = ("--name", "n", "--no-ack", "--start", "earliest", "--timeout", "1", "--json")
    done = penstock("subscribe", stream, *named, *words)
    assert done.code == 0, done.err
    return [json.loads(line) for line in done.out.splitlines()]


def test_an_event_is_settled_by_hand(penstock: Run, stream: str) -> None:
    """felix-119, 121."""
    penstock("publish", stream, "a", "b", "c")
    items = subscribe(penstock, stream, "--max", "3", "--lease-ms", "60s")
    assert [(each["offset"], each["attempt"], each["owner"]) for each in items] == [
        (0, 1, "cli"), (1, 1, "cli"), (2, 1, "cli"),
    ]  # fmt: skip
    of = ("--offset", "0", "--delivery-id", items[0]["delivery_id"])
    acked = penstock("stream", "ack", stream, "n", *of)
    assert (acked.code, acked.out) == (0, f"acked offset 0 of default/default/{stream} for n\n")
    more = ("--reason", "bad", "--delay-ms", "0")
    assert penstock("stream", "nack", stream, "n", "--offset", "1", *more).code == 0
    extended = penstock("stream", "extend", stream, "n", "--offset", "2", "--lease-ms", "90s")
    assert "the lease ends 90000 ms from now" in extended.out
    assert penstock("stream", "release", stream, "n", "--offset", "2").code == 0
    again = {each["offset"]: each for each in subscribe(penstock, stream, "--max", "2")}
    assert (again[1]["attempt"], again[1]["last_error"]) == (2, "bad")
    assert again[2]["attempt"] == 1, "a release is not counted"
    other = penstock("stream", "ack", stream, "n", "--offset", "1", "--owner", "somebody")
    assert other.code == 1
    assert "FAILED_PRECONDITION" in other.err
    unknown = penstock("stream", "release", stream, "m", "--offset", "1")
    assert unknown.code == 1
    assert "no subscription 'm'" in unknown.err


def test_an_event_that_is_not_acked_is_printed_with_its_offset(penstock: Run, stream: str) -> None:
    penstock("publish", stream, "hello")
    words = ("--name", "n", "--no-ack", "--start", "earliest", "--max", "1", "--timeout", "5")
    assert penstock("subscribe", stream, *words).out == "0  hello\n"
    assert penstock("stream", "ack", stream, "n", "--offset", "0").code == 0
    assert subscribe(penstock, stream) == []


def test_offsets_of_a_stream(penstock: Run, stream: str) -> None:
    penstock("publish", stream, "a", "b")
    shown = penstock("stream", "offsets", stream)
    assert shown.out.split() == ["earliest", "next", shown.out.split()[2], "0", "2"]
    found = json.loads(penstock("stream", "offsets", stream, "--time-ms", "0", "--json").out)
    assert (found["earliest"], found["next"], found["at_time"]) == (0, 2, 0)
    late = penstock("stream", "offsets", stream, "--time-ms", "99999999999999")
    assert late.out.split()[-3:] == ["0", "2", "2"]


@pytest.mark.parametrize("words", [("--no-ack",), ("--owner", "w"), ("--lease-ms", "1s")])
def test_options_of_a_name_need_one(penstock: Run, words: tuple[str, ...]) -> None:
    done = penstock("subscribe", "default", *words)
    assert done.code == 2
    assert "need --name" in done.err
