"""`penstock publish` and `penstock subscribe`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO

import pytest

from penstock.client import Client
from penstock.client.sync_handles import StreamHandle
from penstock.model.errors import NotFound
from tests.broker_process import SOURCE, BrokerProcess, eventually
from tests.cli.conftest import Run, run_penstock

BINARY = b"\x00\xff"


@pytest.fixture
def stream(broker: BrokerProcess, request: pytest.FixtureRequest) -> Iterator[StreamHandle]:
    """A stream of the test's own."""
    with Client(broker.url) as client:
        name: str = request.node.name
        client.create_stream("default", "default", name)
        yield client.stream(name)
        with suppress(NotFound):
            client.delete_stream("default", "default", name)


class Subscriber:
    """`penstock subscribe`, or another command that follows a feed, in a process of its own."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        assert process.stdout is not None
        assert process.stderr is not None
        self.out: IO[bytes] = process.stdout
        self.err: IO[bytes] = process.stderr


@contextmanager
def following(url: str, *words: str) -> Iterator[Subscriber]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PENSTOCK_")}
    with subprocess.Popen(
        [sys.executable, "-m", "penstock", *words, "--url", url],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=inherited | {"PYTHONPATH": str(SOURCE), "PYTHONUNBUFFERED": "1"},
    ) as process:
        try:
            yield Subscriber(process)
        finally:
            process.kill()


@contextmanager
def subscribed(broker: BrokerProcess, stream: StreamHandle, *words: str) -> Iterator[Subscriber]:
    before = len(stream.subscriptions())
    command = ("subscribe", stream.path[2], "--timeout", "20", *words)
    with following(broker.url, *command) as subscriber:
        eventually(lambda: len(stream.subscriptions()) > before)
        yield subscriber


def test_a_subscriber_prints_what_is_published_from_then_on(
    broker: BrokerProcess, penstock: Run, stream: StreamHandle
) -> None:
    """felix-45"""
    name = stream.path[2]
    assert penstock("publish", name, "before").code == 0
    with subscribed(broker, stream, "--max", "3") as subscriber:
        done = penstock("publish", name, "one", "two")
        assert (done.code, done.out) == (0, f"published 2 events to default/default/{name}\n")
        penstock("publish", name, "\x1b[31mred", "one too many")
        assert subscriber.out.read() == b"one\ntwo\n\\x1b[31mred\n"
        assert subscriber.process.wait(10) == 0
        assert subscriber.err.read() == b""


def test_a_batch_is_one_step(penstock: Run, stream: StreamHandle) -> None:
    """felix-38: what is wrong with one of it keeps all of it out."""
    name = stream.path[2]
    with stream.subscribe(wait_s=0.5) as subscription:
        done = penstock("publish", name, "a", "b", "--batch", "--json")
        assert json.loads(done.out) == {"count": 2}
        lines = "x\n" * 10_001
        refused = penstock("publish", name, "--batch", stdin=lines)
        assert (refused.code, refused.out) == (2, "")
        assert "at most 10000 events" in refused.err
        assert penstock("publish", name, "--batch", stdin="").out.startswith("published 0 events")
        assert list(subscription) == [b"a", b"b"]


def test_lines_of_stdin_are_published_and_blank_ones_left_out(
    penstock: Run, stream: StreamHandle
) -> None:
    name = stream.path[2]
    with stream.subscribe(wait_s=0.5) as subscription:
        done = penstock("publish", name, "-", stdin="one\n\ntwo\r\nthree")
        assert (done.code, done.out[:18]) == (0, "published 3 events")
        assert penstock("publish", name, stdin="four\n").code == 0
        assert list(subscription) == [b"one", b"two", b"three", b"four"]


def test_a_slow_writers_line_is_published_before_its_next(
    broker: BrokerProcess, stream: StreamHandle
) -> None:
    command = [sys.executable, "-m", "penstock", "publish", stream.path[2], "-"]
    with (
        stream.subscribe() as subscription,
        subprocess.Popen(
            [*command, "--url", broker.url],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={"PYTHONPATH": str(SOURCE)},
        ) as process,
    ):
        assert process.stdin is not None
        process.stdin.write(b"early\n")
        process.stdin.flush()
        assert next(subscription) == b"early"
        process.stdin.close()
    assert process.returncode == 0


def test_an_event_may_remove_keys_from_caches(
    broker: BrokerProcess, penstock: Run, stream: StreamHandle
) -> None:
    """felix-82"""
    with Client(broker.url) as client:
        cache = client.cache("default")
        cache.put("user1", "v")
        name = stream.path[2]
        done = penstock("publish", name, "v", "--invalidate", "cache:default:user1")
        assert done.code == 0
        assert cache.get("user1") is None


def test_bytes_that_are_no_text_are_marked_or_raw(
    broker: BrokerProcess, stream: StreamHandle
) -> None:
    words = (("--max", "2"), ("--max", "2", "--raw"), ("--max", "2", "--json"))
    expected = (b"base64:AP8=\nok\n", b"\x00\xff\nok\n", None)
    for options, wanted in zip(words, expected, strict=True):
        with subscribed(broker, stream, *options) as subscriber:
            stream.publish_batch([BINARY, "ok"])
            out = subscriber.out.read()
            if wanted is not None:
                assert out == wanted
            else:
                events = [json.loads(line) for line in out.splitlines()]
                assert [event["payload"] for event in events] == ["AP8=", "b2s="]
                assert events[0]["subscription_id"].startswith("s")


def test_bytes_given_as_an_argument_are_published_as_they_are(
    broker: BrokerProcess, stream: StreamHandle
) -> None:
    command = [sys.executable, "-m", "penstock", "publish", stream.path[2]]
    with stream.subscribe() as subscription:
        subprocess.run(
            [*map(os.fsencode, command), b"\xff\xfe", b"--url", broker.url.encode()],
            env={"PYTHONPATH": str(SOURCE), "PYTHONUTF8": "1"},
            check=True,
            stdout=subprocess.DEVNULL,
        )
        assert next(subscription) == b"\xff\xfe"


def test_subscribe_ends_when_nothing_came_for_its_timeout(
    penstock: Run, stream: StreamHandle
) -> None:
    started = time.monotonic()
    done = penstock("subscribe", stream.path[2], "--timeout", "0.3")
    assert (done.code, done.out, done.err) == (0, "", "")
    assert time.monotonic() - started < 10


def test_ctrl_c_ends_subscribe_without_complaint(
    broker: BrokerProcess, stream: StreamHandle
) -> None:
    with subscribed(broker, stream) as subscriber:
        stream.publish("v")
        assert subscriber.out.readline() == b"v\n"
        subscriber.process.send_signal(2)
        assert subscriber.process.wait(10) == 0
        assert subscriber.err.read() == b""


def test_the_end_of_the_stream_ends_subscribe_with_an_error(
    broker: BrokerProcess, stream: StreamHandle
) -> None:
    with subscribed(broker, stream) as subscriber, Client(broker.url) as client:
        client.delete_stream(*stream.path)
        assert subscriber.process.wait(10) == 1
        assert subscriber.err.read().startswith(b"Error: NOT_FOUND: ")


def test_the_loss_of_the_broker_ends_subscribe_with_an_error() -> None:
    """felix-49"""
    broker = BrokerProcess(None)
    try:
        with Client(broker.start().url) as client:
            stream = client.stream("default")
            with subscribed(broker, stream) as subscriber:
                broker.kill()
                assert subscriber.process.wait(10) == 1
                assert subscriber.err.read().startswith(b"Error: UNAVAILABLE: ")
    finally:
        broker.close()


def test_what_is_not_there_is_named(penstock: Run) -> None:
    """felix-87, 88, 92."""
    for words, text in (
        (("publish", "s", "v", "--tenant", "x"), "unknown tenant 'x'"),
        (("publish", "s", "v", "-n", "y"), "unknown namespace 'y' of tenant 'default'"),
        (("publish", "nowhere", "v"), "stream not found: 'default/default/nowhere'"),
        (("subscribe", "nowhere"), "stream not found: 'default/default/nowhere'"),
    ):
        done = penstock(*words)
        assert (done.code, done.out) == (1, "")
        assert done.err == f"Error: NOT_FOUND: {text}\n"


def test_a_refusal_in_the_middle_says_how_many_went_before(
    penstock: Run, stream: StreamHandle
) -> None:
    long = "x" * (8 * 2**20 + 1)
    done = penstock("publish", stream.path[2], stdin="one\n" * 300_000 + long + "\n")
    assert done.code == 1
    assert "INVALID_ARGUMENT" in done.err
    assert "events published before" in done.err
    bad = penstock("publish", stream.path[2], "v", "--invalidate", "nonsense")
    assert bad.code == 1
    assert "cache:<cache>:<key>" in bad.err


@pytest.mark.parametrize(
    "words",
    [
        ("publish",),
        ("subscribe",),
        ("subscribe", "default", "--raw", "--json"),
        ("subscribe", "default", "--max", "0"),
        ("subscribe", "default", "--timeout", "-1"),
        ("subscribe", "default", "--timeout", "soon"),
        ("subscribe", "default", "more"),
    ],
    ids=" ".join,
)
def test_a_command_that_cannot_be_is_exit_code_2(penstock: Run, words: tuple[str, ...]) -> None:
    done = penstock(*words)
    assert (done.code, done.out) == (2, "")


def test_without_a_broker_is_exit_code_1() -> None:
    for words in (("publish", "default", "v"), ("subscribe", "default")):
        done = run_penstock(*words, "--url", "http://127.0.0.1:1")
        assert done.code == 1
        assert done.err.startswith("Error: UNAVAILABLE: no broker answers")
